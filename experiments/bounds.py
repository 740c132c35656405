"""Measure what this machine can do at most, and count a step's operations: the bound beside a measured time."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig

from scheduler.cost.model_shapes import Transformer
from streamrl.machine.cpu import this_cpu
from streamrl.runtime.process_plan import KEPT_HEAP, ONE_BLAS_THREAD, PASSIVE_WAITING
from streamrl.verify.hardware_stages import quickest

SIDE = 1024
"""Of the matrices whose product is timed: 4 MB each in fp32, more than a core's own caches."""
READ_BYTES = 2**29
"""Far more than any cache."""
GFLOP = 1e9
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def like_a_trainer() -> None:
    """Start this script again with the environment that `streamrl launch` gives a trainer, unless it has it."""
    restart_with(PASSIVE_WAITING | KEPT_HEAP)


def like_an_instance() -> None:
    """Start this script again with the environment of an instance of one thread, unless it has it."""
    restart_with(PASSIVE_WAITING | KEPT_HEAP | ONE_BLAS_THREAD | {"OMP_NUM_THREADS": "1"})


def restart_with(wanted: Mapping[str, str]) -> None:
    """Replace this process by one of the same script with these variables, unless it has them: glibc and OpenMP read
    theirs when a process starts."""
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})


def result_name(study: str, dtype: str) -> str:
    """Name of the files of a study of this CPU in a type: a separate one for each kind of CPU."""
    if dtype == "float32":
        return study
    return f"{study}_amx" if "amx_bf16" in this_cpu().flags else f"{study}_{dtype}"


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch compute on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def gemm_peak(dtype: str, count: int) -> float:
    """10^9 operations per second of the product of two square matrices on so many threads."""
    a, b = (torch.randn(SIDE, SIDE).to(TYPES[dtype]) for _ in range(2))
    out = torch.empty(SIDE, SIDE, dtype=TYPES[dtype])
    with threads(count):
        return 2.0 * SIDE**3 / quickest(lambda: torch.mm(a, b, out=out)) / GFLOP


def read_bandwidth(count: int) -> float:
    """10^9 bytes of memory read per second on so many threads."""
    data = torch.ones(READ_BYTES // 4)
    with threads(count):
        return READ_BYTES / quickest(data.sum) / 1e9


@dataclass(frozen=True)
class Group:
    """A prompt and its completions, by their tokens."""

    prompt: int
    completions: tuple[int, ...]
    is_flat: bool
    """Its rewards are all equal: nothing is to be learned from it."""


def shape_of(model: Path) -> Transformer:
    """A model's shape, from its folder.

    Raises:
        ValueError: it is of a kind that the cost model does not know.
    """
    return Transformer.from_config(model.name, AutoConfig.from_pretrained(model).to_dict())


def generating(shape: Transformer, groups: Iterable[Group]) -> float:
    """Operations that generating needs: each prompt computed once, each token but a completion's last one once."""
    total = 0.0
    for group in groups:
        total += shape.forward_flops(group.prompt, shape.pairs(group.prompt), 1)
        for length in group.completions:
            seen = max(0, length - 1)
            total += shape.forward_flops(seen, shape.pairs(group.prompt + seen) - shape.pairs(group.prompt))
    return total


def learning(shape: Transformer, groups: Iterable[Group]) -> float:
    """Operations that forward and backward passes need (a backward one is two forward ones), with each prompt computed
    once for its group, and nothing for a group that is flat."""
    total = 0.0
    for group in groups:
        if not group.is_flat:
            tokens = sum(group.completions)
            prompt = shape.pairs(group.prompt)
            squares = prompt + sum(shape.pairs(group.prompt + n) - prompt for n in group.completions)
            total += 3 * shape.forward_flops(group.prompt + tokens, squares, tokens)
    return total
