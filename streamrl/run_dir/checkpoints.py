"""The `checkpoints/` folder: `step_<n>` is complete or absent; `best.json` names the best one so far.

The run's ledger knows its newest checkpoint as well. If that one is not in the folder (a disk that is not mounted, a
copy without it), a resume would delete what came after an older one, or everything: it is refused, unless somebody has
given the checkpoint up by `lost_step_<n>` in its place.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from streamrl.atomic_files import replace_json, sync_files, sync_folder
from streamrl.errors import DISK, ErrorCode, RunFailed, UserError, as_typed, writing
from streamrl.plain_files import read_plain
from streamrl.run_dir.checkpoint_sums import DamagedFile

BEST_FILE = "best.json"
PARTIAL = ".partial_step_"
"""Beginning of the name of a checkpoint that is being written, or never was completed."""
LOST = "lost_"
"""Beginning of the name of a checkpoint that somebody has given up: a folder, whatever is in it."""

OF_STEP = re.compile(r"step_(0|[1-9][0-9]{0,14})")
"""Name of a complete checkpoint, as `path` writes it: of digits that `int` reads, and a step that fits a database."""

SEEN_S, LOOK_S = 120.0, 1.0
"""Seconds within which every node sees a new folder of a shared file system, and between two looks: NFS keeps what it
knows of a folder for up to a minute."""


class CheckpointsUnseen(UserError, OSError):
    """The folder of the checkpoints is there, and cannot be looked into."""


def unreadable(checkpoint: Path, error: BaseException) -> RunFailed:
    """Return the error of a run whose newest checkpoint cannot be read, which no restart would mend."""
    what = f"checkpoint {checkpoint} cannot be read: {_first_line(error)}"
    before = CheckpointFolder(checkpoint.parent).newest_before(int(checkpoint.name.removeprefix("step_")))
    advice = f"if it is damaged, rename it to {LOST}{checkpoint.name}: --resume then continues from {_named(before)}"
    return RunFailed(ErrorCode.RESUME.refer(f"{what}; {advice}"))


def _missing(checkpoint: Path, newest: int | None) -> RunFailed:
    """Return the error of a run whose newest checkpoint has gone, and what is there instead."""
    what = f"checkpoint {checkpoint} is missing: without it the run would continue from {_named(newest)}"
    advice = "bring it back (is its disk mounted?), or give it up, and all that was done since, with: mkdir -p "
    lost = checkpoint.with_name(f"{LOST}{checkpoint.name}")
    return RunFailed(ErrorCode.RESUME.refer(f"{what}; {advice}{as_typed(lost)}"))


def _named(step: int | None) -> str:
    return "the beginning" if step is None else f"step_{step}"


def unfitting(checkpoint: Path, error: BaseException) -> RunFailed:
    """Return the error of a run whose newest checkpoint is of another model or algorithm than its run file."""
    what = f"checkpoint {checkpoint} does not fit the run file: {_first_line(error)}"
    return RunFailed(ErrorCode.RESUME.refer(f"{what}; expected the model and the algorithm that it was written with"))


def _first_line(error: BaseException) -> str:
    text = str(error) if isinstance(error, DamagedFile) else f"{type(error).__name__}: {error}"
    return text.partition("\n")[0]  # torch's may have a dozen lines of advice


class CheckpointFolder:
    """Names, completes and prunes checkpoints; step n means n completed optimizer steps.

    The newest `keep` checkpoints stay, and the best one, however old. An evaluation ends after its checkpoint was
    written, so a checkpoint whose evaluation is in flight or still to come (`pending`) also stays until a later commit.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, step: int) -> Path:
        return self.directory / f"step_{step}"

    def partial(self, step: int) -> Path:
        """Return the folder of a checkpoint that is being written."""
        return self.directory / f"{PARTIAL}{step}"

    def latest(self) -> int | None:
        """Return the step of the newest complete checkpoint; None: there is none.

        Raises:
            CheckpointsUnseen: nobody may look into the folder, as for all methods that look for checkpoints.
            OSError: it cannot be read for another cause, which may pass.
        """
        return max(self._steps(), default=None)

    def to_resume(self, completed: int | None, due: int = 0) -> int:
        """Return the step of the checkpoint that a run continues from; 0: from its beginning.

        Args:
            completed: step of the newest checkpoint that the run is known to have completed; 0: of none; None: it is
                not known.
            due: step of the newest one that it must have completed by its settings, if none is known or seen.

        Raises:
            RunFailed: the one of `completed`, or all up to `due`, are missing, and nobody has given it up.
            CheckpointsUnseen: see `latest`.
        """
        newest = self.latest()
        if completed is None:
            completed = 0 if newest else due
        if (newest or 0) < completed and not self.lost(completed).is_dir():
            raise _missing(self.path(completed), newest)
        return newest or 0

    def newest_before(self, step: int) -> int | None:
        """Return the newest complete checkpoint of a step before `step`; None: there is none."""
        return max((found for found in self._steps() if found < step), default=None)

    def begin(self, step: int) -> Path:
        """Create an empty folder to write a checkpoint into; remove what crashes have left, of any step."""
        for left in self._abandoned():
            shutil.rmtree(left, ignore_errors=True)
        partial = self.partial(step)
        with suppress(FileExistsError):
            self.directory.mkdir()  # a run's folder that has been moved is not made anew
        partial.mkdir()
        return partial

    def has(self, step: int) -> bool:
        """Return whether the checkpoint of a step is complete."""
        return self.path(step).is_dir()

    def count(self) -> int:
        """Return the number of complete checkpoints."""
        return len(self._steps())

    def abandoned_bytes(self) -> int:
        """Return the bytes of checkpoints that were never completed, while none is being written."""
        return _file_bytes(self._abandoned())

    def bytes_to_come(self, keep: int, written: int) -> int:
        """Return the bytes that checkpoints will take beside those that are there, each as large as their largest.

        Args:
            keep: number of newest checkpoints that stay; one more is there while it is written.
            written: most checkpoints that will be written.
        """
        steps = self._steps()
        largest = max((_file_bytes([self.path(step)]) for step in steps), default=0)
        more = min(keep + 1 - min(len(steps), keep), written)
        return max(0, more * largest - _file_bytes(self._abandoned()))

    def commit(self, step: int, keep: int, best: int | None = None, pending: Collection[int] = ()) -> Path:
        """Give a written checkpoint its final name, and delete those that are no longer needed.

        Args:
            step: the checkpoint that `begin` was called for.
            keep: number of newest checkpoints that stay.
            best: step of the best checkpoint, which also stays; default: the one recorded by `mark_best`.
            pending: steps whose evaluations are in flight or still to come; one of them may turn out to be the best.
        """
        target = self.path(step)
        sync_files(self.partial(step))
        self._delete(target)
        self._delete(self.lost(step))  # it is no longer, and this one may be lost in turn
        self.partial(step).rename(target)
        sync_folder(self.directory)
        recorded = self.best()
        spared = {best if best is not None else recorded[0] if recorded else None, *pending}
        for old in self._steps()[:-keep]:
            if old not in spared:
                self._delete(self.path(old))
        return target

    def _delete(self, folder: Path) -> None:
        """Delete a checkpoint, under another name so that half of one never seems complete; or leave it where it is."""
        doomed = self.directory / f"{PARTIAL}deleted"
        shutil.rmtree(doomed, ignore_errors=True)
        if folder.is_dir() and not folder.is_symlink():
            with suppress(OSError):
                folder.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def mark_best(self, step: int | None, score: float) -> None:
        """Record the best step and its score in `best.json` on disk; its checkpoint may still be incomplete.

        Args:
            step: the best step; None: there is none, and no record either.
            score: its score.

        Raises:
            RunFailed: the file cannot be written.
        """
        with writing(self.directory / BEST_FILE):
            if step is None:
                if (self.directory / BEST_FILE).exists():
                    (self.directory / BEST_FILE).unlink()
                    sync_folder(self.directory)
                return
            self.directory.mkdir(exist_ok=True)
            replace_json(self.directory / BEST_FILE, {"step": step, "score": score}, lasting=True)

    def best(self) -> tuple[int, float] | None:
        """Return (step, score) of the recorded best checkpoint; None if there is no record or no such checkpoint."""
        try:
            found = json.loads(read_plain(self.directory / BEST_FILE, below=self.directory.parent))
            step, score = int(found["step"]), float(found["score"])
        except (OSError, ValueError, OverflowError, KeyError, TypeError, RecursionError):
            return None
        return (step, score) if self.has(step) else None

    def _abandoned(self) -> list[Path]:
        return [path for path in self.directory.glob(f"{PARTIAL}*") if path.is_dir() and not path.is_symlink()]

    def lost(self, step: int) -> Path:
        """Return the folder that gives a checkpoint up."""
        return self.directory / f"{LOST}{self.path(step).name}"

    def _steps(self) -> list[int]:
        try:
            with os.scandir(self.directory) as entries:  # `Path.glob` finds nothing in a folder that it cannot read
                steps = [found[1] for entry in entries if (found := OF_STEP.fullmatch(entry.name)) and entry.is_dir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            if error.errno in DISK:
                what = f"cannot look for checkpoints in {self.directory}: {error.strerror}"
                raise CheckpointsUnseen(what) from error
            raise
        return sorted(map(int, steps))


def _file_bytes(folders: Iterable[Path]) -> int:
    """Return the bytes of all files below folders."""
    files = (path for folder in folders for path in folder.rglob("*"))
    return sum(path.stat().st_size for path in files if path.is_file() and not path.is_symlink())
