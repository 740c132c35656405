"""The names of everything in the run folder, except the resolved configuration (`config.load.RESOLVED_NAME`).

A site that does not train has a folder of the same kind, without what the controller writes. `--emulate` puts the other
sites' folders into `sites/` of the trainer's.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from streamrl.errors import UserError
from streamrl.plain_files import plain_names

# written by the controller
STATUS = "status.json"
METRICS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"
TRACE = "trace.json"
LEDGER = "ledger.sqlite"
ROLLOUTS = "rollouts"
"""Folder: one Parquet file per optimizer step."""
REFUSED = "refused"
"""Folder: the micro-batches of each step that the trainer has refused, for `streamrl replay`."""
REPLICAS = "replicas.json"
"""Target number of instances of each pool that was scaled."""

# written by the trainer
CHECKPOINTS = "checkpoints"

# written by a site's service
SITE_STATUS = "site.json"
TOKEN_JOURNAL = "journal.sqlite"
TURN_JOURNAL = "turns.sqlite"
WANTED_INSTANCES = "instances.json"

# written by a site's rewards process
REWARDS_SIGN = "rewards.alive"
"""File of a site that does not train, touched once a second: its time is a sign of life for the launcher."""

# written by a launcher
ADDRESSES = "addresses.json"
LOCK = ".lock"
"""File that is locked by the launcher that owns the folder, which it names."""
PROCESSES = "processes.json"
LOGS = "logs"
"""Folder: one file per process."""
REPORT = "report.html"
SITES = "sites"
"""Folder: the other sites' folders, under --emulate."""
KEYS = "keys"
"""Folder: the keys of this launch, a pair for each process; under --emulate the sites' keys as well."""
NETWORK = "network"
"""Folder: the emulated network, under --emulate."""

# written by every process
START_STAGES = "starting"
DEVICES = "devices"
"""Folder: a lock per GPU that trainer and instances use in turns."""
STACKS = "stacks"

# written by the process of each tracker
TRACKERS = "trackers"
"""Folder: what each tracker has been sent, `NAME.jsonl`, and the files of trackers that write to a folder."""

# written by `streamrl chaos`
LAUNCHER_LOG = "launcher.log"

LARGEST_ROWS = 1 << 30
"""Most bytes of a file with a row per step whose rows may all be held: some 400,000 steps."""
FOREIGN = (f"{TRACKERS}/wandb",)
"""What packages of others write, with links of their own; nothing here reads it."""

SHARED_MEMORY = Path("/dev/shm")
WEIGHTS = "weights"


def site_folders(run_dir: Path) -> dict[str, Path]:
    """Return the folders of a run's sites on this machine, by name; the run's own is called ''.

    Raises:
        NotPlainFile: the folder of sites is a link.
        OSError: it cannot be read.
    """
    sites = run_dir / SITES
    paths = [sites / name for name in plain_names(sites, below=run_dir)]
    return {"": run_dir} | {path.name: path for path in paths if path.is_dir() and not path.is_symlink()}


def whole_folder(folder: Path) -> Path:
    """Return the run's folder that a site's folder is a part of under `--emulate`, else the folder itself."""
    return folder.parents[1] if folder.parent.name == SITES else folder


def new_folder(runs_dir: Path, name: str) -> Path:
    """Return `<runs>/<name>`, or `<name>-2`, `-3` ... if that exists: no run is overwritten."""
    return next(folder for folder in _folders(runs_dir, name) if not folder.exists())


def make_folder(runs_dir: Path, name: str) -> Path:
    """Make the folder that `new_folder` names, or the next one if another process makes that first; return it.

    Raises:
        UserError: it cannot be made.
    """
    try:
        return claim_folder(runs_dir, name)
    except OSError as error:
        if runs_dir.exists() and not runs_dir.is_dir():
            raise UserError(f"--runs-dir {runs_dir}: expected a folder for runs, this is none") from error
        raise UserError(
            f"cannot make the run folder {runs_dir / name}: {error.strerror}; choose another --runs-dir"
        ) from error


def claim_folder(parent: Path, name: str) -> Path:
    """Make a folder that no other process has: `name`, or `name-2`, `name-3` ... if that exists; return it.

    Raises:
        OSError: it cannot be made.
    """
    for folder in _folders(parent, name):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise AssertionError("there is always another name")


def later_folders(folder: Path) -> Iterator[Path]:
    """Yield the folders that later launches of the same name have made beside a folder, the oldest first."""
    base, number = folder.name, 1
    if (numbered := re.fullmatch(r"(.+)-([0-9]{1,9})", base)) and (folder.parent / numbered[1]).is_dir():
        base, number = numbered[1], int(numbered[2])
    names = (folder.parent / f"{base}-{n}" for n in itertools.count(number + 1))
    return itertools.takewhile(Path.is_dir, names)


def _folders(runs_dir: Path, name: str) -> Iterator[Path]:
    return (runs_dir / one for one in itertools.chain([name], (f"{name}-{n}" for n in itertools.count(2))))
