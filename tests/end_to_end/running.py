"""A run of the tiny model in which processes are killed or stopped, and what must hold of it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from streamrl.rollouts.ledger import Ledger
from streamrl.run_dir.instance_files import read_started
from streamrl.run_dir.metrics import read_metrics
from streamrl.run_dir.status import RoleStatus, read_status
from tests.end_to_end.project import Project, trained_rows, wait_for

EASY = [{"kind": "reasoning_gym", "name": "chain_sum", "config": {"max_terms": 2}, "answer": "full"}]


class Running:
    """A run of the tiny model with answers long enough to be interrupted."""

    def __init__(self, project: Project, steps: int, **changes: object) -> None:
        self.project, folder = project, project.folder
        model = {"path": str(folder / "model"), "max_context": 512}
        base = {"tasks": EASY, "model": model, "sampling": {"max_tokens": 300}, "checkpoint": {"every": 2}}
        self.process = self.project.start(steps=steps, **(base | changes))  # type: ignore[arg-type]
        self.run_dir = self.project.run_dir()
        self.wait(lambda: self.steps > 0)

    @property
    def steps(self) -> int:
        path = self.run_dir / "metrics.jsonl"
        return len(read_metrics(path)) if path.exists() else 0

    def wait(self, condition: object) -> None:
        wait_for(condition, 400, self.process)  # type: ignore[arg-type]

    def pid(self, name: str) -> int | None:
        """Return the pid of a process that lives; None: none of this name does."""
        found = (one.pid for one in read_started(self.run_dir) if one.name == name and one.exit_code is None)
        return next(found, None)

    def signal(self, name: str, number: int) -> float:
        """Sends a process a signal; returns when (unix seconds)."""
        pid = self.pid(name)
        assert pid is not None
        os.kill(pid, number)
        return time.time()

    def role(self, name: str) -> RoleStatus:
        return read_status(self.run_dir).roles[name]

    def last_finished(self, name: str) -> float:
        """When an instance ended the last of its samples that is kept (unix seconds)."""
        ours = (row for row in trained_rows(self.run_dir) if row["instance"] == name)
        return max((float(str(row["t_finished"])) for row in ours), default=0.0)

    def goes_on(self, steps: int = 3) -> None:
        """Waits for so many steps more."""
        wanted = self.steps + steps
        self.wait(lambda: self.steps >= wanted)


def assert_every_sample_once(run_dir: Path) -> None:
    """All samples of all steps are trained, none twice, no prompt is skipped.

    A controller that is told to stop may have written the rollouts of one more step, which a resume would remove.
    """
    steps = len(read_metrics(run_dir / "metrics.jsonl"))
    assert [row.step for row in read_metrics(run_dir / "metrics.jsonl")] == list(range(1, steps + 1))
    rows = [row for row in trained_rows(run_dir) if row["t_trained"] is not None]
    assert {int(row["step"]) for row in rows} <= set(range(1, steps + 2))  # type: ignore[call-overload]
    rows = [row for row in rows if int(row["step"]) <= steps]  # type: ignore[call-overload]
    ids = [str(row["sample_id"]) for row in rows]
    assert len(ids) == len(set(ids)) == 18 * steps
    assert sorted(ids) == Ledger(run_dir / "ledger.sqlite").trained_ids()
    prompts = {int(str(row["group_id"])) for row in rows}
    assert len(prompts) == 6 * steps
    for row in rows:
        assert len(row["completion_tokens"]) == row["output_length"]  # type: ignore[arg-type]
        versions = list(row["weight_versions"])  # type: ignore[call-overload]
        assert versions == sorted(versions) and versions[-1] < int(row["step"])  # type: ignore[call-overload]
