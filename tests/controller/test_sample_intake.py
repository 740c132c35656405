"""The taker of samples and rewards: what it records of them."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import numpy as np
import pytest

from streamrl.controller.group_pool import GroupPool
from streamrl.controller.sample_intake import SampleIntake
from streamrl.controller.step_times import StepTimes
from streamrl.protocol.controller_rewards import ScoreAnswer
from streamrl.rollouts.types import Group
from streamrl.transport.endpoint import Delivery
from tests.rollouts.test_rollouts import make_sample


@pytest.mark.parametrize("kept", [0, 1])
def test_the_time_to_a_reward_counts_from_the_end_of_a_sample_of_this_run(
    kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 11.5)
    pool = GroupPool(batch=1, steps=1)
    sample = make_sample("g.0")
    group = Group("g", 1, 0, "t/0", "t", 0, "p", np.arange(3, dtype=np.int32), 1, kept=kept)
    pool.issue([group], version=0)
    pool.finish(sample, 9.0)
    parts = {part.name: cast(Any, MagicMock()) for part in fields(SampleIntake)}
    parts |= {"pool": pool, "times": StepTimes()}
    parts["evaluator"].awaits.return_value = False
    parts["void_watch"].record.return_value = None
    answer = SimpleNamespace(peer="r", body=ScoreAnswer("g.0", 1.0, 0.1), ack=lambda: None)
    SampleIntake(**parts).commit_rewards(cast(list[Delivery], [answer]))
    parts["complete"].assert_called_once_with(group)
    assert parts["times"].rewarding == ([] if kept else [(sample.t_finished, 11.5)])
