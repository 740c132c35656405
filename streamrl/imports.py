"""Imports of large libraries."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
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


@contextlib.contextmanager
def without_torch() -> Iterator[None]:
    """Import transformers for its tokenizers only: it would import torch for them, which takes 5 s and 300 MB.

    For as long as this process lives, transformers has no models in it; torch itself can be imported later. So not in a
    process that runs code of users. Where torch has been imported already, nothing is spared and everything stays as it
    is.
    """
    if {"torch", "transformers"} & sys.modules.keys():
        yield
        return
    advice = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(advice)
    os.environ[advice] = "1"  # it would advise to install torch
    sys.modules["torch"] = None  # type: ignore[assignment]  # as if it were not installed
    try:
        yield
    finally:
        del sys.modules["torch"]
        if before is None:
            del os.environ[advice]
        else:
            os.environ[advice] = before
