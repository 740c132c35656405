"""Fixtures of the tests of plans."""

from __future__ import annotations

from functools import cache

import pytest

from scheduler.capacity import placement_plan


@pytest.fixture
def simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate each split once, however often a test plans with it: its step depends on no budget and no objective."""
    monkeypatch.setattr(placement_plan, "steady_step", cache(placement_plan.steady_step))
