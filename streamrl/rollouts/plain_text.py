"""Text of users' code, of models and of other processes, made fit to be sent, stored and shown."""

from __future__ import annotations

import re

_SURROGATES = re.compile("[\ud800-\udfff]")


MOST_TEXT_BYTES = 8_000_000
"""Most bytes of a completion's text, in UTF-8: with a row of a task it is still one message (`tasks/files.py`)."""


def utf8_bytes(text: str) -> int:
    """Return how many bytes a text has in UTF-8."""
    return len(text) if text.isascii() else len(text.encode(errors="replace"))


def shortened(text: str, most: int) -> str:
    """Return a text without what exceeds `most` bytes in UTF-8, cut between characters."""
    return text if utf8_bytes(text) <= most else text.encode(errors="replace")[:most].decode(errors="ignore")


def plain_text(text: str, most: int | None = None) -> str:
    """Return a text that UTF-8 can encode, of at most `most` characters (None: of any length).

    Halves of surrogate pairs are no characters and cannot be encoded; each becomes the replacement character.
    """
    return _SURROGATES.sub("\ufffd", text[:most])


def shown(text: object) -> str:
    """Return a text of another process as it can be shown: a terminal would obey control characters."""
    text = str(text)
    return text if text.isprintable() else "".join(one if one.isprintable() or one in "\n\t" else "?" for one in text)
