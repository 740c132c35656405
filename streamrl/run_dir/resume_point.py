"""The step that a run continues from, by its checkpoints, its ledger and what else its folder has of its steps.

A run that was ended before its first checkpoint begins again, and its ledger knows that there was none. A copy of a
folder without `checkpoints/` and the ledger, or with a ledger that lacks its newest part, looks the same but for the
files of its steps, which a new beginning would delete.
"""

from __future__ import annotations

from pathlib import Path

from streamrl.errors import ErrorCode, RunFailed, as_typed
from streamrl.rollouts.ledger import KnownSteps
from streamrl.rollouts.parquet_files import step_files
from streamrl.run_dir import layout
from streamrl.run_dir.checkpoints import CheckpointFolder
from streamrl.run_dir.jsonl import StepRow, iter_rows


def resume_point(run_dir: Path, known: KnownSteps, every: int) -> int:
    """Return the step of the checkpoint that a run continues from; 0: from its beginning.

    Args:
        run_dir: the run's folder.
        known: what its ledger knows.
        every: optimizer steps between regular checkpoints.

    Raises:
        RunFailed: the newest checkpoint is missing, or there is none and the ledger does not know of all steps that
            have files; and nobody has given it, or them, up.
        CheckpointsUnseen: nobody may look into the folder of the checkpoints.
        OSError: a file cannot be read.
    """
    checkpoints = CheckpointFolder(run_dir / layout.CHECKPOINTS)
    due = known.due(every) if known.checkpoint is None else known.checkpoint
    step = checkpoints.to_resume(known.checkpoint, due)
    if step or due:  # a checkpoint that was due has been given up, and all that was done since
        return step
    done = _newest_with_files(run_dir)
    if done > known.begun and not checkpoints.lost(done).is_dir():
        unknown = (
            f"{run_dir} has files of {done} steps, and neither a checkpoint nor a ledger that knows of them: the run "
            f"would begin anew and delete them; bring back {layout.CHECKPOINTS} and {layout.LEDGER} (with the file "
            "that ends in -wal), or give up all that was done, with: mkdir -p "
        )
        raise RunFailed(ErrorCode.RESUME.refer(unknown + as_typed(checkpoints.lost(done))))
    return 0


def _newest_with_files(run_dir: Path) -> int:
    """Return the newest step that has rollouts or a row of metrics; 0: none has."""
    rollouts = [step for step, _ in step_files(run_dir / layout.ROLLOUTS)]
    return max([0, *rollouts[-1:], *(row.step for row in iter_rows(run_dir / layout.METRICS, StepRow))])
