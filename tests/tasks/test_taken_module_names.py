"""A module in the folder where a run is started takes no name from a module that the run imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.errors import UserError
from streamrl.tasks.user_functions import import_function
from tests.waiting import scaled

SCORES = "def score(prompt, completion, answer): return 1.0\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.mark.parametrize("name", ["scheduler", "ranker", "json", "sys"])
@pytest.mark.parametrize("package", [False, True])
def test_a_function_of_a_module_whose_name_is_taken_is_refused_with_the_file(
    folder: Path, name: str, package: bool
) -> None:
    own = folder / name / "__init__.py" if package else folder / f"{name}.py"
    own.parent.mkdir(exist_ok=True)
    own.write_text(SCORES)
    with pytest.raises(UserError, match=rf"^reward: the name '{name}' is taken by .*: give {own} another name"):
        import_function(f"{name}:score", "reward")


def test_a_function_of_the_folder_is_found_behind_all_modules(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "rewards_of_mine.py").write_text(SCORES)
    try:
        assert import_function("rewards_of_mine:score", "reward")("", "", "") == 1.0
        assert import_function("rewards_of_mine:score", "reward")  # it is imported by now
    finally:
        del sys.modules["rewards_of_mine"]
    assert sys.path[-1] == str(folder)


def test_a_role_imports_its_own_modules_beside_files_of_their_names(folder: Path) -> None:
    from streamrl.runtime.process_plan import _role_command

    for name in ("scheduler", "ranker", "queue", "streamrl"):
        (folder / f"{name}.py").write_text("raise SystemExit(f'{__name__} of the folder')")
    command = _role_command(folder, "controller")
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(60))
    assert "LAST WORDS: " in done.stderr and "of the folder" not in done.stderr
