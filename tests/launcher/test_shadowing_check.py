"""A folder whose files would replace modules that a run imports is refused before anything starts."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from streamrl.errors import UserError
from streamrl.launcher.shadowing_check import check_shadowing, shadowing
from tests.waiting import scaled

REPOSITORY = Path(__file__).parents[2]


def launch(folder: Path, *options: str, path: Path | str = "") -> subprocess.CompletedProcess[str]:
    """Start as the installed command does, which has not the working folder in its path, with one on PYTHONPATH."""
    command = [sys.executable, "-P", "-m", "streamrl.cli.main", "launch", *options]
    environment = os.environ | {"PYTHONPATH": f"{path}{os.pathsep}{REPOSITORY}" if path else str(REPOSITORY)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=scaled(60))


def refused(monkeypatch: pytest.MonkeyPatch, folder: Path, path: Path | str = "") -> str:
    """What a launch in a folder says of its files and of those on PYTHONPATH; '': nothing."""
    entries = [str(path), str(REPOSITORY)] if path else [str(REPOSITORY)]
    with monkeypatch.context() as there:
        there.chdir(folder)
        there.setenv("PYTHONPATH", os.pathsep.join(entries))
        there.setattr(sys, "path", ["", *map(os.path.abspath, entries), *sys.path])  # as Python begins with
        try:
            check_shadowing()
        except UserError as error:
            return str(error)
    return ""


def put(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise AssertionError\n")


OWN_AND_STANDARD = ("scheduler.py", "ranker/__init__.py", "streamrl.py", "queue.py", "json/__init__.py")
LIBRARIES = ("numpy.py", "torch/__init__.py", "yaml.py", "tokenizers.py", "filelock/__init__.py")


@pytest.mark.parametrize(
    ("names", "options"), [(OWN_AND_STANDARD, ("--dry-run",)), (LIBRARIES, ())], ids=["own and standard", "libraries"]
)
def test_a_launch_names_the_files_and_starts_nothing(
    tmp_path: Path, names: tuple[str, ...], options: tuple[str, ...]
) -> None:
    put(tmp_path, *names)
    done = launch(tmp_path, "--cluster", "missing.yaml", *options)
    assert done.returncode == 2
    told = [line.strip() for line in done.stderr.removeprefix("error: ").splitlines()]
    modules = sorted(name.removesuffix("/__init__.py") for name in names)
    starts = [f"{tmp_path.resolve() / one}: processes of a run would import it in place of " for one in modules]
    assert len(told) == len(names), done.stderr
    for line, start in zip(sorted(told), starts, strict=True):
        assert line.startswith(start) and line.endswith(": give it another name, or start in another folder")


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
    put(tmp_path / "w", "numpy.py", "yaml.py")
    found = dict(shadowing(tmp_path / "w"))
    assert "a module of the installed library PyYAML, 'yaml'" in found[tmp_path / "w" / "yaml.py"]
    assert [path.name for path in found] == ["numpy.py", "yaml.py"]


def test_data_tools_of_developers_and_unused_libraries_are_let_through(tmp_path: Path) -> None:
    put(tmp_path, "datasets/rows.txt", "torch/weights.bin", "numpy.txt", "hypothesis.py", "trl/__init__.py", "tests.py")
    put(tmp_path, "supervisor.py", "anthropic/__init__.py")
    assert shadowing(tmp_path) == []


def test_files_on_pythonpath_are_named(tmp_path: Path) -> None:
    put(tmp_path / "lib", "wave.py", "ranker.py")
    (tmp_path / "work").mkdir()
    done = launch(tmp_path / "work", "--dry-run", path=tmp_path / "lib")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert all(f"{tmp_path / 'lib' / name}: processes of a run" in done.stderr for name in ("wave.py", "ranker.py"))
    assert "give it another name, or take its folder off PYTHONPATH" in done.stderr


@pytest.mark.parametrize("inside", ["", "lib"])
def test_modules_in_a_zip_file_on_pythonpath_are_named(
    tmp_path: Path, inside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "more.zip" / inside
    with zipfile.ZipFile(tmp_path / "more.zip", "w") as packed:
        for name in ("wave.py", "ranker/__init__.py", "mine.py", "torch.py", "time.py"):
            packed.writestr(f"{inside}/{name}".lstrip("/"), "raise AssertionError\n")
    (tmp_path / "work").mkdir()
    said = refused(monkeypatch, tmp_path / "work", place)
    named = [line.partition(": processes of a run")[0] for line in said.splitlines()]
    assert named == [str(place / "ranker"), str(place / "wave.py")]
    assert "give it another name, or take the zip file off PYTHONPATH" in said
    with zipfile.ZipFile(tmp_path / "mine.zip", "w") as packed:
        packed.writestr("mine.py", "")
    (tmp_path / "notes.txt").write_text("no zip file")
    for path in (tmp_path / "mine.zip", tmp_path / "notes.txt", tmp_path / "gone.zip"):
        assert refused(monkeypatch, tmp_path / "work", path) == ""


def test_a_library_on_pythonpath_is_the_users_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "torch/__init__.py")
    (tmp_path / "work").mkdir()
    assert refused(monkeypatch, tmp_path / "work", tmp_path) == ""
    assert refused(monkeypatch, tmp_path, tmp_path) == ""
    # only processes that start in the folder would find it
    assert f"{tmp_path / 'torch'}: processes of a run" in refused(monkeypatch, tmp_path, ".")


def test_the_standard_library_on_pythonpath_is_let_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(monkeypatch, tmp_path, Path(os.__file__).parent) == ""
