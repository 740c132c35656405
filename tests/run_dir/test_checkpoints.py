"""Which checkpoints stay: the newest, the best, and those that may still become the best."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from streamrl.errors import RunFailed, is_final
from streamrl.run_dir.checkpoint_sums import DamagedFile, read_sums
from streamrl.run_dir.checkpoints import CheckpointFolder, CheckpointsUnseen
from tests.run_dir.conftest import FILE_LIMIT, Disk, file_size_limit


def save(folder: CheckpointFolder, step: int, keep: int = 1, **spared: object) -> None:
    (folder.begin(step) / "model").write_text(str(step))
    folder.commit(step, keep, **spared)  # type: ignore[arg-type]


def kept(folder: CheckpointFolder) -> set[str]:
    return {path.name for path in folder.directory.glob("step_*")}


def test_the_best_checkpoint_outlives_newer_ones_and_gives_way_to_a_better_one(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints")
    save(folder, 5)
    save(folder, 10, best=5)
    save(folder, 15, best=5)
    assert kept(folder) == {"step_5", "step_15"} and folder.latest() == 15
    save(folder, 20, best=15)
    assert kept(folder) == {"step_15", "step_20"}


def test_what_is_recorded_as_best_stays_without_being_named_again(tmp_path: Path) -> None:
    save(CheckpointFolder(tmp_path), 5)
    CheckpointFolder(tmp_path).mark_best(5, 0.25)
    trainer = CheckpointFolder(tmp_path)  # in another process
    save(trainer, 10)
    save(trainer, 15)
    assert kept(trainer) == {"step_5", "step_15"}
    assert trainer.best() == (5, 0.25)


def test_a_checkpoint_whose_evaluation_is_under_way_stays(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    save(folder, 5)
    save(folder, 10, pending=[5])
    assert kept(folder) == {"step_5", "step_10"}
    save(folder, 15)
    assert kept(folder) == {"step_15"}


def test_a_folder_with_another_name_is_no_checkpoint(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    save(folder, 5)
    for name in ("9\N{SUPERSCRIPT TWO}", "\N{ARABIC-INDIC DIGIT NINE}", "09", "9" * 16, "9.old", ""):
        (tmp_path / f"step_{name}").mkdir()
    assert (folder.latest(), folder.count()) == (5, 1)


@pytest.mark.parametrize("values", ['{"step": 1e999, "files": {}}', '{"step": 5, "files": {"a": [1e999, ""]}}', "{"])
def test_checksums_that_cannot_be_read_are_damaged(tmp_path: Path, values: str) -> None:
    (tmp_path / "checksums.json").write_text(values)
    with pytest.raises(DamagedFile, match=r"^checksums\.json is damaged$"):
        read_sums(tmp_path)


def test_a_best_without_its_checkpoint_is_none(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints")
    assert folder.best() is None
    folder.mark_best(5, 0.5)
    assert folder.best() is None
    save(folder, 5)
    assert folder.best() == (5, 0.5)
    for damaged in ('{"st', '{"step": 1e999, "score": 0.5}'):
        (folder.directory / "best.json").write_text(damaged)
        assert folder.best() is None
    assert not list(folder.directory.glob("*.tmp")) and not list(folder.directory.glob(".*"))


def test_a_best_that_the_disk_has_no_room_for_is_named(tmp_path: Path) -> None:
    words = re.escape(
        f"cannot write {tmp_path / 'best.json'}: [Errno 27] File too large; {FILE_LIMIT} (see docs: E1007)"
    )
    with file_size_limit(8), pytest.raises(RunFailed, match=words):
        CheckpointFolder(tmp_path).mark_best(5, 0.5)


def test_the_best_is_on_disk_and_so_is_that_there_is_none_any_more(tmp_path: Path, disk: Disk) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.mark_best(None, 0.0)
    assert disk.events == []
    folder.mark_best(5, 0.5)
    assert [what for what, _ in disk.events] == ["on disk", "renamed", "on disk"]
    folder.mark_best(None, 0.0)
    assert disk.events[3:] == [("on disk", tmp_path.name)]


def test_what_crashes_have_left_goes_with_the_next_checkpoint_whatever_its_step(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    save(folder, 5)
    (folder.begin(7) / "part").write_bytes(bytes(100))  # and the trainer dies
    assert (folder.count(), folder.abandoned_bytes()) == (1, 100)
    save(folder, 10, keep=2)
    assert (folder.count(), folder.abandoned_bytes()) == (2, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_10", "step_5"]


@pytest.mark.parametrize("again", [False, True])
def test_a_kill_while_a_checkpoint_is_deleted_leaves_no_half_of_one_under_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    folder = CheckpointFolder(tmp_path)
    save(folder, 5)

    def killed(path: Path, **_: Any) -> None:
        if (path / "model").exists():
            (path / "model").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as during, pytest.raises(KeyboardInterrupt):
        during.setattr(shutil, "rmtree", killed)
        save(folder, 5 if again else 10)  # the same step, or one in whose place the first goes
    assert not folder.has(5) and kept(folder) == (set() if again else {"step_10"})
    save(folder, 15)
    assert [path.name for path in tmp_path.iterdir()] == ["step_15"]


def test_a_resume_goes_back_behind_a_completed_checkpoint_only_if_that_was_given_up(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints")
    assert folder.to_resume(0) == 0
    for step in (4, 8):
        save(folder, step, keep=2)
        assert folder.to_resume(step) == folder.to_resume(0) == step  # the ledger may not have recorded it yet
    for gone, left in ((8, "step_4"), (4, "the beginning")):
        shutil.rmtree(folder.path(gone))
        with pytest.raises(RunFailed, match=rf"step_8 is missing: .* from {left}; .*: mkdir -p .*/lost_step_8 \(see"):
            folder.to_resume(8)
    shutil.rmtree(folder.directory)
    with pytest.raises(RunFailed, match="mkdir -p"):
        folder.to_resume(8)
    (folder.directory / "lost_step_8").mkdir(parents=True)
    assert folder.to_resume(8) == 0
    save(folder, 8)
    assert [path.name for path in folder.directory.iterdir()] == ["step_8"]  # which may be lost again


def test_checkpoints_that_cannot_be_listed_are_not_taken_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(folder := CheckpointFolder(tmp_path), 4)
    for number, kind in ((errno.EACCES, CheckpointsUnseen), (errno.ESTALE, OSError)):
        monkeypatch.setattr(os, "scandir", Mock(side_effect=OSError(number, os.strerror(number))))
        with pytest.raises(kind, match=os.strerror(number)) as found:
            folder.latest()
        assert is_final(found.value) is (number == errno.EACCES)
