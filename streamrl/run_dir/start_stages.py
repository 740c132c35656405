"""What each process does from its start to the run's first sample: `starting/<process>.jsonl` in the run's folder.

A process that starts has no connection yet, and imports alone take it many seconds. So each appends a line per stage to
a file of its own, the first one before it imports anything heavy (this module needs the standard library only). The
launcher writes the very first line; it, `status` and `why-stuck` read the last ones. The files stay: they say how long
each stage of a start has taken.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from streamrl.run_dir import layout

READY = "ready"
"""The last stage: the process serves, and its heartbeats say what it does from now on."""
WAITING = "waiting for "
"""Begins the stages in which a process itself has nothing to do."""


@dataclass(frozen=True)
class Stage:
    """What a process does; times are unix seconds."""

    text: str
    since: float
    began: float
    """When its process was started."""

    @property
    def ready(self) -> bool:
        """Whether the process has started."""
        return self.text == READY

    @property
    def waits(self) -> bool:
        """Whether it has nothing to do itself."""
        return self.text.startswith(WAITING)


def say(run_dir: Path, process: str, text: str) -> None:
    """Note that a process begins a stage. A full disk is not what a run should end for here."""
    with contextlib.suppress(OSError):
        folder = run_dir / layout.START_STAGES
        folder.mkdir(exist_ok=True)
        with (folder / f"{process}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"at": time.time(), "stage": text}) + "\n")


def forget(run_dir: Path) -> None:
    """Delete what an earlier launch has left."""
    for path in (run_dir / layout.START_STAGES).glob("*.jsonl"):
        path.unlink(missing_ok=True)


def history(run_dir: Path, process: str) -> list[Stage]:
    """All stages of a process since its launch, in their order; a line that is only half there is left out."""
    found: list[Stage] = []
    with contextlib.suppress(OSError):
        for line in (run_dir / layout.START_STAGES / f"{process}.jsonl").read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                row = json.loads(line)
                at, text = float(row["at"]), str(row["stage"])
                again = not found or found[-1].ready  # a process that is started again begins anew
                found.append(Stage(text, at, at if again else found[-1].began))
    return found


def read_stages(run_dir: Path) -> dict[str, Stage]:
    """The present stage of every process that has said one, by name, those of emulated sites included."""
    found = {}
    folders = [run_dir, *run_dir.glob(f"{layout.SITES}/*")]
    for path in sorted(path for folder in folders for path in folder.glob(f"{layout.START_STAGES}/*.jsonl")):
        if stages := history(path.parents[1], path.stem):
            found[path.stem] = stages[-1]
    return found


def waiting_for(names: Iterable[str]) -> str:
    """The stage of a process that waits for others."""
    return WAITING + ", ".join(names)
