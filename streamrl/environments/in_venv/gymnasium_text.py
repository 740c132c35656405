"""Environments of gymnasium as text: an observation becomes a message, an answer becomes an action.

What the model is told: the rendering as text where an environment has one ('ansi'), else the observation's numbers.
What it answers: the last name of an action that its answer contains (`actions`), or the last number; for an action of
several numbers, the last that many numbers. An answer without an action is told to the model and steps nothing.

By default such an answer has the lowest of 0, the step rewards of a random player at the start, and those of its own
episode, so that it is never better than acting. The random player draws the same actions in each process.

Keys of the config:
    kwargs          keyword arguments of `gymnasium.make`
    actions         names of the actions of a discrete space, from action 0 on
    instructions    the beginning of the first message; by default the names or the form of the actions
    digits          decimals of observed numbers (3)
    unreadable      reward of an answer without an action, in place of that default
"""

from __future__ import annotations

import importlib
import json
import math
import random
import re
import sys
import time
import traceback
from typing import Any

KEYS = {"kwargs", "actions", "instructions", "digits", "unreadable"}
TRIED_STEPS = 256
"""Steps of the random player at the start."""
TRIED_S = 5.0
"""Seconds after which it takes no further one."""
COLOURED = re.compile(r"\x1b\[[0-9;]*m(.*?)\x1b\[0m")
"""What a rendering marks, such as the place of the player."""
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")

OLD_STEP = "expected 5, got 4"
"""What Python says where a wrapper of gymnasium unpacks the four values of an old `step`."""
FIVE_VALUES = "step must return (observation, reward, terminated, truncated, info)"
OLDER = (
    ", got 4 values: an environment written for gym, or gymnasium before 0.26, returns (observation, reward, done, "
    "info); return done as terminated, and False as truncated"
)


def make(name: str, config: dict[str, Any]) -> GymnasiumEnvironment:
    """Check the config, and return what makes environments `gymnasium.make(name)`; see `_registered` for names."""
    if unknown := set(config) - KEYS:
        raise ValueError(f"unknown keys {sorted(unknown)}; known are {', '.join(sorted(KEYS))}")
    return GymnasiumEnvironment(name, config)


class GymnasiumEnvironment:
    """Makes environments of one id."""

    plays = False

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        gymnasium = importlib.import_module("gymnasium")
        self._config = config
        arguments = dict(config.get("kwargs") or {})
        self._name = _registered(name)
        modes = gymnasium.spec(self._name).entry_point
        modes = getattr(_imported(modes), "metadata", {}).get("render_modes", [])
        if "ansi" in modes and "render_mode" not in arguments:
            arguments["render_mode"] = "ansi"
        self._make = lambda: gymnasium.make(self._name, **arguments)
        self._lowest: float | None = None

    def new(self) -> GymnasiumEpisode:
        """Make one environment; before the first, find out what its steps cost at most."""
        if self._lowest is None and self._config.get("unreadable") is None:
            self._lowest = min(_random_rewards(self._make()))  # closed before the next one, which may need its port
        one = GymnasiumEpisode(self._make(), self._name, self._config)
        if self._lowest is not None:
            one.rewards_before = [self._lowest]
        return one


def _random_rewards(env: Any) -> list[float]:
    """Return 0 and the rewards of `TRIED_STEPS` random steps, or of those before one that fails or after `TRIED_S`;
    close the environment.

    Seeds are fixed: every process of a run finds the same, unless steps are slow.
    """
    rewards, episode, done = [0.0], 0, True
    until = time.monotonic() + TRIED_S
    try:
        env.action_space.seed(0)
        for _ in range(TRIED_STEPS):
            if time.monotonic() > until:
                break
            if done:
                env.reset(seed=episode)
                episode += 1
            _, reward, done = _stepped(env, env.action_space.sample())
            rewards.append(float(reward))
    except (Exception, SystemExit) as error:  # a random action may be one that no player takes; episodes say so
        print(
            f"the random player ended after {len(rewards) - 1} steps: {type(error).__name__}: {error}", file=sys.stderr
        )
    finally:
        env.close()
    return [one for one in rewards if math.isfinite(one)]


def _registered(name: str) -> str:
    """Return an id that gymnasium knows; of 'module:ID', the module is imported, which registers it.

    Raises:
        ValueError: nothing stands before or after the colon.
    """
    module, colon, of_module = name.partition(":")
    if not colon:
        return name
    if not module or not of_module:
        raise ValueError(f"{name!r}: expected an id of gymnasium, or module:ID")
    importlib.import_module(module)
    return of_module


def _imported(entry_point: Any) -> Any:
    if not isinstance(entry_point, str):
        return entry_point
    module, _, name = entry_point.partition(":")
    return getattr(importlib.import_module(module), name)


class GymnasiumEpisode:
    """One environment, which plays one episode after another."""

    def __init__(self, env: Any, name: str, config: dict[str, Any]) -> None:
        """
        Raises:
            TypeError: its actions are of a space that has no form as text.
            ValueError: there are more or fewer names than actions, or a name that no answer can choose.
        """
        self._env, self._digits = env, int(config.get("digits", 3))
        given = config.get("unreadable")
        self.unreadable = None if given is None else float(given)
        """Reward of an answer without an action; None: the lowest of `rewards_before` and of the episode so far."""
        self.rewards_before = [0.0]
        self._rewards: list[Any] = []
        self._names = [str(one).strip() for one in config.get("actions") or []]
        self._spoken = _Spoken(self._names)
        space, kind = env.action_space, type(env.action_space).__name__
        self._shape: tuple[int, ...] = ()
        if kind == "Discrete":
            self._first, self._count = int(space.start), int(space.n)
            if self._names and len(self._names) != self._count:
                raise ValueError(f"actions: {name} has {self._count}, got {len(self._names)} names")
            wanted = f"one of: {', '.join(self._names)}" if self._names else f"a number from {self._first} to "
            self._wanted = wanted if self._names else wanted + str(self._first + self._count - 1)
        elif kind in ("Box", "MultiDiscrete", "MultiBinary"):
            self._shape = tuple(space.shape)
            self._count = 1
            for size in self._shape:
                self._count *= int(size)
            self._wanted = f"{self._count} numbers"
            if kind == "Box":
                self._wanted += f" from {float(space.low.min()):g} to {float(space.high.max()):g}"
        else:
            raise TypeError(f"{name}: actions of space {kind} have no form as text; write an environment of your own")
        self._instructions = str(config.get("instructions") or f"You act in {name}. Answer with {self._wanted}.")

    def reset(self, item: dict[str, Any]) -> dict[str, Any]:
        """Begin an episode with the item's seed.

        Raises:
            TypeError: the environment's `reset` returns the observation alone, as before gymnasium 0.26.
            ValueError: the item has no seed.
        """
        if not isinstance(item.get("seed"), int):
            raise ValueError("the item has no whole number `seed`, from which the environment begins")
        observation = _observed(self._env.reset(seed=item["seed"] % 2**31))
        self._rewards = []
        return _said(f"{self._instructions}\n{self._shown(observation)}")

    def step(self, message: dict[str, Any]) -> dict[str, Any]:
        """Read the action from an answer, and act."""
        action = self.action(str(message.get("content") or ""))
        if action is None:
            told = _said(f"There is no action in your answer. Answer with {self._wanted}.")
            reward = self.unreadable
            if reward is None:
                reward = min(map(float, self.rewards_before + self._rewards))
            return {**told, "reward": reward, "done": False, "metrics": {"unreadable": 1}}
        observation, reward, done = _stepped(self._env, action)
        self._rewards.append(reward)
        return {**_said(self._shown(observation)), "reward": reward, "done": done, "metrics": {}}

    def action(self, answer: str) -> Any:
        """Return the action that an answer names; None: it names none."""
        if self._names:
            place = self._spoken.last(answer)
            return None if place is None else self._first + place
        numbers = [float(one) for one in NUMBER.findall(answer)]
        if not self._shape:
            last = int(numbers[-1]) if numbers and abs(numbers[-1]) < 2**31 else None
            return last if last is not None and self._first <= last < self._first + self._count else None
        if len(numbers) < self._count:
            return None
        numpy, space = importlib.import_module("numpy"), self._env.action_space
        action = numpy.array(numbers[-self._count :]).reshape(self._shape)
        if bounded := hasattr(space, "low"):
            action = numpy.clip(action, space.low, space.high)
        if not _fits(action, space.dtype):
            return None
        action = action.astype(space.dtype)
        return action if bounded or space.contains(action) else None

    def sample(self, draw: random.Random) -> str:
        """Return a valid answer at random."""
        self._env.action_space.seed(draw.randrange(2**31))
        action = self._env.action_space.sample()
        if self._names:
            return self._names[int(action) - self._first]
        return " ".join(f"{float(one):.{self._digits}f}".rstrip("0").rstrip(".") for one in _flat(action))

    def close(self) -> None:
        """Release what the environment holds."""
        self._env.close()

    def _shown(self, observation: Any) -> str:
        if self._env.render_mode == "ansi":
            text = self._env.render()
            return COLOURED.sub(r"[\1]", text if isinstance(text, str) else text.getvalue()).strip()
        return json.dumps(self._plain(observation)) if not isinstance(observation, str) else observation

    def _plain(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): self._plain(one) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._plain(one) for one in value]
        value = value.tolist() if hasattr(value, "tolist") else value
        if isinstance(value, list):
            return self._plain(value)
        return round(value, self._digits) if isinstance(value, float) else value


class _Spoken:
    """Finds names of actions in answers, whatever their case; a longer name goes before one that it begins with."""

    def __init__(self, names: list[str]) -> None:
        """
        Raises:
            ValueError: no answer can choose one of the names.
        """
        self._places = sorted(range(len(names)), key=lambda place: -len(names[place]))
        words = "|".join(rf"({re.escape(names[place])})" for place in self._places)
        self._pattern = re.compile(rf"(?<!\w)(?:{words})(?!\w)", re.IGNORECASE)
        for place, name in enumerate(names):
            if not name:
                raise ValueError(f"actions: the name of action {place} is empty, expected a text")
            if (found := self.last(name)) != place:
                other = "nothing" if found is None else f"{names[found]!r}, the name of action {found}"
                raise ValueError(f"actions: no answer can choose {name!r}: it is read as {other}")

    def last(self, answer: str) -> int | None:
        """Return the place of the last name that an answer contains; None: it contains none."""
        place = None
        for found in self._pattern.finditer(answer):
            place = self._places[(found.lastindex or 0) - 1]
        return place


def _observed(found: Any) -> Any:
    """Return the observation of what `reset` returned.

    Raises:
        TypeError: it is no (observation, info); an observation alone may have two parts as well.
    """
    if isinstance(found, (tuple, list)) and len(found) == 2 and hasattr(found[1], "keys"):
        return found[0]
    raise TypeError(
        f"reset must return (observation, info), info a dict, got {type(found).__name__} {found!r:.80}: an environment "
        "written for gym, or gymnasium before 0.26, returns the observation alone; add the info to it"
    )


def _stepped(env: Any, action: Any) -> tuple[Any, Any, bool]:
    """Act, and return the observation, the reward, and whether the episode has ended.

    Raises:
        TypeError: the environment's `step` returns something other than gymnasium's five values.
    """
    try:
        found = env.step(action)
    except ValueError as error:
        *_, last = traceback.walk_tb(error.__traceback__)
        if OLD_STEP in str(error) and last[0].f_globals.get("__name__", "").partition(".")[0] == "gymnasium":
            raise TypeError(FIVE_VALUES + OLDER) from error
        raise
    if isinstance(found, (tuple, list)) and len(found) == 5:
        return found[0], found[1], bool(found[2]) or bool(found[3])
    four = isinstance(found, (tuple, list)) and len(found) == 4
    raise TypeError(FIVE_VALUES + (OLDER if four else f", got {type(found).__name__} {found!r:.80}"))


def _fits(action: Any, dtype: Any) -> bool:
    """Whether numbers can be an action of a type.

    An environment that squares one, as many do for a reward, would make an infinite reward of a larger one: its episode
    would have no reward, in place of a bad one.
    """
    numpy = importlib.import_module("numpy")
    if dtype.kind == "f":
        return bool((abs(action) < float(numpy.finfo(dtype).max) ** 0.5).all())
    if dtype.kind not in "iu":
        return True
    limits = numpy.iinfo(dtype)
    return bool(((action >= limits.min) & (action < float(limits.max) + 1)).all())


def _flat(action: Any) -> list[Any]:
    return list(action.reshape(-1)) if getattr(action, "shape", ()) else [action]


def _said(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}
