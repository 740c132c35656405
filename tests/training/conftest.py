"""A tiny model, a one-rank process group and random groups."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from streamrl.config.run import RunConfig
from streamrl.rollouts.train_groups import TrainGroup, TrainSequence
from tests.ports import free_port
from tests.tiny_model import save_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def one_rank() -> Iterator[None]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


PRELOADED = [
    "tests.training.test_trainer_ranks",
    "tests.weights.test_sharded_ranks",
    "streamrl.training.trainer",
    "transformers.models.llama.modeling_llama",
    "transformers.masking_utils",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
]
"""Modules that a rank needs; some of them are imported only where they are used."""


def run_ranks(ranks: int, work: Callable[..., None], *arguments: object) -> None:
    """Calls `work(rank, *arguments)` in as many processes. They are forked from one that has imported everything.

    A lone rank, which has nobody to wait for, is this process: it computes a second time without the preparations of
    libraries at a first one, which take most of a rank's time.
    """
    if ranks == 1:
        try:
            return work(0, *arguments)
        finally:
            if dist.is_initialized():  # it has failed
                dist.destroy_process_group()
    multiprocessing.set_forkserver_preload(PRELOADED)
    mp.start_processes(work, arguments, nprocs=ranks, start_method="forkserver")


def head_inputs(tokens: int, width: int, vocabulary: int) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """([hidden, weight, bias], targets, gradient of each log-probability)."""
    generator = torch.Generator().manual_seed(0)
    shapes = (tokens, width), (vocabulary, width), (vocabulary,)
    values = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    return values, targets, torch.randn(tokens, generator=generator)


def random_groups(count: int, seed: int = 0, samples: int = 4) -> list[TrainGroup]:
    rng = np.random.default_rng(seed)

    def sequence() -> TrainSequence:
        length = int(rng.integers(1, 12))
        tokens = rng.integers(0, 256, length).astype(np.int32)
        return TrainSequence(tokens, rng.normal(-5.5, 0.2, length).astype(np.float32), float(rng.normal()))

    return [
        TrainGroup(
            f"g{i}",
            rng.integers(0, 256, int(rng.integers(3, 9))).astype(np.int32),
            [sequence() for _ in range(samples)],
        )
        for i in range(count)
    ]


def with_masks(groups: list[TrainGroup], seed: int = 0) -> list[TrainGroup]:
    """Return the groups with a random half of each sequence's tokens left out of the loss, as of agents' rows."""
    rng = np.random.default_rng(seed)

    def masked(one: TrainSequence) -> TrainSequence:
        return replace(one, mask=np.append(True, rng.random(len(one.completion_tokens) - 1) < 0.5))

    return [replace(group, sequences=[masked(one) for one in group.sequences]) for group in groups]


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Norm of the difference over the norm."""
    return float((ours - theirs).norm() / theirs.norm())


def run_config(path: Path, **changes: object) -> RunConfig:
    values = {
        "model": {"path": str(path), "max_context": 256, "dtype": "float32"},
        "optimizer": {"lr": 1e-3, "max_grad_norm": 1e9},
        "sampling": {"max_tokens": 16},
    }
    return RunConfig.model_validate(values | changes)
