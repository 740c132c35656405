"""Evaluations: when, on what, and the figures; nothing of them can be mistaken for training."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from pydantic import ValidationError

from streamrl.config.evaluation import EvaluationConfig, plain_name
from streamrl.config.tasks import AgentTask, FileTask, ReasoningGymTask, Task, default_tasks
from streamrl.controller import evaluation_plan
from streamrl.controller.evaluation_plan import Evaluations, choose_prompts, pass_at
from streamrl.errors import UserError
from streamrl.rollouts.types import Group, IntArray
from streamrl.run_dir.evaluations import EvaluationRow, best, evaluation_line, read_evaluations
from streamrl.run_dir.jsonl import RowWriter
from streamrl.tasks.source import Prompt, PromptSource


class Held:
    """A source of prompts 'question i', of two tasks in turn; `count` different ones each."""

    def __init__(self, count: int = 10**9) -> None:
        self.count = count

    def prompt(self, index: int) -> Prompt:
        task, item = ("eval-0/sums", "eval-0/words")[index % 2], index // 2
        return Prompt(f"{task}/{item}", task, f"question {index}", item // self.count, {"index": item})


def tokenize(prompt: Prompt) -> IntArray:
    return np.arange(len(prompt.text), dtype=np.int32)


def make(source: Held | None = None, last_step: int = 100, longest: int = 50, **config: Any) -> Evaluations:
    settings = EvaluationConfig(**{"every": 10, "prompts": 4, "samples": 4} | config)
    prompts = choose_prompts(settings.prompts, source or Held(), tokenize, longest)  # type: ignore[arg-type]
    return Evaluations(settings, 7, prompts, last_step)


def finish_all(
    evaluations: Evaluations, groups: Iterable[Group], passes: dict[int, int], length: int = 10, greedy: float = 1.0
) -> EvaluationRow:
    """Finishes everything: group i's greedy reward is `greedy`, and its first `passes[i]` samples pass."""
    row = None
    for index, group in enumerate(groups):
        for number, (sample_id, _, temperature) in enumerate(evaluations.samples(group)):
            assert row is None
            first = number - evaluations.config.greedy
            reward = greedy if temperature == 0 else float(first < passes.get(index, 0))
            row = evaluations.finish(sample_id, reward, length, np.full(length, group.step), 120.0)
    assert row is not None
    return row


def test_prompts_that_do_not_fit_are_refused_with_how_many_were_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation_plan, "MAX_SKIPPED_IN_A_ROW", 3)
    source = cast(PromptSource, Held())

    def first_two_fit(prompt: Prompt) -> IntArray:
        return np.zeros(9 if prompt.reward_input["index"] else 1, np.int32)

    assert len(choose_prompts(2, source, first_two_fit, 5)) == 2
    few = "^evaluation.prompts: 3 held-out prompts in a row, after the first 2, have more than 5 tokens"
    with pytest.raises(UserError, match=few):
        choose_prompts(4, source, first_two_fit, 5)
    none = (
        "^evaluation.prompts: all of the first 2 held-out prompts, the most that are looked at, have more than 0 tokens"
    )
    with pytest.raises(UserError, match=none):
        choose_prompts(1, source, first_two_fit, 0, most_at_first=2)


def test_an_evaluation_is_due_every_so_many_steps_at_the_start_and_at_the_end() -> None:
    evaluations = make(last_step=25)
    due = []
    for step in range(26):
        if evaluations.due(step):
            due.append(step)
            evaluations.begin(step, 0.0)
            assert not evaluations.due(step)
    assert due == [0, 10, 20, 25]
    assert not make(at_start=False).due(0)
    with pytest.raises(ValueError, match="already"):
        evaluations.begin(20, 0.0)


def test_a_due_version_that_is_never_served_is_made_up_for_by_the_next_one_that_is() -> None:
    evaluations = make(last_step=40, every=5)
    due = []
    for step in range(0, 41, 4):  # weights are published every four steps
        if evaluations.due(step):
            due.append(step)
            evaluations.begin(step, 0.0)
    assert due == [0, 8, 12, 16, 20, 28, 32, 36, 40]


def test_checkpoints_of_all_versions_that_may_be_evaluated_are_kept() -> None:
    evaluations = make(last_step=50, every=5)
    evaluations.begin(0, 0.0)
    finish_all(evaluations, evaluations.open_groups().values(), {})
    made = [step for step in range(1, 8) if evaluations.plan(step, published=4)]
    assert made == evaluations.pending == [5, 6, 7], "which of them is published next is not known"
    assert [step for step in (8, 9, 10) if evaluations.plan(step, published=7)] == [10], "version 7 is on its way"
    assert evaluations.due(7) and evaluations.due(8), "a plan is no evaluation"
    groups = evaluations.begin(7, 0.0)
    assert evaluations.pending == [7, 10]
    finish_all(evaluations, groups, {})
    assert evaluations.pending == [10]
    evaluations.begin(10, 0.0)
    assert evaluations.pending == [10]


def test_after_a_resume_what_is_recorded_is_not_done_again_and_what_was_under_way_is() -> None:
    before = make()
    rows = [finish_all(before, before.begin(step, 0.0), {}) for step in (0, 10)]
    before.begin(20, 0.0)
    after = make()
    after.restore(rows)
    assert [step for step in (0, 10, 20) if after.due(step)] == [20]


def test_every_version_is_asked_the_same_with_the_same_seeds_under_ids_of_its_own() -> None:
    evaluations = make()
    first, second = evaluations.begin(0, 0.0), evaluations.begin(10, 0.0)
    assert [group.prompt for group in first] == [group.prompt for group in second]
    assert [group.group_id for group in second] == [f"eval-10-{index}" for index in range(4)]
    samples = [evaluations.samples(group) for group in (first[1], second[1])]
    assert [sample_id for sample_id, _, _ in samples[1]] == [
        "eval-10-1.g",
        *(f"eval-10-1.{number:03d}" for number in range(4)),
    ]
    assert [(seed, t) for _, seed, t in samples[0]] == [(seed, t) for _, seed, t in samples[1]]
    assert [t for _, _, t in samples[0]] == [0.0, None, None, None, None]
    seeds = [seed for group in first for _, seed, t in evaluations.samples(group) if t != 0]
    assert len(set(seeds)) == 16 and max(seeds) < 2**31
    assert {group.size for group in first} == {5}
    assert evaluations.pending == [0, 10] and evaluations.unfinished == 40


def test_the_row_has_the_figures_of_every_task_and_of_all_in_any_order_of_arrival() -> None:
    evaluations = make(prompts=3, samples=2)
    groups = evaluations.begin(10, 100.0)  # sums, words, sums
    rewards = {"eval-10-0": [1.0, 1.0, 0.5], "eval-10-1": [0.0, 0.0, 0.0], "eval-10-2": [0.5, 1.0, 1.0]}
    arriving = [
        (sample_id, rewards[group.group_id][number], group)
        for group in groups
        for number, (sample_id, _, _) in enumerate(evaluations.samples(group))
    ]
    row = None
    for sample_id, reward, group in reversed(arriving):
        assert row is None and evaluations.awaits(sample_id) and evaluations.group_of(sample_id) is group
        versions = np.array([10, 10, 11, 12] if sample_id.endswith(".g") else [10] * 4)
        row = evaluations.finish(sample_id, reward, 4, versions, 130.0)
        assert not evaluations.awaits(sample_id)
    assert row is not None and evaluations.pending == []
    assert (row.step, row.seconds) == (10, 30.0)
    assert row.other_version_share == pytest.approx(6 / 36)
    assert list(row.by_task) == ["sums", "words"]
    overall, sums, words = row.overall, row.by_task["sums"], row.by_task["words"]
    assert (overall.prompts, overall.samples, overall.rewards_void, overall.length_mean) == (3, 9, 0, 4.0)
    assert (sums.prompts, words.prompts) == (2, 1)
    assert sums.reward_greedy == 0.75 and sums.pass_greedy == 0.5 and sums.reward_sampled == 0.875
    assert sums.pass_at == pytest.approx([(0.5 + 1) / 2, 1.0])
    assert words.pass_at == [0.0, 0.0]
    assert overall.pass_at == pytest.approx([0.5, 2 / 3])


def test_pass_at_k_is_the_share_of_draws_without_replacement_that_hold_a_pass() -> None:
    for n in range(1, 7):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
            assert pass_at(k, n, c) == pytest.approx(sum(any(draw) for draw in draws) / len(draws))
    assert pass_at(1, 4, 1) == 0.25


def test_the_threshold_decides_what_passes() -> None:
    evaluations = make(prompts=1, samples=1, threshold=0.5)
    (group,) = evaluations.begin(0, 0.0)
    for sample_id, _, _ in evaluations.samples(group):
        row = evaluations.finish(sample_id, 0.5, 1, np.zeros(1, int), 1.0)
    assert row is not None and row.overall.pass_greedy == 1.0 and row.overall.pass_at == [1.0]


def test_without_greedy_or_without_samples_the_rest_is_measured() -> None:
    evaluations = make(greedy=False)
    row = finish_all(evaluations, evaluations.begin(0, 0.0), {0: 2, 1: 4})
    assert row.overall.reward_greedy is None and row.score == row.overall.reward_sampled == 6 / 16
    evaluations = make(samples=0)
    row = finish_all(evaluations, evaluations.begin(0, 0.0), {})
    assert row.overall.reward_sampled is None and row.overall.pass_at == [] and row.score == 1.0
    with pytest.raises(ValidationError, match="would generate nothing"):
        EvaluationConfig(samples=0, greedy=False)


def test_a_sample_counts_once_and_a_training_sample_not_at_all() -> None:
    evaluations = make()
    (group, *_) = evaluations.begin(0, 0.0)
    evaluations.finish(f"{group.group_id}.g", 1.0, 1, np.zeros(1, int), 1.0)
    for sample_id in (f"{group.group_id}.g", "00000003.001"):
        assert not evaluations.awaits(sample_id)
        with pytest.raises(KeyError):
            evaluations.finish(sample_id, 1.0, 1, np.zeros(1, int), 1.0)
    assert evaluations.unfinished == 19


def test_prompts_that_do_not_fit_are_passed_over_and_too_few_are_an_error() -> None:
    class Growing(Held):
        def prompt(self, index: int) -> Prompt:
            prompt = super().prompt(index)
            return Prompt(prompt.prompt_id, prompt.task, "x" * (60 if index < 3 else 10), prompt.epoch, {})

    (first, *_) = make(Growing()).begin(0, 0.0)
    assert first.prompt_index == 3
    with pytest.raises(UserError, match="more than 5 tokens"):
        make(longest=5)
    with pytest.raises(UserError, match=r"prompts is 9, but after 8 in all, task sums has no more"):
        make(Held(count=4), prompts=9)


def test_the_best_is_the_highest_greedy_reward_and_of_equals_the_earliest() -> None:
    evaluations = make()
    rows = [
        finish_all(evaluations, evaluations.begin(step, 0.0), {}, greedy=greedy)
        for step, greedy in ((0, 0.25), (10, 0.5), (20, 0.5), (30, 0.25))
    ]
    assert best([]) is None
    unrated = rows[0].overall.model_copy(update={"reward_greedy": None, "reward_sampled": None})
    assert best([rows[0].model_copy(update={"overall": unrated})]) is None  # every answer was void
    assert best(rows) == best(reversed(rows)) == rows[1]
    assert evaluation_line(rows[1], rows[:2]) == "eval@10: greedy 0.50 pass@4 0.00 (best)"
    assert evaluation_line(rows[2], rows[:3]) == "eval@20: greedy 0.50 pass@4 0.00"
    lower, early, late, _ = (
        row.model_copy(update={"other_version_share": share})
        for row, share in zip(rows, (0.5, 0.51, 1.0, 0.0), strict=True)
    )
    assert best([lower, early, late]) == lower, "most tokens of the others are by other versions"
    assert best([early, late]) == early and best([late]) is None, "no token is by its version"
    assert best([early.model_copy(update={"other_version_share": 0.1}), rows[2]]) == rows[2]


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("greedy", [False, True])
def test_a_version_of_which_most_rewards_are_void_is_the_best_only_without_another(greedy: bool, earlier: bool) -> None:
    evaluations = make(prompts=4, samples=1, greedy=greedy)
    rows = []
    for step, rewards in ((10, [0.0, 0.5, 0.5, 1.0]), (20, [1.0, None, None, None]), (30, [1.0, 1.0, None, 0.5])):
        row = None
        for group, reward in zip(evaluations.begin(step, 0.0), rewards, strict=True):
            decides, *rest = (sample_id for sample_id, _, _ in evaluations.samples(group))
            row = evaluations.finish(decides, reward, 1, np.full(1, step), 1.0)
            for sample_id in rest:
                row = evaluations.finish(sample_id, 0.0, 1, np.full(1, step), 1.0)
        assert row is not None
        if earlier:
            row = row.model_copy(update={"overall": row.overall.model_copy(update={"prompts_scored": None})})
        rows.append(row)
    whole, failed, mostly = rows
    assert failed.score == 1.0 and failed.overall.scored_share == 0.25 and mostly.overall.scored_share == 0.75
    assert best([whole, failed]) == whole and best([failed]) == failed
    assert best(rows) == mostly
    of_others = mostly.model_copy(update={"other_version_share": 0.9})
    assert best([failed, of_others]) == failed, "few prompts of its own version rather than another version's"


def test_sampled_rewards_stand_in_for_no_greedy_ones_that_are_all_void() -> None:
    evaluations = make(prompts=2, samples=1)
    row = None
    for group in evaluations.begin(10, 0.0):
        (decides, _, _), (sampled, _, _) = evaluations.samples(group)
        evaluations.finish(decides, None, 1, np.full(1, 10), 1.0)
        row = evaluations.finish(sampled, 1.0, 1, np.full(1, 10), 1.0)
    assert row is not None and row.overall.reward_sampled == 1.0
    assert row.overall.reward is None and best([row]) is None
    assert evaluation_line(row) == "eval@10: pass@1 1.00 2 void rewards"


def test_rows_survive_a_kill_and_are_rewound_with_the_run(tmp_path: Path) -> None:
    path = tmp_path / "evaluations.jsonl"
    evaluations = make()
    rows = [finish_all(evaluations, evaluations.begin(step, 0.0), {0: 3}) for step in (0, 10, 20)]
    with RowWriter(path, EvaluationRow) as writer:
        for row in rows:
            writer.append(row)
    assert read_evaluations(path) == rows
    path.write_bytes(path.read_bytes()[:-20])
    assert read_evaluations(path) == rows[:2]
    with RowWriter(path, EvaluationRow) as writer:
        assert writer.rewind(9) == 1
        writer.append(rows[1])
    assert read_evaluations(path) == rows[:2]
    assert read_evaluations(tmp_path / "none.jsonl") == []


def test_held_out_items_are_others_than_those_trained_on_and_others_with_another_seed() -> None:
    tasks: list[Task] = [ReasoningGymTask(name="chain_sum", config={"min_digits": 4, "max_digits": 4})]
    sources: list[list[Task]] = [tasks, *(EvaluationConfig(seed=seed).held_out(tasks) for seed in (0, 1))]
    texts = [{PromptSource(some, 5).prompt(index).text for index in range(50)} for some in sources]
    for ours, theirs in itertools.combinations(texts, 2):
        assert not ours & theirs


def test_held_out_tasks_have_names_of_their_own_and_are_never_a_file_that_is_trained_on() -> None:
    train = FileTask(kind="file", name="gsm", path="train.jsonl")
    run: list[Task] = [*default_tasks(), train]
    names = [task.key for task in EvaluationConfig().held_out(run)]
    assert names == ["eval-0/chain_sum", "eval-0/letter_counting", "eval-0/count_bits"]
    assert [plain_name(name) for name in (*names, "chain_sum")] == [
        *["chain_sum", "letter_counting", "count_bits", "chain_sum"]
    ]
    test = FileTask(kind="file", name="gsm", path="test.jsonl")
    assert [task.key for task in EvaluationConfig(tasks=[test]).held_out(run)] == ["eval-0/gsm"]
    with pytest.raises(ValueError, match=r"reads /.*/train.jsonl, which is trained on by task 'gsm'"):
        EvaluationConfig(tasks=[train]).held_out(run)
    with pytest.raises(ValueError, match="no task of the run is procedural"):
        EvaluationConfig().held_out([train])
    with pytest.raises(ValueError, match="different names"):
        EvaluationConfig(tasks=[test, test]).held_out(run)


def test_a_file_that_is_trained_on_is_found_under_any_of_its_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.jsonl").touch()
    (tmp_path / "link.jsonl").symlink_to("data/a.jsonl")
    names = ["data/a.jsonl", "./data/a.jsonl", str(tmp_path / "data/a.jsonl"), "~/data/a.jsonl", "link.jsonl"]
    for trained, held_out in itertools.product(names, repeat=2):
        run: list[Task] = [FileTask(kind="file", name="mine", path=trained)]
        same = FileTask(kind="file", name="test", path=held_out)
        for task in (same, AgentTask(kind="agent", name="test", run="m:f", path=held_out)):
            with pytest.raises(ValueError, match=r"^evaluation task 'test' reads /.*/data/a.jsonl, which is trained"):
                EvaluationConfig(tasks=[task]).held_out(run)
    other = FileTask(kind="file", name="test", path="data/b.jsonl")
    assert EvaluationConfig(tasks=[other]).held_out([FileTask(kind="file", name="mine", path="data/a.jsonl")])


@pytest.mark.parametrize(("trained", "held_out"), [("sums", "./sums"), ("openai/gsm8k:main", "openai/gsm8k:main")])
def test_a_split_of_a_data_set_is_held_out_only_from_other_splits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: str, held_out: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums").mkdir()
    run: list[Task] = [FileTask(kind="hf_dataset", name="mine", path=trained)]
    split = FileTask(kind="hf_dataset", name="test", path=held_out, split="test")
    assert EvaluationConfig(tasks=[split]).held_out(run)
    with pytest.raises(ValueError, match=r"(sums|gsm8k:main) \(train\), which is trained on"):
        EvaluationConfig(tasks=[split.model_copy(update={"split": "train"})]).held_out(run)


def test_a_data_set_that_was_saved_alone_has_no_other_splits(tmp_path: Path) -> None:
    (tmp_path / "state.json").touch()
    run: list[Task] = [FileTask(kind="hf_dataset", name="mine", path=str(tmp_path))]
    split = FileTask(kind="hf_dataset", name="test", path=str(tmp_path), split="test")
    with pytest.raises(ValueError, match=f"reads {tmp_path}, which is trained on by task 'mine'"):
        EvaluationConfig(tasks=[split]).held_out(run)
    (tmp_path / "dataset_dict.json").touch()
    assert EvaluationConfig(tasks=[split]).held_out(run)


def test_held_out_prompts_are_scored_under_their_own_names_beside_those_of_training() -> None:
    from streamrl.tasks.rewards import Scorer

    config, trained = EvaluationConfig(prompts=6), default_tasks()
    held_out = config.held_out(trained)
    scorer = Scorer([*trained, *held_out], 5)
    evaluations = Evaluations(config, 5, choose_prompts(6, PromptSource(held_out, 5), tokenize, 500), 10)
    for group in evaluations.begin(0, 0.0):
        assert group.task.startswith("eval-0/")
        assert scorer.score(group.task, "no number here", group.reward_input) == 0.0


def test_void_answers_are_in_no_score_and_are_counted_beside_them() -> None:
    evaluations = make(prompts=3, samples=2)
    rewards = {"eval-10-0": [None, 1.0, None], "eval-10-1": [0.0, None, None], "eval-10-2": [1.0, 1.0, 0.0]}
    row = None
    for group in evaluations.begin(10, 100.0):
        for (sample_id, _, _), reward in zip(evaluations.samples(group), rewards[group.group_id], strict=True):
            row = evaluations.finish(sample_id, reward, 4, np.full(4, 10), 130.0)
    assert row is not None
    found = row.overall
    assert (found.prompts, found.samples, found.rewards_void, found.length_mean) == (3, 9, 4, 4.0)
    assert (found.reward_greedy, found.pass_greedy) == (0.5, 0.5)  # of the two greedy answers with a reward
    assert found.reward_sampled == 0.75  # mean of 1.0 and 0.5: each prompt counts alike
    assert found.pass_at == pytest.approx([0.75, 1.0])  # pass@2 has one prompt with two rewards
    words = row.by_task["words"]
    assert (words.reward_sampled, words.pass_at, words.rewards_void) == (None, [], 2)
    assert "4 void rewards" in evaluation_line(row)
