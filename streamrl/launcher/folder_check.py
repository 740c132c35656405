"""Whether a run's folder can be written to, and has room for the checkpoints."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterable
from pathlib import Path

from streamrl.config.run import RunConfig
from streamrl.config.schedule import staleness_limit
from streamrl.errors import ErrorCode, UserError
from streamrl.launcher.model_check import trained_folders
from streamrl.machine.model_files import weight_bytes
from streamrl.run_dir import layout
from streamrl.run_dir.checkpoints import CheckpointFolder
from streamrl.run_dir.launcher_lock import in_use, owner_here

STATE_BYTES_PER_WEIGHT_BYTE = 6
"""Size of a trained model's state in a checkpoint relative to its bf16 weights (2 bytes per parameter): fp32 weights
with two AdamW moments (12). A critic has only that, the policy its bf16 weights, too."""

PART_BYTES = 200
"""Bytes of each part of a path that is tried; file systems take 255 in a name."""


def check_folder(runs_root: Path, resumed: Path | None = None) -> Iterable[str]:
    """Check that a run's folder can be made, or that of a run that is continued be written to."""
    existing, dead = _existing(resumed or runs_root), _dead_link(resumed or runs_root)
    if dead is not None:
        yield f"{_named(runs_root, resumed)}: {dead} is a link that leads nowhere, expected a folder"
    elif not existing.is_dir():
        yield f"{_named(runs_root, resumed)}: {existing} is a file, expected a folder"
    elif not os.access(existing, os.W_OK):
        yield f"{_named(runs_root, resumed)}: cannot write to {existing}"
    elif resumed is not None and not _usable(checkpoints := resumed / layout.CHECKPOINTS):
        yield f"{_named(runs_root, resumed)}: cannot read and write in {checkpoints}"


def check_launcher(resumed: Path | None) -> Iterable[str]:
    """Check that no launcher of this machine has the folder of a run that is continued, and with it the run's ports."""
    if resumed is not None and (owner := owner_here(resumed)) is not None:
        yield in_use(resumed, owner)


def check_database_paths(
    run: RunConfig, runs_root: Path, resumed: Path | None = None, emulated: Iterable[str] = ()
) -> Iterable[str]:
    """Check that SQLite takes the paths of the run's databases: it has a limit of its own.

    Args:
        run: the resolved run file.
        runs_root: parent of a new run's folder.
        resumed: folder of the run that is continued; None: a new run.
        emulated: the sites that have a folder inside the run's.
    """
    # not by `resolve`, which raises at a loop of links in Python 3.11
    folder = Path(os.path.realpath(resumed or runs_root / run.name))
    folders = [folder, *(folder / layout.SITES / name for name in emulated)]
    names = (layout.LEDGER, layout.TOKEN_JOURNAL, layout.TURN_JOURNAL)
    longest = max(len(os.fsencode(one / name)) for one in folders for name in names)
    if not _takes_database(longest):
        yield (
            f"{_named(runs_root, resumed)}: a database of the run would have a path of {longest} bytes, more than "
            "SQLite takes; expected a shorter path"
        )


def _takes_database(length: int) -> bool:
    """Return whether SQLite opens a database whose path has so many bytes, by trying in a temporary folder."""
    with tempfile.TemporaryDirectory() as name:
        parts = "x" * (length - len(os.fsencode(place := Path(name).resolve())) - 1)
        path = place.joinpath(*(parts[at : at + PART_BYTES - 1] for at in range(0, len(parts), PART_BYTES)))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.closing(sqlite3.connect(path)) as database:
                database.execute("PRAGMA journal_mode=WAL")
        except (OSError, sqlite3.Error):
            return path == place  # it is shorter than that of the temporary folder
    return True


def check_disk(run: RunConfig, runs_root: Path, resumed: Path | None = None) -> Iterable[str]:
    """Check for disk space for the kept checkpoints and the one being written, less those that a run has already.

    A run may write fewer than are kept. Those that an operator will ask for are not counted.
    """
    try:
        one = _checkpoint_bytes(run)
    except UserError:
        return
    keep = run.checkpoint.keep
    there, free = _room(runs_root, resumed)
    count, written = keep + 1 - min(there, keep), _to_come(run, resumed)
    if written < count:
        count, what = written, f"{written} checkpoints, all that the run will write"
    else:
        what = f"{keep} checkpoints and one more" + (f", of which {min(there, keep)} are there" if there else "")
    if (needed := count * one) > free:
        yield ErrorCode.DISK.refer(
            f"{_named(runs_root, resumed)}: {needed / 2**30:.1f} GiB needed for {what}, {free / 2**30:.1f} GiB free"
        )


def disk_warnings(run: RunConfig, runs_root: Path, resumed: Path | None = None) -> Iterable[str]:
    """Warn if there is no room for the checkpoints that stay beside the newest ones, in a run with evaluations.

    These are the best one and those whose evaluation is not over, as many as samples may be old, in versions: how long
    an evaluation takes is not known before.
    """
    if run.evaluation is None:
        return
    keep, steps = run.checkpoint.keep, staleness_limit(run.schedule) or 0
    evaluated = 1 + steps // run.evaluation.every
    there, free = _room(runs_root, resumed)
    needed = min(max(1, keep + 2 + evaluated - there), _to_come(run, resumed)) * _checkpoint_bytes(run)
    if needed > free:
        yield (
            f"{_named(runs_root, resumed)}: {free / 2**30:.1f} GiB free, and checkpoints may take {needed / 2**30:.1f} "
            f"GiB more: beside checkpoint.keep ({keep}) and the one being written, the best one stays, and about "
            f"{evaluated} until their evaluation is over"
        )


def _checkpoint_bytes(run: RunConfig) -> int:
    """Return the bytes of a checkpoint.

    Raises:
        UserError: there is no such model.
    """
    policy, *critic = map(weight_bytes, trained_folders(run))
    return policy + STATE_BYTES_PER_WEIGHT_BYTE * (policy + sum(critic))


def _to_come(run: RunConfig, resumed: Path | None) -> int:
    """Return the most checkpoints that the run will write by itself from here on."""
    begun = (CheckpointFolder(resumed / layout.CHECKPOINTS).latest() or 0) if resumed is not None else 0
    periods = [run.checkpoint.every, *([run.evaluation.every] if run.evaluation else [])]
    due = sum(run.steps // period - begun // period for period in periods)
    last = all(run.steps % period for period in periods)  # it always writes one
    return max(0, min(run.steps - begun, due + last))


def _room(runs_root: Path, resumed: Path | None) -> tuple[int, int]:
    """Return the complete checkpoints that there are, and the free bytes for further ones."""
    there, abandoned = 0, 0
    if resumed is not None:
        checkpoints = CheckpointFolder(resumed / layout.CHECKPOINTS)
        there, abandoned = checkpoints.count(), checkpoints.abandoned_bytes()  # the next checkpoint removes the latter
    return there, shutil.disk_usage(_existing(resumed or runs_root)).free + abandoned


def _usable(folder: Path) -> bool:
    """Return whether a folder can be read and written to, or made."""
    return not folder.exists() or (folder.is_dir() and os.access(folder, os.R_OK | os.W_OK | os.X_OK))


def _named(runs_root: Path, resumed: Path | None) -> str:
    """Return the option that names where the run is written, with its folder."""
    return f"--runs-dir {runs_root}" if resumed is None else f"--resume {resumed}"


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    return next(path for path in _with_parents(folder) if path.exists())


def _dead_link(folder: Path) -> Path | None:
    """Return the folder, or one above it, if it is a link to itself or to nothing, in whose place none can be made."""
    return next((path for path in _with_parents(folder) if path.is_symlink() and not path.exists()), None)


def _with_parents(folder: Path) -> list[Path]:
    return [folder.absolute(), *folder.absolute().parents]
