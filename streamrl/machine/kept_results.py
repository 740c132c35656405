"""Results that are kept between commands, as what was measured on this machine: a file for each kind and key."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from streamrl.atomic_files import replace_text
from streamrl.machine.user_folders import cache_directory


def result_file(kind: str, key: str) -> Path:
    """Return the file of a result; its key is a hash of all that it depends on.

    Raises:
        UserError: see `cache_directory`.
    """
    return cache_directory() / "machine" / f"{kind}-{key}.json"


def keep_result(path: Path, values: Any) -> None:
    """Keep a result as JSON; arguments and failures as for `keep_text`.

    Raises:
        ValueError: a value cannot be expressed in JSON (NaN or an infinity).
    """
    keep_text(path, json.dumps(values, allow_nan=False))


def keep_text(path: Path, text: str) -> None:
    """Write a result's file; where that cannot be written, nothing is kept, and the next command finds nothing."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, text)
