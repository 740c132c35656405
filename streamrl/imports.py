"""Imports of large libraries."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import without collecting garbage, and never look through what exists by then.

    A library leaves a million objects that stay for good. Looking through them again and again took a fifth of the time
    to import vLLM or torch, and forked processes would have to copy the memory that the collector writes to.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
