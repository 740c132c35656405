"""The gradient and the updates of a step do not depend on the number of ranks, or on how they divide the work."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaModel

from streamrl.config.optimizer import Recomputation
from streamrl.controller.value_estimation import ValueEstimation
from streamrl.errors import RunFailed
from streamrl.rollouts.rank_shares import balance
from streamrl.rollouts.train_groups import TrainGroup
from streamrl.training.critic import load_critic
from streamrl.training.decoder_layers import decoder_of
from streamrl.training.learner import Division
from streamrl.training.objective import merged
from streamrl.training.policy_model import load_policy
from streamrl.training.tensor_parallel import plan_of
from streamrl.training.trainer import Trainer
from tests.ports import free_port
from tests.tiny_model import save_tiny_model
from tests.training.conftest import random_groups, relative_error, run_config, run_ranks
from tests.training.trained import CPU, PPO, full, precomputed, weights_of


def _precomputed_by_others(trainer: Trainer, worker: int, shares: Sequence[list[TrainGroup]]) -> list[TrainGroup]:
    """This worker's share, after each worker has precomputed that of the next."""
    values = trainer.precompute_reference(shares[(worker + 1) % len(shares)])
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, values)
    of_workers = answers[:: len(answers) // len(shares)]
    return precomputed(shares[worker], of_workers[worker - 1]) if shares[worker] else []


def _estimated(trainer: Trainer, groups: list[TrainGroup], workers: int, worker: int) -> list[TrainGroup]:
    """The groups with whitened advantages, as the controller has them computed: each worker estimates a share."""
    named = [
        replace(one, sequences=[replace(row, sample_id=f"{one.group_id}.{i}") for i, row in enumerate(one.sequences)])
        for one in groups
    ]
    estimation = ValueEstimation()
    estimation.add(named)
    while (shares := estimation.next(60, workers)) is not None:
        answers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(answers, trainer.estimate(shares[worker]))
        estimation.done(answers[:: len(answers) // workers])
    known = estimation.of_rows([row.sample_id for one in named for row in one.sequences], whiten=True)
    return [
        replace(one, sequences=[replace(row, estimates=known[row.sample_id], sample_id="") for row in one.sequences])
        for one in named
    ]


def _rank(
    rank: int,
    ranks: int,
    port: int,
    model: str,
    out: str,
    resume: str | None,
    algorithm: dict[str, Any],
    division: Division,
    batch: dict[str, Any],
    recomputation: Recomputation,
    dtype: str,
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    schedule = {"name": "stream", "sync_every": 2}
    optimizer = {"lr": 1e-3, "max_grad_norm": 1e9, "gradient_checkpointing": recomputation}
    policy = {"path": model, "max_context": 256, "dtype": dtype}
    parts = {"model": policy, "algorithm": algorithm, "schedule": schedule, "batch": batch, "optimizer": optimizer}
    config = run_config(Path(model), **parts)
    trainer = Trainer(config, model, CPU, division=division)
    if resume:
        trainer.load(Path(resume))
    for step in range(2):
        groups = random_groups(5, seed=step)
        workers, worker = ranks // division.sharing, rank // division.sharing
        if config.needs_estimates:
            groups = _estimated(trainer, groups, workers, worker)
        shares = balance(groups, workers)
        if workers == 2 and step == 1:
            shares = [groups, []]  # one rank may have nothing to do, the other nothing to precompute
            trainer.accumulate(_precomputed_by_others(trainer, worker, shares), is_last=True, reference_given=True)
        else:
            with patch.object(dist, "reduce_scatter_single", wraps=dist.reduce_scatter_single) as reduced:
                first = trainer.accumulate(shares[worker][:1], is_last=False)
                stats = merged([first, trainer.accumulate(shares[worker][1:], is_last=True)])
            reductions = reduced.call_count
        if step == 0:
            gradient = torch.cat([division.averaged * full(p.grad).flatten() for p in trainer.policy.parameters()])
        for update in range(config.batch.updates):
            if update:
                trainer.accumulate(shares[worker], is_last=True)
            trainer.step(step, float(sum(g.loss_tokens for g in groups)), update=update)
    weights = {f"policy {i}": value for i, value in enumerate(weights_of(trainer.learner))}
    weights |= {f"critic {i}": value for i, value in enumerate(weights_of(trainer.critic))}
    directory = Path(out)
    if rank == 0:
        directory.mkdir()
    dist.barrier()
    trainer.save(directory)
    manifest, buffer = trainer.lay_out(1)
    for (_, weight), entry in zip(trainer.weights(), manifest.tensors, strict=True):
        laid = torch.from_numpy(buffer[entry.offset : entry.offset + entry.nbytes]).view(weight.dtype)
        assert torch.equal(laid.reshape(entry.shape), weight), entry.name
    if rank == 0:
        torch.save(weights, directory / "weights.pt")
        torch.save(gradient, directory / "gradient.pt")
        (directory / "reductions").write_text(str(reductions))
        (directory / "stats.json").write_text(json.dumps(asdict(stats)))
    dist.destroy_process_group()


def _spawn(
    ranks: int,
    model: Path,
    out: Path,
    algorithm: dict[str, Any],
    resume: Path | None = None,
    division: Division | None = None,
    batch: dict[str, Any] | None = None,
    recomputation: Recomputation = False,
    dtype: str = "float32",
) -> dict[str, torch.Tensor]:
    arguments = (
        ranks,
        free_port(),
        str(model),
        str(out),
        str(resume) if resume else None,
        algorithm,
        division or Division(),
        batch or {},
        recomputation,
        dtype,
    )
    run_ranks(ranks, _rank, *arguments)
    return torch.load(out / "weights.pt")


UNCAPPED = {"ratio_to": "proximal", "correction": "truncate", "high": 1e9}
EVERYTHING = PPO | {"off_policy": UNCAPPED, "entropy_coef": 0.5}
"""Every model there is: critic, reference, proximal copy; and an entropy bonus."""

WHITENED = EVERYTHING | {"critic": {"lr": 1e-3, "value_clip": 0.01}, "whiten_advantages": True}
TWO_UPDATES = {"epochs": 2}

Weights = dict[str, torch.Tensor]


def start_of(model: Path) -> Weights:
    policy, critic = load_policy(str(model)), load_critic(str(model))
    start = {f"policy {i}": p.detach() for i, p in enumerate(policy.parameters())}
    return start | {f"critic {i}": p.detach() for i, p in enumerate(critic.parameters())}


def same_updates(ours: Weights, theirs: Weights, base: Weights, limit: float = 2e-3) -> None:
    assert set(ours) == set(base)
    for name, before in base.items():
        # AdamW divides by the gradient's size: rounding of the smallest gradients shows in the updates
        assert relative_error(ours[name] - before, theirs[name] - before) < limit, name


def gradient_of(run: Path) -> torch.Tensor:
    """The policy's gradient in the first step."""
    return torch.load(run / "gradient.pt")


def reductions_of(run: Path) -> int:
    """Sums of gradients over ranks in the first step's two micro-batches."""
    return int((run / "reductions").read_text())


def test_two_ranks_equal_one_and_checkpoints_load_on_either(tiny_model: Path, tmp_path: Path) -> None:
    algorithm, start = EVERYTHING, start_of(tiny_model)
    one = _spawn(1, tiny_model, tmp_path / "one", algorithm)
    two = _spawn(2, tiny_model, tmp_path / "two", algorithm)
    assert relative_error(gradient_of(tmp_path / "two"), gradient_of(tmp_path / "one")) < 1e-5
    same_updates(two, one, start)
    # every completion in a row of its own, in small parts, of which one rank has more than the other
    rows = {"packing": "separate", "micro_batch_tokens": 64}
    separate = _spawn(2, tiny_model, tmp_path / "separate", algorithm, None, Division(reduction="micro_batch"), rows)
    assert relative_error(gradient_of(tmp_path / "separate"), gradient_of(tmp_path / "one")) < 1e-5
    same_updates(separate, one, start)
    # two more steps from the 2-rank checkpoint on one rank and on two: optimizer state has moved along
    # (now two updates each, with clipped values, on advantages whitened over the ranks)
    again_one = _spawn(1, tiny_model, tmp_path / "again-one", WHITENED, tmp_path / "two", batch=TWO_UPDATES)
    again_two = _spawn(2, tiny_model, tmp_path / "again-two", WHITENED, tmp_path / "two", batch=TWO_UPDATES)
    assert relative_error(gradient_of(tmp_path / "again-two"), gradient_of(tmp_path / "again-one")) < 1e-5
    same_updates(again_two, again_one, two)
    # two nodes of two ranks with a copy of the models each (HSDP), and from its checkpoint to two ranks
    hybrid = _spawn(4, tiny_model, tmp_path / "hybrid", algorithm, division=Division(copies=2, reduction="micro_batch"))
    same_updates(hybrid, one, start)
    units = 2 * (2 + 1)  # policy and critic: two layers and the rest
    assert [reductions_of(tmp_path / name) for name in ("two", "hybrid")] == [units, 2 * units]
    assert reductions_of(tmp_path / "separate") > 2 * units  # micro-batches of several passes
    again = _spawn(2, tiny_model, tmp_path / "again", WHITENED, tmp_path / "hybrid", batch=TWO_UPDATES)
    same_updates(again, again_one, hybrid)


def test_in_bf16_two_ranks_that_shard_equal_one_that_does_not(tiny_model: Path, tmp_path: Path) -> None:
    about = EVERYTHING, None, None, None, False, "bfloat16"
    _spawn(1, tiny_model, tmp_path / "one", *about)
    _spawn(2, tiny_model, tmp_path / "two", *about)
    # micro-batches are cut otherwise, and each one's gradients are rounded to 8 bits
    assert relative_error(gradient_of(tmp_path / "two"), gradient_of(tmp_path / "one")) < 0.01
    # the checkpoint of one loads on both
    one = _spawn(1, tiny_model, tmp_path / "again-one", EVERYTHING, tmp_path / "one", *about[2:])
    two = _spawn(2, tiny_model, tmp_path / "again-two", EVERYTHING, tmp_path / "one", *about[2:])
    assert relative_error(gradient_of(tmp_path / "again-two"), gradient_of(tmp_path / "again-one")) < 0.01
    assert all(relative_error(two[name], weight) < 0.01 for name, weight in one.items())


@dataclass(frozen=True)
class Alone:
    """What one rank has made of a model with two key-value heads."""

    model: Path
    run: Path
    weights: Weights


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    folder = tmp_path_factory.mktemp("alone")
    model = save_tiny_model(folder / "model", kv_heads=2)
    return Alone(model, folder / "one", _spawn(1, model, folder / "one", EVERYTHING))


def test_ranks_that_share_layers_equal_one_and_checkpoints_load_on_either(alone: Alone, tmp_path: Path) -> None:
    model, one = alone.model, alone.weights
    shared = _spawn(2, model, tmp_path / "shared", EVERYTHING, division=Division(layers=2))
    assert relative_error(gradient_of(tmp_path / "shared"), gradient_of(alone.run)) < 1e-5
    same_updates(shared, one, start_of(model), 1e-2)  # sums over units are cut otherwise
    # its checkpoint on one rank, and on four: layers shared by two, in two shards
    again = _spawn(1, model, tmp_path / "again", EVERYTHING, tmp_path / "shared")
    both = _spawn(4, model, tmp_path / "both", EVERYTHING, tmp_path / "shared", Division(layers=2))
    assert relative_error(gradient_of(tmp_path / "both"), gradient_of(tmp_path / "again")) < 1e-5
    same_updates(both, again, shared, 1e-2)


def test_ranks_that_share_rows_equal_one_and_checkpoints_load_on_either(alone: Alone, tmp_path: Path) -> None:
    start = start_of(alone.model)
    division, rows = Division(rows=2, reduction="micro_batch"), {"packing": "separate"}
    pair = _spawn(2, alone.model, tmp_path / "pair", EVERYTHING, None, division, rows)
    assert relative_error(gradient_of(tmp_path / "pair"), gradient_of(alone.run)) < 1e-5
    same_updates(pair, alone.weights, start)
    ours, theirs = (json.loads((run / "stats.json").read_text()) for run in (tmp_path / "pair", alone.run))
    repeated = {"row_tokens", "flops"}  # prompts, in rows of their own
    assert {name: ours[name] for name in theirs.keys() - repeated} == pytest.approx(
        {name: theirs[name] for name in theirs.keys() - repeated}, rel=1e-5, abs=1e-4
    )
    # two pairs, from its checkpoint on; one of them has nothing to do in the second step
    again = _spawn(1, alone.model, tmp_path / "again", EVERYTHING, tmp_path / "pair")
    halves = tmp_path / "pair", Division(rows=2), {}, "selective"
    pairs = _spawn(4, alone.model, tmp_path / "pairs", EVERYTHING, *halves)
    assert relative_error(gradient_of(tmp_path / "pairs"), gradient_of(tmp_path / "again")) < 1e-5
    same_updates(pairs, again, pair)


def test_layers_that_cannot_be_shared_are_refused(tiny_model: Path) -> None:
    trunk = decoder_of(load_policy(str(tiny_model)).model)
    with pytest.raises(RunFailed, match=r"tensor_parallel is 2: it must divide the model's 1 key-value heads"):
        plan_of(trunk, 2)
    trunk.config.base_model_tp_plan = {"layers.*.self_attn.q_norm": "replicated_with_grad_allreduce"}
    with pytest.raises(RunFailed, match="not supported for llama, whose plan has replicated_with_grad_allreduce"):
        plan_of(trunk, 1)
    trunk.config.base_model_tp_plan = None
    with pytest.raises(RunFailed, match="whose plan has none"):
        plan_of(trunk, 1)
    with torch.device("meta"):
        uneven = LlamaModel(LlamaConfig(num_hidden_layers=1, num_key_value_heads=8, intermediate_size=97))
    told = r"tensor_parallel is 2: it must divide the 97 units of layers\.0\.mlp\.gate_proj"
    with pytest.raises(RunFailed, match=told):
        plan_of(uneven, 2)
    assert len(plan_of(uneven, 1)) == 7
