"""metrics.jsonl: what is written is what is read, NaN never gets in, kills and resumes leave whole rows."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import tracemalloc
from pathlib import Path

import pytest
from pydantic import ValidationError

from streamrl.errors import RunFailed
from streamrl.plain_files import NotPlainFile
from streamrl.run_dir import jsonl
from streamrl.run_dir.appended_lines import newest_row
from streamrl.run_dir.jsonl import TAIL_BYTES, BriefRow, RowWriter, iter_rows, parse_row
from streamrl.run_dir.metrics import MetricsRow, read_metrics
from tests.report.synthetic import audit_of, make_row
from tests.run_dir.conftest import FILE_LIMIT, Disk, file_size_limit

CONTRACT_KEYS = [
    "step",
    "time",
    "step_time_s",
    "generate_time_s",
    "train_time_s",
    "bubble_fraction_generation",
    "bubble_fraction_training",
    "samples_per_s",
    "tokens_per_s",
    "reward_mean",
    "reward_std",
    "loss",
    "grad_norm",
    "entropy",
    "output_length_mean",
    "output_length_p50",
    "output_length_p90",
    "output_length_max",
    "staleness_mean",
    "staleness_max",
    "logprob_gap_mean",
    "importance_ratio_max",
    "weight_version",
    "weight_bytes_sent",
    "weight_sync_exposed_s",
    "ranker_recall_at_20",
    "ranker_kendall_tau",
]


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    rows = [make_row(1), make_row(2, length_audit=audit_of(2, dropped=12), step_skipped=True), make_row(3)]
    with RowWriter(tmp_path / "metrics.jsonl", MetricsRow) as writer:
        for row in rows:
            writer.append(row)
    assert read_metrics(tmp_path / "metrics.jsonl") == rows


def test_every_line_has_all_keys_of_the_contract(tmp_path: Path) -> None:
    with RowWriter(tmp_path / "metrics.jsonl", MetricsRow) as writer:
        writer.append(MetricsRow(step=1, time=5.0))
    written = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert set(CONTRACT_KEYS) <= set(written)
    assert written["ranker_kendall_tau"] is None


def test_a_row_is_in_the_file_before_the_writer_is_closed(tmp_path: Path) -> None:
    writer = RowWriter(tmp_path / "metrics.jsonl", MetricsRow)
    writer.append(make_row(1))
    assert [row.step for row in read_metrics(tmp_path / "metrics.jsonl")] == [1]
    writer.close()


def test_nan_and_infinity_become_null(tmp_path: Path) -> None:
    row = make_row(1, loss=math.nan, grad_norm=math.inf, reward_by_task={"a": math.nan, "b": 0.5})
    with RowWriter(tmp_path / "metrics.jsonl", MetricsRow) as writer:
        writer.append(row)
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text
    (read,) = read_metrics(tmp_path / "metrics.jsonl")
    assert (read.loss, read.grad_norm, read.reward_by_task) == (None, None, {"a": None, "b": 0.5})


def test_a_misspelt_key_is_refused_when_writing() -> None:
    with pytest.raises(ValidationError):
        make_row(1, reward_meen=0.1)


def test_keys_of_a_newer_version_do_not_lose_the_row(tmp_path: Path) -> None:
    values = make_row(1).model_dump() | {"something_new": 3}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(values) + "\n")
    assert read_metrics(tmp_path / "metrics.jsonl") == [make_row(1)]


@pytest.mark.parametrize("keep", [1, 40, 400])
def test_a_cut_last_line_is_skipped_and_removed_before_appending(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "metrics.jsonl"
    with RowWriter(path, MetricsRow) as writer:
        writer.append(make_row(1))
        whole = path.stat().st_size
        writer.append(make_row(2))
    path.write_bytes(path.read_bytes()[: whole + keep])
    assert [row.step for row in read_metrics(path)] == [1]
    with RowWriter(path, MetricsRow) as writer:
        writer.append(make_row(3))
    assert [row.step for row in read_metrics(path)] == [1, 3]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_row_that_the_disk_has_no_room_for_is_no_part_of_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with RowWriter(path, MetricsRow) as writer:
        writer.append(make_row(1))
        words = re.escape(f"cannot write {path}: [Errno 27] File too large; {FILE_LIMIT} (see docs: E1007)")
        with file_size_limit(path.stat().st_size + 40), pytest.raises(RunFailed, match=words):
            writer.append(make_row(2))
        writer.append(make_row(3))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 3]


def test_rows_that_the_disk_has_no_room_to_rewind_are_named(tmp_path: Path) -> None:
    writer = RowWriter(path := tmp_path / "metrics.jsonl", MetricsRow)
    writer.append(make_row(1))
    words = re.escape(f"cannot write {path}: [Errno 27] File too large; {FILE_LIMIT} (see docs: E1007)")
    with file_size_limit(40), pytest.raises(RunFailed, match=words):
        writer.rewind(1)
    assert [row.step for row in read_metrics(path)] == [1]


def test_resuming_drops_the_rows_after_the_checkpoint_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with RowWriter(path, MetricsRow) as writer:
        for step in range(1, 8):
            writer.append(make_row(step))
    with RowWriter(path, MetricsRow) as writer:
        assert writer.rewind(5) == 2
        writer.append(make_row(6, reward_mean=0.99))
    rows = read_metrics(path)
    assert [row.step for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[-1].reward_mean == 0.99
    assert [item.name for item in tmp_path.iterdir()] == ["metrics.jsonl"]


class Loss(BriefRow):
    loss: float | None = None


def test_a_file_is_rewound_without_a_look_at_whole_rows_except_those_of_earlier_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, parsed = tmp_path / "metrics.jsonl", []
    lines = [json.dumps(make_row(step, loss=step / 2).model_dump()) for step in range(1, 41)]
    lines[4] = json.dumps(make_row(5).model_dump() | {"loss": float("nan")})
    path.write_text("\n".join([*lines, "[]", "{}", ""]))

    def parse(model: type[MetricsRow], line: bytes) -> MetricsRow | None:
        parsed.append(line)
        return parse_row(model, line)

    monkeypatch.setattr(jsonl, "parse_row", parse)
    with RowWriter(path, MetricsRow) as writer:
        dropped, rows = writer.rewind_reading(30, Loss)
    assert dropped == 10 and len(parsed) == 3
    assert [(row.step, row.loss) for row in rows] == [(n, None if n == 5 else n / 2) for n in range(1, 31)]
    assert path.read_text().splitlines() == lines[:30]


def test_a_file_of_any_size_is_begun_again_and_rewound_in_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    padding = " " * (TAIL_BYTES // 2)
    lines = [json.dumps(make_row(step).model_dump() | {"newer": step}) + padding + "\n" for step in range(1, 41)]
    path.write_text("".join(lines) + "x" * (2 * TAIL_BYTES))  # what a kill has cut takes more than one look at the end
    monkeypatch.setattr(jsonl, "LARGEST_ROWS", size := path.stat().st_size // 4)
    tracemalloc.start()
    try:
        with RowWriter(path, MetricsRow) as writer:
            assert path.read_text() == "".join(lines)
            tracemalloc.reset_peak()
            assert writer.rewind(30) == 10
        assert [row.step for row in iter_rows(path, MetricsRow)] == list(range(1, 31))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert path.read_text() == "".join(lines[:30]), "lines as they were, with what a newer version has written"
    assert peak < size
    with pytest.raises(NotPlainFile):
        read_metrics(path)
    assert newest_row(path, MetricsRow) == make_row(30)


def test_a_missing_metrics_file_has_no_rows(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_a_row_is_on_disk_when_it_is_appended_and_so_are_the_rows_of_a_file_that_is_rewound(
    tmp_path: Path, disk: Disk
) -> None:
    with RowWriter(tmp_path / "metrics.jsonl", MetricsRow) as writer:
        assert disk.events == [("on disk", tmp_path.name)], "the name of a new file"
        disk.events.clear()
        for step in (1, 2):
            writer.append(make_row(step))
        assert disk.events == [("on disk", "metrics.jsonl")] * 2
        disk.events.clear()
        writer.rewind(1)
        assert [what for what, _ in disk.events] == ["on disk", "renamed", "on disk"]
    RowWriter(tmp_path / "metrics.jsonl", MetricsRow).close()
    assert len(disk.events) == 3


def test_a_row_that_cannot_be_written_to_disk_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with RowWriter(tmp_path / "metrics.jsonl", MetricsRow) as writer:
        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(RunFailed, match=r"cannot write .*metrics.jsonl: \[Errno 5\]"):
            writer.append(make_row(1))
