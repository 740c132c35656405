"""Pool, batches, prompts and step metrics: the controller's pure parts."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest

from ranker.online import Trust
from scheduler.schedule.schedules import ScheduleState, make_schedule
from scheduler.simulation.saving import Saving
from streamrl.config.algorithm import AdvantageKind
from streamrl.config.model_and_batch import SamplingConfig
from streamrl.config.run import RunConfig
from streamrl.config.speculation import SpeculationConfig
from streamrl.controller.group_pool import GroupPool
from streamrl.controller.group_source import GroupSource, samples_of
from streamrl.controller.kept_samples import prompt_digest
from streamrl.controller.length_predictor import StepLengths
from streamrl.controller.step_batch import StepBatch
from streamrl.controller.step_metrics import step_metrics
from streamrl.controller.step_times import Interval, Span, Traffic
from streamrl.errors import RunFailed
from streamrl.protocol.controller_trainer import StepDone
from streamrl.rollouts.length_audit import LengthAudit
from streamrl.rollouts.types import Group
from streamrl.tasks.prompt_tokens import PromptTokens
from streamrl.tasks.source import PromptSource
from tests.rollouts.test_rollouts import LATE, make_sample
from tests.rollouts.test_row_parts import TWO_TURNS, trajectory

ADVANTAGES = get_args(AdvantageKind)


def empty_group(group_id: str, size: int = 2) -> Group:
    return Group(group_id, 1, 0, "task/0", "task", 0, "p", np.arange(3, dtype=np.int32), size)


def config(prompts: int = 3, samples: int = 2, **algorithm: object) -> RunConfig:
    batch = {"prompts_per_step": prompts, "samples_per_prompt": samples}
    return RunConfig.model_validate({"batch": batch, "algorithm": {"name": "grpo"} | algorithm})


def finish(pool: GroupPool, group_id: str, rewards: Sequence[float | None], reason: str = "stop") -> Group:
    """All samples of a group come with their rewards, or void ones."""
    for number, reward in enumerate(rewards):
        sample = replace(make_sample(f"{group_id}.{number}", length=2 + number), finish_reason=reason)
        pool.finish(sample, 5.0)
        _, group = pool.score(sample.sample_id, reward, LATE if reward is None else None)
    return group


def pool_of(names: Iterable[str], size: int = 2, batch: int = 3, steps: int = 9) -> GroupPool:
    pool = GroupPool(batch, steps)
    pool.issue([empty_group(name, size) for name in names], 0)
    return pool


def taken(run: RunConfig, rewards: Mapping[str, Sequence[float | None]]) -> StepBatch:
    """A batch of groups with these rewards."""
    pool, batch = pool_of(rewards, len(next(iter(rewards.values())))), StepBatch(run, 1)
    for name, values in rewards.items():
        finish(pool, name, values)
        batch.take(pool.take())
    return batch


def test_a_group_is_complete_with_its_last_reward_and_leaves_the_pool_when_it_is_taken() -> None:
    pool = pool_of("ab")
    assert (pool.issued, pool.generated, pool.running) == (2, 0, 4)
    pool.finish(make_sample("a.0"), 1.0)
    pool.finish(make_sample("a.1"), 1.0)
    assert (pool.generated, pool.running, pool.complete, pool.first()) == (1, 2, 0, None)
    pool.score("a.1", 0.0, None)
    assert pool.first() is None
    _, group = pool.score("a.0", None, LATE)
    assert pool.first() is group and group.complete and group.scored["a.0"].void == LATE
    assert pool.take() is group
    assert (list(pool.groups), pool.complete, pool.issued) == (["b"], 0, 2)


def test_groups_wait_in_the_order_of_their_version_then_of_their_completion() -> None:
    pool = pool_of("ab")
    pool.issue([empty_group("c"), empty_group("d")], 1)
    for name in "dcba":
        finish(pool, name, [0.0, 1.0])
    assert [pool.take().group_id for _ in range(4)] == ["b", "a", "d", "c"]


def test_a_dropped_group_counts_as_if_it_had_not_been_issued() -> None:
    pool = pool_of("abc")
    finish(pool, "b", [1.0, 1.0])
    finish(pool, "a", [1.0, 0.0])
    assert pool.drop("b").group_id == "b"
    assert (pool.issued, pool.generated, pool.complete, list(pool.groups)) == (2, 1, 1, ["a", "c"])
    assert pool.take().group_id == "a"


def test_a_schedule_is_told_what_is_due() -> None:
    pool = pool_of("abcd", batch=2)
    finish(pool, "c", [0.0, 1.0])
    pool.take()
    pool.issue([empty_group("e")], 1)
    state = pool.state(version=1, step=1, taken=1, max_staleness=2)
    assert state == ScheduleState(2, 5, 1, 1, 1, 1, 0, due=(0, 3), steps=9)  # a, b, d within two steps, e within three


def test_a_resumed_pool_counts_what_is_trained() -> None:
    pool = GroupPool(3, 9)
    pool.resume_at(4)
    assert make_schedule("sync").may_issue(pool.state(4, 4, 0, 0))
    assert not make_schedule("sync").may_issue(pool.state(3, 4, 0, 0))


def test_a_reward_for_nobody_is_an_error() -> None:
    with pytest.raises(KeyError):
        pool_of("a").score("a.0", 1.0, None)


def test_flat_groups_are_counted_and_not_sent() -> None:
    run, pool = config(aggregation="token"), pool_of("abc")
    batch = StepBatch(run, 4)
    finish(pool, "a", [1.0, 0.0])
    batch.take(pool.take())
    micro = batch.next_micro_batch(1000, ranks=1)
    assert micro is not None
    shares, is_last = micro
    assert [g.group_id for g in shares[0]] == ["a"] and not is_last
    assert batch.groups["a"].step == 4  # the step that trains on it
    batch.micro_batch_done([{}])
    finish(pool, "b", [1.0, 1.0])
    batch.take(pool.take())
    assert (batch.no_gradient, batch.samples_trained) == (1, 4)
    assert batch.next_micro_batch(1000, ranks=1) is None  # a flat group is not sent
    finish(pool, "c", [0.5, 0.5])
    batch.take(pool.take())
    shares, is_last = batch.next_micro_batch(1000, ranks=1) or ([], False)
    assert (shares, is_last) == ([[]], True)  # nothing is left to train on, but the batch must be closed
    assert not batch.trained
    batch.micro_batch_done([{}])
    assert batch.trained
    assert batch.next_micro_batch(1000, ranks=1) is None
    assert batch.normalizer == 3 * (2 + 3)  # flat groups count in the normalisation


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("advantage", ["group_std", "batch"])
def test_every_gradient_reaches_the_trainer_once_and_the_last_micro_batch_is_last(
    ranks: int, seed: int, advantage: str
) -> None:
    rng = random.Random(seed)
    names = [f"g{i}" for i in range(9)]
    pool, batch = pool_of(names, 3, batch=9), StepBatch(config(9, 3, advantage=advantage), 1)
    waiting = list(names)
    rng.shuffle(waiting)
    sent: list[str] = []
    for _ in range(100):
        if waiting and rng.random() < 0.6:
            finish(pool, waiting.pop(), [rng.random() for _ in range(3)])
            batch.take(pool.take())
        if not batch.in_flight and (micro := batch.next_micro_batch(25, ranks)) is not None:
            shares, is_last = micro
            assert len(shares) == ranks
            assert advantage != "batch" or batch.full  # its advantages need the whole batch
            sent += [g.group_id for share in shares for g in share]
            assert not batch.trained
            batch.micro_batch_done([{}] * ranks)
            assert batch.trained == is_last
    assert batch.trained
    assert sorted(set(sent)) == sorted(batch.groups)
    assert batch.samples_trained == 27


def test_advantages_are_the_algorithms() -> None:
    rewards = {"a": (1.0, 0.0), "b": (1.0, 1.0), "c": (3.0, 0.0)}

    def advantages(**algorithm: object) -> list[float]:
        batch = taken(config(**algorithm), rewards)
        return [value for group in batch.groups.values() for value in group.advantages.values()]

    assert advantages(advantage="group_mean") == [0.5, -0.5, 0.0, 0.0, 1.5, -1.5]
    assert advantages(advantage="leave_one_out") == [1.0, -1.0, 0.0, 0.0, 3.0, -3.0]
    assert advantages(advantage="batch") == pytest.approx([0.0, -1.0, 0.0, 0.0, 2.0, -1.0], abs=1e-5)
    assert advantages(name="ppo", advantage="gae", critic={}) == [], "the trainer computes them"


def test_truncated_samples_may_have_no_loss_and_long_ones_a_penalty() -> None:
    pool, batch = pool_of("a"), StepBatch(config(1, mask_truncated=True, aggregation="token"), 1)
    finish(pool, "a", [1.0, 0.0], reason="length")
    batch.take(pool.take())
    assert batch.next_micro_batch(1000, 1) == ([[]], True)
    assert (batch.normalizer, batch.no_gradient, batch.samples_trained) == (1, 1, 2)
    penalised = config(1, overlong={"margin_tokens": 126, "penalty": 1.0})  # max_tokens is 128: grows from 2 on
    assert taken(penalised, {"a": (1.0, 1.0)}).no_gradient == 0


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 1),
        ({"name": "reinforce_pp", "advantage": "batch_group_baseline"}, 1),
        ({"name": "reinforce_pp"}, 0),
        ({"name": "ppo", "advantage": "gae", "critic": {}}, 0),
        ({"kl": {"coef": 0.1}}, 0),
        ({"entropy_coef": 0.1}, 0),
    ],
)
def test_groups_of_equal_rewards_are_counted_where_they_have_no_gradient(
    changes: dict[str, object], count: int
) -> None:
    assert taken(config(2, **changes), {"a": (1.0, 1.0), "b": (1.0, 0.0)}).no_gradient == count


@pytest.mark.parametrize(("changes", "count"), [({}, 2), ({"kl": {"coef": 0.1}}, 0), ({"entropy_coef": 0.1}, 0)])
def test_a_batch_of_equal_rewards_has_no_gradient_where_advantages_are_relative_to_it(
    changes: dict[str, object], count: int
) -> None:
    batch = taken(config(2, name="reinforce_pp", **changes), {"a": (1.0, 1.0), "b": (1.0, 1.0)})
    assert batch.no_gradient == count
    assert taken(config(3, name="reinforce_pp"), {"a": (1.0, 1.0), "b": (1.0, 1.0)}).no_gradient == 0, "not full yet"


@pytest.mark.parametrize("advantage", ["group_std", "batch"])
def test_a_group_without_a_loss_counts_once_as_one_without_gradient(advantage: str) -> None:
    pool, batch = pool_of("abcd"), StepBatch(config(4, mask_truncated=True, advantage=advantage), 1)
    finish(pool, "a", [1.0, 0.0], reason="length")
    finish(pool, "b", [1.0, 1.0], reason="length")
    finish(pool, "c", [1.0, None], reason="length")
    finish(pool, "d", [1.0, 0.0])
    for _ in "abcd":
        batch.take(pool.take())
    assert batch.no_gradient == 3
    assert sorted(batch.pieces) == ["d"]


@pytest.mark.parametrize("kind", ADVANTAGES)
@pytest.mark.parametrize("share", [0.05, 0.15])
def test_survivors_are_trained_as_if_the_void_had_never_been_drawn(kind: str, share: float) -> None:
    """5 % and 15 % of rewards are void, at random: advantages, sequences sent and divisor are those of the rest."""
    chance = random.Random(f"{kind}{share}")
    algorithm: dict[str, object] = {"aggregation": "token", "advantage": kind, "overlong": {"margin_tokens": 126}}
    run = config(40, 8, **algorithm, **({"name": "ppo", "critic": {}} if kind == "gae" else {}))
    rewards = {f"g{n:02d}": [chance.gauss(0, 1) for _ in range(8)] for n in range(40)}
    dead = {f"{name}.{n}" for name in rewards for n in range(8) if chance.random() < share}
    assert 320 * share / 2 < len(dead) < 320 * share * 2
    some = {name: [None if f"{name}.{n}" in dead else r for n, r in enumerate(row)] for name, row in rewards.items()}
    with_dead = taken(run, some)
    without = StepBatch(run, 1)
    for name, row in rewards.items():  # groups that were never larger than their survivors
        alive = [n for n in range(8) if f"{name}.{n}" not in dead]
        pool = GroupPool(40, 9)
        pool.issue([empty_group(name, len(alive))], 0)
        for n in alive:
            pool.finish(make_sample(f"{name}.{n}", length=2 + n), 5.0)
            pool.score(f"{name}.{n}", row[n], None)
        without.take(pool.take())
    assert len(with_dead.groups) == 40  # none was lost
    for name, group in with_dead.groups.items():
        assert group.advantages == without.groups[name].advantages
        assert group.advantages.keys().isdisjoint(dead)
    assert with_dead.normalizer == without.normalizer
    sent, expected = with_dead.next_micro_batch(10**6, 1), without.next_micro_batch(10**6, 1)
    assert sent is not None and expected is not None
    for ours, theirs in zip(*(groups[0][0] for groups in (sent, expected)), strict=True):
        assert [(s.advantage, len(s.completion_tokens)) for s in ours.sequences] == [
            (s.advantage, len(s.completion_tokens)) for s in theirs.sequences
        ]


def test_sample_ids_and_seeds_depend_on_the_run_and_the_prompt_only() -> None:
    group = empty_group("00000007", size=8)
    samples = samples_of(group, seed=1)
    assert samples == samples_of(group, seed=1)
    assert len({seed for _, seed, _ in samples}) == len({sample_id for sample_id, *_ in samples}) == 8
    assert all(0 <= seed < 2**31 and temperature is None for _, seed, temperature in samples)
    assert {seed for _, seed, _ in samples_of(group, seed=2)}.isdisjoint(seed for _, seed, _ in samples)


def group_source(tmp_path: Path, max_tokens: int, context: int, **settings: Any) -> GroupSource:
    from transformers import AutoTokenizer

    from tests.tiny_model import save_tiny_model

    config = RunConfig.model_validate(
        {
            "model": {"path": str(save_tiny_model(tmp_path / "model")), "max_context": context},
            "sampling": {"max_tokens": max_tokens},
            "batch": {"prompts_per_step": 3, "samples_per_prompt": 2},
            "tasks": [{"kind": "reasoning_gym", "name": "chain_sum", "config": {"max_terms": 6}}],
        }
        | settings
    )
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    return GroupSource(config, PromptSource(config.tasks, config.seed), tokenizer)


def prompts(source: GroupSource, count: int) -> list[str]:
    return [source.next_group(1).prompt for _ in range(count)]


def test_groups_continue_after_a_checkpoint_as_if_nothing_had_happened(tmp_path: Path) -> None:
    expected = prompts(group_source(tmp_path, 100, 400), 12)
    first = group_source(tmp_path, 100, 400)
    groups = [first.next_group(1) for _ in range(8)]
    resumed = group_source(tmp_path, 100, 400)
    resumed.restore(json.loads(json.dumps(first.state([groups[3], groups[6]]))))  # two were not trained
    again = [resumed.next_group(1) for _ in range(6)]
    assert [g.prompt for g in again] == [expected[3], expected[6], *expected[8:]]
    assert [g.group_id for g in again[:2]] == [groups[3].group_id, groups[6].group_id]
    assert len(set(expected)) == 12


@pytest.mark.parametrize(
    ("settings", "same"),
    [
        ({}, True),
        ({"optimizer": {"lr": 0.5}}, True),
        ({"sampling": {"max_tokens": 100, "temperature": 0.5}}, False),
        ({"sampling": {"max_tokens": 100, "stop": ["."]}}, False),
        ({"algorithm": {"name": "grpo", "router_replay": True}}, False),
    ],
)
def test_a_sample_is_kept_over_a_resume_if_it_would_be_drawn_with_the_same_settings(
    tmp_path: Path, settings: dict[str, Any], same: bool
) -> None:
    before, after = (
        group_source(tmp_path, 100, 400).next_group(1),
        group_source(tmp_path, 100, 400, **settings).next_group(1),
    )
    assert (prompt_digest(before) == prompt_digest(after)) is same
    assert prompt_digest(before) == prompt_digest(group_source(tmp_path, 100, 400).next_group(1))


@pytest.fixture
def few_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run ends after 100 prompts in a row that do not fit, which takes a tenth of the time."""
    monkeypatch.setattr("streamrl.controller.group_source.MAX_SKIPPED_IN_A_ROW", 100)


def test_prompts_that_do_not_fit_are_skipped_and_counted_and_all_too_long_is_an_error(
    tmp_path: Path, few_skipped: None
) -> None:
    roomy = group_source(tmp_path, 100, 400)
    every = [roomy.next_group(1) for _ in range(24)]
    limit = int(np.median([len(g.prompt_tokens) for g in every]))
    tight = group_source(tmp_path, 100, 100 + limit)
    fitting = [tight.next_group(1) for _ in range(9)]
    assert all(len(g.prompt_tokens) <= limit for g in fitting)
    assert tight.too_long > 0
    expected = [g.prompt for g in every if len(g.prompt_tokens) <= limit]
    assert [g.prompt for g in fitting] == expected[: len(fitting)]
    with pytest.raises(RunFailed, match=r"prompts in a row have more than 10 tokens"):
        group_source(tmp_path, 100, 110).next_group(1)


def test_prompts_that_no_longer_fit_after_a_resume_are_left_out_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    roomy = group_source(tmp_path, 100, 400)
    groups = [roomy.next_group(1) for _ in range(24)]
    limit = int(np.median([len(group.prompt_tokens) for group in groups]))
    resumed = group_source(tmp_path, 100, 100 + limit)
    resumed.restore(json.loads(json.dumps(roomy.state(groups))))
    fitting = [group for group in groups if len(group.prompt_tokens) <= limit]
    left_out = [group.prompt_id for group in groups if group not in fitting]
    assert [resumed.next_group(1).group_id for _ in fitting] == [group.group_id for group in fitting]
    resumed.next_group(1)
    assert resumed.too_long >= len(left_out) > 0
    assert [message.split()[1] for message in caplog.messages if "it is left out" in message] == left_out


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (["a", "b", "c"], ""),
        (["a", "b"], "task 't' has 2 rows now, and had 3 at the checkpoint"),
        (["a", "c", "b"], "task 't' has other rows, or the same in another order, than at the checkpoint"),
    ],
)
@pytest.mark.parametrize("kind", ["file", "agent"])
def test_a_file_that_has_changed_since_the_checkpoint_is_named_at_a_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, rows: list[str], says: str
) -> None:
    path = tmp_path / "rows.jsonl"

    def source_of(rows: Sequence[str]) -> GroupSource:
        path.write_text("".join(json.dumps({"prompt": row, "answer": row}) + "\n" for row in rows))
        agent = {"run": "agents:play"} if kind == "agent" else {}
        task = {"kind": kind, "name": "t", "path": str(path)} | agent
        return group_source(tmp_path, 100, 400, tasks=[task, {"kind": "reasoning_gym", "name": "gcd"}])

    state = json.loads(json.dumps(source_of("abc").state([])))
    source_of(rows).restore(state)
    assert [message.split(":")[0] for message in caplog.messages if "checkpoint" in message] == [says] * bool(says)
    del state["contents"], state["mixed_by"], state["written_by"]  # of an earlier version
    caplog.clear()
    source_of(rows).restore(state)
    assert not caplog.messages


def test_a_seed_or_a_weight_that_has_changed_since_the_checkpoint_is_named_at_a_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gcd = {"kind": "reasoning_gym", "name": "gcd"}
    state = json.loads(json.dumps(group_source(tmp_path, 100, 400, tasks=[gcd], seed=4).state([])))
    group_source(tmp_path, 100, 400, tasks=[gcd], seed=4).restore(state)
    assert not caplog.messages
    group_source(tmp_path, 100, 400, tasks=[gcd | {"weight": 2}], seed=5).restore(state)
    assert [message.partition(" at the checkpoint: ")[0] for message in caplog.messages] == [
        "seed: 5 now, and 4",
        "tasks: [['gcd', 2.0]] now, and [['gcd', 1.0]]",
    ]


@pytest.mark.parametrize(
    ("changed", "named"),
    [("", []), ("template", ["chat template"]), ("token", ["vocabulary"])],
)
def test_a_tokenizer_that_has_changed_since_the_checkpoint_is_named_at_a_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changed: str, named: list[str]
) -> None:
    source = group_source(tmp_path, 100, 400)
    state, tokenizer = json.loads(json.dumps(source.state([]))), source.tokenizer
    if changed == "template":
        tokenizer.chat_template += "{# another #}"
    elif changed == "token":
        tokenizer.add_tokens(["<|another|>"])
    GroupSource(source.run, source.source, tokenizer).restore(state)
    path = source.run.model.path
    assert [message.partition(" is another one than at the checkpoint: ")[0] for message in caplog.messages] == [
        f"model.path: the {part} of {path}" for part in named
    ]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_curriculum_may_end_in_more_long_rows_than_come_together_by_chance(
    tmp_path: Path, few_skipped: None, shuffle: bool
) -> None:
    rows, path = ["1"] * 2 + ["2" * 50] * 120, tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": row, "answer": row}) + "\n" for row in rows))
    task = {"kind": "file", "name": "t", "path": str(path), "shuffle": shuffle}
    source = group_source(tmp_path, 100, 110, tasks=[task])
    if shuffle:
        with pytest.raises(RunFailed, match=r"^100 prompts in a row have more than 10 tokens"):
            prompts(source, 9)
        return
    groups = [source.next_group(1) for _ in range(5)]
    assert [(group.prompt_id, group.epoch) for group in groups[:4]] == [("t/0", 0), ("t/1", 0), ("t/0", 1), ("t/1", 1)]
    path.write_text("".join(json.dumps({"prompt": row, "answer": row}) + "\n" for row in rows[2:]))
    with pytest.raises(RunFailed, match=r"^120 prompts in a row have more than 10 tokens"):
        group_source(tmp_path, 100, 110, tasks=[task]).next_group(1)


@pytest.mark.parametrize(("shuffle", "most"), [(True, 1000), (False, 5000)])
def test_a_run_ends_after_a_thousand_long_prompts_in_a_row_or_five_thousand_of_a_curriculum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shuffle: bool, most: int
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text((json.dumps({"prompt": "2", "answer": "2"}) + "\n") * 6000)
    task = {"kind": "file", "name": "t", "path": str(path), "shuffle": shuffle}
    source, long = group_source(tmp_path, 100, 110, tasks=[task]), np.zeros(11, np.int32)
    monkeypatch.setattr(source, "tokens", lambda prompt: long)  # making tokens of so many takes seconds
    with pytest.raises(RunFailed, match=f"^{most} prompts in a row have more than 10 tokens"):
        source.next_group(1)
    assert source.too_long == most


def test_chat_template_is_applied_with_the_system_prompt(tmp_path: Path) -> None:
    source = group_source(tmp_path, 100, 400)
    source.tokens = PromptTokens(source.run.model.model_copy(update={"system_prompt": "Be brief"}), source.tokenizer)
    group = source.next_group(1)
    text = source.tokenizer.decode(group.prompt_tokens)
    assert text == f"<|system|>Be brief<|user|>{group.prompt}<|assistant|>"


def test_step_metrics_are_what_they_say() -> None:
    batch = taken(config(2, aggregation="token"), {"a": (1.0, 0.0), "b": (1.0, 1.0)})
    batch.next_micro_batch(1000, 1)
    batch.micro_batch_done(
        [
            {
                "tokens": 5,
                "row_tokens": 9,
                "flops": 8e12,
                "sequences": 2,
                "loss_sum": 2.0,
                "clipped": 1.0,
                "kl_sum": 0.0,
                "entropy_sum": 3.0,
                "entropy_tokens": 2,
                "mismatch_sum": 0.5,
                "ratio_sum": 6.0,
                "ratio_max": 1.5,
                "weight_sum": 5.0,
                "weight_sq_sum": 6.25,
                "seq_weight_sum": 2.0,
                "seq_weight_sq_sum": 2.0,
                "masked": 1.0,
                "outside": 1.0,
                "truncated": 2.0,
            }
        ]
    )
    spans = {"here-regular-0": ((2.0, 4.0),), "idle": ()}
    nothing: dict[str, tuple[Span, ...]] = {"here-regular-0": (), "idle": ()}
    present = dict.fromkeys(spans, (0.0, 10.0))
    times = Interval(
        0.0, 10.0, ((5.0, 8.0), (8.0, 9.0)), ((8.0, 9.0),), spans, nothing, ((8.0, 9.0),), present, ((5.0, 7.0),)
    )
    result = StepDone(rank=0, started=0.0, finished=1.0, grad_norm=0.3, learning_rate=1e-3, skipped=False)
    predictions = StepLengths(Trust(0.6, 0.4, 4), Saving(10.0, 8.0, 7.5), True, 4.5)
    audit = LengthAudit(128).end_step(1)
    costs = {"here": {"trainer": 0.06, "here-tail-0": 0.04}, "far": {"link": 0.01}}
    row = step_metrics(batch, times, result, Traffic(7, 2.5), 2, 1.5, predictions, audit, 6, costs, 16.0)
    assert row.step_time_s == 10
    assert (row.train_tokens_per_s, row.train_tflops, row.mfu) == (4.5, 4.0, 0.25)
    assert row.generate_time_s == pytest.approx(2.0)
    assert row.bubble_fraction_generation == pytest.approx(1 - (2 / 10 + 0) / 2)  # one instance never worked
    assert (row.train_time_s, row.bubble_fraction_training) == (4.0, pytest.approx(0.6))
    assert row.weight_sync_exposed_s == 1.0
    assert row.reward_mean == 0.75
    assert (row.usd, row.usd_by_process) == (pytest.approx(0.11), costs)  # the processes, and the links' traffic
    assert row.usd_per_1k_samples == pytest.approx(1000 * row.usd / 4)
    clock_set = step_metrics(
        *(batch, Interval(9.0, 9.0, (), (), spans, nothing, (), present, ()), result, Traffic(7, 2.5), 2, 1.5),
        *(predictions, audit, 6),
    )
    assert (clock_set.step_time_s, clock_set.samples_per_s, clock_set.tokens_per_s) == (None, None, None)
    free = step_metrics(batch, times, result, Traffic(7, 2.5), 2, 1.5, predictions, audit, 6)
    assert (free.usd, free.usd_per_1k_samples, free.usd_by_process) == (None, None, {})  # a cluster file without prices
    assert (free.train_tflops, free.mfu) == (4.0, None)  # a device whose peak is not known
    assert row.loss == pytest.approx(2.0 / 10)  # tokens of the whole batch
    assert (row.entropy, row.logprob_gap_mean, row.clip_fraction) == (1.5, 0.1, 0.2)
    assert (row.groups_no_gradient, row.groups_total, row.samples_total) == (1, 2, 4)
    assert (row.staleness_mean, row.staleness_max) == (0, 0)
    assert (row.output_length_p50, row.output_length_max) == (2.5, 3)
    assert (row.kl_mean, row.prompts_too_long, row.weight_bytes_sent, row.weight_transfer_s) == (None, 2, 7, 2.5)
    assert (row.importance_ratio_mean, row.importance_ratio_max) == (1.2, 1.5)
    assert (row.ess_token, row.ess_sequence) == (pytest.approx(0.8), 1.0)  # 5^2 / (5 * 6.25)
    assert (row.masked_fraction, row.truncated_weight_fraction) == (0.2, 0.4)
    assert row.outside_truncation_fraction is None  # nothing is truncated
    batch.run = batch.run.model_copy(update={"sampling": SamplingConfig(min_p=0.1)})
    cut = step_metrics(batch, times, result, Traffic(7, 2.5), 2, 1.5, predictions, audit, 6)
    assert cut.outside_truncation_fraction == 0.2
    assert (row.drafted_tokens, row.accepted_by_route) == (None, {})  # nothing speculates
    batch.run = batch.run.model_copy(update={"speculation": SpeculationConfig(method="auto")})
    for group, (route, accepted) in zip(batch.groups.values(), (("tail", 3), ("regular", 1)), strict=True):
        for sample_id, one in group.scored.items():
            some = replace(one.sample, route=route, drafted_tokens=4, accepted_tokens=accepted)
            group.scored[sample_id] = replace(one, sample=some)
    fast = step_metrics(batch, times, result, Traffic(7, 2.5), 2, 1.5, predictions, audit, 6)
    assert (fast.drafted_tokens, fast.accepted_tokens) == (16, 8)
    assert fast.accepted_by_route == {"regular": 0.25, "tail": 0.75}
    assert (row.value_loss, row.step_skipped, row.groups_dropped) == (None, False, 0)
    assert (row.grad_norm, row.critic_grad_norm) == (0.3, None)
    of_critic = msgspec.structs.replace(result, critic_grad_norm=0.4)
    with_critic = step_metrics(batch, times, of_critic, Traffic(7, 2.5), 2, 1.5, predictions, audit, 6)
    assert (with_critic.grad_norm, with_critic.critic_grad_norm) == (0.3, 0.4)
    assert (row.samples_parked, row.weight_publications, row.length_bias_warning) == (6, 1, None)
    assert row.reward_by_task == {"task": 0.75}
    assert (row.ranker_recall_at_20, row.ranker_kendall_tau, row.ranker_refit_s) == (0.6, 0.4, 4.5)
    assert row.dispatch_by_prediction is True
    assert (row.dispatch_saved, row.dispatch_captured) == (pytest.approx(0.2), pytest.approx(0.8))


def test_step_metrics_have_the_means_of_what_agents_returned_by_task() -> None:
    batch = taken(config(2), {"a": (1.0, 0.0, None), "b": (0.0, 1.0, 1.0)})
    numbers = {"a.0": {"turns": 2.0, "won": 1.0}, "a.1": {"turns": 5.0}, "a.2": {"turns": 100.0}}
    for group in batch.groups.values():
        for sample_id, member in group.scored.items():
            told = trajectory([TWO_TURNS]) if group.group_id == "a" else None
            told = told and msgspec.structs.replace(told, metrics=numbers[sample_id])
            object.__setattr__(member.sample, "trajectory", told)
    times = Interval(0.0, 10.0, (), (), {"one": ()}, {"one": ()}, (), {"one": (0.0, 10.0)})
    result = StepDone(rank=0, started=0.0, finished=1.0, grad_norm=0.3, learning_rate=1e-3, skipped=False)
    audit, nothing = LengthAudit(128).end_step(1), StepLengths(None, None)

    def means() -> Mapping[str, Mapping[str, float | None]]:
        row = step_metrics(batch, times, result, Traffic(0, 0.0), 0, None, nothing, audit)
        return row.agent_metrics_by_task

    assert means() == {"task": {"turns": 3.5, "won": 1.0}}  # a.2 is void
    numbers["a.1"].update((f"{n:03}", float(n)) for n in range(150))
    assert list(means()["task"]) == [f"{n:03}" for n in range(100)]


def test_step_metrics_leave_void_samples_out_of_means_and_count_them_by_cause() -> None:
    batch = taken(config(2), {"a": (1.0, 0.0, None), "b": (None, 0.5, 0.5)})
    batch.dropped.append(finish(pool_of("c", 3), "c", [None, 7.0, None]))
    batch.not_finite.append(finish(pool_of("d", 3), "d", [None, 7.0, 8.0]))
    every = [*batch.groups.values(), *batch.dropped, *batch.not_finite]
    times = Interval(0.0, 10.0, (), (), {"one": ()}, {"one": ()}, (), {"one": (0.0, 10.0)})
    result = StepDone(rank=0, started=0.0, finished=1.0, grad_norm=0.3, learning_rate=1e-3, skipped=False)
    audit, nothing = LengthAudit(128).end_step(1), StepLengths(None, None)
    row = step_metrics(batch, times, result, Traffic(0, 0.0), 0, None, nothing, audit)
    assert (row.reward_mean, row.reward_std) == (0.5, pytest.approx(0.125**0.5))
    assert row.reward_by_task == {"task": 0.5}
    assert (row.samples_total, row.samples_judged, row.samples_void, row.groups_void) == (4, 12, 5, 1)
    assert row.void_rate == pytest.approx(5 / 12) == row.void_rate_by_cause["timeout"]
    assert row.output_length_mean == 3.0  # of all six: lengths are valid
    assert row.samples_per_s == 0.4
    assert row.tokens_per_s == pytest.approx(sum(m.sample.output_length for g in every for m in g.members()) / 10)
    assert row.tokens_per_s > 6 * row.output_length_mean / 10
