"""A working folder whose files would replace modules that a run imports is refused before anything starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.launcher.shadowing_check import shadowing
from tests.waiting import scaled

REPOSITORY = Path(__file__).parents[2]


def launch(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Start as the installed command does, which has not the working folder in its path."""
    command = [sys.executable, "-P", "-m", "streamrl.cli.main", "launch", *options]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=scaled(60))


def put(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("raise AssertionError\n")


@pytest.mark.parametrize("name", ["scheduler.py", "ranker/__init__.py", "streamrl.py", "queue.py", "json/__init__.py"])
@pytest.mark.parametrize("options", [("--dry-run",), ()])
def test_a_launch_names_the_file_and_starts_nothing(tmp_path: Path, name: str, options: tuple[str, ...]) -> None:
    put(tmp_path, name)
    done = launch(tmp_path, "--cluster", "missing.yaml", *options)
    module = name.removesuffix("/__init__.py")
    assert done.returncode == 2 and "give it another name, or start in another folder" in done.stderr
    assert f"error: {tmp_path.resolve() / module}: processes of a run would import it in place of" in done.stderr


def test_other_files_of_the_working_folder_are_let_through(tmp_path: Path) -> None:
    put(tmp_path, "rewards.py", "helper.py", "utils/__init__.py", "queue/notes.txt", "time.py", "turtle.py", "test.py")
    assert shadowing(tmp_path) == []
    assert "missing.yaml" in launch(tmp_path, "--cluster", "missing.yaml", "--dry-run").stderr


def test_the_repository_itself_is_let_through(tmp_path: Path) -> None:
    assert shadowing(REPOSITORY) == []
    (tmp_path / "link").symlink_to(REPOSITORY)
    assert shadowing(tmp_path / "link") == []


def test_each_file_is_named(tmp_path: Path) -> None:
    put(tmp_path, "scheduler.py", "types.py", "logging/__init__.py")
    found = dict(shadowing(tmp_path))
    assert [path.name for path in found] == ["logging", "scheduler.py", "types.py"]
    assert "a package of StreamRL, 'scheduler'" in found[tmp_path / "scheduler.py"]
    assert "a module of Python's standard library, 'types'" in found[tmp_path / "types.py"]
