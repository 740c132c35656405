"""What `trace.json` says of one stretch of a run: bars for each track, as many as a screen can show.

Zoomed out, bars shorter than a pixel are merged with their neighbours of the same name, and of the samples that overlap
on an instance it is shown when at least one was generated, and how many were on average. Zoomed in far enough, each
sample is a bar of its own, in the lowest lane in which it overlaps no other. The seconds that spans of a name cover are
computed from the spans themselves: merged bars cover the gaps between them, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streamrl.run_dir.trace_spans import SpanTrack, TraceSpans

MOST_LANED = 300
"""Most overlapping spans of a track in a window that are shown one by one."""
MOST_BARS = 50_000
"""Most bars of all tracks together, about: what a browser still draws, in some 5 MB."""
COARSER = 4
"""Factor by which pixels grow while there are more."""
SEVERAL = "several tasks"
"""Name of a bar that stands for samples of more than one task."""


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


def spans_window(spans: TraceSpans, start: float, end: float, pixels: int) -> dict[str, Any]:
    """Return the tracks with what they show of a window, for the page; of very many bars, more are merged.

    Args:
        spans: the trace.
        start: begin of the window, seconds since the origin.
        end: its end, above `start`.
        pixels: width of the picture; nothing shorter than a pixel is told apart.
    """
    tracks = sorted(spans.tracks.values(), key=lambda track: track.order)
    shown = [
        {"name": track.name, "bars": [vars(bar) for bar in bars], "covered": covered_seconds(track, start, end)}
        for track, bars in zip(tracks, _limited_bars(tracks, start, end, max(1, pixels)), strict=True)
    ]
    first, last = spans.extent
    return {"origin": spans.origin, "first": first, "last": last, "start": start, "end": end, "tracks": shown}


def _limited_bars(tracks: Sequence[SpanTrack], start: float, end: float, pixels: int) -> list[list[TimelineBar]]:
    """Return each track's bars of a window, with the finest of a few pixels for which there are not too many."""
    of_track = max(1, MOST_BARS // max(1, len(tracks)))
    most_laned = MOST_LANED
    while True:
        coarsest = pixels <= of_track and most_laned <= of_track
        found, count = [], 0
        for track in tracks:
            found.append(bars := window_bars(track, start, end, (end - start) / pixels, most_laned))
            count += len(bars)
            if count > MOST_BARS and not coarsest:
                break
        else:
            return found
        pixels = min(pixels, max(of_track, pixels // COARSER))
        most_laned = min(most_laned, of_track)


def window_bars(
    track: SpanTrack, start: float, end: float, pixel: float, most_laned: int = MOST_LANED
) -> list[TimelineBar]:
    """Return what a track shows of a window; bars are not cut at its ends.

    Args:
        track: the track.
        start: begin of the window, seconds.
        end: its end.
        pixel: seconds of one pixel.
        most_laned: most overlapping spans that are shown one by one.
    """
    starts, ends = track.times()
    inside = np.flatnonzero((ends >= start) & (starts <= end))
    together = np.array(track.overlapping, bool)[inside]
    bars = _merged(track, inside[~together], starts, ends, pixel)
    return bars + _overlapping(track, inside[together], starts, ends, pixel, most_laned)


def covered_seconds(track: SpanTrack, start: float, end: float) -> dict[str, float]:
    """Return for how many seconds of a window a track had a span of each name, overlaps counted once.

    Args:
        track: the track.
        start: begin of the window, seconds.
        end: its end.
    """
    starts, ends = track.times()
    inside = np.flatnonzero((ends >= start) & (starts <= end))
    inside = inside[np.argsort(starts[inside], kind="stable")]
    names = np.array(track.names)[inside]
    found = {}
    for name in np.unique(names).tolist():
        chosen = inside[names == name]
        begins, stops = np.clip(starts[chosen], start, end), np.clip(ends[chosen], start, end)
        until = np.concatenate(([start], np.maximum.accumulate(stops)[:-1]))
        found[track.texts[name]] = float(np.maximum(0.0, stops - np.maximum(begins, until)).sum())
    return found


def lowest_lanes(spans: Iterable[tuple[float, float]]) -> list[int]:
    """Return for each span, in order of their starts, the lowest lane in which it overlaps none before it.

    Args:
        spans: start and end of each, in seconds.
    """
    free_at: list[float] = []
    lanes = []
    for start, end in spans:
        lane = next((lane for lane, time in enumerate(free_at) if time <= start), len(free_at))
        free_at[lane : lane + 1] = [end]
        lanes.append(lane)
    return lanes


def _bar(track: SpanTrack, index: int, lane: int = 0) -> TimelineBar:
    start, end = track.starts[index], track.ends[index]
    return TimelineBar(track.kind(index), start, end, lane, detail=track.detail(index))


def _merged(
    track: SpanTrack, chosen: npt.NDArray[np.int64], starts: npt.NDArray[Any], ends: npt.NDArray[Any], pixel: float
) -> list[TimelineBar]:
    """Return disjoint or nested spans; short ones close to each other become one bar, by name."""
    open_bars: dict[str, TimelineBar] = {}
    done: list[TimelineBar] = []
    for index in map(int, chosen[np.argsort(starts[chosen], kind="stable")]):
        name, start, end = track.kind(index), float(starts[index]), float(ends[index])
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
    track: SpanTrack,
    chosen: npt.NDArray[np.int64],
    starts: npt.NDArray[Any],
    ends: npt.NDArray[Any],
    pixel: float,
    most_laned: int,
) -> list[TimelineBar]:
    """Return spans that may overlap: one by one if they are few, else the stretches in which there was any."""
    ordered = chosen[np.argsort(starts[chosen], kind="stable")]
    if len(ordered) <= most_laned:
        lanes = lowest_lanes((track.starts[index], track.ends[index]) for index in ordered)
        return [_bar(track, int(index), lane) for index, lane in zip(ordered, lanes, strict=True)]
    return _stretches(track, ordered, starts, ends, pixel)


def _stretches(
    track: SpanTrack, ordered: npt.NDArray[np.int64], starts: npt.NDArray[Any], ends: npt.NDArray[Any], pixel: float
) -> list[TimelineBar]:
    """Return a bar for each stretch in which there was a span, named as they are or `SEVERAL`."""
    begins, stops = starts[ordered], ends[ordered]
    until = np.maximum.accumulate(stops)
    first = np.flatnonzero(np.concatenate(([True], begins[1:] - until[:-1] >= pixel)))
    last = np.concatenate((first[1:], [len(ordered)])) - 1
    names = np.array(track.names)[ordered]
    same = np.minimum.reduceat(names, first) == np.maximum.reduceat(names, first)
    work = np.add.reduceat(stops - begins, first)
    return [
        TimelineBar(
            track.texts[names[one]] if alone else SEVERAL,
            float(begins[one]),
            float(until[other]),
            0,
            int(other - one + 1),
            float(worked / max(until[other] - begins[one], 1e-9)),
        )
        for one, other, alone, worked in zip(first, last, same, work, strict=True)
    ]
