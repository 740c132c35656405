"""Episodes as rows: what is sampled, what rows share, and how they go to the trainer and to disk."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest

from ranker.data import read_rollouts
from streamrl.config.run import RunConfig
from streamrl.controller.step_batch import StepBatch
from streamrl.report.run_data import load_run, read_texts
from streamrl.rollouts.micro_batch import split_into_micro_batches
from streamrl.rollouts.micro_batch_wire import from_wire, to_wire
from streamrl.rollouts.rollout_store import RolloutStore
from streamrl.rollouts.row_parts import episode_rows, sample_of_row
from streamrl.rollouts.train_groups import train_groups
from streamrl.rollouts.trajectory import MOST_STEPS, MOST_TOLD, NOT_SAMPLED, EpisodeStep, RowExtent, Trajectory, kept_of
from streamrl.rollouts.types import Group, Sample, Scored
from streamrl.rollouts.void import VoidCause
from streamrl.run_dir import layout
from streamrl.transport import wire
from tests.rollouts.test_rollouts import make_sample

ROW = tuple[list[int], str]
"""(tokens, which of them were sampled: 's', and which were not: '.')."""


def trajectory(rows: list[ROW], reward: float | None = 1.0, cause: VoidCause | None = None) -> Trajectory:
    return Trajectory(
        rows=[RowExtent(tokens=len(tokens), prompt=marks.index("s")) for tokens, marks in rows],
        reward=reward,
        void_cause=cause,
        metrics={"guesses": 2.0, "won": 1.0},
        messages=[{"role": "user", "content": "hi"}],
        steps=[EpisodeStep("tool", "add", 1.0, 2.0)],
    )


def episode(sample_id: str, rows: list[ROW]) -> Sample:
    tokens = np.concatenate([np.asarray(tokens, np.int32) for tokens, _ in rows])
    sampled = np.asarray([mark == "s" for _, marks in rows for mark in marks])
    return replace(
        make_sample(sample_id, length=len(tokens)),
        completion_tokens=tokens,
        logprobs=np.where(sampled, -0.5, 0).astype(np.float32),
        token_versions=np.where(sampled, 3, NOT_SAMPLED).astype(np.int32),
        trajectory=trajectory(rows),
    )


TWO_TURNS: ROW = ([1, 2, 3, 10, 11, 4, 12], "...ss.s")
FORK: ROW = ([1, 2, 3, 7, 13], "....s")
"""Its prompt begins with that of the row above."""
OTHER: ROW = ([9, 2, 14], "..s")


def agent_group(*rows: list[ROW]) -> Group:
    group = Group("g", 4, 0, "task/0", "task", 0, "a prompt", np.arange(4, dtype=np.int32), len(rows), agent=True)
    for number, some in enumerate(rows):
        sample = episode(f"g.{number}", some)
        group.scored[sample.sample_id] = Scored(sample, 1.0, None, 5.0)
        group.advantages[sample.sample_id] = float(number)
    return group


def test_an_episodes_length_is_what_was_sampled() -> None:
    sample = episode("g.0", [TWO_TURNS, FORK])
    assert sample.output_length == 4 and sample.sampled_versions.tolist() == [3, 3, 3, 3]
    (prompt, part), (other, second) = episode_rows(sample)
    assert prompt.tolist() == [1, 2, 3] and part.tokens.tolist() == [10, 11, 4, 12]
    assert part.mask is not None and part.mask.tolist() == [True, True, False, True] and part.sampled == 3
    assert other.tolist() == [1, 2, 3, 7] and second.tokens.tolist() == [13]
    assert [part.row_id, second.row_id] == ["g.0", "g.0#1"]
    assert sample_of_row("g.0#1") == sample_of_row("g.0") == "g.0"


def test_the_longest_answer_of_an_episode_is_that_of_one_turn() -> None:
    assert episode("g.0", [TWO_TURNS, FORK]).longest_answer == 2
    assert episode("g.0", [FORK, ([1, 5, 6, 7, 2, 8], ".sss.s")]).longest_answer == 3
    assert make_sample("g.0", length=4).longest_answer == 4


def test_the_overlong_penalty_goes_by_the_longest_answer_of_an_episode() -> None:
    algorithm = {"name": "grpo", "overlong": {"margin_tokens": 2, "penalty": 1.0}}
    limits = {"sampling": {"max_tokens": 3}, "batch": {"samples_per_prompt": 2}}
    run = RunConfig.model_validate({"algorithm": algorithm, **limits})
    group = agent_group([TWO_TURNS, FORK], [FORK])  # four tokens in answers of 2, 1 and 1; one token
    assert StepBatch(run, 1).rewards(group) == [0.5, 1.0]


def test_rows_share_the_shortest_prompt_that_theirs_begins_with() -> None:
    first, second = train_groups(agent_group([TWO_TURNS, OTHER], [FORK, TWO_TURNS]))
    assert first.prompt_tokens.tolist() == [1, 2, 3] and second.prompt_tokens.tolist() == [9, 2]
    assert [one.sample_id for one in first.sequences] == ["g.0", "g.1", "g.1#1"]
    assert [one.advantage for one in first.sequences] == [0.0, 1.0, 1.0]
    fork = first.sequences[1]
    assert fork.completion_tokens.tolist() == [7, 13]  # what it does not share is context of its own
    assert fork.mask is not None and fork.mask.tolist() == [False, True]
    assert (first.loss_tokens, first.tokens) == (7, 3 + 4 + 2 + 4)
    assert [one.sample_id for one in second.sequences] == ["g.0#1"]


def test_the_rows_of_an_episode_with_several_stay_together_where_a_loss_needs_them_all() -> None:
    group = agent_group([TWO_TURNS, FORK], [OTHER], [FORK])
    told = [
        (one.trajectory, one.prompt_tokens.tolist(), [(s.sample_id, s.trajectory_tokens) for s in one.sequences])
        for one in train_groups(group, trajectories=True)
    ]
    assert told == [
        ("", [9, 2], [("g.1", None)]),
        ("", [1, 2, 3, 7], [("g.2", None)]),
        ("g.0", [1, 2, 3], [("g.0", 4), ("g.0#1", 4)]),
    ]
    both = [
        (one.trajectory, [(s.sample_id, s.trajectory_tokens) for s in one.sequences]) for one in train_groups(group)
    ]
    assert both == [("", [("g.0", 4), ("g.0#1", 4), ("g.2", None)]), ("", [("g.1", None)])]


def test_prompts_that_only_begin_alike_in_bytes_are_not_shared() -> None:
    # 258 is 02 01 in bytes: [1, 258] begins with the bytes of no shorter list of tokens
    long, short = train_groups(agent_group([([1, 258, 5], "..s")], [([1, 2, 5], "..s")]))
    assert {tuple(one.prompt_tokens.tolist()) for one in (long, short)} == {(1, 258), (1, 2)}


def test_masks_and_references_of_masked_rows_survive_the_wire() -> None:
    groups = train_groups(agent_group([TWO_TURNS, OTHER], [FORK]))
    values = np.linspace(-1, -0.1, 3).astype(np.float32)  # as many as sampled tokens
    groups[0].sequences[0] = replace(groups[0].sequences[0], reference_logprobs=values)
    back = from_wire(*to_wire(groups))
    assert len(back) == len(groups) and [one.loss_tokens for one in back] == [4, 1]
    for ours, theirs in zip(groups, back, strict=True):
        assert np.array_equal(ours.prompt_tokens, theirs.prompt_tokens)
        for a, b in zip(ours.sequences, theirs.sequences, strict=True):
            assert a.mask is not None and b.mask is not None and np.array_equal(a.mask, b.mask)
            assert np.array_equal(a.completion_tokens, b.completion_tokens) and a.advantage == b.advantage
    assert np.array_equal(back[0].sequences[0].reference_logprobs, values)
    assert back[0].sequences[1].reference_logprobs is None
    body, arrays = to_wire(groups)
    with pytest.raises(ValueError, match="reference log-probabilities"):
        from_wire(body, arrays | {"reference_logprobs": np.zeros(4, np.float32)})
    with pytest.raises(ValueError, match="do not add up"):
        from_wire(body, arrays | {"masks": arrays["masks"][1:]})


def test_a_group_that_is_cut_keeps_its_masks() -> None:
    groups = train_groups(agent_group([TWO_TURNS], [TWO_TURNS], [FORK]))
    parts = [part for batch in split_into_micro_batches(groups, 8) for part in batch]
    assert len(parts) > len(groups)
    assert sum(part.loss_tokens for part in parts) == sum(group.loss_tokens for group in groups) == 7


def test_rows_that_cannot_be_are_refused() -> None:
    sample = episode("g.0", [TWO_TURNS])
    with pytest.raises(ValueError, match="do not add up to its 7 tokens"):
        replace(sample, trajectory=trajectory([OTHER]))
    with pytest.raises(ValueError, match="does not follow its prompt"):
        replace(sample, trajectory=trajectory([(TWO_TURNS[0], "..s.sss")]))
    with pytest.raises(ValueError, match="prompt of at least one token"):
        trajectory([([1], "s")])
    with pytest.raises(ValueError, match="either a reward or a cause"):
        trajectory([OTHER], reward=None)
    with pytest.raises(ValueError, match="either a reward or a cause"):
        trajectory([OTHER], reward=1.0, cause=VoidCause.TOOL)
    for reward, says in ((float("nan"), "finite"), (-1e200, "between")):
        with pytest.raises(ValueError, match=says):
            trajectory([OTHER], reward=reward)


def test_of_a_long_conversation_as_much_is_kept_as_a_message_carries() -> None:
    steps = [EpisodeStep("tool", "read", 1.0, 2.0, "x" * 2000)] * 10_000
    messages = [{"role": "user", "content": "hi"}]
    assert kept_of(messages, steps[:3]) == (messages, steps[:3])
    assert kept_of(messages, steps) == (messages, steps[:MOST_STEPS])
    short, bare = kept_of([{"role": "tool", "content": "y" * MOST_TOLD, "name": "z"}], steps)
    assert len(short[0]["content"]) == 10_000 and len(bare) == MOST_STEPS and bare[0].detail == ""
    told = telling(short, bare)
    assert told.told_bytes <= MOST_TOLD
    named = [msgspec.structs.replace(step, name="\U0001f642" * 2_000) for step in steps]
    assert len(msgspec.json.encode(kept_of([], named))) <= MOST_TOLD


def test_of_a_conversation_of_too_many_values_its_text_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MOST_PLAIN", 10)
    few, many = ([{"role": "tool", "content": "four", "board": list(range(count))}] for count in (6, 7))
    assert kept_of(few, []) == (few, [])
    short, _ = kept_of(many, [])
    assert short == [{"role": "tool", "content": "four"}]
    telling(short, [])
    with pytest.raises(ValueError, match="too many"):
        telling(many, [])


def telling(messages: list[dict[str, Any]], steps: list[EpisodeStep]) -> Trajectory:
    return Trajectory(rows=[], reward=0.0, messages=messages, steps=steps)


def test_each_row_of_an_episode_is_a_row_of_its_file_and_the_conversation_is_in_the_first(tmp_path: Path) -> None:
    table = pq.read_table(RolloutStore(tmp_path).write(4, [agent_group([TWO_TURNS, FORK], [OTHER])])).to_pylist()
    assert [row["sample_id"] for row in table] == ["g.0", "g.0#1", "g.1"]
    assert [row["trajectory_id"] for row in table] == ["g.0", "g.0", "g.1"]
    assert [row["output_length"] for row in table] == [4, 4, 1]
    assert [row["prompt_tokens"] for row in table] == [[1, 2, 3], [1, 2, 3, 7], [9, 2]]
    assert table[0]["mask"] == [True, True, False, True] and table[0]["weight_versions"] == [3, 3, -1, 3]
    told = json.loads(table[0]["conversation"])
    assert told["messages"][0]["content"] == "hi" and told["steps"][0]["name"] == "add"
    assert [dict(row["metrics"]) for row in table] == [{"guesses": 2.0, "won": 1.0}] * 3
    assert table[1]["conversation"] is None and table[2]["conversation"] is not None


def test_conversations_are_written_with_all_letters_as_they_are_which_a_search_can_read(tmp_path: Path) -> None:
    group = agent_group([OTHER], [OTHER])
    for sample_id, one in group.scored.items():
        told = msgspec.structs.replace(trajectory([OTHER]), messages=[{"role": "user", "content": "Żory"}])
        group.scored[sample_id] = replace(one, sample=replace(one.sample, trajectory=told))
    table = pq.read_table(RolloutStore(tmp_path).write(4, [group])).to_pylist()
    assert all('"Żory"' in row["conversation"] for row in table)


def test_a_report_shows_the_numbers_of_an_episode_and_reads_files_without_them(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    path = RolloutStore(run_dir / layout.ROLLOUTS).write(4, [agent_group([TWO_TURNS, FORK])])
    (run_dir / layout.METRICS).touch()
    data = load_run(run_dir)
    assert data.rollouts is not None

    def shown() -> str:
        return str(read_texts(data, [0])[0][1])

    assert "[returned beside the reward]\nguesses: 2\nwon: 1\n\n[steps]" in shown()
    older = pq.read_table(path).drop_columns(["metrics"])
    pq.write_table(older, path)
    assert shown().startswith("[user] hi\n\n[steps]")


def test_numbers_that_are_not_finite_are_no_part_of_an_episode() -> None:
    with pytest.raises(ValueError, match="a number beside the reward is not finite"):
        Trajectory(rows=[], reward=0.0, messages=[], steps=[], metrics={"loss": float("nan")})


def test_what_learns_lengths_reads_each_episode_once(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    store.write(4, [agent_group([TWO_TURNS, FORK], [OTHER])])
    assert [row["output_length"] for row in store.newest(["output_length"], 10)] == [4, 1]
    assert read_rollouts([tmp_path]).output_length.tolist() == [4, 1]


def test_an_episode_without_any_token_has_one_row(tmp_path: Path) -> None:
    group = agent_group([OTHER])
    empty = replace(
        group.scored["g.0"].sample,
        completion_tokens=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        token_versions=np.empty(0, np.int32),
        trajectory=trajectory([], None, VoidCause.CRASH),
    )
    group.scored["g.0"] = Scored(empty, None, empty.trajectory and empty.trajectory.void, 5.0)
    (row,) = pq.read_table(RolloutStore(tmp_path).write(4, [group])).to_pylist()
    assert (row["sample_id"], row["output_length"], row["void_cause"]) == ("g.0", 0, "crash")
    assert train_groups(group, set()) == []
