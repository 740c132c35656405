"""Folders for temporary files: gone with their process, one way or another, and never those of a living one."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from streamrl import scratch_folders
from streamrl.scratch_folders import JoinedFolder, ScratchFolder

HOLDER = """
import sys
from streamrl.scratch_folders import ScratchFolder

with ScratchFolder() as folder:
    (folder / "inside").mkdir()
    (folder / "inside" / "file").write_text("kept")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, in which this process has not looked yet."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    scratch_folders._remove_abandoned.cache_clear()
    return tmp_path


@contextmanager
def holder() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process, and the folder that it has."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def killed() -> Path:
    """The folder that a killed process has left."""
    with holder() as (process, folder):
        assert (folder / "inside" / "file").read_text() == "kept"
        process.kill()
        assert process.wait() == -signal.SIGKILL
    return folder


def test_it_is_private_and_empty_and_gone_at_the_end(temporary: Path) -> None:
    with ScratchFolder() as folder:
        assert folder.parent == temporary
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert list(folder.iterdir()) == []
        (folder / "file").write_text("x")
    assert list(temporary.iterdir()) == []


def test_no_file_stays_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        ScratchFolder().close()
    twice = ScratchFolder()
    twice.close()
    twice.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_next_process_removes_what_a_killed_one_left(temporary: Path) -> None:
    left = killed()
    assert left.exists()
    with ScratchFolder() as folder:
        assert list(temporary.iterdir()) == [folder]


def test_a_process_looks_once() -> None:
    with ScratchFolder():
        left = killed()
        with ScratchFolder():
            assert left.exists()


def test_the_folder_of_a_living_process_stays() -> None:
    with holder() as (process, theirs):
        with ScratchFolder():
            assert (theirs / "inside" / "file").read_text() == "kept"
        process.communicate("")
        assert process.returncode == 0
        assert not theirs.exists()


def test_a_child_that_only_starts_another_program_does_not_hold_it(temporary: Path) -> None:
    left = ScratchFolder()
    code = "print('runs', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False
    ) as child:
        assert child.stdout and child.stdout.readline() == b"runs\n"
        os.close(left._held)  # as if this process were killed
        left._held = -1
        scratch_folders._remove_abandoned.cache_clear()
        scratch_folders._remove_abandoned(str(temporary))
        assert not left.path.exists()
        child.communicate(b"\n")


def test_nothing_else_is_removed(temporary: Path) -> None:
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("kept")
    kernel = scratch_folders._kernel()
    (temporary / f"streamrl-abcdefgh.{kernel}").symlink_to(elsewhere)
    (temporary / f"streamrl-abcdefgi.{kernel}").write_text("a file")
    for name in ("streamrl-abcdefgh", f"streamrl-mine.{kernel}", f"streamrl-abcdefgh.{kernel}.old", "other"):
        (temporary / name).mkdir()
    before = sorted(temporary.iterdir())
    ScratchFolder().close()
    assert sorted(temporary.iterdir()) == before
    assert (elsewhere / "file").read_text() == "kept"


def test_folders_that_another_kernel_has_locked_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    left = killed()
    monkeypatch.setattr(scratch_folders, "_kernel", lambda: "abcdef")
    with ScratchFolder() as folder:
        assert folder.name.endswith(".abcdef")
        assert left.exists()


def test_kernels_are_told_apart() -> None:
    assert re.fullmatch("[0-9a-f]{6}", scratch_folders._kernel())
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    assert scratch_folders._kernel() == hashlib.blake2b(boot.encode(), digest_size=3).hexdigest()


def test_each_place_has_folders_of_its_own(temporary: Path) -> None:
    memory = temporary / "memory"
    memory.mkdir()
    left = killed()
    with ScratchFolder(memory) as folder:
        assert folder.parent == memory
        assert left.exists()
    assert list(memory.iterdir()) == []


@pytest.mark.parametrize(("reader", "removed"), [("its owner", True), ("another", False), ("root", True)])
def test_only_root_removes_those_of_others(monkeypatch: pytest.MonkeyPatch, reader: str, removed: bool) -> None:
    left = killed()
    owner = left.stat().st_uid
    user = {"its owner": owner, "another": owner + 1, "root": 0}[reader]
    monkeypatch.setattr(os, "geteuid", lambda: user)
    ScratchFolder().close()
    assert left.exists() != removed


def test_without_locks_nothing_is_taken_for_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    left = killed()

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "no locks here")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with ScratchFolder() as folder:
        assert folder.is_dir()
    assert not folder.exists()
    assert left.exists()


def test_one_that_was_taken_away_before_it_was_locked_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    flock, taken = fcntl.flock, list[str]()

    def too_late(opened: int, how: int) -> None:
        if len(taken) < 2:
            path = os.readlink(f"/proc/self/fd/{opened}")
            os.rmdir(path)
            taken.append(path)
            if len(taken) == 2:
                raise BlockingIOError
        flock(opened, how)

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(fcntl, "flock", too_late)
    with ScratchFolder() as folder:
        assert len(taken) == 2
        assert folder.is_dir()
        assert str(folder) not in taken
    assert len(os.listdir("/proc/self/fd")) == before


def test_too_many_open_files_are_an_error_and_no_endless_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    opens = os.open

    def none_left(path: str, flags: int, *rest: int, **named: int) -> int:
        if flags & os.O_DIRECTORY:
            raise OSError(errno.EMFILE, "too many open files")
        return opens(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", none_left)
    with pytest.raises(OSError, match="too many open files"):
        ScratchFolder()


def test_a_folder_of_another_machine_is_removed_with_the_last_that_has_joined_it(tmp_path: Path) -> None:
    path = tmp_path / "of the launcher" / "sockets"
    first, second = JoinedFolder(path), JoinedFolder(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    (path / "socket").touch()
    first.close()
    first.close()
    assert (path / "socket").exists()
    third = JoinedFolder(path)
    second.close()
    assert (path / "socket").exists()
    third.close()
    assert not path.exists()
    JoinedFolder(path).close()
    assert not path.exists()


def test_a_folder_that_its_launcher_has_is_not_removed_by_those_that_join_it() -> None:
    with ScratchFolder() as folder:
        joined = JoinedFolder(folder)
        joined.close()
        assert folder.is_dir()


def test_a_folder_that_goes_as_one_joins_it_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, flock = tmp_path / "sockets", fcntl.flock

    def late(opened: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        before.close()
        flock(opened, how)

    before = JoinedFolder(path)
    monkeypatch.setattr(fcntl, "flock", late)
    after = JoinedFolder(path)
    (path / "socket").touch()
    after.close()
    assert not path.exists()


def test_without_locks_a_joined_folder_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(opened: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", none)
    JoinedFolder(tmp_path / "sockets").close()
    assert (tmp_path / "sockets").is_dir()
