"""Reading rollouts: every usable row once, and a clear message for what cannot be used."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ranker.data import read_jsonl, read_rollouts
from ranker.errors import RankerError
from ranker.history import simulate
from ranker.train import train_and_hold_out

CUT_SHORT_ROW = "1 rows of void episodes, or cut off before their first token, were left out"


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path: Path, columns: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "x.jsonl", [{"prompt": "\ufeffp", "output_length": 5}, {"prompt": "q"}])
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    rows = list(read_jsonl(file, partial(file.open, "rb")))
    assert rows == [(1, {"prompt": "\ufeffp", "output_length": 5}), (2, {"prompt": "q"})]
    assert read_rollouts([file]).output_length.tolist() == [5]


def test_folders_files_and_mixed_schemas_are_read_together(tmp_path: Path) -> None:
    write_parquet(
        tmp_path / "a" / "step_000001.parquet",
        {"prompt": ["p", "q"], "output_length": [3, 9], "step": [1, 1], "group_id": ["g", "h"], "task": ["t", None]},
    )
    # another run with the same group ids; lengths as floats, group ids as numbers
    write_parquet(
        tmp_path / "b" / "step_000001.parquet", {"prompt": ["p"], "output_length": [4.0], "step": [7], "group_id": [1]}
    )
    plain = write_jsonl(tmp_path / "x.jsonl", [{"prompt": "r", "output_length": 0, "other": [1]}])
    rollouts = read_rollouts([tmp_path / "a", tmp_path / "b", plain])
    assert [rollouts.texts[i] for i in rollouts.prompt] == ["p", "q", "p", "r"]
    assert rollouts.output_length.tolist() == [3, 9, 4, 1]
    assert rollouts.step.tolist() == [1, 1, 7, 0]
    assert len(set(rollouts.run.tolist())) == 3
    assert len(set(rollouts.group[:3].tolist())) == 3 and rollouts.group[3] == -1
    assert rollouts.tasks == ["t"] and rollouts.task.tolist() == [0, -1, -1, -1]


def test_a_file_named_twice_is_read_once(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "x.jsonl", [{"prompt": "r", "output_length": 5}])
    assert len(read_rollouts([file, tmp_path, str(file)])) == 1


def test_a_file_of_a_relative_and_an_absolute_name_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_jsonl(tmp_path / "x.jsonl", [{"prompt": "r", "output_length": 5}])
    monkeypatch.chdir(tmp_path)
    assert len(read_rollouts(["x.jsonl", file, "."])) == 1


def test_an_episode_counts_once_in_any_format(tmp_path: Path) -> None:
    """Its further rows repeat its length."""
    rows = [
        {"prompt": f"p{n}", "output_length": 9, "sample_id": f"s{n}", "trajectory_id": f"s{n}-{k}" if k else f"s{n}"}
        for n in range(4)
        for k in range(3)
    ]
    rows.append({"prompt": "p9", "output_length": 9, "sample_id": "s9", "trajectory_id": None})
    plain = write_jsonl(tmp_path / "x.jsonl", rows)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    found = [read_rollouts([file]) for file in (plain, write_parquet(tmp_path / "x.parquet", columns))]
    assert [[one.texts[i] for i in one.prompt] for one in found] == [["p0", "p1", "p2", "p3", "p9"]] * 2


def test_files_of_one_step_each_are_one_run_whatever_their_names(tmp_path: Path) -> None:
    for step in range(3):
        rows = [{"prompt": f"p{n}", "output_length": 100 + n, "step": step} for n in range(5)]
        write_jsonl(tmp_path / f"rollouts_{step}.jsonl", rows)
    rollouts = read_rollouts([tmp_path])
    assert set(rollouts.run.tolist()) == {0} and not rollouts.notes
    assert np.isfinite(simulate(rollouts)[:, 0]).sum() == 10  # all but those of the first step
    write_jsonl(tmp_path / "other.jsonl", [{"prompt": "p", "output_length": 5, "step": step} for step in (1, 7)])
    rollouts = read_rollouts([tmp_path])
    assert len(set(rollouts.run.tolist())) == 4
    said = f"4 files of {tmp_path.resolve()} have steps in common: each counts as a run of its own"
    assert rollouts.notes == [said]
    write_jsonl(tmp_path / "other.jsonl", [{"prompt": "p", "output_length": 5}])  # of no step
    assert len(set(read_rollouts([tmp_path]).run.tolist())) == 4


def test_nulls_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [{"prompt": None, "output_length": 5}, {"prompt": "p", "output_length": None}, {"prompt": "p"}]
    rows += [{"prompt": "p", "output_length": length} for length in (-1, 1e300, float("nan"), 10**400)]
    file = write_jsonl(tmp_path / "x.jsonl", [{"prompt": "p", "output_length": 5}, *rows])
    rollouts = read_rollouts([file])
    assert len(rollouts) == 1 and rollouts.notes == [
        "4 rows without a prompt or a length were left out",
        "3 rows with a length that is negative or above 1,000,000,000 tokens were left out",
    ]


def test_what_only_rows_that_are_left_out_have_is_not_counted(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"p{n}", "output_length": None if n < 37 else n, "task": f"t{n}", "group_id": f"g{n}"}
        for n in range(40)
    ]
    rollouts = read_rollouts([write_jsonl(tmp_path / "x.jsonl", rows)])
    assert (rollouts.texts, rollouts.tasks) == (["p37", "p38", "p39"], ["t37", "t38", "t39"])
    assert rollouts.prompt.tolist() == rollouts.task.tolist() == rollouts.group.tolist() == [0, 1, 2]
    assert train_and_hold_out(rollouts).report.prompts == 3


def test_the_length_limit_is_told_or_recognised(tmp_path: Path) -> None:
    rows = [{"prompt": str(n), "output_length": min(100, n)} for n in range(200)]
    told = [row | {"finish_reason": "length" if row["output_length"] == 100 else "stop"} for row in rows]
    assert read_rollouts([write_jsonl(tmp_path / "a.jsonl", told)]).cap == 100
    rollouts = read_rollouts([write_jsonl(tmp_path / "b.jsonl", rows)])
    assert rollouts.cap == 100 and "taken for the length limit" in rollouts.notes[0]
    assert read_rollouts([write_jsonl(tmp_path / "c.jsonl", rows[:90])]).cap is None
    ended = read_rollouts([write_jsonl(tmp_path / "d.jsonl", [row | {"finish_reason": "stop"} for row in rows])])
    assert ended.cap is None and not ended.notes, "short answers, many of one length"


def test_what_one_file_tells_of_its_ends_says_nothing_of_another(tmp_path: Path) -> None:
    told = [{"prompt": f"a{n}", "output_length": n + 1, "finish_reason": "stop"} for n in range(60)]
    cut = [{"prompt": f"b{n}", "output_length": min(512, 5 * n + 1)} for n in range(200)]
    few = [{"prompt": f"c{n}", "output_length": 7} for n in range(20)]
    for name, rows in (("a", told), ("b", cut), ("c", few)):
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
    rollouts = read_rollouts([tmp_path])
    assert rollouts.capped.sum() == 97 and set(rollouts.output_length[rollouts.capped]) == {512}
    assert rollouts.notes == ["44 % of lengths are exactly 512: taken for the length limit"]


def test_small_files_that_do_not_tell_are_judged_together(tmp_path: Path) -> None:
    for part in range(5):
        rows = [{"prompt": f"p{part}-{n}", "output_length": min(30, 2 * n + 1)} for n in range(20)]
        write_jsonl(tmp_path / f"{part}.jsonl", rows)
    assert read_rollouts([tmp_path]).capped.sum() == 25


@pytest.mark.parametrize("reason", ["length", "max_tokens", "MAX_TOKENS", "max_new_tokens", "truncated"])
def test_other_systems_words_for_a_limit_are_known(tmp_path: Path, reason: str) -> None:
    rows = [
        {"prompt": f"p{n}", "output_length": min(100, n), "finish_reason": reason if n >= 100 else "end_turn"}
        for n in range(200)
    ]
    rows.append({"prompt": "q", "output_length": 0, "finish_reason": reason})
    rollouts = read_rollouts([write_jsonl(tmp_path / "x.jsonl", rows)])
    assert rollouts.capped.sum() == 100 and rollouts.notes == [CUT_SHORT_ROW]


@pytest.mark.parametrize("reason", ["limit reached", None])
def test_a_pile_of_lengths_of_which_no_known_reason_says_how_they_ended_is_noted(
    tmp_path: Path, reason: str | None
) -> None:
    rows = [
        {"prompt": f"p{n}", "output_length": min(100, n), "finish_reason": reason if n >= 100 else "stop"}
        for n in range(200)
    ]
    rollouts = read_rollouts([write_jsonl(tmp_path / "x.jsonl", rows)])
    assert rollouts.cap is None and len(rollouts.notes) == 1
    assert rollouts.notes[0].startswith("50 % of a run's lengths are exactly 100, and no known finish_reason says")


def test_the_limit_is_that_of_the_longest_sample_where_limits_differ(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{n}", "output_length": 100 * n, "finish_reason": "stop"} for n in range(1, 9)]
    cut = [{"prompt": "p1", "output_length": 64, "finish_reason": "length"}]
    rollouts = read_rollouts([write_jsonl(tmp_path / "x.jsonl", rows + cut)])
    assert rollouts.cap == 800 and rollouts.output_length[rollouts.capped].tolist() == [64]


def test_what_was_cut_off_before_its_first_token_says_nothing_of_a_length(tmp_path: Path) -> None:
    rows = [
        {"prompt": "p", "output_length": 9, "finish_reason": "stop"},
        {"prompt": "q", "output_length": 0, "finish_reason": "length"},  # no site could generate it
        {"prompt": "r", "output_length": 0, "finish_reason": "stop"},  # an episode that asked no model
    ]
    rollouts = read_rollouts([write_jsonl(tmp_path / "x.jsonl", rows)])
    assert rollouts.texts == ["p", "r"] and rollouts.output_length.tolist() == [9, 1] and rollouts.cap is None
    assert rollouts.notes == [CUT_SHORT_ROW]


def test_void_episodes_broke_off_and_void_completions_are_whole(tmp_path: Path) -> None:
    rows = [
        {"prompt": "p", "output_length": 5, "void_cause": "crash", "metrics": {"turns": 1.0}},
        {"prompt": "q", "output_length": 6, "void_cause": "environment", "metrics": {}},
        {"prompt": "r", "output_length": 7, "void_cause": None, "metrics": {}},
        {"prompt": "s", "output_length": 8, "void_cause": "crash", "metrics": None},
    ]
    assert read_rollouts([write_jsonl(tmp_path / "x.jsonl", rows)]).output_length.tolist() == [7, 8]
    table = {name: [row[name] for row in rows] for name in ("prompt", "output_length", "void_cause")}
    metrics = pa.array([row["metrics"] and list(row["metrics"].items()) for row in rows], pa.map_("string", "double"))
    columns = {**table, "metrics": metrics}
    assert read_rollouts([write_parquet(tmp_path / "x.parquet", columns)]).output_length.tolist() == [7, 8]
    del columns["void_cause"]  # as earlier versions wrote it
    assert read_rollouts([write_parquet(tmp_path / "y.parquet", columns)]).output_length.tolist() == [5, 6, 7, 8]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.jsonl", '{"prompt": "p"}\n', "x.jsonl: no column 'output_length'"),
        ("x.jsonl", '{"output_length": 3, "text": "p"}\n', "no column 'prompt'.*found: output_length, text"),
        ("x.jsonl", '{"prompt": "p", "output_length": 3}\n{"prompt"\n', "x.jsonl, line 2: not JSON"),
        ("x.jsonl", "[1]\n", "line 1: expected an object"),
        ("x.jsonl", '{"prompt": "p", "output_length": "3"}\n', "column 'output_length' is '3'; expected a number"),
        ("x.jsonl", '{"prompt": 7, "output_length": 3}\n', "column 'prompt' is 7; expected text"),
        ("x.jsonl", "", "no usable rows"),
        ("x.jsonl", '{"prompt": null, "output_length": 3}\n', "no usable rows.*1 rows without"),
        ("x.parquet", "not parquet", "x.parquet: cannot be read as Parquet"),
        ("x.csv", "a,b", "x.csv: expected a file that ends in .parquet or .jsonl"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(RankerError, match=message):
        read_rollouts([tmp_path / name])


def test_parquet_columns_of_another_type_are_named(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "x.parquet", {"prompt": ["p"], "output_length": ["3"]})
    with pytest.raises(RankerError, match=r"x.parquet: column 'output_length' is string; expected a number"):
        read_rollouts([file])
    file = write_parquet(tmp_path / "y.parquet", {"text": ["p"], "output_length": [3]})
    with pytest.raises(RankerError, match=r"y.parquet: no column 'prompt'"):
        read_rollouts([file])


def test_missing_paths_and_empty_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(RankerError, match="nowhere: no such file or folder"):
        read_rollouts([tmp_path / "nowhere"])
    with pytest.raises(RankerError, match=r"no \.parquet or \.jsonl file in this folder"):
        read_rollouts([tmp_path])
    with pytest.raises(RankerError, match="no rollouts given"):
        read_rollouts([])


def test_zero_rows_of_parquet_beside_others_do_no_harm(tmp_path: Path) -> None:
    empty = {"prompt": pa.array([], pa.string()), "output_length": pa.array([], pa.int32())}
    write_parquet(tmp_path / "step_000001.parquet", empty)
    write_parquet(tmp_path / "step_000002.parquet", {"prompt": ["p"], "output_length": [3]})
    rollouts = read_rollouts([tmp_path])
    assert len(rollouts) == 1 and np.isnan(rollouts.finished).all()
