"""Turn the spans of a trace into rows of bars for one stretch of a run, one per instance and one for the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from streamrl.report.trace_window import TimelineBar, lowest_lanes, window_bars
from streamrl.run_dir.metrics import MetricsRow
from streamrl.run_dir.trace_spans import TraceSpans

PIXELS = 2_000
"""Parts of a window's width that are told apart."""
MOST_DRAWN = 2_000
"""Most overlapping bars of a track that are drawn one by one."""


@dataclass
class Track:
    """One row of the timeline."""

    name: str
    bars: list[TimelineBar]

    def lanes(self) -> list[tuple[TimelineBar, int]]:
        """Return every bar with the lowest lane in which it overlaps no other."""
        ordered = sorted(self.bars, key=lambda bar: (bar.start, -bar.end))
        return list(zip(ordered, lowest_lanes((bar.start, bar.end) for bar in ordered), strict=True))


@dataclass(frozen=True)
class Window:
    """A stretch of a run, in seconds since the trace's origin."""

    title: str
    start: float
    end: float

    def shows(self, bar: TimelineBar) -> bool:
        """Whether some of the bar lies in the window."""
        return bar.end > self.start and bar.start < self.end


def timeline_tracks(spans: TraceSpans, window: Window) -> list[Track]:
    """Return the tracks that have bars in a window, in their order; begins without an end are left out."""
    pixel = (window.end - window.start) / PIXELS
    found = []
    for track in sorted(spans.tracks.values(), key=lambda track: track.order):
        bars = window_bars(track, window.start, window.end, pixel, MOST_DRAWN)
        if shown := [bar for bar in bars if window.shows(bar)]:
            found.append(Track(track.name, shown))
    return found


def choose_windows(rows: Sequence[MetricsRow], spans: TraceSpans) -> list[Window]:
    """Choose the stretches to show: a typical step (median time, not the first) and the slowest.

    Without steps, or if the trace's times cannot be compared with the metrics, show the whole trace.
    """
    if not spans.count:
        return []
    (first, last), zero = spans.extent, spans.origin
    timed = []
    if zero is not None:
        timed = [row for row in rows if row.step_time_s and first < row.time - zero <= last + row.step_time_s]
    if zero is None or not timed:
        return [Window("the whole run so far", first, last)]

    def window(title: str, row: MetricsRow) -> Window:
        end = row.time - zero
        return Window(title, end - (row.step_time_s or 0.0), end)

    # The first step warms everything up, and has no earlier step to overlap with.
    pool = timed[1:] or timed
    by_time = sorted(pool, key=lambda row: row.step_time_s or 0.0)
    typical, slowest = by_time[(len(by_time) - 1) // 2], by_time[-1]
    windows = [window(f"step {typical.step} (of median duration)", typical)]
    if len(pool) >= 5 and slowest is not typical:
        windows.append(window(f"step {slowest.step} (the slowest)", slowest))
    return windows
