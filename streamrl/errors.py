"""The errors with which a command, or a process of a run, fails."""


class UserError(Exception):
    """Bad input: shown as one message without a traceback; nothing was started (exit code 2)."""

    exit_code = 2


class RunFailed(Exception):
    """Failure of a run that had started; the message ends with the cause (exit code 1)."""

    exit_code = 1


class RestartNeeded(RunFailed):
    """Failure of a process that a restarted one can overcome."""
