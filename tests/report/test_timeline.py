"""The timeline of a report: which stretches of a run it shows, and in which lanes what overlaps."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.report import plots
from streamrl.report.timeline import Window, choose_windows, timeline_tracks
from streamrl.run_dir.trace import TraceWriter
from tests.report.synthetic import START, make_row, spans_of


def test_tracks_are_read_back_and_overlaps_get_lanes(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace.json") as trace:
        trace.span("trainer", "micro-batch", START, START + 1.5)
        trace.async_span("here-0", "sample", START + 0.5, START + 3.0, "s1")
        trace.async_span("here-0", "sample", START + 0.6, START + 2.0, "s2")
    spans = spans_of(tmp_path / "trace.json")
    assert spans.origin == START
    trainer, instance = timeline_tracks(spans, Window("all", 0.0, 10.0))
    assert (trainer.name, instance.name) == ("trainer", "here-0")
    assert [(bar.name, bar.start, bar.end) for bar in instance.bars] == [("sample", 0.5, 3.0), ("sample", 0.6, 2.0)]
    assert [lane for _, lane in instance.lanes()] == [0, 1]
    (alone,) = timeline_tracks(spans, Window("end", 2.0, 9.0))
    assert (alone.name, len(alone.bars)) == ("here-0", 1)


def test_the_timeline_shows_the_step_of_median_duration_not_the_first(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace.json") as trace:
        trace.span("trainer", "work", START, START + 200)
    spans = spans_of(tmp_path / "trace.json")
    times = [60.0, 20.0, 18.0, 30.0]
    rows = [
        make_row(step + 1, time=START + sum(times[: step + 1]), step_time_s=value) for step, value in enumerate(times)
    ]
    (window,) = choose_windows(rows, spans)
    assert "step 2" in window.title
    assert (window.start, window.end) == (60.0, 80.0)
    (window,) = choose_windows([], spans)
    assert window.end - window.start == 200


def test_a_timeline_without_bars_has_no_legend_and_nothing_to_warn_of(
    caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    plots.timeline_figure([], Window("all", 0.0, 10.0), {})
    assert not caplog.records and not list(recwarn)
    (axis,) = plots.timeline_figure([], Window("all", 0.0, 10.0), {"micro-batch": plots.BLUE}).axes
    assert axis.get_legend() is not None
