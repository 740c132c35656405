"""How often ranks reduce their gradients, by the memory that they may use together."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from scheduler.cost.training_memory import REDUCE_BYTES, WHOLE_GRADIENT_SHARE
from streamrl.training import learner
from streamrl.training.learner import Division

CPU = torch.device("cpu")


def test_ranks_on_cpus_share_the_memory_that_they_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, operation: None)  # all ranks find the same
    weights = 1_000_000
    enough = 4 * REDUCE_BYTES * weights / WHOLE_GRADIENT_SHARE
    monkeypatch.setattr(learner, "total_memory", lambda: 1.01 * enough)
    assert Division().reduces_once(weights, CPU)
    monkeypatch.setattr(learner, "total_memory", lambda: 0.99 * enough)  # of a container, say
    assert not Division().reduces_once(weights, CPU)
    assert Division(reduction="step").reduces_once(weights, CPU)
