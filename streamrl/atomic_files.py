"""Atomic replacement of small files, so that no reader ever sees half of one. Standard library only."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def replace_text(path: Path, text: str) -> None:
    """Replace a file by new text atomically.

    Raises:
        OSError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def replace_json(path: Path, values: Any) -> None:
    """Replace a JSON file atomically.

    Raises:
        OSError: the file cannot be written.
        ValueError: a value cannot be expressed in JSON (NaN or an infinity).
    """
    replace_text(path, json.dumps(values, allow_nan=False))
