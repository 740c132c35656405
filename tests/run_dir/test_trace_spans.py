"""Spans of traces that are too large to be held as they are, or were made by somebody else."""

from __future__ import annotations

import tracemalloc
from contextlib import nullcontext
from pathlib import Path

import pytest

from streamrl.plain_files import NotPlainFile
from streamrl.run_dir import trace_spans
from streamrl.run_dir.appended_lines import READ_AT_ONCE
from streamrl.run_dir.layout import LARGEST_ROWS
from streamrl.run_dir.trace import TraceWriter
from streamrl.run_dir.trace_spans import OTHER, TraceSpans
from tests.report.synthetic import START, spans_of

THREAD = '{"ph": "M", "name": "thread_name", "tid": %d, "args": {"name": "%s"}},\n'
SPAN = '{"ph": "X", "name": "%s", "tid": 1, "ts": %s, "dur": 1000000},\n'


def written(path: Path, text: str) -> TraceSpans:
    path.write_text("[\n" + text)
    return spans_of(path)


def test_a_trace_may_be_larger_than_other_files_that_are_followed_and_is_read_in_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trace.json"
    with TraceWriter(path) as trace:
        trace.span("trainer", "train", START, START + 1)
    with path.open("r+b") as file:
        file.seek(-3, 2)
        file.write(b",\n")
        file.seek(6 * READ_AT_ONCE)  # a hole, which takes no room on the disk
        file.write(b"\n" + (SPAN % ("train", 5_000_000)).encode())
    spans = TraceSpans(path)
    tracemalloc.start()
    try:
        spans.look()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert spans.count == 2 and spans.extent == (0.0, 6.0)
    assert peak < 4 * READ_AT_ONCE
    assert trace_spans.LARGEST_TRACE > 8 * LARGEST_ROWS
    for more, fits in ((0, True), (-1, False)):
        monkeypatch.setattr(trace_spans, "LARGEST_TRACE", path.stat().st_size + more)
        with nullcontext() if fits else pytest.raises(NotPlainFile):
            TraceSpans(path).look()


def test_of_more_spans_than_are_held_each_track_forgets_its_older_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_spans, "MOST_SPANS", 100)
    path = tmp_path / "trace.json"
    with TraceWriter(path) as trace:
        trace.span("once", "load", START, START + 1)
        for number in range(250):
            trace.span("trainer", f"kind {number % 3}", START + number, START + number + 1, step=number)
    spans = spans_of(path)
    once, track = spans.tracks.values()
    assert spans.count == len(once.starts) + len(track.starts) <= 100 and spans.count + spans.forgotten == 251
    assert len(once.starts) == 1 and spans.extent == (0.0, 250.0)
    first = 250 - len(track.starts)
    assert list(track.starts) == [float(number) for number in range(first, 250)]
    for index in range(250 - first):
        assert (track.kind(index), track.detail(index)) == (f"kind {(first + index) % 3}", f"step {first + index}")


def test_tracks_names_and_arguments_without_end_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_spans, "MOST_TRACKS", 2)
    monkeypatch.setattr(trace_spans, "MOST_NAMES", 3)
    threads = "".join(THREAD % (number, "x" * 1000) for number in range(1, 9))
    named = "".join(SPAN % (f"{number}" * 1000, number) for number in range(1, 9))
    argued = '{"ph": "X", "name": "1", "tid": 1, "ts": 9, "dur": 1, "args": {"text": "%s"}},\n' % ("é" * 1000)
    odd = SPAN % ("1", "Infinity") + SPAN % ("1", "NaN") + '{"ph": "b", "name": "1", "tid": 1, "ts": 1, "id": []},\n'
    spans = written(tmp_path / "trace.json", threads + named + argued + odd)
    assert len(spans.tracks) == 2 and spans.count == 9
    track = spans.tracks[1]
    assert len(track.name) == 200 and track.detail(8) == "text " + "é" * 195
    kinds = [track.kind(index) for index in range(9)]
    assert kinds == ["1" * 200, "2" * 200, "3" * 200, *[OTHER] * 6]
    assert spans.seconds_by_name() == pytest.approx({kinds[0]: 1, kinds[1]: 1, kinds[2]: 1, OTHER: 5 + 1e-6})
