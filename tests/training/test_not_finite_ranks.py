"""What is not finite on one rank refuses the step on all of them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from streamrl.errors import RunFailed
from streamrl.protocol.controller_trainer import Refusal
from streamrl.training.step_guard import refusal
from streamrl.training.trainer import Trainer
from tests.ports import free_port
from tests.training.conftest import random_groups, run_config, run_ranks
from tests.training.test_not_finite import CPU, PPO, everything, local, same, weight_of, with_advantage


def _rank(rank: int, ranks: int, port: int, model: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    groups = random_groups(4)
    trainers = [Trainer(run_config(Path(model), algorithm=PPO), model, CPU) for _ in range(2)]
    bad = [groups[:1], [with_advantage(groups[1], math.nan), *groups[2:]]][rank]  # on rank 1 alone
    trainer = trainers[0]
    before = everything(trainer)
    trainer.accumulate(bad, is_last=True)
    assert trainer.step(0, 40.0).refused == Refusal("loss", "micro-batch 1")
    assert same(everything(trainer), before)
    assert list(trainer.examine(bad)) == [[], ["g1"]][rank]
    for each in trainers:
        each.accumulate([groups[:1], groups[2:]][rank], is_last=True)
        assert each.step(0, 30.0).refused is None
    assert same(everything(trainer), everything(trainers[1]))
    good = [groups[:1], groups[2:]][rank]
    trainer.accumulate(good, is_last=True)
    norms = [one.divide(30.0) for one in trainer.learners]
    bad_losses = ["micro-batch 4"] if rank == 1 else []  # the gradient is finite, and so is the other rank's loss
    assert refusal(trainer.learners, norms, [1e-3, 1e-3], bad_losses, CPU) == Refusal("loss", "micro-batch 4")
    assert refusal(trainer.learners, norms, [1e-3, 1e-3], [], CPU) is None
    for one in trainer.learners:
        one.clear()
    if rank == 1:  # in this rank's rows alone
        with torch.no_grad():
            local(weight_of(trainer)).view(-1)[0] = math.nan
    trainer.accumulate(good, is_last=True)
    refused = trainer.step(1, 30.0).refused
    assert refused is not None and refused.what == "weight"
    with pytest.raises(RunFailed, match="is not finite"):
        trainer.lay_out(2)
    dist.destroy_process_group()


def test_two_ranks_refuse_together_what_one_of_them_has(tiny_model: Path) -> None:
    run_ranks(2, _rank, 2, free_port(), str(tiny_model))
