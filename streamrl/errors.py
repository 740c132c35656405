"""The errors with which a command, or a process of a run, fails, and the codes of their documentation."""

from __future__ import annotations

from enum import StrEnum


class ErrorCode(StrEnum):
    """Codes of the entries of docs/how-to/troubleshoot.md, which `streamrl explain` prints."""

    CONFIGURATION = "E1001"
    MODEL = "E1002"
    INSTALLATION = "E1003"
    PORT = "E1004"
    CONTEXT = "E1005"
    MEMORY = "E1006"
    DISK = "E1007"
    REWARD = "E1008"
    RESUME = "E1009"
    INSTANCE = "E1010"
    HANG = "E1011"
    SITES = "E1012"
    KEYS = "E1013"
    PACKING = "E1014"
    REFUSED_STEPS = "E1015"

    def refer(self, message: str) -> str:
        """Append `(see docs: CODE)` to a message; a message that has a code already keeps it."""
        return message if SEE_DOCS in message else f"{message} ({SEE_DOCS}{self})"


SEE_DOCS = "see docs: "
"""What stands before the code in a message."""


class UserError(Exception):
    """Bad input: shown as one message without a traceback; nothing was started (exit code 2)."""

    exit_code = 2


class RunFailed(Exception):
    """Failure of a run that had started; the message ends with the cause (exit code 1)."""

    exit_code = 1


class RestartNeeded(RunFailed):
    """Failure of a process that a restarted one can overcome."""
