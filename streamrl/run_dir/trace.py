"""`trace.json`: a timeline of every instance and the trainer, in the Chrome trace format that Perfetto opens.

The file is a JSON array with one event per line, each written at once, so a killed run leaves a file that still opens:
the format makes the closing bracket optional, and the comma is written *before* an event. Reopening the file for a
resumed run cuts a half-written event and the bracket, and keeps the origin.

Times are passed as unix seconds and stored as microseconds since the origin: the start of the run, or the first
written event's start if that is earlier. Perfetto drops events at negative times, so an event that starts before the
origin is clipped to it.

Events on one track must be disjoint or nested; for those that overlap (samples of an instance) `async_span` writes
begin/end pairs. Perfetto groups such pairs by *name*, so the name is prefixed with the track: let `name` be the kind of
event ('sample') and put the rest into the arguments.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from streamrl.run_dir.appended_lines import parse_event
from streamrl.run_dir.jsonl import append_whole, finite

PID = 1
READ_AT_ONCE = 32 << 10
"""Bytes of an existing file that are read in one piece."""
_ORIGIN_KEY = "origin_unix_s"
_BEGINS = b'{"name": '
"""What every event begins with."""
_SPAN_ENDS = b"}},\n"
"""What every event of a span that others follow ends with, its arguments being the last."""
_METADATA = b'"ph": "M"'
"""What every event of the origin and the tracks has; in a text it would have other quotes."""

Event = dict[str, Any]


def trace_origin(events: list[Event]) -> float | None:
    """Return time zero (unix seconds) of a trace written by `TraceWriter`; None for others and for an empty one."""
    for event in events:
        if event.get("name") == "process_name":
            value = event.get("args", {}).get(_ORIGIN_KEY)
            return float(value) if value is not None else None
    return None


def _blocks(path: Path) -> Iterator[bytes]:
    """Yield a file in blocks of whole lines; the last one may lack its end."""
    parts: list[bytes] = []
    with path.open("rb") as file:
        while chunk := file.read(READ_AT_ONCE):
            if cut := chunk.rfind(b"\n") + 1:
                yield b"".join([*parts, chunk[:cut]])
                parts = []
            parts.append(chunk[cut:])
    if rest := b"".join(parts):
        yield rest


def _are_spans(block: bytes) -> bool:
    """Return whether all lines of a block, or the one, are whole events of spans, and others follow them."""
    return (
        block.startswith(_BEGINS)
        and block.endswith(_SPAN_ENDS)
        and block.count(b"\n") == block.count(_SPAN_ENDS + _BEGINS) + 1
        and block.count(b"{") == block.count(b"}")  # else one may be cut behind an inner brace
        and _METADATA not in block
    )


class TraceWriter:
    """The writer of a trace, event by event; one per file."""

    def __init__(self, path: Path, started: float | None = None) -> None:
        """Open a new file, or an existing one, whose events and origin are kept.

        Args:
            path: the file.
            started: start of the run (unix seconds), the origin of a new file; None: now.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._tracks: dict[str, int] = {}
        self._origin: float | None = None
        self._empty = True
        self._held: list[bytes] | None = None
        """Events that are written together; None: each is written at once."""
        self._started = time.time() if started is None else started
        self._open_existing(path)
        self._file = path.open("ab", buffering=0)
        if self._file.tell() == 0:
            append_whole(self._file, b"[")

    @property
    def origin(self) -> float | None:
        """Time zero (unix seconds); None before the first event."""
        return self._origin

    def _open_existing(self, path: Path) -> None:
        """Cut what follows the last whole event, and take over origin and tracks.

        A trace may have tens of millions of lines: few are in memory at a time, and of spans only the ends are looked
        at, as parsing them would take minutes.
        """
        if not path.exists():
            return
        metadata: list[Event] = []
        offset = end = 0
        for block in _blocks(path):
            if offset and _are_spans(block):
                offset += len(block)
                end = offset - 2
                continue
            for line in block.splitlines(keepends=True):
                if offset == 0:
                    whole = line.rstrip() == b"["
                    end = int(whole)
                elif _are_spans(line):
                    end = offset + len(line) - 2
                elif whole := (event := parse_event(line)) is not None:
                    end = offset + len(line.rstrip(b",\n"))
                    if event.get("ph") == "M":
                        metadata.append(event)
                if not whole:  # the bracket, or an event that is not whole
                    break
                offset += len(line)
            if not whole:
                break
        os.truncate(path, end)
        self._empty = end <= 1
        self._origin = trace_origin(metadata)
        for event in metadata:
            if event.get("name") == "thread_name":
                self._tracks[event["args"]["name"]] = event["tid"]

    def span(self, track: str, name: str, start: float, end: float, **args: Any) -> None:
        """Write a piece of work (unix seconds) on a track whose spans nest or do not overlap."""
        ts = self._microseconds(start)
        duration = max(0, self._microseconds(end) - ts)
        event = {"name": name, "ph": "X", "ts": ts, "dur": duration, "pid": PID, "tid": self._tid(track)}
        self._write(event | {"args": args})

    def async_span(self, track: str, name: str, start: float, end: float, id: str | int, **args: Any) -> None:
        """Write one of several concurrent pieces of work on a track; `id` is unique among those in flight on it."""
        begin = self._microseconds(start)
        common = {"name": f"{track} {name}", "cat": track, "id": str(id), "pid": PID, "tid": self._tid(track)}
        self._write(common | {"ph": "b", "ts": begin, "args": args})
        self._write(common | {"ph": "e", "ts": max(begin, self._microseconds(end)), "args": {}})

    @contextmanager
    def together(self) -> Iterator[None]:
        """Write the events of the block at its end, in one piece: a write for each takes a third of their time.

        A kill within that write leaves some of them, of which the last may be cut.
        """
        self._held = []
        try:
            yield
        finally:
            content, self._held = b"".join(self._held), None
            append_whole(self._file, content)

    def close(self) -> None:
        """Write the closing bracket, which a later writer removes."""
        if not self._file.closed:
            self._file.write(b"\n]\n")
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _microseconds(self, moment: float) -> int:
        if self._origin is None:
            # Spans are written when they end, so the first one written need not be the first in time.
            self._origin = min(moment, self._started)
            args = {"name": "streamrl", _ORIGIN_KEY: self._origin}
            self._write({"name": "process_name", "ph": "M", "pid": PID, "tid": 0, "args": args})
        return max(0, round((moment - self._origin) * 1e6))

    def _tid(self, track: str) -> int:
        tid = self._tracks.get(track)
        if tid is None:
            tid = self._tracks[track] = max(self._tracks.values(), default=0) + 1
            common = {"ph": "M", "pid": PID, "tid": tid}
            self._write({"name": "thread_name", "args": {"name": track}} | common)
            self._write({"name": "thread_sort_index", "args": {"sort_index": tid}} | common)
        return tid

    def _write(self, event: Event) -> None:
        separator = "\n" if self._empty else ",\n"
        content = (separator + json.dumps(finite(event), allow_nan=False, default=str)).encode()
        if self._held is not None:
            self._held.append(content)
        else:  # unbuffered: a kill leaves whole events
            append_whole(self._file, content)
        self._empty = False
