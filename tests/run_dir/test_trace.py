"""trace.json: valid for Perfetto at every moment, also after a kill and after a resume."""

from __future__ import annotations

import json
import re
import time
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest

from streamrl.errors import RunFailed
from streamrl.run_dir import trace as trace_module
from streamrl.run_dir.appended_lines import parse_event
from streamrl.run_dir.trace import Event, TraceWriter
from tests.report.synthetic import START, spans_of
from tests.run_dir.conftest import FILE_LIMIT, file_size_limit
from tests.run_dir.trace_events import events_of


def check_format(events: list[Event]) -> None:
    """What the Chrome trace format asks of each event, and begin/end pairs that match."""
    open_pairs: Counter[tuple[str, str, int]] = Counter()
    named = {event["tid"] for event in events if event["name"] == "thread_name"}
    for event in events:
        assert isinstance(event["name"], str) and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event["ph"] in "MXbe"
        if event["ph"] == "M":
            continue
        assert event["tid"] in named
        assert isinstance(event["ts"], int) and event["ts"] >= 0
        if event["ph"] == "X":
            assert isinstance(event["dur"], int) and event["dur"] >= 0
        if event["ph"] in "be":
            assert event["cat"]
            key = (event["name"], event["id"], event["pid"])
            open_pairs[key] += 1 if event["ph"] == "b" else -1
            assert open_pairs[key] in (0, 1)
    assert not any(open_pairs.values())


def write_some(path: Path) -> TraceWriter:
    trace = TraceWriter(path)
    trace.span("trainer", "micro-batch", START, START + 1.5, group="g1")
    trace.async_span("here-0", "sample", START + 0.5, START + 3.0, "s1", tokens=12)
    trace.async_span("here-0", "sample", START + 0.6, START + 2.0, "s2", loss=float("nan"))
    return trace


def test_a_closed_trace_is_json_and_every_event_is_valid(tmp_path: Path) -> None:
    write_some(tmp_path / "trace.json").close()
    events = json.loads((tmp_path / "trace.json").read_text())
    check_format(events)
    assert events == events_of(tmp_path / "trace.json")
    (span,) = (event for event in events if event["ph"] == "X")
    assert (span["name"], span["ts"], span["dur"]) == ("micro-batch", 0, 1_500_000)
    names = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert set(names) == {"trainer", "here-0"} and len(set(names.values())) == 2
    order = {event["tid"]: event["args"]["sort_index"] for event in events if event["name"] == "thread_sort_index"}
    assert order[names["trainer"]] < order[names["here-0"]]
    assert events[0]["args"]["name"] == "streamrl"


def test_samples_of_two_instances_do_not_share_a_perfetto_track(tmp_path: Path) -> None:
    # Perfetto puts async events of one name in one group, whatever their thread.
    with TraceWriter(tmp_path / "trace.json") as trace:
        trace.async_span("here-0", "sample", START, START + 1, "s1")
        trace.async_span("here-1", "sample", START, START + 1, "s1")
    names = {event["name"] for event in events_of(tmp_path / "trace.json") if event["ph"] == "b"}
    assert len(names) == 2


def test_a_killed_run_leaves_a_trace_that_opens(tmp_path: Path) -> None:
    write_some(tmp_path / "trace.json")  # never closed
    text = (tmp_path / "trace.json").read_text()
    assert not text.rstrip().endswith(",")
    events = json.loads(text + "]")
    check_format(events)
    assert events_of(tmp_path / "trace.json") == events


def test_a_trace_cut_anywhere_gives_its_whole_events(tmp_path: Path) -> None:
    write_some(tmp_path / "whole.json").close()
    content = (tmp_path / "whole.json").read_bytes()
    whole = events_of(tmp_path / "whole.json")
    for size in range(0, len(content), 7):
        (tmp_path / "cut.json").write_bytes(content[:size])
        events = events_of(tmp_path / "cut.json")
        assert events == whole[: len(events)]
        assert len(events) >= content[:size].count(b"},\n")


def test_an_event_that_the_disk_has_no_room_for_is_no_part_of_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with TraceWriter(path) as trace:
        trace.span("trainer", "first", START, START + 1)
        words = re.escape(f"cannot write {path}: [Errno 27] File too large; {FILE_LIMIT} (see docs: E1007)")
        with file_size_limit(path.stat().st_size + 30), pytest.raises(RunFailed, match=words):
            trace.span("trainer", "second", START, START + 1)
        trace.span("trainer", "third", START, START + 1)
    assert [event["name"] for event in json.loads(path.read_text()) if event["ph"] == "X"] == ["first", "third"]


def test_a_large_trace_is_opened_again_in_little_memory_and_cut_at_its_first_broken_event(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with TraceWriter(path) as trace:
        for number in range(5000):
            trace.async_span("here-0", "sample", START + number, START + number + 1, f"s{number}")
    before = events_of(path)
    tracemalloc.start()
    try:
        trace = TraceWriter(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 300_000 < path.stat().st_size
    trace.close()
    assert json.loads(path.read_text()) == before
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:100], lines[100][:40] + b",", *lines[101:]]))  # as a full disk once left it
    TraceWriter(path).close()
    assert json.loads(path.read_text()) == before[:99]


@pytest.mark.parametrize("closed", [True, False])
def test_a_large_trace_is_opened_again_without_parsing_its_spans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    path, parsed = tmp_path / "trace.json", []
    trace = TraceWriter(path)
    for number in range(500):
        trace.async_span(
            f"here-{number // 250}", "sample", START + number, START + number + 1, f"s{number}", text="}}{{"
        )
        trace.span("trainer", '"ph": "M"', START + number, START + number + 1)
    if closed:
        trace.close()
    before = events_of(path)

    def parse(line: bytes) -> Event | None:
        parsed.append(line)
        return parse_event(line)

    monkeypatch.setattr(trace_module, "parse_event", parse)
    with TraceWriter(path) as trace:
        trace.span("here-1", "sleep", START + 1000, START + 1001)
    metadata = [event for event in before if event["ph"] == "M"]
    assert len(metadata) == 7 and len(parsed) == len(metadata) + 1 + closed  # and the last event, and the bracket
    events = json.loads(path.read_text())
    assert events[:-1] == before and events[-1]["tid"] == metadata[-2]["tid"]


@pytest.mark.parametrize("read_at_once", [64, 1 << 20])
def test_an_event_that_is_cut_behind_an_inner_brace_ends_the_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_at_once: int
) -> None:
    monkeypatch.setattr(trace_module, "READ_AT_ONCE", read_at_once)
    path = tmp_path / "trace.json"
    with TraceWriter(path) as trace:
        for number in range(9):
            trace.span("trainer", "step", START + number, START + number + 1, of={"a": {"b": number}})
    content, before = path.read_bytes(), events_of(path)
    TraceWriter(path).close()
    assert path.read_bytes() == content
    path.write_bytes(content.replace(b'{"b": 5}}}},', b'{"b": 5}}},'))
    TraceWriter(path).close()
    assert json.loads(path.read_text()) == before[:8]


@pytest.mark.parametrize("ending", ["closed", "open", "cut", "empty"])
def test_a_resumed_run_goes_on_in_the_same_file_with_the_same_zero_and_tracks(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "trace.json"
    if ending == "empty":
        path.touch()
        write_some(path)
    elif ending == "closed":
        write_some(path).close()
    else:
        write_some(path)
    if ending == "cut":
        path.write_bytes(path.read_bytes() + b',\n{"name": "sam')
    before = events_of(path)
    with TraceWriter(path) as trace:
        trace.span("trainer", "micro-batch", START + 100, START + 101)
        trace.span("here-9", "sleep", START + 101, START + 102)
    events = json.loads(path.read_text())
    check_format(events)
    assert events[: len(before)] == before
    added = [event for event in events[len(before) :] if event["ph"] == "X"]
    assert [event["ts"] for event in added] == [100_000_000, 101_000_000]
    assert len([event for event in events if event["args"].get("name") == "trainer"]) == 1
    assert len({event["tid"] for event in events if event["name"] == "thread_name"}) == 3


def test_an_event_before_the_origin_is_clipped_because_perfetto_drops_negative_times(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace.json") as trace:
        trace.span("trainer", "wait", START, START)
        trace.span("trainer", "load", START - 2, START + 3)
    (_, span) = (event for event in events_of(tmp_path / "trace.json") if event["ph"] == "X")
    assert (span["ts"], span["dur"]) == (0, 3_000_000)


def test_spans_written_late_keep_their_start_when_no_origin_is_given(tmp_path: Path) -> None:
    # The controller writes a step's trainer spans before the samples that started earlier.
    with TraceWriter(tmp_path / "trace.json") as trace:
        now = time.time()
        trace.span("trainer", "micro-batch", now + 5, now + 6)
        trace.async_span("here-0", "sample", now + 1, now + 4, "s1")
    trainer, instance = spans_of(tmp_path / "trace.json").tracks.values()
    assert (trainer.starts[0] - instance.starts[0], instance.ends[0] - instance.starts[0]) == pytest.approx((4, 3))
