"""Files that grow, are cut, are replaced, or are not there (yet, or any more)."""

from __future__ import annotations

import json
from pathlib import Path

from streamrl.dashboard.step_series import StepSeries
from streamrl.run_dir.appended_lines import AppendedLines, AppendedRows, newest_row
from streamrl.run_dir.jsonl import TAIL_BYTES, RowWriter
from streamrl.run_dir.metrics import MetricsRow
from tests.report.synthetic import make_row, write_evaluations


def test_each_line_comes_once_and_a_half_one_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "x"
    lines = AppendedLines(path)
    assert lines.read() == (False, [])
    path.write_text("one\ntw")
    assert lines.read() == (False, [b"one"])
    assert lines.read() == (False, [])
    with path.open("a") as file:
        file.write("o\nthree\n")
    assert lines.read() == (False, [b"two", b"three"])


def test_a_file_that_is_shorter_replaced_or_gone_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("one\ntwo\n")
    lines = AppendedLines(path)
    lines.read()
    path.write_text("1\n")
    assert lines.read() == (True, [b"1"])
    other = tmp_path / "y"
    other.write_text("a\nb\nc\n")
    other.replace(path)
    assert lines.read() == (True, [b"a", b"b", b"c"])
    path.unlink()
    assert lines.read() == (True, [])
    assert lines.read() == (False, [])


def test_a_file_with_other_lines_begins_anew_though_it_has_grown_in_the_same_place(tmp_path: Path) -> None:
    path = tmp_path / "x"
    alike = "x" * 2000  # as the ends of two rows are
    path.write_text(f"one\n1{alike}\n")
    lines = AppendedLines(path)
    assert len(lines.read()[1]) == 2
    path.write_text(f"one\n2{alike}\nthree\nfour\n")
    anew, found = lines.read()
    assert anew and [line[:5] for line in found] == [b"one", b"2xxxx", b"three", b"four"]
    with path.open("a") as file:
        file.write("five\n")
    assert lines.read() == (False, [b"five"])


def test_a_reader_gets_only_rows_that_it_has_not_seen(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = AppendedRows(path, MetricsRow)
    with RowWriter(path, MetricsRow) as writer:
        writer.append(make_row(1))
        rows.look()
        assert [row.step for row in rows.since("")[0]] == [1]
        cursor = rows.cursor
        writer.append(make_row(2))
        writer.append(make_row(3))
        rows.look()
        new, reset = rows.since(cursor)
        assert ([row.step for row in new], reset) == ([2, 3], False)
        cursor = rows.cursor
        writer.rewind(1)  # the run is resumed from step 1
        writer.append(make_row(2, reward_mean=0.9))
        rows.look()
        new, reset = rows.since(cursor)
        assert ([(row.step, row.reward_mean) for row in new], reset) == ([(1, 0.1), (2, 0.9)], True)
    assert rows.since("nonsense")[1] and rows.since(f"{rows.generation}.99")[1] and rows.since("-1.-1")[1]


def test_a_row_that_is_held_takes_little_more_memory_than_its_values(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with RowWriter(path, MetricsRow) as writer:
        for step in range(1, 21):
            writer.append(make_row(step))
    rows = AppendedRows(path, MetricsRow)
    rows.look()
    assert len({id(row.model_fields_set) for row in rows.rows}) == 1  # a set of all names is as large as the values
    assert rows.rows == [make_row(step) for step in range(1, 21)]


def test_the_newest_row_is_the_last_whole_one_of_the_end_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert newest_row(path, MetricsRow) is None
    path.write_text("nonsense\n")
    assert newest_row(path, MetricsRow) is None
    with RowWriter(path, MetricsRow) as writer:
        steps = 2 * TAIL_BYTES // len(make_row(1).model_dump_json())
        for step in range(1, steps + 1):
            writer.append(make_row(step))
    with path.open("a") as file:
        file.write('{"step": 1000, "time"')
    newest = newest_row(path, MetricsRow)
    assert newest is not None and newest.step == steps


def test_lines_of_another_version_are_read_as_far_as_they_are_known(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "time": 2.0, "reward_mean": 0.5, "of_the_future": 1}\nnonsense\n{"step": "x"}\n{"step": 2, "time"'
    )
    told = StepSeries(tmp_path).since("")
    assert told["step"] == [1] and told["figures"]["reward_mean"] == [0.5] and told["figures"]["loss"] == [None]


def test_steps_come_as_columns_of_one_length(tmp_path: Path) -> None:
    series = StepSeries(tmp_path)
    with RowWriter(tmp_path / "metrics.jsonl", MetricsRow) as writer:
        writer.append(make_row(1, usd=0.5, reward_by_task={"a": 1.0}, void_rate_by_cause={}))
        new = {"accepted_by_route": {"tail": 0.5}, "agent_metrics_by_task": {"b": {"turns": 2.0}}}
        writer.append(make_row(2, usd=0.25, reward_by_task={"b": 0.5}, step_refused="a gradient was NaN", **new))
    write_evaluations(tmp_path, 4)
    evaluations = tmp_path / "evaluations.jsonl"
    evaluations.write_text("".join(reversed(evaluations.read_text().splitlines(keepends=True))))  # as they may end
    told = series.since("")
    assert {len(column) for column in told["figures"].values()} == {2}
    assert not any(isinstance(value, dict) for column in told["figures"].values() for value in column)
    assert told["by_name"]["reward_by_task"] == {"a": [1.0, None], "b": [None, 0.5]}
    assert told["by_name"]["accepted_by_route"] == {"tail": [None, 0.5]}
    assert told["usd"] == 0.75
    assert told["warnings"] == [{"step": 2, "text": "step refused: a gradient was NaN"}]
    assert [row["step"] for row in told["evaluations"]] == [0, 4]
    assert json.dumps(told, allow_nan=False)
    again = series.since(told["cursor"])
    assert again["step"] == [] and not again["reset"] and again["usd"] == 0.75
