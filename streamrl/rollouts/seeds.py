"""Seeds of tasks and completions, all made from the run's."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, key: str) -> int:
    """The seed of one thing in a run: below 2**31, so that adding any item number stays a valid numpy seed."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{key}".encode()).digest()[:4], "little") >> 1
