"""Whether a run has anything left to do."""

from __future__ import annotations

from pathlib import Path

from streamrl.config.run import RunConfig
from streamrl.run_dir import layout
from streamrl.run_dir.checkpoints import CheckpointFolder
from streamrl.run_dir.evaluations import read_evaluations


def nothing_left(run_dir: Path, run: RunConfig) -> int | None:
    """Return the step of a run's newest checkpoint if it has neither steps to do nor an evaluation of the last one.

    None: it goes on when it is resumed.
    """
    done = CheckpointFolder(run_dir / layout.CHECKPOINTS).latest()
    if done is None or done < run.steps:
        return None
    if done > run.steps or run.evaluation is None:
        return done
    return done if any(row.step == done for row in read_evaluations(run_dir / layout.EVALUATIONS)) else None
