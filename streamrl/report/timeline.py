"""Turn trace events into rows of bars for one stretch of a run, one per instance and one for the trainer. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from streamrl.run_dir.metrics import MetricsRow
from streamrl.run_dir.trace import Event


@dataclass(frozen=True)
class Bar:
    """One span; times in unix seconds if the trace has an origin, else since its first event."""

    name: str
    start: float
    end: float
    overlapping: bool
    """Whether it may overlap others of its track, as samples on an instance do."""


@dataclass
class Track:
    """One row of the timeline."""

    name: str
    sort_index: int
    bars: list[Bar] = field(default_factory=list)

    def lanes(self) -> list[tuple[Bar, int]]:
        """Return every bar with the lowest lane in which it overlaps no other."""
        free_at: list[float] = []
        placed = []
        for bar in sorted(self.bars, key=lambda bar: (bar.start, -bar.end)):
            lane = next((index for index, time in enumerate(free_at) if time <= bar.start), len(free_at))
            free_at[lane : lane + 1] = [bar.end]
            placed.append((bar, lane))
        return placed


def tracks(events: Sequence[Event], origin: float | None) -> list[Track]:
    """Return all tracks with their finished spans, by sort index; begins without an end are left out."""
    names: dict[int, str] = {}
    order: dict[int, int] = {}
    for event in events:
        if event.get("name") == "thread_name":
            names[event["tid"]] = event["args"]["name"]
        elif event.get("name") == "thread_sort_index":
            order[event["tid"]] = event["args"]["sort_index"]
    found = {tid: Track(name, order.get(tid, tid)) for tid, name in names.items()}
    zero = origin or 0.0
    begun: dict[tuple[int, str, str], Event] = {}
    for event in events:
        phase, tid = event.get("ph"), event.get("tid")
        if tid not in found:
            continue
        track = found[tid]
        if phase == "X":
            start = zero + event["ts"] / 1e6
            track.bars.append(Bar(event["name"], start, start + event["dur"] / 1e6, False))
        elif phase == "b":
            begun[tid, event["name"], event["id"]] = event
        elif phase == "e" and (begin := begun.pop((tid, event["name"], event["id"]), None)):
            name = event["name"].removeprefix(f"{track.name} ")
            track.bars.append(Bar(name, zero + begin["ts"] / 1e6, zero + event["ts"] / 1e6, True))
    return sorted((track for track in found.values() if track.bars), key=lambda track: track.sort_index)


@dataclass(frozen=True)
class Window:
    """A stretch of a run, in the trace's seconds."""

    title: str
    start: float
    end: float

    def shows(self, bar: Bar) -> bool:
        """Whether some of the bar lies in the window."""
        return bar.end > self.start and bar.start < self.end


def choose_windows(rows: Sequence[MetricsRow], all_tracks: Sequence[Track], has_origin: bool) -> list[Window]:
    """Choose the stretches to show: a typical step (median time, not the first) and the slowest.

    Without steps, or if the trace's times cannot be compared with the metrics, show the whole trace.
    """
    bars = [bar for track in all_tracks for bar in track.bars]
    if not bars:
        return []
    first, last = min(bar.start for bar in bars), max(bar.end for bar in bars)
    timed = [row for row in rows if row.step_time_s and has_origin and first < row.time <= last + row.step_time_s]
    if not timed:
        return [Window("the whole run so far", first, last)]
    # The first step warms everything up, and has no earlier step to overlap with.
    pool = timed[1:] or timed
    by_time = sorted(pool, key=lambda row: row.step_time_s or 0.0)
    typical, slowest = by_time[(len(by_time) - 1) // 2], by_time[-1]
    windows = [_window(f"step {typical.step} (of median duration)", typical)]
    if len(pool) >= 5 and slowest is not typical:
        windows.append(_window(f"step {slowest.step} (the slowest)", slowest))
    return windows


def _window(title: str, row: MetricsRow) -> Window:
    return Window(title, row.time - (row.step_time_s or 0.0), row.time)
