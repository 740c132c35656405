"""Text of users' code and of models, made fit to be sent and stored."""

from __future__ import annotations

import re

_SURROGATES = re.compile("[\ud800-\udfff]")


def plain_text(text: str, most: int | None = None) -> str:
    """Return a text that UTF-8 can encode, of at most `most` characters (None: of any length).

    Halves of surrogate pairs are no characters and cannot be encoded; each becomes the replacement character.
    """
    return _SURROGATES.sub("\ufffd", text[:most])
