"""The ways in which a command, or a process of a run, fails."""


class UserError(Exception):
    """Bad input: one readable message, no traceback, nothing started (exit code 2)."""

    exit_code = 2


class RunFailed(Exception):
    """A run that had started and failed; the message ends with the cause (exit code 1)."""

    exit_code = 1


class StartAgain(RunFailed):
    """A process of a run cannot go on, but a new one in its place can."""
