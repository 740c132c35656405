"""Plans whose splits are simulated once, for tests that plan for the same cluster again and again."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from scheduler.capacity import placement_plan


@contextmanager
def splits_simulated_once() -> Iterator[None]:
    """Simulate each split once, however often it is planned with: its step depends on no budget and no objective."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement_plan, "steady_step", functools.cache(placement_plan.steady_step))
        yield
