"""The finished spans of a `trace.json` that may still grow, in bounded memory however large the file is."""

from __future__ import annotations

import contextlib
import math
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from streamrl.run_dir.appended_lines import AppendedLines, parse_event
from streamrl.run_dir.trace import trace_origin

LARGEST_TRACE = 16 << 30
"""Most bytes of a trace that is read: of some fifty million samples."""
MOST_SPANS = 8_000_000
"""Most spans that are held, in 27 bytes each and their arguments; beyond that, each track forgets its older half."""
MOST_TRACKS = 10_000
MOST_NAMES = 60_000
"""Most different names of spans; further ones are called `OTHER`."""
OTHER = "other"
LONGEST_NAME = 200
"""Characters that are kept of a name, and of a span's arguments."""
OPENED_AT_ONCE = 200_000
"""Most begins without an end that are remembered; a killed run leaves as many as were in flight."""


@dataclass
class SpanTrack:
    """The finished spans of one track, in order of being written; times are seconds since the trace's origin."""

    name: str
    order: int
    texts: list[str]
    """Names of spans, of all tracks of the trace."""
    starts: array[float] = field(default_factory=lambda: array("d"))
    ends: array[float] = field(default_factory=lambda: array("d"))
    names: array[int] = field(default_factory=lambda: array("H"))
    """Places in `texts`."""
    overlapping: bytearray = field(default_factory=bytearray)
    _details: bytearray = field(default_factory=bytearray)
    _detail_ends: array[int] = field(default_factory=lambda: array("Q"))

    def add(self, name: int, start: float, end: float, overlapping: bool, detail: bytes) -> None:
        """Append a finished span."""
        self.names.append(name)
        self.starts.append(start)
        self.ends.append(end)
        self.overlapping.append(overlapping)
        self._details += detail
        self._detail_ends.append(len(self._details))

    def kind(self, index: int) -> str:
        """Return a span's name."""
        return self.texts[self.names[index]]

    def detail(self, index: int) -> str:
        """Return a span's arguments as text."""
        begin = self._detail_ends[index - 1] if index else 0
        return self._details[begin : self._detail_ends[index]].decode()

    def times(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Return starts and ends, as they are now."""
        return np.array(self.starts), np.array(self.ends)

    def forget_half(self) -> int:
        """Forget the older half of the spans, and return how many that were."""
        half = len(self.starts) // 2
        cut = self._detail_ends[half - 1] if half else 0
        for column in (self.starts, self.ends, self.names, self.overlapping, self._detail_ends):
            del column[:half]
        del self._details[:cut]
        self._detail_ends = array("Q", (end - cut for end in self._detail_ends))
        return half


class TraceSpans:
    """All finished spans of a trace, or the newer ones of a very long one."""

    def __init__(self, path: Path, details: bool = True) -> None:
        """Take the file, and whether the arguments of spans are kept."""
        self._lines = AppendedLines(path, last_line=b"]", largest=LARGEST_TRACE)
        self._keeps_details = details
        self.generation = 0
        """How often the file began anew."""
        self._clear()

    def _clear(self) -> None:
        self.origin: float | None = None
        """Time zero, in unix seconds; None: unknown."""
        self.tracks: dict[int, SpanTrack] = {}
        self.count = self.forgotten = 0
        """Numbers of spans that are held, and that are not any more."""
        self._names: list[str] = []
        self._numbers: dict[str, int] = {}
        self._begun: dict[int, tuple[float, bytes]] = {}

    def look(self) -> None:
        """Read what is new.

        Raises:
            NotPlainFile: the file is a link, no regular file, or has more than `LARGEST_TRACE` bytes.
            OSError: it cannot be read.
        """
        for anew, lines in self._lines.read_all():
            if anew:
                self.generation += 1
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
                if isinstance(tid, int) and tid not in self.tracks and len(self.tracks) < MOST_TRACKS:
                    self.tracks[tid] = SpanTrack(str(event["args"]["name"])[:LONGEST_NAME], tid, self._names)
            elif event["name"] == "thread_sort_index":
                self.tracks[event["tid"]].order = int(event["args"]["sort_index"])
            return
        track, name = self.tracks[event["tid"]], str(event["name"])
        at, args = float(event["ts"]) / 1e6, event.get("args") or {}
        if phase == "X":
            self._add(track, name, at, at + float(event["dur"]) / 1e6, False, self._detail(args))
            return
        key = hash((tid, name, event["id"]))
        if phase == "b" and len(self._begun) < OPENED_AT_ONCE:
            self._begun[key] = at, self._detail({"id": event["id"], **args})
        elif phase == "e" and (begin := self._begun.pop(key, None)):
            self._add(track, name.removeprefix(f"{track.name} "), begin[0], at, True, begin[1])

    def _detail(self, args: dict[str, Any]) -> bytes:
        text = ", ".join(f"{key} {value}" for key, value in args.items()) if self._keeps_details else ""
        return text[:LONGEST_NAME].encode(errors="replace")

    def _add(self, track: SpanTrack, name: str, start: float, end: float, overlapping: bool, detail: bytes) -> None:
        if not math.isfinite(end - start):
            return
        name = name[:LONGEST_NAME]
        if name not in self._numbers:
            name = name if len(self._names) < MOST_NAMES else OTHER
            if self._numbers.setdefault(name, len(self._names)) == len(self._names):
                self._names.append(name)
        track.add(self._numbers[name], start, end, overlapping, detail)
        self.count += 1
        if self.count > MOST_SPANS:
            forgotten = sum(one.forget_half() for one in self.tracks.values())
            self.count, self.forgotten = self.count - forgotten, self.forgotten + forgotten

    def seconds_by_name(self) -> dict[str, float]:
        """Return the sum of all spans' seconds by their name."""
        total = np.zeros(len(self._names))
        for track in self.tracks.values():
            starts, ends = track.times()
            total += np.bincount(np.array(track.names), ends - starts, len(total))
        return dict(zip(self._names, total.tolist(), strict=True))

    @property
    def extent(self) -> tuple[float, float]:
        """First start and last end of all spans, (0, 0) without any."""
        times = [track.times() for track in self.tracks.values() if track.starts]
        return (float(min(t[0].min() for t in times)), float(max(t[1].max() for t in times))) if times else (0.0, 0.0)
