"""A hash of code, by which a result that is kept between commands is that of the code as it is now."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path


@lru_cache
def code_hash(folder: Path) -> str:
    """Return a hash of the Python and C sources in a folder, without those in folders below it."""
    parts = [path.read_bytes() for path in sorted(folder.glob("*.*")) if path.suffix in (".py", ".c")]
    return hashlib.blake2b(b"".join(parts), digest_size=8).hexdigest()
