"""The return of a resumed run to its newest checkpoint: every part of the controller goes back to that step."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import dataclass
from typing import Any

from streamrl.controller.evaluation_runner import Evaluator
from streamrl.controller.group_pool import GroupPool
from streamrl.controller.group_source import GroupSource
from streamrl.controller.length_predictor import COLUMNS, LengthPredictor
from streamrl.controller.telemetry import Telemetry
from streamrl.controller.training_steps import TrainingSteps
from streamrl.errors import RunFailed
from streamrl.rollouts.ledger import Ledger
from streamrl.rollouts.rollout_store import RolloutStore
from streamrl.run_dir.checkpoint_sums import STATE_FILE, DamagedFile, check_files, read_sums
from streamrl.run_dir.checkpoints import LOOK_S, SEEN_S, CheckpointFolder, unreadable
from streamrl.run_dir.jsonl import BriefRow
from streamrl.run_dir.resume_point import resume_point
from streamrl.runtime.process_context import RoleContext

log = logging.getLogger(__name__)


class _Step(BriefRow):
    """What a resumed run needs of each step's metrics: those of a long run, whole, would take gigabytes."""

    step_time_s: float | None = None
    step_refused: str | None = None


@dataclass(frozen=True)
class Resumption:
    """The parts of a run that go back, in files and in memory."""

    context: RoleContext
    checkpoints: CheckpointFolder
    ledger: Ledger
    rollouts: RolloutStore
    telemetry: Telemetry
    groups: GroupSource
    pool: GroupPool
    lengths: LengthPredictor
    evaluator: Evaluator
    training: TrainingSteps

    async def see_checkpoint(self) -> None:
        """Wait until this node sees the newest checkpoint, at most for `SEEN_S`; after that `restore` fails."""
        deadline, told = time.monotonic() + SEEN_S, False
        while time.monotonic() < deadline:
            try:
                self._to_resume()
            except RunFailed as error:
                if not told:
                    text = "%s; looking for it for %.0f s, as a node may see a new folder of a shared disk later"
                    log.warning(text, error, SEEN_S)
                    self.context.say("looking for the newest checkpoint")
                told = True
                await asyncio.sleep(LOOK_S)
            else:
                return

    def _to_resume(self) -> int:
        """Return the step of the checkpoint to go back to; 0: the beginning. Raises as `restore`."""
        return resume_point(self.context.run_dir, self.ledger.known(), self.context.run.checkpoint.every)

    def restore(self) -> None:
        """Rewind to the newest checkpoint; groups that no step up to it has trained are issued again.

        Raises:
            RunFailed: the newest checkpoint of the run, or its ledger, is missing or damaged; nothing was rewound.
            CheckpointsUnseen: nobody may look into their folder.
        """
        step = self._to_resume()
        self.training.resume_at(step, self._restore_state(step) if step else {})
        self.pool.resume_at(step)
        metrics = self.telemetry.metrics
        _, rows = metrics.rewind_reading(step, _Step)
        self.rollouts.rewind(step + 1)
        undone = self.ledger.rewind(step + 1)  # last: it must know of the steps that still have files
        if (known := self.ledger.steps()) != step:
            log.warning(
                "%s knows %d of the %d steps of the checkpoint: a part of it is lost, as in a copy without the file "
                "that ends in -wal; its counts of samples are too small",
                self.ledger.path,
                known,
                step,
            )
        self.context.say("reading the lengths of the newest samples")
        self.lengths.restore(self.rollouts.newest(COLUMNS, self.context.run.ranker.window))
        if lost := step - len({row.step for row in rows}):
            log.warning("%s lacks %d of the %d steps of the checkpoint: these rows are lost", metrics.path, lost, step)
        self.training.refusals.resume_at(step, sum(row.step_refused is not None for row in rows))
        self.evaluator.rewind(step)
        self.telemetry.resume_at(step, (row.step_time_s for row in rows))
        text = "resumed after step %d; %d samples of later steps will be trained again, up to %d taken as they are"
        log.info(text, step, undone, self.ledger.count_kept())

    def _restore_state(self, step: int) -> dict[str, Any]:
        """Restore the position in the prompts from a checkpoint; return its choice of the schedule ({}: none).

        Raises:
            RunFailed: the checkpoint is missing or damaged.
        """
        folder = self.checkpoints.path(step)
        self.ledger.found_checkpoint(step)  # which may be newer than known, and damaged: it is given up by its name
        try:
            check_files(folder, read_sums(folder), [STATE_FILE])
            state = json.loads((folder / STATE_FILE).read_bytes())
            if (saved := state["step"]) != step:
                raise DamagedFile(f"{STATE_FILE} is of step {saved}")
            self.groups.restore(state["prompts"])
            chosen: dict[str, Any] = state.get("schedule", {})  # earlier versions' has none
        except (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise unreadable(folder, error) from error
        return chosen
