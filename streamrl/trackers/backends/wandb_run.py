"""Weights & Biases: a run that continues under the same id, online, or offline for `wandb sync`."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import Any

from streamrl.config.trackers import WandbTracker
from streamrl.run_dir import layout
from streamrl.trackers.sent_rows import SentRows
from streamrl.trackers.tracker import RolloutTable, TrackedRun

INIT_S = 30.0
"""Seconds that the service has to answer when the run is opened; then it is tried again later."""


class WandbRun:
    """A run of W&B; its own service process sends, and holds what the network does not take.

    W&B's history only grows: a step is added as it is committed or the next one begins, and what comes for it later is
    dropped. So the last call for a step commits it, unless evaluations may follow: they belong to earlier steps than
    the newest, to which they are added, and have an axis of their own, `evaluation/step`.
    """

    def __init__(self, config: WandbTracker, run: TrackedRun, sent: SentRows) -> None:
        """Open the run, or continue it.

        Raises:
            wandb.errors.Error: the service cannot be reached, or refuses the key.
            RuntimeError: the environment has switched W&B off.
        """
        import wandb

        if config.mode is None and os.environ.get("WANDB_MODE") == "disabled":  # it takes all and keeps nothing
            raise RuntimeError("WANDB_MODE is disabled: set it to offline or online, or `mode` in the run file")
        if not sent.id:
            sent.name(secrets.token_hex(8))  # before the service knows it: a kill in between makes no second run
        self.id = sent.id
        self._table = wandb.Table
        self._newest = sent.last_step
        self._samples_due = config.samples_due
        self._evaluates = run.settings.get("evaluation") is not None
        folder = run.folder / layout.TRACKERS
        self._run: Any = wandb.init(
            id=self.id,
            resume="allow",
            project=config.project,
            entity=config.entity,
            group=config.group,
            tags=config.tags,
            mode=config.mode,
            name=run.name,
            dir=str(folder),
            config=dict(run.settings),
            settings=wandb.Settings(
                console="off",
                silent=True,
                init_timeout=INIT_S,
                x_disable_stats=True,
                x_disable_meta=True,
                disable_git=True,
                save_code=False,
            ),
        )
        # the service, but no file, says where a run goes on: a process that was killed may have left a step open
        following = int(self._run.step)
        self.last_step: int | None = max(0, following - 1)
        if self._run.offline and not following:
            self.last_step = None  # a new file, which knows nothing of those before
        self._run.define_metric("evaluation/step", hidden=True)
        self._run.define_metric("evaluation/*", step_metric="evaluation/step")

    def log_step(self, step: int, time: float, figures: Mapping[str, float]) -> None:
        """Hand a step's figures to W&B's service process."""
        self._newest = step
        self._run.log(dict(figures), step=step, commit=not self._evaluates and not self._samples_due(step))

    def log_evaluation(self, step: int, time: float, figures: Mapping[str, float]) -> None:
        """Add an evaluation to the newest step; its axis is the step that was evaluated."""
        newest = max(self._newest, self._run.step)
        self._run.log({**figures, "evaluation/step": step}, step=newest)

    def log_samples(self, step: int, table: RolloutTable) -> None:
        """Add a table to its step."""
        self._run.log({"samples": self._table(**table.cells())}, step=step, commit=not self._evaluates)

    def rewind(self, step: int) -> bool:
        """Return False: a run's history cannot be taken back."""
        return False

    def close(self) -> None:
        """Wait until all is sent, or offline until it is written."""
        self._run.finish()
