"""A trial of an environment without a model: random or given answers, and what it costs and does wrong."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from streamrl.environments.environment_pool import GIB, EnvironmentPlace, EnvironmentPool
from streamrl.environments.environment_process import EnvironmentEnded, EnvironmentFailed

ROUNDS = 4
"""Parts of a trial, after each of which memory is looked at."""
LEAK_MIB = 16.0
"""Growth from the second part to the last from which a leak is suspected; the first part fills caches."""


@dataclass
class EnvironmentTrial:
    """What a trial has found; times in seconds."""

    resets: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    """Sum of the rewards of each episode."""
    lowest_step: float = math.inf
    """Lowest reward of a step in which the environment acted."""
    unreadable: float | None = None
    """Reward of an answer without an action, if the config of a gymnasium environment names one."""
    ended: int = 0
    """Episodes that the environment ended by itself."""
    cut: int = 0
    """Episodes that had used up their steps."""
    failures: Counter[str] = field(default_factory=Counter)
    """Episodes that failed, by the text of the failure."""
    memory_gib: list[float] = field(default_factory=list)
    """Memory of the processes together, after each part."""
    same_seed_differs: bool = False
    """Whether two resets from one item gave different messages: a group would compare different problems."""
    restarts: int = 0
    left_out: int = 0
    """Episodes for which there was no time."""

    def problems(self) -> list[str]:
        """Return what is wrong with the environment, one sentence each."""
        found = [f"{count} of {self.episodes} episodes failed: {text}" for text, count in self.failures.most_common(5)]
        if self.same_seed_differs:
            found.append("the same item begins differently each time: make what is random from its `seed`")
        lowest = min(0.0, self.lowest_step)
        if self.unreadable is not None and self.unreadable > lowest:
            found.append(
                f"an answer without an action has reward {self.unreadable:g}, and acting may have {lowest:g}, so that "
                f"a model may learn not to act: set `unreadable` to {lowest:g} or less, or leave it out"
            )
        if len(self.memory_gib) > 2 and not self.failures:
            grown = 1024 * (self.memory_gib[-1] - self.memory_gib[1])
            if grown > LEAK_MIB and self.memory_gib[-1] > self.memory_gib[-2] > self.memory_gib[1]:
                found.append(f"memory grew by {grown:.0f} MiB in the last {self.episodes // 2} episodes: does it leak?")
        return found

    @property
    def episodes(self) -> int:
        """Number of episodes that were begun."""
        return self.ended + self.cut + self.failures.total()


async def try_environment(
    pool: EnvironmentPool,
    episodes: int,
    most_steps: int,
    answers: Sequence[str] = (),
    at_once: int = 8,
    seconds: float = float("inf"),
) -> EnvironmentTrial:
    """Play episodes in a pool that has been started.

    Args:
        pool: the processes of an environment that steps.
        episodes: number of episodes.
        most_steps: after which an episode is given up.
        answers: given in turn, as long as an episode goes on; empty: random ones that the environment proposes.
        at_once: episodes that go on at once.
        seconds: after which no further episode begins, and those that go on are cut.
    """
    config = {**pool.installed.config, **pool.use.config}
    unreadable = config.get("unreadable") if pool.installed.make.startswith("gymnasium:") else None
    trial = EnvironmentTrial(unreadable=None if unreadable is None else float(unreadable))
    end = time.monotonic() + seconds
    limit = asyncio.Semaphore(at_once)

    async def one(number: int) -> None:
        async with limit:
            if time.monotonic() > end:
                trial.left_out += 1
                return
            try:
                async with pool.place(f"trial-{number}") as place:
                    await _play(trial, place, number, most_steps, answers, end)
            except (EnvironmentFailed, EnvironmentEnded) as error:
                trial.failures[str(error)] += 1

    for part in range(ROUNDS):
        numbers = range(part * episodes // ROUNDS, (part + 1) * episodes // ROUNDS)
        await asyncio.gather(*(one(number) for number in numbers))
        trial.memory_gib.append(pool.memory() / GIB)
    trial.restarts = pool.restarts
    return trial


async def _play(
    trial: EnvironmentTrial, place: EnvironmentPlace, number: int, most_steps: int, answers: Sequence[str], end: float
) -> None:
    item = {"prompt": f"trial {number}", "index": number, "seed": number, "answer": ""}
    began = await place.reset(item)
    if number == 0:
        again = await place.reset(item)
        trial.same_seed_differs = began.result["messages"] != again.result["messages"]
    reward, done = 0.0, False
    trial.resets.append(began.took_s)
    for turn in range(most_steps):
        text = answers[turn % len(answers)] if answers else await place.sample(1000 * number + turn)
        found = await place.step({"role": "assistant", "content": text})
        trial.steps.append(found.took_s)
        reward += found.result["reward"]
        if not found.result["metrics"].get("unreadable"):
            trial.lowest_step = min(trial.lowest_step, found.result["reward"])
        if (done := found.result["done"]) or time.monotonic() > end:
            break
    trial.rewards.append(reward)
    trial.ended += done
    trial.cut += not done


def summary(trial: EnvironmentTrial) -> list[tuple[str, str]]:
    """Return a trial's figures as rows of a table: what, and how much."""
    rows = [
        ("episodes", f"{trial.episodes}: {trial.ended} ended, {trial.cut} cut, {trial.failures.total()} failed"),
        ("reset", _times(trial.resets)),
        ("step", _times(trial.steps)),
    ]
    if trial.rewards:
        low, high = min(trial.rewards), max(trial.rewards)
        rows.append(("reward", f"mean {statistics.mean(trial.rewards):.3f}, from {low:.3g} to {high:.3g}"))
    if trial.memory_gib:
        rows.append(("memory", f"{trial.memory_gib[-1]:.2f} GiB (after a quarter: {trial.memory_gib[0]:.2f})"))
    if trial.left_out:
        rows.append(("no time for", f"{trial.left_out} episodes"))
    if trial.restarts:
        rows.append(("processes replaced", str(trial.restarts)))
    return rows


def _times(seconds: list[float]) -> str:
    if not seconds:
        return "none"
    ordered = sorted(1000 * one for one in seconds)
    most = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    middle = statistics.median(ordered)
    return f"{len(ordered)} times, median {middle:.2f} ms, 95 % within {most:.2f}, longest {ordered[-1]:.2f}"
