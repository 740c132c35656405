"""Batches, schedules, prompts and step metrics: the controller's pure parts."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import pytest

from ranker.online import Trust
from scheduler.saving import Saving
from streamrl.config.run import RunConfig
from streamrl.control.batch import Batch
from streamrl.control.lengths import StepLengths
from streamrl.control.prompts import GroupSource, samples_of
from streamrl.control.schedules import Progress, make_schedule
from streamrl.control.step_metrics import StepTimes, covered, step_metrics
from streamrl.errors import RunFailed
from streamrl.rollouts.types import Group
from streamrl.tasks.source import PromptSource
from tests.rollouts.test_rollouts import make_sample


def empty_group(group_id: str, size: int = 2) -> Group:
    return Group(group_id, 1, 0, "task/0", "task", 0, "p", np.arange(3, dtype=np.int32), size)


def finish(batch: Batch, group_id: str, rewards: list[float]) -> None:
    for number, reward in enumerate(rewards):
        sample = make_sample(f"{group_id}.{number}", length=2 + number)
        batch.finish(sample, 5.0)
        batch.score(sample.sample_id, reward, None, normalize_by_std=True)


def test_a_group_is_queued_when_its_last_reward_arrives_and_flat_groups_are_only_counted() -> None:
    batch = Batch(1, {g: empty_group(g) for g in "abc"}, 0.0)
    batch.finish(make_sample("a.0"), 1.0)
    batch.score("a.0", 1.0, None, True)
    assert batch.complete == 0
    assert batch.next_micro_batch(1000, ranks=1) is None
    batch.finish(make_sample("a.1"), 1.0)
    batch.score("a.1", 0.0, None, True)
    micro = batch.next_micro_batch(1000, ranks=1)
    assert micro is not None
    shares, is_last = micro
    assert [g.group_id for g in shares[0]] == ["a"]
    assert not is_last
    batch.micro_batch_done({})
    finish(batch, "b", [1.0, 1.0])
    assert (batch.complete, batch.no_gradient, batch.samples_trained) == (2, 1, 4)
    assert batch.next_micro_batch(1000, ranks=1) is None  # a flat group is not sent
    finish(batch, "c", [0.5, 0.5])
    shares, is_last = batch.next_micro_batch(1000, ranks=1) or ([], False)
    assert (shares, is_last) == ([[]], True)  # nothing is left to train on, but the batch must be closed
    assert not batch.trained
    batch.micro_batch_done({})
    assert batch.trained
    assert batch.next_micro_batch(1000, ranks=1) is None
    assert batch.loss_tokens == 3 + 3 + 2 * (2 + 3)  # flat groups count in the normalisation


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_every_gradient_reaches_the_trainer_once_and_the_last_micro_batch_is_last(ranks: int, seed: int) -> None:
    rng = random.Random(seed)
    batch = Batch(1, {f"g{i}": empty_group(f"g{i}", 3) for i in range(9)}, 0.0)
    waiting = [f"g{i}" for i in range(9)]
    rng.shuffle(waiting)
    sent: list[str] = []
    for _ in range(100):
        if waiting and rng.random() < 0.6:
            finish(batch, waiting.pop(), [rng.random() for _ in range(3)])
        if batch.in_flight == 0 and (micro := batch.next_micro_batch(25, ranks)) is not None:
            shares, is_last = micro
            assert len(shares) == ranks
            sent += [g.group_id for share in shares for g in share]
            for _ in range(ranks):
                assert not batch.trained
                batch.micro_batch_done({})
            assert batch.trained == is_last
    assert batch.trained
    assert sorted(sent) == sorted(batch.groups)
    assert batch.samples_trained == batch.total_samples


def test_a_reward_for_nobody_is_an_error() -> None:
    with pytest.raises(KeyError):
        Batch(1, {"a": empty_group("a")}, 0.0).score("a.0", 1.0, None, True)


@pytest.mark.parametrize("name", ["sync", "stream"])
def test_on_policy_schedules_issue_only_when_the_newest_weights_serve(name: str) -> None:
    schedule = make_schedule(RunConfig.model_validate({"schedule": {"name": name}}))
    for issued, trained, serving in itertools.product(range(4), repeat=3):
        allowed = schedule.may_issue(Progress(issued, trained, serving, 0, 4))
        assert allowed == (issued == trained == serving)
    partly, whole = Progress(1, 0, 0, 2, 4), Progress(1, 0, 0, 4, 4)
    assert schedule.may_train(whole)
    assert schedule.may_train(partly) == (name == "stream")
    assert not schedule.may_train(Progress(1, 0, 0, 0, 4))


def test_sample_ids_and_seeds_depend_on_the_run_and_the_prompt_only() -> None:
    group = empty_group("00000007", size=8)
    samples = samples_of(group, seed=1)
    assert samples == samples_of(group, seed=1)
    assert len({s for _, s in samples}) == len({i for i, _ in samples}) == 8
    assert all(0 <= seed < 2**31 for _, seed in samples)
    assert {s for _, s in samples_of(group, seed=2)}.isdisjoint(s for _, s in samples)


def group_source(tmp_path: Path, max_tokens: int, context: int) -> GroupSource:
    from transformers import AutoTokenizer

    from tests.tiny_model import save_tiny_model

    config = RunConfig.model_validate(
        {
            "model": {"path": str(save_tiny_model(tmp_path / "model")), "max_context": context},
            "sampling": {"max_tokens": max_tokens},
            "batch": {"prompts_per_step": 3, "samples_per_prompt": 2},
            "tasks": [{"kind": "reasoning_gym", "name": "chain_sum", "config": {"max_terms": 6}}],
        }
    )
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    return GroupSource(config, PromptSource(config.tasks, config.seed), tokenizer)


def test_groups_continue_after_a_checkpoint_as_if_nothing_had_happened(tmp_path: Path) -> None:
    whole, first = group_source(tmp_path, 100, 400), group_source(tmp_path, 100, 400)
    expected = [g.prompt for step in range(1, 5) for g in whole.batch(step)]
    prompts = [g.prompt for step in (1, 2) for g in first.batch(step)]
    resumed = group_source(tmp_path, 100, 400)
    resumed.restore(first.state())
    prompts += [g.prompt for step in (3, 4) for g in resumed.batch(step)]
    assert prompts == expected
    assert len(set(expected)) == 12


def test_prompts_that_do_not_fit_are_skipped_and_counted_and_all_too_long_is_an_error(tmp_path: Path) -> None:
    roomy = group_source(tmp_path, 100, 400)
    every = [g for step in range(1, 9) for g in roomy.batch(step)]
    limit = int(np.median([len(g.prompt_tokens) for g in every]))
    tight = group_source(tmp_path, 100, 100 + limit)
    fitting = [g for step in range(1, 4) for g in tight.batch(step)]
    assert all(len(g.prompt_tokens) <= limit for g in fitting)
    assert tight.too_long > 0
    expected = [g.prompt for g in every if len(g.prompt_tokens) <= limit]
    assert [g.prompt for g in fitting] == expected[: len(fitting)]
    with pytest.raises(RunFailed, match=r"prompts in a row have more than 10 tokens"):
        group_source(tmp_path, 100, 110).batch(1)


def test_chat_template_is_applied_with_the_system_prompt(tmp_path: Path) -> None:
    source = group_source(tmp_path, 100, 400)
    source.run = source.run.model_copy(
        update={"model": source.run.model.model_copy(update={"system_prompt": "Be brief"})}
    )
    group = source.batch(1)[0]
    text = source.tokenizer.decode(group.prompt_tokens)
    assert text == f"<|system|>Be brief<|user|>{group.prompt}<|assistant|>"


def test_covered_time_counts_overlaps_once() -> None:
    assert covered([(0, 2), (1, 3), (5, 6), (5.5, 5.7), (9, 12)], 0.5, 10) == pytest.approx(2.5 + 1 + 1)
    assert covered([], 0, 1) == 0


def test_step_metrics_are_what_they_say() -> None:
    batch = Batch(1, {"a": empty_group("a"), "b": empty_group("b")}, 0.0)
    finish(batch, "a", [1.0, 0.0])
    finish(batch, "b", [1.0, 1.0])
    batch.next_micro_batch(1000, 1)
    batch.micro_batch_done(
        {
            "tokens": 5,
            "loss_sum": 2.0,
            "clipped": 1.0,
            "kl_sum": 0.0,
            "entropy_sum": 3.0,
            "entropy_tokens": 2,
            "gap_sum": 0.5,
            "ratio_max": 1.5,
        }
    )
    times = StepTimes(0.0, 10.0, 9.0, [(5.0, 8.0), (8.0, 9.0)])
    result = {"grad_norm": 0.3, "learning_rate": 1e-3}
    predictions = StepLengths(Trust(0.6, 0.4, 4), Saving(10.0, 8.0, 7.5))
    row = step_metrics(batch, times, ["here-regular-0", "idle"], result, 7, 2, False, 1.5, predictions)
    assert row.step_time_s == 10
    assert row.generate_time_s == pytest.approx(2.0)  # make_sample: dispatched at 2, finished at 4
    assert row.bubble_fraction_generation == pytest.approx(1 - (2 / 10 + 0) / 2)  # one instance never worked
    assert (row.train_time_s, row.bubble_fraction_training) == (4.0, pytest.approx(0.6))
    assert row.weight_sync_exposed_s == 1.0
    assert row.reward_mean == 0.75
    assert row.loss == pytest.approx(2.0 / 10)  # tokens of the whole batch
    assert (row.entropy, row.logprob_gap_mean, row.clip_fraction) == (1.5, 0.1, 0.2)
    assert (row.groups_no_gradient, row.groups_total, row.samples_total) == (1, 2, 4)
    assert (row.staleness_mean, row.staleness_max) == (0, 0)
    assert (row.output_length_p50, row.output_length_max) == (2.5, 3)
    assert (row.kl_mean, row.prompts_too_long, row.weight_bytes_sent) == (None, 2, 7)
    assert row.reward_by_task == {"task": 0.75}
    assert (row.ranker_recall_at_20, row.ranker_kendall_tau) == (0.6, 0.4)
    assert row.dispatch_by_prediction is False  # none of its groups has a forecast
    assert (row.dispatch_saved, row.dispatch_captured) == (pytest.approx(0.2), pytest.approx(0.8))
