"""Atomic replacement of files, so that no reader ever sees half of one. Standard library only."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path to write to, which replaces a file atomically if the block ends well, and is deleted if not.

    Raises:
        OSError: the file cannot be replaced.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Replace a file by new text atomically.

    Raises:
        OSError: the file cannot be written.
    """
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def replace_json(path: Path, values: Any) -> None:
    """Replace a JSON file atomically.

    Raises:
        OSError: the file cannot be written.
        ValueError: a value cannot be expressed in JSON (NaN or an infinity).
    """
    replace_text(path, json.dumps(values, allow_nan=False))
