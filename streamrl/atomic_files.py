"""Small files that are replaced in one piece: no reader ever meets half of one. Standard library only."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def replace_text(path: Path, text: str) -> None:
    """Writes a file in place of the one that was there.

    Raises:
        OSError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def replace_json(path: Path, values: Any) -> None:
    """Writes a JSON file in place of the one that was there.

    Raises:
        OSError: it cannot be written.
        ValueError: a value that JSON has no word for (NaN, an infinity).
    """
    replace_text(path, json.dumps(values, allow_nan=False))
