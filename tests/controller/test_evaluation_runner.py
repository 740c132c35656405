"""The best version of a run that goes back to a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from streamrl.config.run import RunConfig
from streamrl.controller.evaluation_runner import Evaluator
from streamrl.run_dir import layout
from streamrl.run_dir.checkpoints import BEST_FILE, CheckpointFolder
from streamrl.run_dir.evaluations import EvaluationRow, Scores
from streamrl.run_dir.finished import nothing_left
from streamrl.run_dir.jsonl import RowWriter


def row(step: int, score: float) -> EvaluationRow:
    overall = Scores(prompts=4, samples=4, reward_greedy=score, length_mean=10.0)
    return EvaluationRow(step=step, time=1.0, seconds=1.0, overall=overall, by_task={}, other_version_share=0.0)


def save(folder: CheckpointFolder, step: int) -> None:
    (folder.begin(step) / "model").write_text(str(step))
    folder.commit(step, keep=1)


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    """The checkpoints of a run that had evaluated version 40, its best one, before checkpoint 40 was complete."""
    found = CheckpointFolder(tmp_path / layout.CHECKPOINTS)
    with RowWriter(tmp_path / layout.EVALUATIONS, EvaluationRow) as writer:
        for step, score in ((20, 0.5), (30, 0.25), (40, 0.75)):
            writer.append(row(step, score))
            if step < 40:
                save(found, step)
            if step != 30:
                found.mark_best(step, score)
    return found


def run_of(**changes: Any) -> RunConfig:
    return RunConfig.model_validate({"evaluation": {"every": 10, "prompts": 4, "samples": 1}} | changes)


def made(folder: CheckpointFolder, **changes: Any) -> Evaluator:
    groups: Any = Mock(longest_prompt=1000)
    groups.tokens = lambda prompt: np.arange(len(prompt.text), dtype=np.int32)
    return Evaluator(run_of(**changes), folder.directory.parent, groups, folder.mark_best)


def rewound(folder: CheckpointFolder, step: int) -> None:
    evaluator = made(folder)
    evaluator.rewind(step)
    assert evaluator.due(step + 10) and not any(map(evaluator.due, range(20, step + 1, 10)))
    assert evaluator.pending == [10] * (step == 10), "which is served again, and was never evaluated"


def test_the_best_of_a_run_that_goes_back_is_the_best_up_to_there_and_its_checkpoint_stays(
    folder: CheckpointFolder,
) -> None:
    assert folder.best() is None  # of what would be the best there is no checkpoint
    rewound(folder, 30)
    assert folder.best() == (20, 0.5)
    save(folder, 35)
    assert {path.name for path in folder.directory.glob("step_*")} == {"step_20", "step_35"}


def test_a_run_that_goes_back_to_before_its_first_evaluation_has_no_best(folder: CheckpointFolder) -> None:
    rewound(folder, 10)
    assert not (folder.directory / BEST_FILE).exists()
    rewound(folder, 10)


def test_a_kill_between_the_mark_and_the_row_of_the_last_version_leaves_something_to_do(
    folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = folder.directory.parent
    save(folder, 100)
    evaluator = made(folder, steps=100)
    evaluator.rewind(100)
    groups = evaluator.begin(100, 1.0)
    ids = [sample_id for group in groups for sample_id, *_ in evaluator.samples(group)]
    arrived: Any = Mock(output_length=1, sampled_versions=np.full(1, 100))
    for one in ids:
        evaluator._samples[one] = arrived
    for one in ids[:-1]:
        evaluator.scored(one, 1.0, 2.0)

    def killed(writer: RowWriter[EvaluationRow], row: EvaluationRow) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as during, pytest.raises(KeyboardInterrupt):
        during.setattr(RowWriter, "append", killed)
        evaluator.scored(ids[-1], 1.0, 2.0)
    assert folder.best() == (100, 1.0)
    assert nothing_left(run_dir, run_of(steps=100)) is None, "a resumed run evaluates it again"
