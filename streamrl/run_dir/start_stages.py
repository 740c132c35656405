"""The start stages of each process up to the run's first sample: `starting/<process>.jsonl` in the run's folder.

A starting process has no connection yet, and its imports alone take many seconds. So each process appends a line per
stage to a file of its own, the first one before any heavy import (this module needs the standard library only). The
launcher writes the very first line; it, `status` and `why-stuck` read the last ones. The files stay and show how long
each stage took.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from streamrl.plain_files import plain_names, read_plain
from streamrl.run_dir import layout

READY = "ready"
"""The last stage: the process serves, and its heartbeats report what it does from now on."""
WAITING = "waiting for "
"""Prefix of the stages in which a process waits for others."""


@dataclass(frozen=True)
class Stage:
    """One stage of a process's start; times are unix seconds."""

    text: str
    since: float
    began: float
    """Start time of the process."""

    @property
    def ready(self) -> bool:
        """Whether the process has started."""
        return self.text == READY

    @property
    def waits(self) -> bool:
        """Whether the process waits for others."""
        return self.text.startswith(WAITING)


def say(run_dir: Path, process: str, text: str) -> None:
    """Record that a process begins a stage; a full disk does not end the run here."""
    with contextlib.suppress(OSError):
        folder = run_dir / layout.START_STAGES
        folder.mkdir(exist_ok=True)
        with (folder / f"{process}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"at": time.time(), "stage": text}) + "\n")


def forget(run_dir: Path) -> None:
    """Delete the files of an earlier launch."""
    for path in (run_dir / layout.START_STAGES).glob("*.jsonl"):
        path.unlink(missing_ok=True)


def history(run_dir: Path, process: str) -> list[Stage]:
    """Read all stages of a process since its launch, in order; incomplete lines are skipped; none of no plain file."""
    found: list[Stage] = []
    path = run_dir / layout.START_STAGES / f"{process}.jsonl"
    with contextlib.suppress(OSError):
        for line in read_plain(path, below=layout.whole_folder(run_dir)).splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
                row = json.loads(line)
                at, text = float(row["at"]), str(row["stage"])
                again = not found or found[-1].ready  # a restarted process begins again
                found.append(Stage(text, at, at if again else found[-1].began))
    return found


def launched_at(run_dir: Path) -> float | None:
    """Return when the newest launch started the controller, its first process, for the first time; None: unknown."""
    return next((stage.since for stage in history(run_dir, "controller")), None)


class StageReader:
    """Reads the stages of a run's processes again and again, each file only if it has changed."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._read: dict[Path, tuple[tuple[int, int], list[Stage]]] = {}
        """Size and time of change of each file when it was read, and the stages in it."""

    def read(self) -> dict[str, Stage]:
        """Return the current stage of every process that has recorded one, by name, including emulated sites.

        Raises:
            NotPlainFile: a folder of stages is a link.
        """
        found: dict[str, Stage] = {}
        for folder in layout.site_folders(self._run_dir).values():
            for name in plain_names(folder / layout.START_STAGES, below=layout.whole_folder(folder)):
                process = name.removesuffix(".jsonl")
                if process != name and (stages := self._history(folder, process)):
                    found[process] = stages[-1]
        return found

    def _history(self, folder: Path, process: str) -> list[Stage]:
        path = folder / layout.START_STAGES / f"{process}.jsonl"
        try:
            there = path.lstat()
        except OSError:
            return []
        seen = there.st_size, there.st_mtime_ns
        if path not in self._read or self._read[path][0] != seen:
            self._read[path] = seen, history(folder, process)
        return self._read[path][1]


def read_stages(run_dir: Path) -> dict[str, Stage]:
    """Return the current stages once, see `StageReader.read`."""
    return StageReader(run_dir).read()


def waiting_for(names: Iterable[str]) -> str:
    """Return the stage of a process that waits for others."""
    return WAITING + ", ".join(names)
