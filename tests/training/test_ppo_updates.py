"""PPO with several updates, value clipping and whitening: plain models, loops and the formulas of TRL and verl."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from streamrl.controller.step_batch import StepBatch
from streamrl.rollouts.micro_batch_wire import from_wire, to_wire
from streamrl.rollouts.train_groups import TrainGroup, TrainSequence
from streamrl.rollouts.types import FloatArray, Group, Scored
from streamrl.training.critic import load_critic
from streamrl.training.objective import MicroStats, merged
from streamrl.training.packing import pack
from streamrl.training.policy_model import load_policy
from streamrl.training.trainer import Trainer
from tests.rollouts.test_rollouts import make_sample
from tests.training.conftest import relative_error, run_config

CPU = torch.device("cpu")
CLIP = 0.05
OPTIMIZER = {"lr": 1e-2, "max_grad_norm": 1e9, "eps": 1e-3}
PPO: dict[str, Any] = {
    "name": "ppo",
    "critic": {"lr": 1e-2, "value_clip": CLIP},
    "lam": 0.9,
    "gamma": 0.95,
    "whiten_advantages": True,
    "mask_truncated": True,
    "kl": {"coef": 0.2, "placement": "reward", "estimator": "k1"},
}
BATCH = {"prompts_per_step": 4, "samples_per_prompt": 2, "epochs": 2, "mini_batches": 2}


def trainer_of(model: Path, algorithm: dict[str, Any], batch: dict[str, Any]) -> Trainer:
    schedule = {"name": "sync"}
    config = run_config(model, algorithm=algorithm, optimizer=OPTIMIZER, batch=batch, schedule=schedule)
    trainer = Trainer(config, str(model), CPU)
    assert trainer.critic is not None
    torch.manual_seed(1)
    torch.nn.init.normal_(trainer.critic.model.head.weight, std=0.1)  # a fresh critic gives 0 everywhere
    return trainer


def groups_of() -> list[Group]:
    """Four prompts; the last sample of the third was cut by the token limit, and has no loss."""
    found, rng = [], np.random.default_rng(3)
    for number in range(4):
        group = Group(f"g{number}", 1, 0, "t/0", "t", 0, "p", rng.integers(0, 256, 4).astype(np.int32), 2)
        for index in range(2):
            sample = make_sample(f"g{number}.{index}", length=3 + number + 2 * index)
            tokens = rng.integers(0, 256, sample.output_length).astype(np.int32)
            logprobs = rng.normal(-5.5, 0.2, sample.output_length).astype(np.float32)
            cut = "length" if (number, index) == (2, 1) else "stop"
            sample = replace(sample, completion_tokens=tokens, logprobs=logprobs, finish_reason=cut)
            group.scored[sample.sample_id] = Scored(sample, float(rng.normal()), None, 5.0)
        found.append(group)
    return found


def estimate(batch: StepBatch, trainer: Trainer) -> int:
    """Estimate what waits in requests of two workers; return their number."""
    requests = 0
    while (shares := batch.estimation.next(24, 2)) is not None:
        assert batch.awaits_estimates and batch.next_micro_batch(24, 2) is None
        batch.estimated([trainer.estimate(from_wire(*to_wire(share))) for share in shares])
        requests += 1
    return requests


def trained(batch: StepBatch, trainer: Trainer) -> list[tuple[set[str], MicroStats]]:
    """Train every update of a batch; return the samples and statistics of each."""
    found = []
    while True:
        ids: set[str] = set()
        stats = []
        while (micro := batch.next_micro_batch(24, 1)) is not None:
            ids |= {row.sample_id for group in micro[0][0] for row in group.sequences}
            stats.append(trainer.accumulate(from_wire(*to_wire(micro[0][0])), micro[1]))
            batch.micro_batch_done([{"tokens": 1.0, "ratio_sum": 1.0}])
        assert trainer.step(0, batch.normalizer, update=batch.update).refused is None
        found.append((ids, merged(stats)))
        if not batch.next_update():
            return found


def test_several_clipped_updates_on_whitened_advantages_are_those_written_by_hand(
    tiny_model: Path, one_rank: None
) -> None:
    """Values, GAE, whitening (`masked_whiten`) and the clipped value loss of verl and TRL, with torch's AdamW."""
    trainer, groups = trainer_of(tiny_model, PPO, BATCH), groups_of()
    assert trainer.critic is not None
    critic = load_critic(str(tiny_model))
    policy, reference = (load_policy(str(tiny_model), attention="eager").model for _ in range(2))
    critic.load_state_dict(trainer.critic.model.state_dict())
    with torch.no_grad():  # away from the reference, so that there is a KL
        for weight in (*policy.parameters(), *trainer.policy.parameters()):
            weight.mul_(1.05)
    start = [p.detach().clone() for p in (*policy.parameters(), *critic.parameters())]
    batch = StepBatch(trainer.run, 1)
    for group in groups:
        batch.take(group)
    assert batch.samples_trained == 1  # the one without a loss
    assert estimate(batch, trainer) > 1
    every = trained(batch, trainer)

    shared = {"betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 0.0}
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2, **shared) for one in (policy, critic)]
    samples = {m.sample.sample_id: (g, m) for g in groups for m in g.members() if m.sample.finish_reason == "stop"}

    def outputs(name: str, model: Any = policy) -> tuple[torch.Tensor, torch.Tensor]:
        group, member = samples[name]
        prompt, tokens = group.prompt_tokens, member.sample.completion_tokens
        ids = torch.tensor(np.concatenate([prompt, tokens]))[None].long()
        logprobs = torch.log_softmax(model(input_ids=ids).logits[0, len(prompt) - 1 : -1], -1)
        alone = TrainGroup("", prompt, [TrainSequence(tokens, member.sample.logprobs, 0.0)])
        return logprobs.gather(-1, ids[0, len(prompt) :, None])[:, 0], critic(pack([alone]))

    old, advantages, returns = {}, {}, {}
    with torch.no_grad():
        for name, (_, member) in samples.items():
            logprobs, values = outputs(name)
            penalties = 0.2 * (logprobs - outputs(name, reference)[0])
            old[name] = values
            later, found = 0.0, torch.zeros(len(values))
            for t in reversed(range(len(values))):
                ends = t + 1 == len(values)
                reward = (float(member.reward or 0.0) if ends else 0.0) - float(penalties[t])
                delta = reward + 0.95 * (0.0 if ends else float(values[t + 1])) - float(values[t])
                found[t] = later = delta + 0.95 * 0.9 * later
            advantages[name], returns[name] = found, found + values
    together = torch.cat(list(advantages.values()))
    mean, variance = together.mean(), together.var(unbiased=True)
    advantages = {name: (one - mean) * torch.rsqrt(variance + 1e-8) for name, one in advantages.items()}
    clipped = []
    for ids, _ in every:
        loss, normalizer, cut = torch.zeros(()), 0, 0
        for name in ids:
            logprobs, values = outputs(name)
            ratio = torch.exp(logprobs - torch.tensor(samples[name][1].sample.logprobs))
            loss = loss - torch.minimum(ratio * advantages[name], ratio.clamp(0.8, 1.2) * advantages[name]).sum()
            limited = torch.clip(values, old[name] - CLIP, old[name] + CLIP)
            errors = (values - returns[name]) ** 2, (limited - returns[name]) ** 2
            loss = loss + 0.5 * torch.max(*errors).sum()
            cut += int((errors[1] > errors[0]).sum())
            normalizer += len(values)
        for optimizer in optimizers:
            optimizer.zero_grad()
        (loss / normalizer).backward()
        for optimizer in optimizers:
            optimizer.step()
        clipped.append(cut)
    assert [len(ids) for ids, _ in every] in ([4, 3, 4, 3], [3, 4, 3, 4], [4, 3, 3, 4], [3, 4, 4, 3])
    assert [stats.value_clipped for _, stats in every] == clipped and clipped[0] == 0 < clipped[-1]
    ours = [p.detach() for learner in trainer.learners for p in learner.model.parameters()]
    theirs = [p.detach() for p in (*policy.parameters(), *critic.parameters())]
    for one, other, before in zip(ours, theirs, start, strict=True):
        assert relative_error(one - before, other - before) < 2e-3


def test_a_value_that_is_not_finite_leaves_the_other_groups_finite(tiny_model: Path, one_rank: None) -> None:
    """So the trainer can name the group, and the step is taken without it, whitened anew over the others."""
    trainer, groups = trainer_of(tiny_model, PPO, BATCH), groups_of()
    batch = StepBatch(trainer.run, 1)
    for group in groups:
        batch.take(group)
    while (shares := batch.estimation.next(24, 1)) is not None:
        values = trainer.estimate(shares[0])
        if any(group.group_id == "g1" for group in shares[0]):
            at = sum(group.loss_tokens for group in shares[0][: [g.group_id for g in shares[0]].index("g1")])
            values[at] = np.nan
        batch.estimated([values])
    every = [one for pieces in batch.pieces.values() for one in pieces]
    unknown = [replace(one, sequences=[replace(row, estimates=None) for row in one.sequences]) for one in every[:1]]
    with pytest.raises(ValueError, match="some sequence has none"):
        trainer.accumulate(unknown, is_last=True)
    assert set(trainer.examine(every)) == {"g1"}
    again = batch.without({"g1"})
    assert again.estimation.next(24, 1) is None and not again.awaits_estimates
    left: list[FloatArray] = [
        row.estimates[:, 0]
        for pieces in again.pieces.values()
        for group in pieces
        for row in group.sequences
        if row.estimates is not None
    ]
    together = np.concatenate(left).astype(np.float64)
    assert len(left) == 5 and abs(together.mean()) < 1e-6 and together.var(ddof=1) == pytest.approx(1.0, rel=1e-5)
