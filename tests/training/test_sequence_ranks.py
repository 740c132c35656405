"""Ranks that share rows compute what one rank computes: values and gradients, whatever the model, packing and masks."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from streamrl.config.optimizer import Recomputation
from streamrl.rollouts.train_groups import TrainGroup, TrainSequence
from streamrl.training.attention import OWN_ROWS, SHARED_PREFIX, SHARED_PREFIX_LONG
from streamrl.training.attention_in_parts import IN_PARTS, SDPA
from streamrl.training.critic import Critic
from streamrl.training.packing import pack
from streamrl.training.packing_proof import proof_groups, small_model
from streamrl.training.policy_model import Policy, in_training
from streamrl.training.sequence_parallel import SequenceRanks
from streamrl.training.truncation import ALL_TOKENS, Truncation
from streamrl.verify.families import FAMILIES
from tests.ports import free_port
from tests.training.conftest import random_groups, relative_error, run_ranks, with_masks

BATCHES = {
    "different lengths": proof_groups,
    "masked": lambda: with_masks(random_groups(5)),
    # all tokens with a loss are predicted in the second half of the row, or in the first one
    "late": lambda: [lone(20, 5)],
    "early": lambda: [lone(2, 3), lone(20, 0)],
}


def lone(prompt: int, completion: int) -> TrainGroup:
    tokens = np.arange(completion, dtype=np.int32) + 7
    sequence = TrainSequence(tokens, np.zeros(completion, np.float32), 1.0)
    return TrainGroup("lone", np.arange(prompt, dtype=np.int32) + 3, [sequence])


@dataclass(frozen=True)
class Case:
    """A model and a batch, computed by one rank and by several."""

    family: str = "Llama"
    attention: str = SHARED_PREFIX
    batch: str = "different lengths"
    recomputation: Recomputation = False
    truncation: Truncation = ALL_TOKENS
    every_entropy: bool = False
    critic: bool = False
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Errors:
    """Largest differences between several ranks' values and one rank's; the gradient's over its norm."""

    tokens: int
    logprobs: float
    entropies: float
    gradient: float


REFUSED = {
    ("Gemma 2", SDPA),
    ("gpt-oss", SDPA),
    ("Qwen3-Next", SDPA),
    ("Qwen3-Next", SHARED_PREFIX),
    ("Qwen3-Next", OWN_ROWS),
}
"""Families and packings that `choose_packing` says ranks cannot share (`test_packing_proof.py`)."""
CASES = {
    2: {
        **{
            f"{family}, {attention}": Case(family, attention)
            for family, attention in itertools.product(FAMILIES, (SHARED_PREFIX, OWN_ROWS, SDPA))
            if (family, attention) not in REFUSED
        },
        "shared prompts in fp64": Case(dtype=torch.float64),
        "the kernels of long rows": Case(attention=SHARED_PREFIX_LONG),
        "tokens without a loss": Case(batch="masked"),
        "tokens without a loss in rows of their own": Case(attention=SDPA, batch="masked"),
        "a first rank without a loss": Case(batch="late"),
        "a last rank without a loss": Case(batch="early"),
        "recomputed": Case(recomputation=True),
        "recomputed but for products": Case(recomputation="selective"),
        "long rows recomputed but for products": Case(attention=SHARED_PREFIX_LONG, recomputation="selective"),
        "rows of their own recomputed": Case(attention=SDPA, recomputation=True),
        "an entropy bonus and a truncation": Case(every_entropy=True, truncation=Truncation(20, 0.9, 0.01)),
        "a critic": Case(critic=True),
        "a critic in rows of their own": Case(attention=SDPA, critic=True),
        "windows by kernels": Case("Mistral (windowed)", SHARED_PREFIX_LONG),
        "experts and sinks by kernels": Case("gpt-oss", SHARED_PREFIX_LONG),
    },
    4: {
        "a key-value head for two ranks": Case(),
        "a key-value head for two ranks by kernels": Case(attention=SHARED_PREFIX_LONG),
        "a key-value head for two ranks in rows of their own": Case(attention=SDPA),
        "sinks": Case("gpt-oss"),
    },
}


def _computed(model: nn.Module, case: Case) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Log-probabilities or values, entropies, what is outside, and this rank's gradient, flat."""
    batch = pack(BATCHES[case.batch]())
    if case.critic:
        values = model(batch)
        found = [values, values.new_zeros(0), values.new_zeros(0)]
    else:
        found = list(model(batch, 0.8, case.truncation, case.every_entropy))
    weights = torch.randn(len(found[0]), generator=torch.Generator().manual_seed(1))
    loss = (found[0] * weights).sum()
    if case.every_entropy:
        loss = loss + (found[1] * weights).sum()
    model.zero_grad()
    loss.backward()
    gradients = [p.new_zeros(p.shape) if p.grad is None else p.grad for p in model.parameters()]
    return [one.detach() for one in found], torch.cat([one.flatten() for one in gradients])


def _errors(case: Case, ranks: SequenceRanks) -> Errors:
    model = in_training(small_model(FAMILIES[case.family]()), case.recomputation).to(case.dtype)

    def wrapped(ranks: SequenceRanks | None) -> nn.Module:
        separate = case.attention in (SDPA, OWN_ROWS)
        model.set_attn_implementation(case.attention if ranks is None else IN_PARTS[case.attention])
        if not case.critic:
            return Policy(model, separate, ranks=ranks)
        critic = Critic(model.base_model, separate, ranks).to(case.dtype)
        nn.init.ones_(critic.head.weight)
        return critic

    one, expected = _computed(wrapped(None), case)
    several, gradient = _computed(wrapped(ranks), case)
    dist.all_reduce(gradient, group=ranks.group)
    assert torch.equal(several[2], one[2]), "what lies outside of the truncation"
    differences = [float((a - b).abs().max()) if len(a) else 0.0 for a, b in zip(several[:2], one[:2], strict=True)]
    return Errors(len(one[0]), *differences, relative_error(gradient, expected))


def _rank(rank: int, ranks: int, port: int, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    together = SequenceRanks.of(ranks)
    assert together is not None and (together.size, together.rank) == (ranks, rank)
    found = {name: vars(_errors(case, together)) for name, case in CASES[ranks].items()}
    Path(out, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=CASES)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Errors]]:
    """What each rank found, by case."""
    out, ranks = tmp_path_factory.mktemp("ranks"), int(request.param)
    run_ranks(ranks, _rank, ranks, free_port(), str(out))
    of_ranks = [json.loads((out / f"{rank}.json").read_text()) for rank in range(ranks)]
    return {name: [Errors(**one[name]) for one in of_ranks] for name in CASES[ranks]}


def test_values_and_gradients_are_those_of_one_rank(found: dict[str, list[Errors]]) -> None:
    for name, of_ranks in found.items():
        for one in of_ranks:
            assert one.tokens and one.logprobs < 2e-5 and one.entropies < 2e-5, f"{name}: {one}"
            assert one.gradient < 1e-5, f"{name}: {one}"
