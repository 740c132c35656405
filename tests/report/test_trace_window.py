"""The timeline of a trace that grows: what a window shows, merged or one by one."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.report import trace_window
from streamrl.report.trace_window import MOST_LANED, SEVERAL, spans_window
from streamrl.run_dir.trace import TraceWriter
from streamrl.run_dir.trace_spans import TraceSpans
from tests.report.synthetic import spans_of

ZERO = 1_700_000_000.0


def test_a_window_has_the_bars_that_lie_in_it_with_their_names_and_arguments(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with TraceWriter(path) as trace:
        trace.span("trainer", "train", ZERO, ZERO + 2, step=1)
        trace.span("trainer", "step", ZERO + 2, ZERO + 3, step=1)
        trace.span("trainer", "train", ZERO + 10, ZERO + 12, step=2)
    told = spans_window(spans_of(path), 1.0, 5.0, 1000)
    assert (told["origin"], told["first"], told["last"]) == (ZERO, 0.0, 12.0)
    (track,) = told["tracks"]
    assert track["name"] == "trainer"
    assert [(bar["name"], bar["start"], bar["end"], bar["detail"]) for bar in track["bars"]] == [
        ("train", 0.0, 2.0, "step 1"),
        ("step", 2.0, 3.0, "step 1"),
    ]


def test_short_spans_of_one_name_are_merged_when_zoomed_out_and_told_apart_when_zoomed_in(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with TraceWriter(path) as trace:
        for number in range(100):
            trace.span("trainer", "train", ZERO + 0.01 * number, ZERO + 0.01 * number + 0.009)
        trace.span("trainer", "train", ZERO + 50, ZERO + 60)
    spans = spans_of(path)
    (track,) = spans_window(spans, 0.0, 100.0, 100)["tracks"]
    assert [bar["count"] for bar in track["bars"]] == [100, 1]
    (track,) = spans_window(spans, 0.0, 0.1, 1000)["tracks"]
    assert {bar["count"] for bar in track["bars"]} == {1} and len(track["bars"]) == 11


def test_shares_of_a_window_are_those_of_the_spans_however_far_it_is_zoomed_out(tmp_path: Path) -> None:
    path, steps = tmp_path / "trace.json", 2000
    with TraceWriter(path) as trace:
        for at in range(0, 10 * steps, 10):
            trace.span("trainer", "train", ZERO + at, ZERO + at + 3)
            trace.span("trainer", "publish", ZERO + at + 3, ZERO + at + 4)
            for end in (6, 5):
                trace.async_span("here-0", "sample", ZERO + at + 4, ZERO + at + end, f"{at} {end}")
    spans = spans_of(path)
    told = spans_window(spans, 0.0, 10.0 * steps, 100)["tracks"]
    assert {len(track["bars"]) for track in told} == {1, 2}
    assert [track["covered"] for track in told] == [
        {"train": pytest.approx(3 * steps), "publish": pytest.approx(steps)},
        {"sample": pytest.approx(2 * steps)},
    ]
    assert spans_window(spans, 2.0, 3.5, 100)["tracks"][0]["covered"] == {
        "train": pytest.approx(1),
        "publish": pytest.approx(0.5),
    }


def test_samples_that_overlap_are_in_lanes_of_their_own_and_many_are_one_bar_with_their_mean_number(
    tmp_path: Path,
) -> None:
    path = tmp_path / "trace.json"
    with TraceWriter(path) as trace:
        for number, (start, end) in enumerate([(0, 4), (1, 2), (2, 3), (3, 5)]):
            trace.async_span("here-0", "sample", ZERO + start, ZERO + end, number)
        for number in range(MOST_LANED + 1):
            trace.async_span("here-1", "sample", ZERO, ZERO + 2, f"x{number}")
        trace.async_span("here-1", "sample", ZERO + 5, ZERO + 6, "alone")
        for name in ("sum", "sample"):
            trace.async_span("here-1", name, ZERO + 8, ZERO + 9, "mixed")
    few, many = spans_window(spans_of(path), 0.0, 10.0, 1000)["tracks"]
    assert [(bar["start"], bar["lane"]) for bar in few["bars"]] == [(0.0, 0), (1.0, 1), (2.0, 1), (3.0, 1)]
    assert few["bars"][0]["name"] == "sample"
    bar, alone, mixed = many["bars"]
    assert [bar["name"], mixed["name"], mixed["count"]] == ["sample", SEVERAL, 2]
    assert (alone["start"], alone["count"], alone["busy"]) == (5.0, 1, pytest.approx(1.0))
    assert (bar["count"], bar["busy"], bar["end"]) == (MOST_LANED + 1, pytest.approx(MOST_LANED + 1), 2.0)


def test_a_window_of_many_tracks_has_a_limited_number_of_bars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_window, "MOST_BARS", 400)
    path, tracks, steps = tmp_path / "trace.json", 20, 50
    with TraceWriter(path) as trace:
        for at in range(0, 10 * steps, 10):
            for track in range(tracks):
                trace.span(f"here-{track}", "load", ZERO + at, ZERO + at + 1)
                trace.async_span(f"here-{track}", "sample", ZERO + at + 2, ZERO + at + 5, f"{track} {at}")
    spans = spans_of(path)
    whole = spans_window(spans, 0.0, 10.0 * steps, 1000)["tracks"]
    assert sum(len(track["bars"]) for track in whole) <= 400
    assert {sum(bar["count"] for bar in track["bars"]) for track in whole} == {2 * steps}, "no span is left out"
    assert [track["covered"]["sample"] for track in whole] == [pytest.approx(3 * steps)] * tracks
    part = spans_window(spans, 100.0, 139.0, 1000)["tracks"]
    assert {bar["count"] for track in part for bar in track["bars"]} == {1}, "few enough to be told apart"
    alone = TraceSpans(path)
    alone.look()
    alone.tracks = dict([*alone.tracks.items()][:1])
    assert {bar["count"] for bar in spans_window(alone, 0.0, 10.0 * steps, 1000)["tracks"][0]["bars"]} == {1}


def test_a_trace_that_grows_is_read_on_also_after_it_was_closed_and_resumed(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    spans = TraceSpans(path)
    spans.look()
    assert spans_window(spans, 0.0, 1.0, 10)["tracks"] == []
    with TraceWriter(path) as trace:
        trace.span("trainer", "train", ZERO, ZERO + 1)
        trace.span("trainer", "train", ZERO + 1, ZERO + 2)
        spans.look()
        assert spans.extent == (0.0, 1.0), "the last event has no end of line yet"
    spans.look()
    assert spans.extent == (0.0, 2.0)
    with TraceWriter(path) as trace:  # a resumed run cuts the bracket and goes on
        trace.span("trainer", "train", ZERO + 5, ZERO + 6)
    spans.look()
    assert spans.extent == (0.0, 6.0)
    (track,) = spans.tracks.values()
    assert list(track.starts) == [0.0, 1.0, 5.0]


def test_foreign_lines_and_spans_without_an_end_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with TraceWriter(path) as trace:
        trace.span("trainer", "train", ZERO, ZERO + 1)
    odd = [
        '{"name": "x", "ph": "b", "ts": 1, "tid": 1, "id": "7"}',
        '{"ph": "X"}',
        "nonsense",
        "[1, 2]",
        '{"ph": "X", "tid": 9}',
    ]
    path.write_text(path.read_text().replace("\n]", "") + "".join(f",\n{line}" for line in odd) + "\n")
    (track,) = spans_window(spans_of(path), 0.0, 2.0, 100)["tracks"]
    assert [bar["name"] for bar in track["bars"]] == ["train"]
