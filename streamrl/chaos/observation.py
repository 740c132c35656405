"""Read a run's folder: the state of the run, its logs, and what an audit needs."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from streamrl.chaos.audit import Account, LedgerRow, RolloutRow
from streamrl.chaos.follow import Observation, SeenProcess
from streamrl.errors import UserError
from streamrl.run_dir import layout
from streamrl.run_dir.checkpoint_sums import STATE_FILE
from streamrl.run_dir.checkpoints import CheckpointFolder
from streamrl.run_dir.instance_files import read_started
from streamrl.run_dir.metrics import read_metrics
from streamrl.run_dir.status import read_status

TELLING = re.compile(
    rb"corrupt|fetching complete weights|token journal|of which \d+ are in the journal| is silent$|"
    rb"agent worker is replaced|a process of environment .* is replaced",
    re.IGNORECASE,
)
"""Log lines that report a fault."""
LOST = re.compile(r"(\S+) had (\d+) requests with (\d+) tokens, of which (\d+) are in the journal")
COLUMNS = ["sample_id", "trajectory_id", "step", "t_trained", "output_length"]
ARRAYS = ["completion_tokens", "logprobs", "weight_versions", "mask"]
ACCOUNT_TRIES = 5
"""Attempts to read the newest checkpoint, which may be pruned during one."""


def processes_of(run_dir: Path) -> dict[str, SeenProcess]:
    """Return all processes that launchers have started, by name."""
    found = {}
    for site, folder in layout.site_folders(run_dir).items():
        with contextlib.suppress(ValueError, TypeError):
            for one in read_started(folder):
                found[one.name] = SeenProcess(one.pid, one.role, site, one.exit_code)
    return found


def look(run_dir: Path, said: Sequence[str] = (), launched: bool = True) -> Observation:
    """Return the current state of a run; `said`: lines of its logs, from `Logs`."""
    processes, now = processes_of(run_dir), time.time()
    try:
        status = read_status(run_dir)
    except UserError:
        return Observation(now, processes=processes, said=tuple(said), launched=launched)
    return Observation(
        now,
        status.state,
        status.updated_at,
        status.step,
        status.latest.time if status.latest is not None else 0.0,
        status.error or "",
        processes,
        status.roles,
        status.scaling.ready,
        status.scaling.wanted,
        status.sites,
        tuple(said),
        launched,
    )


class Logs:
    """Lines that a run logs from now on."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / layout.LOGS
        self._read = {path: path.stat().st_size for path in self._paths()}
        self.lines: list[str] = []
        """Lines that report a fault, oldest first."""

    def _paths(self) -> list[Path]:
        return sorted(self._folder.glob("*.log"))

    def read(self) -> list[str]:
        """Read what is new; return all lines so far."""
        for path in self._paths():
            begin = self._read.get(path, 0)
            with contextlib.suppress(OSError), path.open("rb") as log:
                log.seek(begin)
                new = log.read()
                whole = new[: new.rfind(b"\n") + 1]
                self._read[path] = begin + len(whole)
                self.lines += [line.decode(errors="replace") for line in whole.splitlines() if TELLING.search(line)]
        return self.lines


def interrupted(lines: Sequence[str], names: frozenset[str]) -> tuple[int, int, int] | None:
    """Return the interrupted work of the named instances, as their service has logged it.

    Returns:
        (requests, their tokens, tokens of these in the journal); None: the service has logged nothing.
    """
    found = [match.groups() for line in lines if (match := LOST.search(line)) is not None]
    counts = [(int(n), int(tokens), int(kept)) for name, n, tokens, kept in found if name in names]
    if not counts:
        return None
    return sum(one[0] for one in counts), sum(one[1] for one in counts), sum(one[2] for one in counts)


def read_account(run_dir: Path) -> Account:
    """Read what an audit compares; of a live run, up to the newest step that all files have.

    Raises:
        OSError: a file cannot be read.
        sqlite3.Error: the ledger cannot be read.
    """
    position = _position(run_dir)  # first, so that prompts issued during the reading do not count as lost
    ledger, sizes = _ledger(run_dir / layout.LEDGER)
    metrics = read_metrics(run_dir / layout.METRICS)
    newest = max((row.step for row in metrics), default=0)
    if sizes and newest < max(sizes):  # its row is being written
        time.sleep(0.5)
        metrics = read_metrics(run_dir / layout.METRICS)
    metrics = [row for row in metrics if row.step in sizes or row.step < max(sizes, default=0)]
    too_long = max((row.prompts_too_long or 0 for row in metrics), default=0)
    rollouts = [
        row for step in sorted(sizes) for row in _rollouts(run_dir / layout.ROLLOUTS / f"step_{step:06d}.parquet")
    ]
    return Account(ledger, sizes, rollouts, [row.step for row in metrics], too_long, *position)


def _position(run_dir: Path) -> tuple[int, frozenset[int]]:
    """Return the number of the next new prompt, and those to issue again, by the newest checkpoint."""
    checkpoints = CheckpointFolder(run_dir / layout.CHECKPOINTS)
    for _ in range(ACCOUNT_TRIES):
        if (step := checkpoints.latest()) is None:
            return 0, frozenset()
        try:
            found = json.loads((checkpoints.path(step) / STATE_FILE).read_bytes())["prompts"]
            return int(found["next_index"]), frozenset(map(int, found.get("again", ())))
        except FileNotFoundError:
            continue
    raise FileNotFoundError(f"no checkpoint in {run_dir} can be read")


def _ledger(path: Path) -> tuple[list[LedgerRow], dict[int, int]]:
    """Return all rows, and the number of samples of each step, from one snapshot."""
    address = f"{path.absolute().as_uri()}?mode=ro"
    with contextlib.closing(sqlite3.connect(address, uri=True, isolation_level=None)) as db:
        db.execute("BEGIN")
        rows = [LedgerRow(*row) for row in db.execute("SELECT sample_id, group_id, state, void_cause FROM samples")]
        sizes = {int(step): int(count) for step, count in db.execute("SELECT step, samples FROM steps")}
        db.execute("COMMIT")
    return rows, sizes


def _sampled(row: dict[str, Any], column: str, dtype: type) -> npt.NDArray[Any]:
    """Return a column's values at the sampled tokens."""
    values: npt.NDArray[Any] = np.asarray(row[column], dtype)
    return values if row["mask"] is None else values[np.asarray(row["mask"], bool)]


def _rollouts(path: Path) -> list[RolloutRow]:
    rows = pq.read_table(path, columns=[*COLUMNS, *ARRAYS]).to_pylist()
    sampled = Counter[str]()
    for row in rows:
        sampled[row["trajectory_id"]] += len(_sampled(row, "completion_tokens", np.int32))
    return [
        RolloutRow(
            row["sample_id"],
            row["sample_id"] == row["trajectory_id"],
            row["step"],
            row["t_trained"] is not None,
            row["output_length"] - sampled[row["trajectory_id"]] + len(_sampled(row, "completion_tokens", np.int32)),
            _sampled(row, "completion_tokens", np.int32),
            _sampled(row, "logprobs", np.float32),
            _sampled(row, "weight_versions", np.int32),
        )
        for row in rows
    ]
