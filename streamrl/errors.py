"""The two ways in which a command fails, and their exit codes."""


class UserError(Exception):
    """Bad input: one readable message, no traceback, nothing started (exit code 2)."""

    exit_code = 2


class RunFailed(Exception):
    """A run that had started and failed; the message ends with the cause (exit code 1)."""

    exit_code = 1
