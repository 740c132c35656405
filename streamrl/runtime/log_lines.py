"""The lines of a process's log. What others sent is in them, and people read them in terminals."""

from __future__ import annotations

import logging
import sys
from types import TracebackType

from streamrl.rollouts.plain_text import shown

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
FURTHER = "\n    "
"""Beginning of the further lines of a record."""


class LogFormatter(logging.Formatter):
    """Formats records so that a text of another process can be no record, and does nothing to a terminal.

    Only the first line of a record begins at the margin: the launcher reads there why a process has ended.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Format what comes before a traceback."""
        return shown(super().formatMessage(record)).replace("\n", FURTHER)

    def formatException(
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None],
    ) -> str:
        """Format a traceback."""
        return shown(super().formatException(ei)).replace("\n", FURTHER)


def log_to_stderr(level: str | int = logging.WARNING) -> None:
    """Have all records of this process from `level` on written to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter(FORMAT))
    logging.basicConfig(level=level, handlers=[handler])
