"""How an instance's steps compare with its curve."""

from __future__ import annotations

import pytest

from scheduler.cost import StepCurve
from streamrl.generation.engine import Worked
from streamrl.generation.pace import LEAST_TOKENS, pace

CURVE = StepCurve.measured({1: 0.01, 10: 0.02, 20: 0.03})


def test_steps_as_long_as_the_curve_says_have_pace_1() -> None:
    before = Worked(1000, 50.0, 20.0)
    # 3 s with 10 requests: 150 steps of 20 ms, 10 tokens each
    assert pace(CURVE, before, Worked(2500, 80.0, 23.0)) == pytest.approx(1.0)
    assert pace(CURVE, before, Worked(1750, 80.0, 23.0)) == pytest.approx(2.0)


def test_idle_time_does_not_count() -> None:
    assert pace(CURVE, Worked(), Worked(100, 1.0, 1.0)) == pytest.approx(1.0)


def test_too_little_work_says_nothing() -> None:
    assert pace(CURVE, Worked(), Worked(LEAST_TOKENS - 1, 1.0, 1.0)) is None
    assert pace(CURVE, Worked(5, 1.0, 1.0), Worked(5, 1.0, 1.0)) is None
