"""What a package needs besides modules is in it, its version is named once, and the shell completes its commands."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from streamrl.cli.main import cli
from tests.cli.calling import streamrl

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_file_of_a_package_that_is_no_module_comes_with_the_wheel() -> None:
    declared = PROJECT["tool"]["setuptools"]["package-data"]
    for package in ("streamrl", "scheduler", "ranker"):
        files = [path for path in (ROOT / package).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        others = [str(path.relative_to(ROOT / package)) for path in files if path.suffix != ".py"]
        patterns = [pattern.removeprefix("**/") for pattern in declared.get(package, [])]
        assert [name for name in others if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)] == []


def test_links_in_the_package_lead_to_files_of_the_repository() -> None:
    links = [path for path in (ROOT / "streamrl").rglob("*") if path.is_symlink()]
    assert len(links) >= 4
    for link in links:
        assert link.resolve(strict=True).is_relative_to(ROOT) and not link.readlink().is_absolute()


def test_the_newest_entry_of_the_changes_is_the_version_of_the_package() -> None:
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None and newest[1] == PROJECT["project"]["version"]


@pytest.mark.parametrize(
    ("words", "begun", "expected"),
    [
        ([], "la", ["launch"]),
        (["launch"], "--res", ["--resume"]),
        (["schema"], "", ["cluster", "run"]),
        (["simulate", "--schedule"], "a", ["async"]),
    ],
)
def test_the_shell_completes_commands_options_and_choices(words: list[str], begun: str, expected: list[str]) -> None:
    shell = ShellComplete(cli, {}, "streamrl", "_STREAMRL_COMPLETE")
    assert [item.value for item in shell.get_completions(words, begun)] == expected


def test_the_command_answers_the_shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"_STREAMRL_COMPLETE": "bash_complete", "COMP_WORDS": "streamrl ini", "COMP_CWORD": "1"}.items():
        monkeypatch.setenv(name, value)
    assert streamrl(monkeypatch) == 0
    assert capsys.readouterr().out == "plain,init\n"
