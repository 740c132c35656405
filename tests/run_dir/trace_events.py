"""The events of a trace as they stand in its file."""

from __future__ import annotations

from pathlib import Path

from streamrl.run_dir.appended_lines import parse_event
from streamrl.run_dir.trace import Event


def events_of(path: Path) -> list[Event]:
    """The whole events of a trace file; it may lack its end."""
    return [event for line in path.read_bytes().splitlines() if (event := parse_event(line)) is not None]
