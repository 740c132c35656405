"""What measurements of a site's instances say of each other."""

from __future__ import annotations

import pytest

from scheduler.cost.decode import StepCurve
from streamrl.generation.site.step_curves import disagreement


def test_two_measurements_disagree_where_they_differ_most() -> None:
    one = StepCurve((1, 8), (0.01, 0.02))
    assert disagreement([one]) is None and disagreement([]) is None
    assert disagreement([one, one.scaled(1.24)]) is None
    assert disagreement([one, StepCurve((1, 8), (0.013, 0.06)), one]) == (8, pytest.approx(0.02), pytest.approx(0.06))
