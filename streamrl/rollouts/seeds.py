"""Seeds of tasks and completions, all derived from the run's seed."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, key: str) -> int:
    """Derive a seed for `key` from the run's; it is below 2**31, so adding any item number gives a valid numpy seed."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{key}".encode()).digest()[:4], "little") >> 1
