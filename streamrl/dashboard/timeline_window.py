"""What `trace.json` says of one stretch of a run: bars for each track, as many as a screen can show.

Zoomed out, bars shorter than a pixel are merged with their neighbours of the same name, and of the samples that overlap
on an instance it is shown when at least one was generated, and how many were on average. Zoomed in far enough, each
sample is a bar of its own, in the lowest lane in which it overlaps no other. The seconds that spans of a name cover are
computed from the spans themselves: merged bars cover the gaps between them, too.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from streamrl.run_dir.appended_lines import AppendedLines, parse_event
from streamrl.run_dir.trace import trace_origin

MOST_LANED = 300
"""Most overlapping spans of a track in a window that are shown one by one."""
SEVERAL = "several tasks"
"""Name of a bar that stands for samples of more than one task."""
OPENED_AT_ONCE = 200_000
"""Most begins without an end that are remembered; a killed run leaves as many as were in flight."""


@dataclass
class SpanTrack:
    """The finished spans of one track, in order of being written; times are seconds since the trace's origin."""

    name: str
    order: int
    starts: array[float] = field(default_factory=lambda: array("d"))
    ends: array[float] = field(default_factory=lambda: array("d"))
    names: list[str] = field(default_factory=list)
    overlapping: list[bool] = field(default_factory=list)
    details: list[str] = field(default_factory=list)

    def add(self, name: str, start: float, end: float, overlapping: bool, args: dict[str, Any]) -> None:
        """Append a finished span."""
        self.names.append(name)
        self.starts.append(start)
        self.ends.append(end)
        self.overlapping.append(overlapping)
        self.details.append(", ".join(f"{key} {value}" for key, value in args.items())[:200])


@dataclass(frozen=True)
class TimelineBar:
    """One bar of the picture; times are seconds since the origin."""

    name: str
    start: float
    end: float
    lane: int = 0
    count: int = 1
    """Number of spans that it stands for."""
    busy: float = 1.0
    """Mean number of spans at a time within it."""
    detail: str = ""


class TraceSpans:
    """All finished spans of a trace file that may still grow."""

    def __init__(self, path: Path) -> None:
        self._lines = AppendedLines(path, last_line=b"]")
        self._clear()

    def _clear(self) -> None:
        self.origin: float | None = None
        self.tracks: dict[int, SpanTrack] = {}
        self._begun: dict[tuple[int, str, str], tuple[float, dict[str, Any]]] = {}

    def look(self) -> None:
        """Read what is new."""
        for anew, lines in self._lines.read_all():
            if anew:
                self._clear()
            for event in map(parse_event, lines):
                if event is not None:
                    with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError, OverflowError):
                        self._take(event)  # one of another version is not shown

    def _take(self, event: dict[str, Any]) -> None:
        phase, tid = event.get("ph"), event.get("tid")
        if phase == "M":
            if event["name"] == "process_name" and self.origin is None:
                self.origin = trace_origin([event])
            elif event["name"] == "thread_name":
                known = self.tracks.get(tid) if isinstance(tid, int) else None
                if known is None:
                    self.tracks[int(event["tid"])] = SpanTrack(str(event["args"]["name"]), int(event["tid"]))
            elif event["name"] == "thread_sort_index":
                self.tracks[event["tid"]].order = int(event["args"]["sort_index"])
            return
        track = self.tracks[event["tid"]]
        at, args = float(event["ts"]) / 1e6, event.get("args") or {}
        if phase == "X":
            track.add(str(event["name"]), at, at + float(event["dur"]) / 1e6, False, args)
        elif phase == "b" and len(self._begun) < OPENED_AT_ONCE:
            self._begun[event["tid"], event["name"], event["id"]] = at, args
        elif phase == "e" and (begin := self._begun.pop((event["tid"], event["name"], event["id"]), None)):
            name = str(event["name"]).removeprefix(f"{track.name} ")
            track.add(name, begin[0], at, True, {"id": event["id"], **begin[1]})

    @property
    def extent(self) -> tuple[float, float]:
        """First start and last end of all spans, (0, 0) without any."""
        some = [track for track in self.tracks.values() if track.starts]
        return (min(min(t.starts) for t in some), max(max(t.ends) for t in some)) if some else (0.0, 0.0)

    def window(self, start: float, end: float, pixels: int) -> dict[str, Any]:
        """Return the tracks with what they show of a window, for the page.

        Args:
            start: begin of the window, seconds since the origin.
            end: its end, above `start`.
            pixels: width of the picture; nothing shorter than a pixel is told apart.
        """
        pixel = (end - start) / max(1, pixels)
        shown = []
        for track in sorted(self.tracks.values(), key=lambda track: track.order):
            bars = window_bars(track, start, end, pixel)
            covered = covered_seconds(track, start, end)
            shown.append({"name": track.name, "bars": [vars(bar) for bar in bars], "covered": covered})
        first, last = self.extent
        return {"origin": self.origin, "first": first, "last": last, "start": start, "end": end, "tracks": shown}


def window_bars(track: SpanTrack, start: float, end: float, pixel: float) -> list[TimelineBar]:
    """Return what a track shows of a window; bars are not cut at its ends.

    Args:
        track: the track.
        start: begin of the window, seconds.
        end: its end.
        pixel: seconds of one pixel.
    """
    starts, ends = np.array(track.starts), np.array(track.ends)
    if not len(starts):
        return []
    inside = np.flatnonzero((ends >= start) & (starts <= end))
    together = np.asarray(track.overlapping)[inside]
    bars = _merged(track, inside[~together], starts, ends, pixel)
    return bars + _overlapping(track, inside[together], starts, ends, pixel)


def covered_seconds(track: SpanTrack, start: float, end: float) -> dict[str, float]:
    """Return for how many seconds of a window a track had a span of each name, overlaps counted once.

    Args:
        track: the track.
        start: begin of the window, seconds.
        end: its end.
    """
    starts, ends = np.array(track.starts), np.array(track.ends)
    inside = np.flatnonzero((ends >= start) & (starts <= end))
    by_name: dict[str, list[int]] = {}
    for index in map(int, inside[np.argsort(starts[inside], kind="stable")]):
        by_name.setdefault(track.names[index], []).append(index)
    found = {}
    for name, chosen in by_name.items():
        begins, stops = np.clip(starts[chosen], start, end), np.clip(ends[chosen], start, end)
        until = np.concatenate(([start], np.maximum.accumulate(stops)[:-1]))
        found[name] = float(np.maximum(0.0, stops - np.maximum(begins, until)).sum())
    return found


def _bar(track: SpanTrack, index: int, lane: int = 0) -> TimelineBar:
    start, end = track.starts[index], track.ends[index]
    return TimelineBar(track.names[index], start, end, lane, detail=track.details[index])


def _merged(
    track: SpanTrack, chosen: npt.NDArray[np.int64], starts: npt.NDArray[Any], ends: npt.NDArray[Any], pixel: float
) -> list[TimelineBar]:
    """Return disjoint or nested spans; short ones close to each other become one bar, by name."""
    open_bars: dict[str, TimelineBar] = {}
    done: list[TimelineBar] = []
    for index in map(int, chosen[np.argsort(starts[chosen], kind="stable")]):
        name, start, end = track.names[index], float(starts[index]), float(ends[index])
        last = open_bars.get(name)
        short = last is not None and (end - start < pixel or last.end - last.start < pixel)
        if last is not None and short and start - last.end < pixel:
            open_bars[name] = TimelineBar(name, last.start, max(end, last.end), 0, last.count + 1)
            continue
        if last is not None:
            done.append(last)
        open_bars[name] = _bar(track, index)
    return sorted([*done, *open_bars.values()], key=lambda bar: (bar.start, -bar.end))


def _overlapping(
    track: SpanTrack, chosen: npt.NDArray[np.int64], starts: npt.NDArray[Any], ends: npt.NDArray[Any], pixel: float
) -> list[TimelineBar]:
    """Return spans that may overlap: one by one if they are few, else the stretches in which there was any."""
    ordered = chosen[np.argsort(starts[chosen], kind="stable")]
    if len(ordered) <= MOST_LANED:
        free_at: list[float] = []
        bars = []
        for index in map(int, ordered):
            lane = next((lane for lane, time in enumerate(free_at) if time <= starts[index]), len(free_at))
            free_at[lane : lane + 1] = [float(ends[index])]
            bars.append(_bar(track, index, lane))
        return bars
    return list(_stretches(track, ordered, starts, ends, pixel))


def _stretches(
    track: SpanTrack, ordered: npt.NDArray[np.int64], starts: npt.NDArray[Any], ends: npt.NDArray[Any], pixel: float
) -> Iterator[TimelineBar]:
    """Yield a bar for each stretch in which there was a span; it has their name, or `SEVERAL` if they have several."""
    names: set[str] = set()
    begin = until = work = 0.0
    count = 0

    def bar() -> TimelineBar:
        name = names.copy().pop() if len(names) == 1 else SEVERAL
        return TimelineBar(name, begin, until, 0, count, work / max(until - begin, 1e-9))

    for index in map(int, ordered):
        start, end = float(starts[index]), float(ends[index])
        if count and start - until >= pixel:
            yield bar()
            count = 0
        if not count:
            names, begin, until, work = set(), start, end, 0.0
        names.add(track.names[index])
        until, work, count = max(until, end), work + end - start, count + 1
    if count:
        yield bar()
