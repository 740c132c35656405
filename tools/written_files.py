"""Write files that are made from others, or compare them (`--check`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


def write_files(texts: Mapping[Path, str], source: str, arguments: Sequence[str]) -> int:
    """Write those files that differ from their text, and name them; with `--check` only name them.

    Args:
        texts: path, in the repository -> what the file must hold.
        source: what it is made from.
        arguments: those of the command line.

    Returns:
        The exit code: 1 if a file differs and is only checked.
    """
    check = "--check" in arguments
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        name = path.relative_to(ROOT)
        if check:
            print(f"{name} differs from {source}; run: make docs")
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(texts[path], encoding="utf-8")
        print(f"written: {name}")
    return 1 if stale and check else 0
