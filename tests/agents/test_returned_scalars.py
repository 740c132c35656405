"""An agent may return the scalars that a reward function may."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from streamrl.agents.agent_result import outcome_of
from streamrl.tasks.void_reward import VoidReward


@pytest.mark.parametrize(
    "one", [np.bool_(True), np.float32(1), np.array(1.0), np.int64(1), Decimal(1), torch.tensor(1.0), True, 1]
)
def test_a_scalar_is_a_reward_and_a_metric(one: Any) -> None:
    assert outcome_of(one) == (1.0, {})
    reward, metrics = outcome_of({"reward": one, "solved": one})
    assert (reward, metrics) == (1.0, {"solved": 1.0})
    assert {type(number) for number in (reward, *metrics.values())} == {float}


@pytest.mark.parametrize("none", [np.ones(2), "1", None, Decimal("inf"), torch.tensor(float("nan"))])
def test_what_is_no_finite_number_is_refused(none: Any) -> None:
    with pytest.raises(VoidReward, match="the reward must be"):
        outcome_of(none)
