"""TensorBoard: event files, written by tensorboardX, which needs no torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from time import time_ns
from typing import Any

from streamrl.config.trackers import TensorBoardTracker
from streamrl.run_dir import layout
from streamrl.trackers.sent_rows import SentRows
from streamrl.trackers.tracker import RolloutTable, TrackedRun

OWN = "tensorboard"
"""What the record calls a run with event files in its own folder, and earlier versions called every run."""


class TensorBoardFiles:
    """Event files in a folder of their own; a new file hides what older ones have after its first step."""

    last_step: int | None = None

    def __init__(self, config: TensorBoardTracker, run: TrackedRun, sent: SentRows) -> None:
        """Begin a file that goes on behind the last step sent.

        Raises:
            OSError: the folder cannot be written.
        """
        begun = bool(sent.id)
        if config.folder:
            shared = Path(config.folder)
            self.id = _known(run, sent) or layout.claim_folder(shared, run.name).name
            sent.name(self.id)  # at once: a try that fails from here on finds its folder again
            self._folder = shared / self.id
        else:
            self.id = OWN
            self._folder = run.folder / layout.TRACKERS / "tensorboard"
        self._writer: Any = self._new_file(sent.last_step + 1 if begun else None)
        if not sent.last_step:
            settings = json.dumps(run.settings, indent=2, default=str)
            self._writer.add_text("settings", f"```json\n{settings}\n```", 0)
            self._writer.flush()

    def _new_file(self, first: int | None) -> Any:
        """Begin a file that hides what older ones have from a step on; None: hide nothing."""
        # tensorboardX imports torch where there is one, for graphs that are not written here: a second and 200 MB
        hidden = "torch" not in sys.modules
        if hidden:
            sys.modules["torch"] = None  # type: ignore[assignment]
        try:
            from tensorboardX import SummaryWriter
        finally:
            if hidden:
                del sys.modules["torch"]
        # its names have whole seconds: a second file of the same second would replace the first
        return SummaryWriter(str(self._folder), purge_step=first, filename_suffix=f".{time_ns()}")

    def log_step(self, step: int, time: float, figures: Mapping[str, float]) -> None:
        """Write a step's figures."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step, walltime=time)
        self._writer.flush()

    log_evaluation = log_step

    def log_samples(self, step: int, table: RolloutTable) -> None:
        """Write a table as Markdown, which the text page of TensorBoard shows."""
        lines = [table.columns, ["---"] * len(table.columns), *table.rows]
        self._writer.add_text("samples", "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines), step)
        self._writer.flush()

    def rewind(self, step: int) -> bool:
        """Begin a file that hides everything after a step."""
        self._writer.close()
        self._writer = self._new_file(step + 1)
        return True

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


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
