"""Files of rows beyond what may be held of another's folder: a run's own readers go on, others say why they do not."""

from __future__ import annotations

import io
import re
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from rich.console import Console

from streamrl import plain_files
from streamrl.exporter.run_collector import StepTotals
from streamrl.report.live_view import LiveView
from streamrl.report.panels import run_notes
from streamrl.run_dir import appended_lines, jsonl, layout
from streamrl.run_dir.jsonl import RowWriter
from streamrl.run_dir.metrics import MetricsRow
from streamrl.run_dir.status import RunStatus, write_status
from streamrl.trackers.follower import NewRows
from tests.cli.calling import streamrl
from tests.report.synthetic import START, make_row, make_status

SMALL = 3 * len(make_row(1).model_dump_json())
"""What stands for 1 GiB here, in bytes."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_plain(path: Path, *, below: Path | None = None, largest: int | None = plain_files.LARGEST) -> BinaryIO:
        return plain_files.open_plain(path, below=below, largest=SMALL if largest == layout.LARGEST_ROWS else largest)

    monkeypatch.setattr(appended_lines, "open_plain", open_plain)
    monkeypatch.setattr(jsonl, "open_plain", open_plain)


def steps_of(folder: Path, first: int, last: int, **changes: Any) -> None:
    with RowWriter(folder / layout.METRICS, MetricsRow) as writer:
        for step in range(first, last + 1):
            writer.append(make_row(step, **changes))
    write_status(folder, make_status(last, 20, START + 30 + 18 * last))


@pytest.mark.parametrize(("largest", "shown"), [(None, ["2", "3", "4", "5", "6"]), (layout.LARGEST_ROWS, ["2"])])
def test_the_launchers_view_shows_the_steps_of_a_file_of_any_size_and_a_watcher_says_where_it_ends(
    tmp_path: Path, largest: int | None, shown: list[str]
) -> None:
    steps_of(tmp_path, 1, 1)
    buffer = io.StringIO()
    with LiveView(tmp_path, True, Console(file=buffer, width=200), lambda: START + 80, largest) as view:
        for first, last in ((2, 2), (3, 5), (6, 6)):
            steps_of(tmp_path, first, last)
            view.refresh()
    lines = buffer.getvalue().splitlines()
    assert [line.split()[1].split("/")[0] for line in lines if line.startswith("step ")] == shown
    said = [line for line in lines if line.startswith("new rows are not shown: ") and "of such a file at most" in line]
    assert len(said) == (largest is not None)


def test_the_exporter_and_the_trackers_follow_a_file_of_any_size(tmp_path: Path) -> None:
    steps_of(tmp_path, 1, 1)
    totals, open_rows = StepTotals(tmp_path, None), NewRows(tmp_path / layout.METRICS, MetricsRow, largest=None)
    steps_of(tmp_path, 2, 6)
    totals.look()
    assert totals.newest is not None and totals.newest.step == 6
    assert [row.step for row in open_rows.open_rows()] == [1, 2, 3, 4, 5, 6]


def test_status_reads_the_end_of_a_file_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps_of(tmp_path, 1, 20)
    monkeypatch.setattr(appended_lines, "SHOWN_BYTES", SMALL)
    read, parse = Counter[str](), appended_lines.parse_row

    def count(model: type[MetricsRow], line: bytes) -> MetricsRow | None:
        read["lines"] += 1
        return parse(model, line)

    monkeypatch.setattr(appended_lines, "parse_row", count)
    assert streamrl(monkeypatch, "status", tmp_path) == 0
    printed = capsys.readouterr().out
    assert re.search(r" 20 +1\.050", printed) and 1 <= read["lines"] <= 4, printed


def test_sums_over_the_newest_steps_say_of_which() -> None:
    status = RunStatus.model_validate(make_status(9, 20, START))
    rows = [make_row(step, usd=0.5, usd_per_1k_samples=2.0, step_refused="a loss is nan") for step in (7, 8, 9)]
    notes = {what: text for what, text, _ in run_notes(status, rows, ())}
    assert notes["cost"].startswith("1.5 USD for steps 7 to 9, ")
    assert notes["refused"].endswith("(3 in steps 7 to 9)")
    whole = {what: text for what, text, _ in run_notes(status, [make_row(1, usd=0.5), *rows], ())}
    assert whole["cost"].startswith("2 USD for the finished steps, ") and whole["refused"].endswith("(3 in this run)")
