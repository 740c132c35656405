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
from streamrl.environments.environment_trial import try_environment
from streamrl.environments.in_venv import gymnasium_text
from streamrl.environments.in_venv.gymnasium_text import GymnasiumEpisode, make
from streamrl.environments.installed import add_environment
from streamrl.errors import UserError
from streamrl.runtime.output_pipe import OutputLog
from tests.waiting import scaled

GYMNASIUM = """
import random
import types

registry = {}

class Discrete:
    start = 0
    def __init__(self, n):
        self.n = n
    def seed(self, seed):
        self.random = random.Random(seed)
    def sample(self):
        return self.random.randrange(self.n)

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

def unpacked(*found):
    observation, reward, terminated, truncated, info = found
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

class Cliff(gymnasium.Counted):
    # each action costs 1, the last one 7; action 1 with seed 99 costs 9
    def reset(self, seed):
        self.seed = seed
        return super().reset(seed)
    def step(self, action):
        reward = -9 if (self.seed, action) == (99, 1) else -7 if action == 3 else -1
        return "walked", reward, False, False, {}

class Illegal(Cliff):
    def step(self, action):
        raise RuntimeError("illegal move")

class Quits(Cliff):
    def step(self, action):
        raise SystemExit("no more")

class Alone(Cliff):
    opened = 0
    def __init__(self):
        super().__init__()
        if Alone.opened:
            raise BlockingIOError("the port is taken")
        Alone.opened = 1

    def close(self):
        Alone.opened = 0

class Old(Cliff):
    def __init__(self, observation):
        super().__init__()
        self.observation = observation

    def reset(self, seed):
        super().reset(seed)
        return self.observation

class OldStep(Cliff):
    def __init__(self, found):
        super().__init__()
        self.found = found

    def step(self, action):
        if self.found == "its own":
            gone, too, are, all, five = range(4)
        return gymnasium.unpacked(0, 1.0, False, {}) if self.found == "wrapped" else self.found

gymnasium.register("Old-v0", Old)
gymnasium.register("OldStep-v0", OldStep)
gymnasium.register("Cliff-v0", Cliff)
gymnasium.register("Quits-v0", Quits)
gymnasium.register("Alone-v0", Alone)
gymnasium.register("Illegal-v0", Illegal)
"""
OWN_NUMBERS = """
import gymnasium
import numpy

class Box:
    def __init__(self, dtype, low, high):
        self.dtype, self.shape = numpy.dtype(dtype), (2,)
        self.low, self.high = numpy.full(2, low, dtype), numpy.full(2, high, dtype)

class MultiDiscrete:
    dtype, shape = numpy.dtype("int8"), (2,)
    def contains(self, action):
        return bool(((action >= 0) & (action < 5)).all())

class Numbers(gymnasium.Counted):
    def __init__(self, space, arguments=()):
        super().__init__()
        self.action_space = {"Box": Box, "MultiDiscrete": MultiDiscrete}[space](*arguments)

gymnasium.register("Numbers-v0", Numbers)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path of modules, with the stand-in."""
    (tmp_path / "gymnasium.py").write_text(GYMNASIUM)
    (tmp_path / "own_games.py").write_text(OWN_GAMES)
    (tmp_path / "own_numbers.py").write_text(OWN_NUMBERS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "gymnasium", raising=False)
    yield tmp_path
    for name in ("gymnasium", "own_games", "own_numbers"):
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


INFINITE = float("inf")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("space", "arguments", "answer", "action"),
    [
        ("Box", ("float32", -INFINITE, INFINITE), "1e18 -2", [1e18, -2]),
        ("Box", ("float32", -INFINITE, INFINITE), "1 1e999", None),
        ("Box", ("float32", -INFINITE, INFINITE), "1 -1e30", None),  # its square is infinite
        ("Box", ("float64", -INFINITE, INFINITE), "1 1e30", [1, 1e30]),
        ("Box", ("float32", -1, 1), "1e999 -1e30", [1, -1]),
        ("Box", ("int64", 0, 2**63 - 1), "7 1e30", None),
        ("Box", ("uint8", 0, 255), "-3 1e30", [0, 255]),
        ("Box", ("bool", 0, 1), "0 7", [0, 1]),
        ("MultiDiscrete", (), "4 0", [4, 0]),
        ("MultiDiscrete", (), "4 257", None),  # 1 in eight bits
        ("MultiDiscrete", (), "4 1e999", None),
    ],
)
def test_numbers_that_an_action_cannot_have_are_no_action(
    space: str, arguments: tuple[Any, ...], answer: str, action: list[float] | None
) -> None:
    config = {"kwargs": {"space": space, "arguments": arguments}, "unreadable": 0}
    found = make("own_numbers:Numbers-v0", config).new().action(answer)
    assert (None if found is None else found.tolist()) == (None if action is None else pytest.approx(action))


def say(one: GymnasiumEpisode, text: str) -> float:
    return float(one.step({"content": text})["reward"])


@pytest.mark.usefixtures("folder")
def test_an_answer_without_an_action_is_never_better_than_acting() -> None:
    made = make("own_games:Cliff-v0", {})
    one = made.new()
    one.reset({"seed": 99})
    assert [say(one, text) for text in ("well", "0", "well", "1", "well")] == [-7, -1, -7, -9, -9]
    one.reset({"seed": 99})
    assert [say(one, "well"), say(made.new(), "well")] == [-7, -7]  # another episode's cost is not known
    assert say(make("Counted-v1", {}).new(), "well") == 0  # each step gives 1
    assert say(make("own_games:Cliff-v0", {"unreadable": -2}).new(), "well") == -2


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("observation", ["ab", (1.5, 2.5), [3, 4], {"at": 1, "to": 2}, "a", (0, {}, {})])
def test_a_reset_that_returns_the_observation_alone_is_refused(observation: object) -> None:
    one = make("own_games:Old-v0", {"kwargs": {"observation": observation}}).new()
    with pytest.raises(
        TypeError, match=r"reset must return \(observation, info\), info a dict, got .*the observation alone"
    ):
        one.reset({"seed": 1})


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("found", "told"),
    [
        ((0, 1.0, False, {}), "got 4 values: an environment written for gym, or gymnasium before 0.26, returns"),
        ("wrapped", "got 4 values: an environment written for gym"),  # by a wrapper of gymnasium, which unpacks them
        ("12345", "got str '12345'"),
        ((0, 1.0), r"got tuple \(0, 1.0\)"),
    ],
)
def test_a_step_that_returns_something_other_than_five_values_is_refused(found: object, told: str) -> None:
    one = make("own_games:OldStep-v0", {"kwargs": {"found": found}}).new()
    one.reset({"seed": 1})
    with pytest.raises(TypeError, match=rf"step must return \(observation, .*, truncated, info\), {told}"):
        say(one, "3")


@pytest.mark.usefixtures("folder")
def test_an_environments_own_mistake_is_not_taken_for_an_old_step() -> None:
    with pytest.raises(ValueError, match="expected 5, got 4"):
        say(make("own_games:OldStep-v0", {"kwargs": {"found": "its own"}}).new(), "3")


@pytest.mark.usefixtures("folder")
def test_a_random_player_that_fails_ends_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert say(make("own_games:Illegal-v0", {}).new(), "well") == 0
    assert "the random player ended after 0 steps: RuntimeError: illegal move" in capsys.readouterr().err


@pytest.mark.usefixtures("folder")
def test_a_random_player_holds_up_no_start(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert say(make("own_games:Alone-v0", {}).new(), "well") == -7  # one at a time
    assert say(make("own_games:Quits-v0", {}).new(), "well") == 0
    assert "the random player ended after 0 steps: SystemExit: no more" in capsys.readouterr().err
    monkeypatch.setattr(gymnasium_text, "TRIED_S", -1.0)
    assert say(make("own_games:Cliff-v0", {}).new(), "well") == 0


def test_a_trial_reports_an_answer_without_an_action_that_is_better_than_acting(folder: Path) -> None:
    installed = add_environment(folder / "environments" / "cliff", "gymnasium:own_games:Cliff-v0", paths=[folder])

    async def problems(*answers: str, **config: Any) -> list[str]:
        use = EnvironmentUse(name="cliff", config=config, processes=1)
        pool = EnvironmentPool(use, installed, OutputLog(None), scaled(20), scaled(20))
        await pool.start()
        try:
            return (await try_environment(pool, 2, 4, answers)).problems()
        finally:
            await pool.close()

    (told,) = asyncio.run(problems("0", "well", "3", unreadable=-2.5))
    assert told.startswith("an answer without an action has reward -2.5, and acting may have -7")
    (above,) = asyncio.run(problems("well", unreadable=1))
    assert "reward 1, and acting may have 0" in above
    assert asyncio.run(problems("0", "3", unreadable=-7)) == asyncio.run(problems("well", "3")) == []
