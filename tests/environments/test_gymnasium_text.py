"""Environments of gymnasium as text, with a module that stands in for gymnasium: answers become actions."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamrl.config.tasks import EnvironmentUse
from streamrl.environments.environment_pool import EnvironmentPool
from streamrl.environments.in_venv.gymnasium_text import GymnasiumEpisode, make
from streamrl.environments.installed import add_environment
from streamrl.errors import UserError
from streamrl.runtime.output_pipe import OutputLog
from tests.waiting import scaled

GYMNASIUM = """
import types

registry = {}

class Discrete:
    start = 0
    def __init__(self, n):
        self.n = n

class Counted:
    metadata = {"render_modes": []}
    render_mode = None
    def __init__(self, n=4):
        self.action_space = Discrete(n)
    def reset(self, seed):
        return "begun", {}
    def step(self, action):
        return f"action {action}", 1.0, True, False, {}
    def close(self):
        pass

def register(name, entry_point):
    registry[name] = types.SimpleNamespace(entry_point=entry_point)

def spec(name):
    if name not in registry:
        raise LookupError(f"Environment `{name}` doesn't exist.")
    return registry[name]

def make(name, **arguments):
    return spec(name).entry_point(**arguments)

register("Counted-v1", Counted)
"""
OWN_GAMES = """
import gymnasium

class Loud(gymnasium.Counted):
    metadata = {"render_modes": ["human", "ansi"]}
    def __init__(self, render_mode=None, n=2):
        super().__init__(n)
        self.render_mode = render_mode
    def render(self):
        return "shown"

gymnasium.register("own/Loud-v0", Loud)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path of modules, with the stand-in."""
    (tmp_path / "gymnasium.py").write_text(GYMNASIUM)
    (tmp_path / "own_games.py").write_text(OWN_GAMES)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "gymnasium", raising=False)
    yield tmp_path
    for name in ("gymnasium", "own_games"):
        sys.modules.pop(name, None)


def episode(names: list[Any], **config: Any) -> GymnasiumEpisode:
    return make("Counted-v1", {"actions": names, "kwargs": {"n": len(names)}, **config}).new()


FIRING = ["fire", "left", "fire left", "noop"]
SIGNS = ["+", "->", "?", "++"]


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("names", "answer", "action"),
    [
        (FIRING, "I fire left", 2),
        (FIRING, "Fire LEFT!", 2),
        (FIRING, "fire, left", 1),
        (FIRING, "fire left, no: fire", 0),
        (FIRING, "misfire leftover", None),
        (FIRING, "fire lefty", 0),
        (SIGNS, "+", 0),
        (SIGNS, "I choose ->.", 1),
        (SIGNS, "what ? no, ++", 3),
        (SIGNS, "why?", None),
        (SIGNS, "a+b", None),
        (["\u017f", "t"], "S", 0),
    ],
)
def test_the_last_whole_name_in_an_answer_is_the_action(names: list[str], answer: str, action: int | None) -> None:
    assert episode(names).action(answer) == action


@pytest.mark.usefixtures("folder")
def test_every_name_that_is_taken_can_be_answered() -> None:
    for names in (FIRING, SIGNS, ["a", "ab", "abc", "a b"], [" padded ", "1", "-1", "x-"]):
        one = episode(names)
        assert [one.action(name.strip()) for name in names] == list(range(len(names)))


@pytest.mark.usefixtures("folder")
def test_names_that_no_answer_can_choose_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no answer can choose 'left': it is read as 'Left', the name of action 0"):
        episode(["Left", "right", "left"])
    with pytest.raises(ValueError, match="the name of action 1 is empty, expected a text"):
        episode(["left", " "])


@pytest.mark.usefixtures("folder")
def test_an_environment_of_a_module_is_registered_by_importing_it() -> None:
    with pytest.raises(LookupError, match="`own/Loud-v0` doesn't exist"):
        make("own/Loud-v0", {})
    began = make("own_games:own/Loud-v0", {"kwargs": {"n": 3}}).new().reset({"seed": 1})
    told = "You act in own/Loud-v0. Answer with a number from 0 to 2.\nshown"  # as its class renders text
    assert began == {"messages": [{"role": "user", "content": told}]}


@pytest.mark.usefixtures("folder")
def test_a_name_that_names_no_module_or_no_environment_is_refused() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_games"):
        make("no_such_games:Loud-v0", {})
    with pytest.raises(LookupError, match="`Quiet-v0` doesn't exist"):
        make("own_games:Quiet-v0", {})
    for name in (":Loud-v0", "own_games:"):
        with pytest.raises(ValueError, match=f"'{name}': expected an id of gymnasium, or module:ID"):
            make(name, {})


def test_a_start_and_so_env_test_report_a_name_that_no_answer_can_choose(folder: Path) -> None:
    installed = add_environment(folder / "environments" / "loud", "gymnasium:own_games:own/Loud-v0", paths=[folder])
    config = {"actions": ["up", "down", "UP"], "kwargs": {"n": 3}}

    async def scenario() -> None:
        pool = EnvironmentPool(
            EnvironmentUse(name="loud", config=config), installed, OutputLog(None), scaled(20), scaled(20)
        )
        try:
            await pool.start()
        finally:
            await pool.close()

    with pytest.raises(UserError, match="'loud' does not start: ValueError: actions: no answer can choose 'UP'"):
        asyncio.run(scenario())
