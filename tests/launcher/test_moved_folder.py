"""A run whose folder is moved or deleted ends, and makes none of it anew."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest

from streamrl.errors import RunFailed
from streamrl.launcher import supervisor
from streamrl.rollouts.rollout_store import RolloutStore
from streamrl.run_dir.checkpoints import CheckpointFolder
from tests.troubled_place import Place

MOVES = "import os; os.rename('runs/tiny', 'runs/moved')"
ALL_STARTED = """import os, time
while not os.path.exists("runs/tiny/processes.json"): time.sleep(0.01)
"""
DELETES = f"""{ALL_STARTED}
import shutil, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # the launcher notices before all is deleted
shutil.rmtree("runs/tiny")
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
"""
REPLACES = f"{ALL_STARTED}{MOVES}; os.mkdir('runs/tiny'); open('runs/tiny/.lock', 'w').close()"
STAYS, DIES, ENDS = "import time; time.sleep(3600)", "raise SystemExit(3)", "raise SystemExit(0)"


@pytest.mark.parametrize(
    ("script", "then"), [(MOVES, STAYS), (MOVES, DIES), (MOVES, ENDS), (DELETES, STAYS), (REPLACES, STAYS)]
)
def test_a_run_whose_folder_is_gone_ends_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], script: str, then: str
) -> None:
    place = Place(tmp_path, monkeypatch, capfd)
    monkeypatch.setattr(supervisor, "POLL_S", 0.01)
    printed = place.supervise({"controller": f"{script}\n{then}"}, recovery={"restarts": 3})
    assert "error: run folder runs/tiny is gone (moved or deleted?), the run has ended" in printed
    assert "is started again" not in printed and "Traceback" not in printed
    assert {path.name for path in Path("runs").glob("tiny/*")} <= {".lock"}
    assert script == REPLACES or not Path("runs/tiny").exists()


def test_a_folder_is_gone_if_two_looks_miss_it_and_the_file_system_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tiny"
    with supervisor._locked(folder) as held:
        assert not held.look() and not held.is_gone
        folder.rename(tmp_path / "moved")
        assert held.look() and not held.is_gone
        (tmp_path / "moved").rename(folder)  # a network file system may miss a folder for a moment
        assert not held.look()
        shutil.move(folder, tmp_path / "moved")
        folder.mkdir()
        (folder / ".lock").touch()
        assert held.look() and not held.is_gone and held.look() and held.is_gone
        monkeypatch.setattr(os, "stat", Mock(side_effect=OSError(errno.ESTALE, os.strerror(errno.ESTALE))))
        assert not held.look() and not held.is_gone


@pytest.mark.parametrize("replaced", [False, True])
def test_a_run_goes_on_without_its_lock_but_not_beside_another_launcher(tmp_path: Path, replaced: bool) -> None:
    folder = tmp_path / "tiny"
    with supervisor._locked(folder) as held:
        (folder / "logs").mkdir()
        (folder / ".lock").unlink()
        if replaced:
            (folder / ".lock").touch()
        assert not held.look() and not held.look() and not held.is_gone
        with supervisor._locked(folder):
            assert held.look() and held.look() and held.is_gone
            assert "belongs to another launcher" in str(supervisor._gone(held))
        assert not held.look() and not held.is_gone


def test_what_a_run_writes_does_not_make_its_folder_anew(tmp_path: Path) -> None:
    run_dir = tmp_path / "tiny"
    checkpoints = CheckpointFolder(run_dir / "checkpoints")
    with pytest.raises(FileNotFoundError):
        checkpoints.begin(1)
    with pytest.raises(RunFailed, match="No such file"):
        checkpoints.mark_best(1, 0.5)
    with pytest.raises(RunFailed, match="No such file"):
        RolloutStore(run_dir / "rollouts").write(1, [])
    assert not run_dir.exists()
