"""Installation of environments: a venv and a lock for each, and nothing half-made when it fails."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click.testing
import pytest

from streamrl.cli.env import command
from streamrl.environments import installed
from streamrl.environments.installed import add_environment, find_environment, list_environments, remove_environment
from streamrl.errors import RunFailed, UserError
from tests.environments.own_environment import CODE, install


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STREAMRL_ENVIRONMENTS", str(tmp_path / "environments"))
    return tmp_path / "environments"


def test_it_is_found_by_name_or_folder_and_removed_whole(folder: Path) -> None:
    added = install(folder.parent)
    assert find_environment("room") == find_environment(str(folder / "room")) == added == list_environments(folder)[0]
    assert added.python.exists() and (folder / "room" / "requirements.lock").read_text() == ""
    with pytest.raises(UserError, match="already installed"):
        install(folder.parent)
    with pytest.raises(UserError, match=r"'maze' is not installed in .* \(installed there: room\); streamrl env add"):
        find_environment("maze")
    with pytest.raises(UserError, match="has no program 'server'"):
        added.program("server")
    remove_environment(folder / "room")
    assert list_environments(folder) == [] and not (folder / "room").exists()


def test_a_package_that_cannot_be_installed_leaves_nothing_and_pips_own_words(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def run(arguments: list[str], what: str) -> str:
        calls.append(arguments)
        if "venv" in arguments:
            return real(["mkdir", "-p", arguments[-1]], what)
        return real(["sh", "-c", "echo ERROR: No matching distribution found for nix >&2; exit 1"], what)

    real = installed._run
    monkeypatch.setattr(installed, "_run", run)
    with pytest.raises(UserError, match=r"(?s)pip install nix failed; nothing was installed.*No matching distribution"):
        add_environment(folder / "broken", "module:function", ["nix"])
    assert calls[0][1:3] == ["-m", "venv"] and "--without-pip" not in calls[0]
    assert not (folder / "broken").exists() and list_environments(folder) == []


@pytest.mark.parametrize(("make", "words"), [("nomodule:make", "No module named 'nomodule'"), ("one:nix", "'nix'")])
def test_a_module_that_cannot_be_imported_is_told_when_it_is_added(folder: Path, make: str, words: str) -> None:
    (folder.parent / "one.py").write_text("")
    with pytest.raises(UserError, match=f"(?s)the import of {make} failed; nothing was installed.*{words}"):
        add_environment(folder / "bad", make, paths=[folder.parent])
    assert list_environments(folder) == []


def test_a_name_that_cannot_be_one_is_refused_before_anything_is_said(folder: Path) -> None:
    done = click.testing.CliRunner().invoke(command, ["add", "b/ad", "--make", "one:make"])
    assert isinstance(done.exception, UserError) and "making a venv" not in done.output


def test_what_an_interrupted_installation_has_left_is_replaced_and_anything_else_kept(folder: Path) -> None:
    (folder / "room" / "venv" / "old").mkdir(parents=True)
    assert list_environments(folder) == []
    assert not (install(folder.parent).folder / "venv" / "old").exists()
    (folder / "mine").mkdir()
    (folder / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(UserError, match=r"is no environment: it holds 'thesis.txt'"):
        install(folder.parent, name="mine")
    with pytest.raises(UserError, match=r"holds 'thesis.txt'; nothing was removed"):
        remove_environment(folder / "mine")
    assert (folder / "mine" / "thesis.txt").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["../up", "--make", "a:b"], "'../up' is no name of an environment"),
        (["-x"], "No such option"),
        (["room", "--make", "gymnasium"], "expected gymnasium:ID, verifiers:ID, mcp:PROGRAM, mcp:URL"),
        (["room", "--make", "a:b", "--path", "nowhere"], "--path nowhere: there is no such folder"),
        (["room", "--make", "a:b", "--config", "[1]"], "--config must be a JSON object, got list"),
        (["room", "--make", "a:b", "--lock", "nowhere"], "--lock nowhere: there is no such file"),
        (["room", "--make", "a:b", "--", "--index-url=x"], "is no package; options of pip belong"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_made(folder: Path, arguments: list[str], text: str) -> None:
    done = click.testing.CliRunner().invoke(command, ["add", *arguments])
    assert done.exit_code != 0 and not folder.exists()
    assert re.search(text, str(done.exception) + done.output)


def test_a_folder_that_cannot_be_written_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder.parent / "file").write_text("")
    with pytest.raises(UserError, match=r"environment 'room': cannot write .*file/envs: Not a directory"):
        add_environment(folder.parent / "file" / "envs" / "room", "")

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(folder / "room"))

    for name in ("_install", "shutil.rmtree"):
        (folder / "room").mkdir(parents=True, exist_ok=True)
        with monkeypatch.context() as patch:
            patch.setattr(f"streamrl.environments.installed.{name}", refused)
            with pytest.raises(UserError, match=r"environment 'room': cannot write .*room: Permission denied"):
                (add_environment(folder / "room", "") if name == "_install" else remove_environment(folder / "room"))


def test_the_commands_add_list_test_and_remove(folder: Path) -> None:
    def call(*arguments: str) -> str:
        done = click.testing.CliRunner().invoke(command, arguments)
        if done.exception is not None:
            raise done.exception
        return done.output

    folder.parent.joinpath("own_room.py").write_text(CODE)
    said = call("add", "room", "--make", "own_room:make", "--path", str(folder.parent), "--config", '{"a": 1}')
    assert "0 packages" in said and "streamrl env test room" in said
    assert json.loads((folder / "room" / "environment.json").read_text())["config"] == {"a": 1}
    assert "own_room:make" in call("list")
    said = call("test", "room", "--episodes", "4", "--processes", "1")
    assert "4: 4 ended, 0 cut, 0 failed" in said and "no problem found" in said
    with pytest.raises(RunFailed, match="4 of 4 episodes failed: a process of environment 'room' ended: exit code 9"):
        call("test", "room", "--episodes", "4", "--processes", "1", "--answer", "die")
    assert "removed" in call("remove", "room")
    assert "no environments" in call("list")
