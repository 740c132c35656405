"""An agent task in the run file: one way to play, one source of items, and an agent that can be called."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from streamrl.agents.agent_function import load_agent
from streamrl.config.load import load_run
from streamrl.config.run import RunConfig
from streamrl.config.tasks import AgentTask
from streamrl.environments.installed import add_environment
from streamrl.errors import UserError
from streamrl.launcher.preflight import check_tasks

GOOD = {"kind": "agent", "name": "mine", "run": "some_agents:good", "items": "some_agents:items"}
AGENTS = """
def items(index, seed): return {"prompt": "p"}
async def good(task, client): return 1.0
class Played:
    async def __call__(self, task, client): return 1.0
played = Played()
def ordinary(task, client): return 1.0
async def lonely(task): return 1.0
async def greedy(task, client, tools): return 1.0
import functools
preset = functools.partial(greedy, tools=[])
"""


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_agents.py").write_text(AGENTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # without the folders of other tests
    monkeypatch.delitem(sys.modules, "some_agents", raising=False)


def task(**changes: Any) -> AgentTask:
    return AgentTask.model_validate({name: value for name, value in {**GOOD, **changes}.items() if value is not None})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"run": None}, "needs one of `run`, `command` and `environment`, got none"),
        ({"command": ["true"]}, "needs one of `run`, `command` and `environment`, got run and command"),
        ({"environment": {"name": "maze"}}, "got run and environment"),
        ({"run": None, "environment": {"name": "maze", "processes": 0}}, "greater than or equal to 1"),
        ({"run": None, "items": None, "environment": {"name": "m"}, "answer_column": "a"}, "belong to `path`"),
        ({"items": None}, "needs either `path` or `items`, got neither"),
        ({"path": "a.jsonl"}, "needs either `path` or `items`, got both"),
        ({"items": None, "path": "a.jsonl", "count": 3}, "`count` belongs to `items`"),
        ({"prompt_column": "question"}, "prompt_column and answer_column belong to `path`"),
        ({"answer_column": "solution"}, "prompt_column and answer_column belong to `path`"),
        ({"run": None, "command": []}, "at least 1 item"),
        ({"max_turns": 0}, "greater than or equal to 1"),
        ({"deadlines": {"tool_s": 0}}, "greater than 0"),
        ({"deadlines": {"tools": 3}}, "Extra inputs are not permitted"),
    ],
)
def test_what_contradicts_itself_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        task(**changes)


def test_a_wrong_agent_task_of_a_run_file_is_named_by_its_place(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "model: {path: m}\ntasks: [{kind: agent, name: mine, run: 'a:b', items: 'a:b', max_turn: 3}]\n"
    )
    with pytest.raises(UserError, match=r"unknown key 'tasks\.0\.max_turn'; did you mean 'max_turns'"):
        load_run(tmp_path / "run.yaml")


@pytest.mark.parametrize("run", ["some_agents:good", "some_agents:played", "some_agents:preset"])
def test_a_coroutine_is_an_agent(run: str) -> None:
    assert load_agent(task(run=run)) is not None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"run": "good"}, "task 'mine': run 'good': expected 'module:function'"),
        ({"run": "some_agents:god"}, "run 'some_agents:god': cannot be imported: AttributeError"),
        ({"run": "no_agents:good"}, "cannot be imported: ModuleNotFoundError"),
        ({"run": "some_agents:ordinary"}, r"must be a coroutine: async def f\(task, client\)"),
        ({"run": "some_agents:Played"}, "must be a coroutine"),
        ({"run": "some_agents:AGENTS"}, "cannot be imported"),
        ({"run": "some_agents:lonely"}, r"must be callable as f\(task, client\): too many positional"),
        ({"run": "some_agents:greedy"}, r"must be callable as f\(task, client\): missing a required argument: 'tools'"),
        ({"run": None, "command": ["no-such-agent", "-x"]}, "command: there is no program 'no-such-agent'"),
    ],
)
def test_an_agent_that_cannot_be_called_is_refused_before_anything_starts(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        load_agent(task(**changes))


def test_the_check_before_a_run_names_the_task_that_is_wrong(tmp_path: Path) -> None:
    text = "model: {path: m}\ntasks:\n- {kind: agent, name: a, run: 'some_agents:good', items: 'some_agents:items'}\n"
    text += "- {kind: agent, name: b, run: 'some_agents:ordinary', items: 'some_agents:items'}\n"
    (tmp_path / "run.yaml").write_text(text)
    (problem,) = check_tasks(load_run(tmp_path / "run.yaml"))
    assert problem.startswith("tasks.1: task 'b': run 'some_agents:ordinary' must be a coroutine")


@pytest.mark.parametrize(
    ("make", "source", "got"),
    [
        ("gymnasium:Lake-v1", {"path": "seeded.jsonl"}, None),
        ("gymnasium:Lake-v1", {"path": "partly.jsonl"}, "item game/2 needs a whole number `seed`, .* got none"),
        ("gymnasium:Lake-v1", {"path": "floats.jsonl"}, "item game/0 needs .* environment '.*lake' begins, got 3.0"),
        ("gymnasium:Lake-v1", {"items": "some_agents:items"}, "item game/.* got none"),
        ("gymnasium:Lake-v1", {}, None),
        ("some_lake:make", {"path": "floats.jsonl"}, None),
        ("verifiers:lake", {"path": "seeded.jsonl"}, None),
        ("verifiers:lake", {"path": "partly.jsonl"}, "item game/2 needs a whole number `index`, the place .* got none"),
        ("verifiers:lake", {}, None),
    ],
)
def test_items_without_the_number_that_their_environment_needs_are_refused_before_anything_starts(
    tmp_path: Path, make: str, source: dict[str, str], got: str | None
) -> None:
    add_environment(tmp_path / "venvs" / "lake", make)
    for name, values in {"seeded": [1, 2**40], "partly": [1, 2, None], "floats": [3.0]}.items():
        rows = [{"prompt": "p"} | ({} if value is None else {"seed": value, "index": value}) for value in values]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    played = {"kind": "agent", "name": "game", "environment": {"name": str(tmp_path / "venvs" / "lake")}, **source}
    run = RunConfig.model_validate({"model": {"path": "m"}, "tasks": [played]})
    problems = "".join(check_tasks(run, rendered=False))
    assert re.fullmatch("" if got is None else f"tasks.0: task 'game': {got}", problems)
    assert list(check_tasks(run, rendered=False, resumed=True)) == []


def test_rows_that_are_too_large_for_a_program_are_refused_before_anything_starts(tmp_path: Path) -> None:
    rows = [{"prompt": "p"}, {"prompt": "p", "table": "é" * 70_000}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    played = {"kind": "agent", "name": "game", "command": ["env"], "path": str(tmp_path / "rows.jsonl")}
    run = RunConfig.model_validate({"model": {"path": "m"}, "tasks": [played]})
    (problem,) = check_tasks(run, rendered=False)
    assert re.search(r"^tasks\.0: task 'game': item game/1: the item has 140,0\d\d bytes; .* takes 131,056; ", problem)
    assert list(check_tasks(run, rendered=False, resumed=True)) == []
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0]))
    assert list(check_tasks(run, rendered=False)) == []


@pytest.mark.parametrize(
    ("training", "held_out", "by_user"),
    [
        (GOOD, {"kind": "reasoning_gym", "name": "chain_sum"}, True),
        ({"kind": "reasoning_gym", "name": "chain_sum"}, GOOD, True),
        ({**GOOD, "items": None, "path": "rows.jsonl"}, {"kind": "reasoning_gym", "name": "chain_sum"}, False),
    ],
)
def test_it_is_known_whether_the_users_code_makes_items(
    training: dict[str, Any], held_out: dict[str, Any], by_user: bool
) -> None:
    run = RunConfig.model_validate(
        {"model": {"path": "m"}, "tasks": [training], "evaluation": {"tasks": [held_out], "every": 1}}
    )
    assert run.items_by_users_code == by_user
