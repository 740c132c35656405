"""TensorBoard: event files, written by tensorboardX, which needs no torch."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import time, time_ns
from typing import Any

from streamrl.config.trackers import TensorBoardTracker
from streamrl.run_dir import layout
from streamrl.trackers.sent_rows import OWN, SentRows
from streamrl.trackers.tracker import RolloutTable, TrackedRun


class _EventFile:
    """An event file that is written at once, in this thread.

    A `SummaryWriter` leaves the writing to a thread that dies of a full disk, after which its next calls never return.
    """

    def __init__(self, folder: Path, first: int | None) -> None:
        """Begin a file that hides what older ones have from step `first` on; None: hide nothing.

        Raises:
            OSError: it cannot be written.
        """
        # tensorboardX imports torch where there is one, for graphs that are not written here: a second and 200 MB
        hidden = "torch" not in sys.modules
        if hidden:
            sys.modules["torch"] = None  # type: ignore[assignment]
        try:
            from tensorboardX import summary
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto import event_pb2
        finally:
            if hidden:
                del sys.modules["torch"]
        self._folder, self._summary, self._event = folder, summary, event_pb2.Event
        folder.mkdir(parents=True, exist_ok=True)
        # its names have whole seconds: a second file of the same second would replace the first
        self._suffix = f".{time_ns()}"
        self._whole = 0
        """Bytes of the file up to the end of the last row that it has whole."""
        self._writer: Any = EventsWriter(str(folder / "events"), self._suffix)
        if first is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(first, time(), session_log=start)

    def _write(self, step: int, wall_time: float, **what: Any) -> None:
        self._writer.write_event(self._event(step=step, wall_time=wall_time, **what))

    def scalar(self, name: str, value: float, step: int, wall_time: float) -> None:
        """Write a figure, of a time in unix seconds."""
        self._write(step, wall_time, summary=self._summary.scalar(name, value))

    def text(self, name: str, text: str, step: int) -> None:
        """Write a text."""
        self._write(step, time(), summary=self._summary.text(name, text))

    def flush(self) -> None:
        """Give all that is written, whole rows, to the system."""
        self._writer.flush()
        self._whole = sum(path.stat().st_size for path in self._paths())

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def abandon(self) -> None:
        """Close the file after an error, without the row that was not written whole, and delete it if it has no other.

        That row is written again to another file, and would be shown twice.
        """
        with contextlib.suppress(OSError):
            self._writer.close()
        with contextlib.suppress(OSError):
            for path in self._paths():
                if self._whole:
                    os.truncate(path, self._whole)
                else:
                    path.unlink()

    def _paths(self) -> list[Path]:
        """Return the file's path, whose name tensorboardX completes."""
        return list(self._folder.glob(f"events*{self._suffix}"))


class TensorBoardFiles:
    """Event files in a folder of their own; a new file hides what older ones have after its first step."""

    last_step: int | None = None

    def __init__(self, config: TensorBoardTracker, run: TrackedRun, sent: SentRows) -> None:
        """Begin a file that goes on behind the last step sent.

        Raises:
            OSError: the folder cannot be written.
        """
        self._first = sent.last_step + 1 if sent.id else None
        """Step from which on another file hides what the older ones have."""
        if config.folder:
            shared = Path(config.folder)
            self.id = _known(run, sent) or layout.claim_folder(shared, run.name).name
            sent.name(self.id)  # at once: a try that fails from here on finds its folder again
            self._folder = shared / self.id
        else:
            self.id = OWN
            self._folder = run.folder / layout.TRACKERS / "tensorboard"
        self._file: _EventFile | None = None
        with self._written() as file:
            if not sent.last_step:
                settings = json.dumps(run.settings, indent=2, default=str)
                file.text("settings", f"```json\n{settings}\n```", 0)

    @contextlib.contextmanager
    def _written(self) -> Iterator[_EventFile]:
        """Give the file to write to, and write it to its end; after an error the next one gets another file."""
        if self._file is None:
            self._file = _EventFile(self._folder, self._first)
        try:
            yield self._file
            self._file.flush()
        except OSError:
            self._file.abandon()
            self._file = None
            self._first = self._first or 1  # readers may have seen a part of the first step
            raise

    def log_step(self, step: int, time: float, figures: Mapping[str, float]) -> None:
        """Write a step's figures."""
        self.log_evaluation(step, time, figures)
        self._first = max(step + 1, self._first or 0)

    def log_evaluation(self, step: int, time: float, figures: Mapping[str, float]) -> None:
        """Write an evaluation's figures."""
        with self._written() as file:
            for name, value in figures.items():
                file.scalar(name, value, step, time)

    def log_samples(self, step: int, table: RolloutTable) -> None:
        """Write a table as Markdown, which the text page of TensorBoard shows."""
        lines = [table.columns, ["---"] * len(table.columns), *table.rows]
        with self._written() as file:
            file.text("samples", "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines), step)

    def rewind(self, step: int) -> bool:
        """Begin a file that hides everything after a step."""
        self.close()
        self._first = step + 1
        with self._written():
            return True

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _known(run: TrackedRun, sent: SentRows) -> str:
    """Return the name of a run's folder among others, as it was when something was sent; '': nothing was."""
    return run.name if sent.id == OWN else sent.id


def _cell(value: Any) -> str:
    """Return a cell of a Markdown table; a text's own marks and tags have no effect in it."""
    if value is None:
        return ""
    if not isinstance(value, str):
        return f"{value:.6g}" if isinstance(value, float) else str(value)
    for mark, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "&#124;"), ("`", "&#96;"), ("*", "&#42;")):
        value = value.replace(mark, entity)
    return value.replace("_", "&#95;").replace("\r", "").replace("\n", "<br>")
