"""The gradient of a step does not depend on arrival order, on how the batch was cut, or on the number of ranks."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils.flop_counter import FlopCounterMode

from streamrl.rollouts.canary import Canary
from streamrl.rollouts.micro_batch import split_into_micro_batches
from streamrl.rollouts.train_groups import TrainGroup, TrainSequence
from streamrl.run_dir.checkpoints import CheckpointFolder
from streamrl.training.learner import Division, _fully_shard
from streamrl.training.objective import policy_objective
from streamrl.training.packing import PackedShare, pack
from streamrl.training.policy_model import load_policy
from streamrl.training.received_ahead import ReceivedAhead
from streamrl.training.trainer import Trainer
from streamrl.training.truncation import Truncation
from tests.training.conftest import random_groups, relative_error, run_config, with_masks
from tests.training.trained import CPU, PPO, accumulated_gradient, full, precomputed, weights_of

ALGORITHMS: list[dict[str, Any]] = [
    {"name": "grpo", "kl": {"coef": 0.1}},
    {"name": "dr_grpo", "entropy_coef": 0.5},
    {"name": "dapo", "off_policy": {"correction": "mask", "low": 0.1, "high": 5.0}},
    {"name": "gspo"},
    {"name": "cispo"},
    {"name": "sapo"},
    {"name": "rloo", "off_policy": {"correction": "truncate", "level": "geometric", "high": 1.1}},
    {"name": "reinforce_pp", "off_policy": {"ratio_to": "proximal", "correction": "truncate", "level": "sequence"}},
    PPO,
]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda keys: keys["name"])
def test_streaming_gives_the_gradient_of_the_whole_batch_for_any_arrival_order(
    tiny_model: Path, one_rank: None, algorithm: dict[str, Any]
) -> None:
    config = run_config(tiny_model, algorithm=algorithm, schedule={"name": "stream", "sync_every": 2})
    trainer = Trainer(config, str(tiny_model), CPU)
    trainer.accumulate(random_groups(3, seed=9), is_last=True)  # off the start: ratios and values are not trivial
    trainer.step(0, 10.0)
    groups = random_groups(4)
    whole = accumulated_gradient(trainer, [groups])  # sync: the barrier's one batch
    assert float(whole.norm()) > 0
    for order in itertools.islice(itertools.permutations(groups), 0, 24, 11):
        streamed = accumulated_gradient(trainer, [[group] for group in order])
        assert relative_error(streamed, whole) < 1e-5
    cut = split_into_micro_batches(groups[::-1], max_tokens=30)
    assert len(cut) > len(groups)
    assert relative_error(accumulated_gradient(trainer, cut), whole) < 1e-5


@pytest.mark.parametrize("algorithm", [{"name": "grpo", "kl": {"coef": 0.1}}, PPO], ids=["grpo", "ppo"])
def test_closing_a_batch_with_an_empty_micro_batch_adds_nothing(
    tiny_model: Path, one_rank: None, algorithm: dict[str, Any]
) -> None:
    trainer = Trainer(run_config(tiny_model, algorithm=algorithm), str(tiny_model), CPU)
    groups = random_groups(2)
    assert torch.equal(accumulated_gradient(trainer, [groups, []]), accumulated_gradient(trainer, [groups]))


@pytest.mark.parametrize("masked", [False, True], ids=["completions", "rows of agents"])
def test_separate_rows_give_the_gradient_of_shared_prompts(tiny_model: Path, one_rank: None, masked: bool) -> None:
    groups = with_masks(random_groups(4)) if masked else random_groups(4)
    found = []
    for packing, rows in (("shared", 2048), ("separate", 2048), ("separate", 64)):
        batch = {"packing": packing, "micro_batch_tokens": rows}
        trainer = Trainer(run_config(tiny_model, algorithm=PPO, batch=batch), str(tiny_model), CPU)
        assert trainer.packing.kind == packing and trainer.policy.separate == (packing == "separate")
        reference = trainer.precompute_reference(groups)
        stats = trainer.accumulate(precomputed(groups, reference), is_last=True, reference_given=True)
        assert trainer.critic is not None
        gradients = [p.grad for model in (trainer.policy, trainer.critic.model) for p in model.parameters()]
        found.append((reference, stats, torch.cat([gradient.flatten() for gradient in gradients])))
    shared, whole, parts = found
    for reference, stats, gradient in (whole, parts):
        np.testing.assert_allclose(reference, shared[0], rtol=1e-5, atol=1e-5)
        assert relative_error(gradient, shared[2]) < 1e-5
        assert (stats.tokens, stats.sequences) == (shared[1].tokens, shared[1].sequences)
        assert stats.loss_sum == pytest.approx(shared[1].loss_sum, rel=1e-4)
        assert stats.ratio_max == pytest.approx(shared[1].ratio_max, rel=1e-4)
    prompts = sum(len(group.prompt_tokens) - 1 for group in groups for _ in group.sequences)
    tokens = sum(len(one.completion_tokens) for group in groups for one in group.sequences)
    assert whole[1].row_tokens == parts[1].row_tokens == prompts + tokens
    assert whole[1].tokens == sum(group.loss_tokens for group in groups)


@pytest.mark.parametrize("packing", ["shared", "separate"])
def test_the_entropy_bonus_is_that_of_plain_autograd_through_the_models_own_logits(
    tiny_model: Path, one_rank: None, packing: str
) -> None:
    algorithm = {"name": "rloo", "aggregation": "token", "entropy_coef": 0.7}
    sampling = {"max_tokens": 16, "temperature": 0.8}
    config = run_config(tiny_model, algorithm=algorithm, sampling=sampling, batch={"packing": packing})
    trainer = Trainer(config, str(tiny_model), CPU)
    groups = with_masks(random_groups(2))
    plain = load_policy(str(tiny_model), attention="eager").model
    loss = torch.zeros(())
    entropies = 0.0
    for prompt, one in ((group.prompt_tokens, one) for group in groups for one in group.sequences):
        tokens = torch.tensor(np.concatenate([prompt, one.completion_tokens]))[None].long()
        first = len(prompt) - 1
        logprobs = torch.log_softmax(plain(input_ids=tokens).logits[0, first:-1] / 0.8, -1)
        mask = torch.tensor(one.mask)
        chosen = logprobs.gather(-1, tokens[0, first + 1 :, None])[:, 0]
        entropy = torch.distributions.Categorical(logits=logprobs).entropy()
        loss = loss - ((one.advantage * chosen + 0.7 * entropy) * mask).sum()
        entropies += float((entropy * mask).sum())
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in plain.parameters()])
    stats = trainer.accumulate(groups, is_last=True)
    ours = torch.cat([p.grad.flatten() for p in trainer.policy.parameters()])
    assert relative_error(ours, expected) < 1e-5
    assert stats.loss_sum == pytest.approx(float(loss), rel=1e-5)
    assert stats.entropy_sum == pytest.approx(entropies, rel=1e-5)
    assert stats.entropy_tokens == stats.tokens == sum(group.loss_tokens for group in groups)


@pytest.mark.parametrize("ratio_to", ["generator", "proximal"])
def test_two_passes_over_a_batch_are_two_of_torchs_steps_with_the_old_log_probabilities_fixed(
    tiny_model: Path, one_rank: None, ratio_to: str
) -> None:
    """By hand: PPO's clipped loss (arXiv 1707.06347, eq. 7) on the model's own logits, and torch's AdamW."""
    algorithm = {"name": "grpo", "aggregation": "token", "off_policy": {"ratio_to": ratio_to}}
    options = {"lr": 1e-2, "max_grad_norm": 1e9, "eps": 1e-3}
    batch = {"epochs": 2, "packing": "shared"}
    config = run_config(tiny_model, algorithm=algorithm, optimizer=options, batch=batch)
    trainer, groups = Trainer(config, str(tiny_model), CPU), random_groups(2)
    normalizer = float(sum(group.loss_tokens for group in groups))
    start = weights_of(trainer.learner)
    plain = load_policy(str(tiny_model), attention="eager").model
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.0)
    old: dict[int, torch.Tensor] = {}
    for update in range(2):
        trainer.accumulate(groups[::-1] if update else groups, is_last=True)
        assert trainer.step(0, normalizer, update=update).refused is None
        loss = torch.zeros(())
        for number, (prompt, one) in enumerate((g.prompt_tokens, one) for g in groups for one in g.sequences):
            tokens = torch.tensor(np.concatenate([prompt, one.completion_tokens]))[None].long()
            logprobs = torch.log_softmax(plain(input_ids=tokens).logits[0, len(prompt) - 1 : -1], -1)
            chosen = logprobs.gather(-1, tokens[0, len(prompt) :, None])[:, 0]
            first = torch.tensor(one.logprobs) if ratio_to == "generator" else chosen.detach()
            ratio = torch.exp(chosen - old.setdefault(number, first))
            clipped = ratio.clamp(0.8, 1.2)
            loss = loss - torch.minimum(ratio * one.advantage, clipped * one.advantage).sum()
        optimizer.zero_grad()
        (loss / normalizer).backward()
        optimizer.step()
    for ours, theirs, before in zip(weights_of(trainer.learner), plain.parameters(), start, strict=True):
        assert relative_error(ours - before, theirs.detach() - before) < 1e-3


def test_a_step_uses_the_updated_weights_afterwards(tiny_model: Path, one_rank: None) -> None:
    trainer = Trainer(run_config(tiny_model), str(tiny_model), CPU)
    groups = random_groups(2)
    before = {name: tensor.clone() for name, tensor in trainer.weights()}
    first = trainer.accumulate(groups, is_last=True)
    result = trainer.step(0, normalizer=float(len(groups)))
    assert result.grad_norm > 0 and not result.skipped and result.critic_grad_norm is None
    after = dict(trainer.weights())
    assert any(not torch.equal(before[name], after[name]) for name in before)
    second = trainer.accumulate(groups, is_last=True)
    assert second.loss_sum < first.loss_sum  # the same groups again: the surrogate has improved


def test_bf16_compute_keeps_fp32_master_weights(tiny_model: Path, one_rank: None) -> None:
    model = {"path": str(tiny_model), "max_context": 256, "dtype": "bfloat16"}
    trainer = Trainer(run_config(tiny_model, model=model, algorithm=PPO), str(tiny_model), CPU)
    trainer.accumulate(random_groups(2), is_last=True)
    trainer.step(0, 10)
    trainer.measure_canary(Canary(np.arange(4, dtype=np.int32), np.arange(6, dtype=np.int32)))
    for learner in (trainer.learner, trainer.critic):
        assert learner is not None
        assert {p.dtype for p in learner.model.parameters()} == {torch.float32}
    assert {t.dtype for _, t in trainer.weights()} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"], ids=["plain", "copies"])
def test_forward_passes_before_an_optimizer_step_leave_its_bits_as_they_are(
    tiny_model: Path, one_rank: None, dtype: str
) -> None:
    config = run_config(tiny_model, algorithm=PPO, model={"path": str(tiny_model), "dtype": dtype})
    groups, tokens = random_groups(4), np.arange(10, dtype=np.int32)
    found, norms = [], []
    for passes in (False, True):
        trainer = Trainer(config, str(tiny_model), CPU)

        def between(trainer: Trainer = trainer, passes: bool = passes) -> None:
            if passes:
                trainer.measure_canary(Canary(tokens[:4], tokens[4:]))
                trainer.precompute_reference(groups)

        for step in range(2):
            trainer.accumulate(groups[:2], is_last=False)
            between()
            trainer.accumulate(groups[2:], is_last=True)
            between()
            if passes:  # one that leaves its compute copies
                with torch.no_grad():
                    trainer.policy(pack(groups), 1.0)
            norms.append(trainer.step(step, 10.0).grad_norm)
        found.append([*weights_of(trainer.learner), *weights_of(trainer.critic)])
    assert norms[0] > 0 and norms[:2] == norms[2:]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_lone_rank_shards_nothing_and_copies_what_it_converts(tiny_model: Path, one_rank: None) -> None:
    for dtype, is_converted in (("float32", False), ("bfloat16", True)):
        model = {"path": str(tiny_model), "max_context": 256, "dtype": dtype}
        trainer = Trainer(run_config(tiny_model, model=model, algorithm=PPO), str(tiny_model), CPU)
        assert trainer.critic is not None and trainer.reference is not None
        for one in (trainer.policy, trainer.critic.model, trainer.reference):
            assert not any(isinstance(module, FSDPModule) for module in one.modules())
            is_frozen = one is trainer.reference
            assert (one.copies is not None) == (is_converted and not is_frozen)
            own = torch.bfloat16 if is_converted and is_frozen else torch.float32
            assert {parameter.dtype for parameter in one.parameters()} == {own}


def test_a_model_that_ranks_share_is_never_whole_on_the_device(tiny_model: Path, one_rank: None) -> None:
    """torch moves each unit as it is sharded."""
    model = {"path": str(tiny_model), "max_context": 256, "dtype": "bfloat16"}
    policy = load_policy(str(tiny_model))
    with patch.object(torch.nn.Module, "to", autospec=True) as moves:
        _fully_shard(policy, run_config(tiny_model, model=model), CPU, Division())
    assert isinstance(policy, FSDPModule)
    assert not {type(call.args[0]).__name__ for call in moves.call_args_list} & {"Policy", "FSDPPolicy"}


def test_kl_to_the_reference_is_zero_at_the_start_and_grows(tiny_model: Path, one_rank: None) -> None:
    config = run_config(tiny_model, algorithm={"name": "grpo", "kl": {"coef": 0.1}})
    trainer = Trainer(config, str(tiny_model), CPU)
    groups = random_groups(2)
    assert trainer.accumulate(groups, is_last=True).kl_sum == pytest.approx(0.0, abs=1e-6)
    trainer.step(0, 10)
    assert trainer.accumulate(groups, is_last=True).kl_sum > 1e-6


def test_no_completion_tokens_at_all_give_no_gradient(tiny_model: Path, one_rank: None) -> None:
    trainer = Trainer(run_config(tiny_model, algorithm=PPO), str(tiny_model), CPU)
    none = np.zeros(0, np.int32)
    empty = TrainSequence(none, none.astype(np.float32), 1.0)
    prompt = np.arange(3, dtype=np.int32)
    for sequences in ([empty, empty], []):  # nothing was generated; every sample was masked
        stats = trainer.accumulate([TrainGroup("g", prompt, sequences)], is_last=True)
        assert (stats.tokens, stats.sequences, stats.loss_sum, stats.ratio_max) == (0, 0, 0.0, 0.0)
    assert trainer.step(0, 1.0).grad_norm == 0.0


def test_policy_and_critic_are_divided_by_the_batchs_normalizer(tiny_model: Path, one_rank: None) -> None:
    # with so large an eps AdamW's step is proportional to the gradient; no momentum, no weight decay
    options = {"lr": 1.0, "max_grad_norm": 1e9, "eps": 1e5, "betas": (0.0, 0.0)}
    config = run_config(tiny_model, algorithm={"name": "ppo", "critic": {"lr": 1.0}}, optimizer=options)
    trainer = Trainer(config, str(tiny_model), CPU)
    torch.nn.init.normal_(trainer.critic.model.head.weight, std=0.1)  # its gradient is far below eps
    groups, norms = random_groups(2), []
    for normalizer in (0.25, 0.5):
        trainer.accumulate(groups, is_last=True)
        for learner in (trainer.learner, trainer.critic):
            norms.append(torch.stack([full(p.grad).norm() for p in learner.model.parameters()]).norm())
        before = [torch.cat([w.flatten() for w in weights_of(x)]) for x in (trainer.learner, trainer.critic)]
        result = trainer.step(0, normalizer)
        after = [torch.cat([w.flatten() for w in weights_of(x)]) for x in (trainer.learner, trainer.critic)]
        assert result.grad_norm == pytest.approx(float(norms[-2]) / normalizer, rel=1e-4)
        assert result.critic_grad_norm == pytest.approx(float(norms[-1]) / normalizer, rel=1e-4)
        for old, new, norm in zip(before, after, norms[-2:], strict=True):
            # lr / eps times the gradient, to the rounding of the fp32 weights
            assert float((new - old).norm()) == pytest.approx(1e-5 * float(norm) / normalizer, rel=0.02)


def test_a_skipped_step_changes_nothing(tiny_model: Path, one_rank: None) -> None:
    trainer = Trainer(run_config(tiny_model, algorithm=PPO), str(tiny_model), CPU)

    def everything() -> list[torch.Tensor]:
        moments = [
            value.detach().clone()
            for learner in (trainer.learner, trainer.critic)
            for state in learner.optimizer.state.values()
            for value in map(full, state.values())
        ]
        return weights_of(trainer.learner) + weights_of(trainer.critic) + moments

    trainer.accumulate(random_groups(2), is_last=True)
    trainer.step(0, 10.0)
    before = everything()
    whole = accumulated_gradient(trainer, [random_groups(2, seed=1)])
    trainer.accumulate(random_groups(2, seed=2), is_last=True)
    result = trainer.step(1, 10.0, skip=True)
    assert result.skipped and result.grad_norm > 0
    assert all(torch.equal(a, b) for a, b in zip(before, everything(), strict=True))
    # the thrown away gradient is not in the next one
    assert torch.equal(accumulated_gradient(trainer, [random_groups(2, seed=1)]), whole)


@pytest.mark.parametrize("epochs", [1, 2])
def test_the_proximal_policy_is_that_after_the_last_step_that_publishes(
    tiny_model: Path, one_rank: None, epochs: int
) -> None:
    """When the version leaves for the instances does not matter: the trainer is told nothing of it."""
    off_policy = {"ratio_to": "proximal", "correction": "truncate", "high": 1.1}
    config = run_config(
        tiny_model,
        algorithm={"name": "grpo", "off_policy": off_policy},
        schedule={"name": "stream", "sync_every": 2},
        batch={"epochs": epochs},
    )
    trainer = Trainer(config, str(tiny_model), CPU)

    def published_log_probabilities(groups: list[TrainGroup]) -> torch.Tensor:
        """By a model made anew of the current weights."""
        policy = load_policy(str(tiny_model))
        policy.model.load_state_dict(dict(trainer.weights()), strict=False)  # the tied head comes once
        with torch.no_grad():
            return policy(pack(groups), 1.0)[0]

    groups = random_groups(3)
    for step, update in itertools.product(range(4), range(epochs)):
        newest = step % 2 == 0 and update == 0
        if newest:
            proximal = published_log_probabilities(groups)
        current = published_log_probabilities(groups)
        batch = pack(groups)
        expected = policy_objective(
            config.algorithm, current, batch.generator_logprobs, batch.advantages, batch.sequence_ids, proximal
        )
        stats = trainer.accumulate(groups, is_last=True)
        assert stats.loss_sum == pytest.approx(float(expected.loss_sum), rel=1e-4)
        assert stats.ratio_sum == pytest.approx(float(expected.sums["ratio_sum"]), rel=1e-5)
        assert (abs(stats.ratio_sum - stats.tokens) < 1e-3) == newest
        trainer.step(step, 3.0, update=update)


@pytest.mark.parametrize("end", ["skipped", "refused"])
def test_a_skipped_update_ends_its_step_for_the_proximal_policy_and_a_refused_one_does_not(
    tiny_model: Path, one_rank: None, end: str
) -> None:
    algorithm = {"name": "grpo", "off_policy": {"ratio_to": "proximal"}}
    config = run_config(tiny_model, algorithm=algorithm, batch={"epochs": 2})
    trainer = Trainer(config, str(tiny_model), CPU)
    groups = random_groups(3)
    trainer.accumulate(groups, is_last=True)
    trainer.step(0, 3.0)
    trainer.accumulate(groups, is_last=True)
    assert bool(trainer.step(0, 3.0 if end == "skipped" else float("nan"), end == "skipped", 1).refused) == (
        end == "refused"
    )
    stats = trainer.accumulate(groups, is_last=True)
    assert (abs(stats.ratio_sum - stats.tokens) < 1e-3) == (end == "skipped")


def test_a_rank_without_work_computes_only_where_a_gradient_is_needed(tiny_model: Path, one_rank: None) -> None:
    trainer = Trainer(run_config(tiny_model), str(tiny_model), CPU)
    with patch.object(trainer.policy, "forward", wraps=trainer.policy.forward) as passes:
        trainer.accumulate([], is_last=False)
        trainer.accumulate(random_groups(1), is_last=False)
        trainer.accumulate([], is_last=True)
        assert passes.call_count == 1
        trainer.step(0, 1.0)
        trainer.accumulate([], is_last=True)  # AdamW's moments move the weights in a step without samples, too
        assert passes.call_count == 2
    assert not any(p.grad.any() for p in trainer.policy.parameters())


def test_a_micro_batch_is_received_and_packed_while_another_one_is_computed(tiny_model: Path, one_rank: None) -> None:
    trainer, groups = Trainer(run_config(tiny_model), str(tiny_model), CPU), random_groups(4)
    whole = accumulated_gradient(trainer, [groups])

    async def play() -> list[str]:
        order: list[str] = []
        coming: asyncio.Queue[int] = asyncio.Queue()
        packed = [asyncio.Event() for _ in range(4)]

        async def pack_one(number: int) -> PackedShare:
            order.append(f"packs {number}")
            packed[number].set()
            return trainer.pack([groups[number]])

        commands = ReceivedAhead(coming.get, pack_one)
        for number in range(4):
            coming.put_nowait(number)
        for number in range(4):
            _, share = await commands.next()
            if number < 3:
                await packed[number + 1].wait()  # the next one, before this one is computed
            order.append(f"computes {number}")
            trainer.accumulate(share, is_last=number == 3)
        commands.close()
        return order

    order = asyncio.run(play())
    assert order.index("packs 2") < order.index("computes 1") < order.index("packs 3") < order.index("computes 2")
    ours = torch.cat([p.grad.flatten() for p in trainer.policy.parameters()])
    assert relative_error(ours, whole) < 1e-5


def test_checkpoint_folder_is_complete_or_absent_and_keeps_the_newest(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints")
    assert folder.latest() is None
    for step in (5, 10, 15):
        (folder.begin(step) / "model").write_text("x")
        folder.commit(step, keep=2)
    folder.begin(20)  # died while writing
    assert folder.latest() == 15
    assert sorted(p.name for p in folder.directory.glob("step_*")) == ["step_10", "step_15"]


def test_operations_are_counted_as_torch_counts_them(tiny_model: Path, one_rank: None) -> None:
    for algorithm in ({"name": "grpo", "kl": {"coef": 0.1}}, PPO):
        trainer = Trainer(run_config(tiny_model, algorithm=algorithm), str(tiny_model), CPU)
        groups = random_groups(3)
        with FlopCounterMode(display=False) as counter:
            stats = trainer.accumulate(groups, is_last=True)
        counted = counter.get_flop_counts()["Global"]
        products = sum(n for operation, n in counted.items() if operation in (torch.ops.aten.mm, torch.ops.aten.addmm))
        # attention's own products are counted by whole squares there, and by the half that is needed here
        batch = pack(groups)
        models = 4 + (3 if trainer.critic else 0)
        assert trainer.operations.policy.shape is not None
        attention = models * trainer.operations.policy.shape.forward_flops(0, batch.squares(separate=False))
        assert stats.flops - attention == pytest.approx(products, rel=0.02)
        assert stats.row_tokens == batch.input_ids.shape[1]


def test_policy_reference_and_proximal_copy_have_the_distribution_that_is_sampled_from(
    tiny_model: Path, one_rank: None
) -> None:
    """So with equal weights no ratio and no KL term differs from that of the generator."""
    run = run_config(
        tiny_model,
        sampling={"max_tokens": 16, "temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
        algorithm={"name": "grpo", "kl": {"coef": 0.1}, "off_policy": {"ratio_to": "proximal", "correction": "none"}},
        schedule={"name": "async", "max_staleness": 2, "sync_every": 2},
    )
    groups = random_groups(3)
    with torch.no_grad():
        drawn = load_policy(str(tiny_model))(pack(groups), 0.8, Truncation(30, 0.9, 0.01))
    assert drawn.outside.any() and not drawn.outside.all()
    parts = iter(drawn.logprobs.split([len(one.completion_tokens) for group in groups for one in group.sequences]))
    groups = [
        replace(group, sequences=[replace(one, logprobs=next(parts).numpy()) for one in group.sequences])
        for group in groups
    ]
    trainer = Trainer(run, str(tiny_model), CPU)
    assert trainer.proximal is not None
    np.testing.assert_allclose(trainer.precompute_reference(groups), drawn.logprobs.numpy(), atol=1e-5)
    stats = trainer.accumulate(groups, is_last=True)
    assert stats.outside == int(drawn.outside.sum())
    assert stats.mismatch_sum / stats.tokens < 1e-5 and abs(stats.kl_sum) < 1e-5
    assert stats.ratio_sum == pytest.approx(stats.tokens, rel=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"], ids=["plain", "copies"])
def test_a_trainer_that_left_its_device_between_steps_makes_the_same_bits(
    tiny_model: Path, one_rank: None, dtype: str
) -> None:
    groups = random_groups(2)
    found = []
    for leaves in (False, True):
        config = run_config(tiny_model, algorithm=PPO, model={"path": str(tiny_model), "dtype": dtype})
        trainer = Trainer(config, str(tiny_model), CPU)
        for step in range(2):
            trainer.accumulate(groups, is_last=True)
            trainer.step(step, 10.0)
            if leaves:
                freed = trainer.leave_device()
                weights = sum(p.numel() * p.element_size() for model in models_of(trainer) for p in model.parameters())
                trained = sum(p.numel() for learner in trainer.learners for p in learner.model.parameters())
                assert freed >= weights + 8 * trained  # of all models; two moments
                assert not any(memory_of(p) for model in models_of(trainer) for p in model.parameters())
                assert not any(memory_of(t) for learner in trainer.learners for t in learner.tensors())
                trainer.return_to_device()
                trainer.return_to_device()  # a no-op
        found.append([*weights_of(trainer.learner), *weights_of(trainer.critic)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def models_of(trainer: Trainer) -> list[torch.nn.Module]:
    models = (trainer.policy, trainer.reference, *(learner.model for learner in trainer.learners[1:]))
    return [model for model in models if model is not None]


def memory_of(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.untyped_storage().nbytes()
