"""Episodes that an environment plays with the model: its messages, the model's answers, and the sum of its rewards.

    the environment says that it is over            -> reward: the sum of all rewards
    `max_turns` or the context are used up          -> the sum so far; metric `cut` is 1
    it raises, or returns something of a wrong type -> void, cause environment
    a sum is not finite, or it has too many metrics -> void, cause environment
    a reset or step exceeds `deadlines.tool_s`      -> void, cause timeout
    its process ends                                -> void for the episode that it stepped; others are played again
    a metric of its own has the name of one of ours -> recorded as `own_NAME`

Each episode steps as soon as its own turn has ended, while the model generates turns of other episodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx2

from streamrl.agents.agent_result import outcome_of
from streamrl.agents.client import AgentClient, EpisodeOver
from streamrl.agents.episode import EpisodeOrder, EpisodeOutcome
from streamrl.agents.live_episode import LiveEpisode
from streamrl.agents.worker_process import void_outcome
from streamrl.config.tasks import AgentTask
from streamrl.environments.environment_pool import EnvironmentPlace, EnvironmentPool
from streamrl.environments.environment_process import EnvironmentAnswer, EnvironmentEnded, EnvironmentFailed
from streamrl.environments.installed import find_environment
from streamrl.rollouts.void import VoidCause
from streamrl.runtime.output_pipe import OutputLog
from streamrl.tasks.void_reward import VoidReward, one_line, text_of

OURS = ("environment_s", "environment_wait_s", "environment_steps", "model_s")
"""Numbers of an episode that the player adds up."""


class EnvironmentPlayer:
    """Plays the episodes of tasks with an environment. Use it from one event loop: `start` first, `close` last."""

    def __init__(self, tasks: Sequence[AgentTask], output: OutputLog) -> None:
        """
        Args:
            tasks: those tasks of the run that have an environment; a task and its held-out one share its processes.
            output: takes what environments print.
        """
        self._tasks = {task.key: task for task in tasks}
        self._output = output
        self._pools: dict[str, EnvironmentPool] = {}
        """Processes, by `AgentTask.environment_key`."""
        self._connections: httpx2.AsyncHTTPTransport | None = None

    async def start(self, timeout_s: float) -> None:
        """Start the processes of all environments.

        Raises:
            UserError: an environment is not installed, or does not start within `timeout_s` seconds.
        """
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        self._connections = httpx2.AsyncHTTPTransport(verify=False, trust_env=False, limits=limits)
        for task in self._tasks.values():
            if (key := task.environment_key) not in self._pools:
                assert task.environment is not None
                installed, use = find_environment(task.environment.name), task.environment
                pool = EnvironmentPool(use, installed, self._output, task.deadlines.tool_s, timeout_s)
                self._pools[key] = pool
                await pool.start()

    async def play(self, order: EpisodeOrder, base_url: str, api_key: str) -> EpisodeOutcome:
        """Play one episode to its end; a failure is a void outcome. Arguments as of `EpisodeRunner`."""
        task = self._tasks[order.task]
        live = LiveEpisode(order, task.deadlines, api_key=api_key)
        assert self._connections is not None
        client = AgentClient(live, base_url, api_key, self._connections)
        game = _Game(task, live, client)
        try:
            async with self._pools[task.environment_key].place(api_key) as place:
                playing = asyncio.ensure_future(game.play(place, order))
                expiring = asyncio.ensure_future(live.over.wait())
                try:
                    await asyncio.wait({playing, expiring}, return_when=asyncio.FIRST_COMPLETED)
                    outcome = EpisodeOutcome(None, live.void) if live.void is not None else playing.result()
                finally:
                    expiring.cancel()
                    playing.cancel()
                    await asyncio.wait({playing})
                    live.end()
        except EnvironmentEnded as error:
            outcome = void_outcome(error.cause, text_of(error), again=error.again)
        except EnvironmentFailed as error:
            outcome = void_outcome(VoidCause.ENVIRONMENT, f"environment: {text_of(error)}", traceback=error.traceback)
        except VoidReward as error:
            outcome = void_outcome(error.cause, text_of(error))
        except Exception as error:
            outcome = void_outcome(VoidCause.ENVIRONMENT, one_line(error))
        finally:
            with contextlib.suppress(Exception):
                await client.close()
        return replace(outcome, steps=live.steps)

    async def close(self) -> None:
        """End all processes at once; no episode may be played any more."""
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))
        if self._connections is not None:
            await self._connections.aclose()


class _Game:
    """The turns of one episode."""

    def __init__(self, task: AgentTask, live: LiveEpisode, client: AgentClient) -> None:
        assert task.environment is not None
        self._name, self._turns, self._episode_s = task.environment.name, task.max_turns, task.deadlines.episode_s
        self._live, self._client = live, client
        self._ours = dict.fromkeys(OURS, 0.0)
        self._own: defaultdict[str, float] = defaultdict(float)
        """The environment's own numbers."""

    async def play(self, place: EnvironmentPlace, order: EpisodeOrder) -> EpisodeOutcome:
        """Play until the environment is over, or turns or context are used up.

        An episode that waits for room, or for the resets of others, has not begun.
        """
        if place.plays:
            self._live.begin()
            return await self._have_played(place, order)
        began = self._took("reset", await place.reset(order.item, self._live.begin))
        messages: list[dict[str, Any]] = list(began["messages"])
        reward, cut = 0.0, 1.0
        for _ in range(self._turns):
            called = time.monotonic()
            try:
                messages.append(await self._client.chat(messages, began.get("tools")))
            except EpisodeOver:
                break
            finally:
                self._ours["model_s"] += time.monotonic() - called
            found = self._took("step", await place.step(messages[-1]))
            reward += found["reward"]
            for name, value in found["metrics"].items():
                self._own[name] += value
            if found["done"]:
                cut = 0.0
                break
            messages += found["messages"]
        return _outcome(reward, {**self._ours, "cut": cut}, self._own)

    async def _have_played(self, place: EnvironmentPlace, order: EpisodeOrder) -> EpisodeOutcome:
        """Let an environment that calls the model itself play; as it takes `base_url`, turns have no limit."""
        answer = await place.play(order.item, self._client.base_url, self._client.api_key, self._episode_s)
        self._live.step("environment", self._name, answer.started, "played")
        return _outcome(answer.result["reward"], {}, answer.result.get("metrics") or {})

    def _took(self, what: str, answer: EnvironmentAnswer) -> dict[str, Any]:
        """Record what the environment did, and return its result."""
        told = f"{1000 * answer.took_s:.1f} ms, after waiting {1000 * answer.waited_s:.1f} ms for its process"
        self._live.step("environment", f"{self._name} {what}", answer.started, told)
        self._ours["environment_s"] += answer.took_s
        self._ours["environment_wait_s"] += answer.waited_s
        self._ours["environment_steps"] += what == "step"
        return answer.result


def _outcome(reward: Any, ours: Mapping[str, float], own: Mapping[str, Any]) -> EpisodeOutcome:
    """Return the outcome of an episode that was played, with what can be recorded of its metrics' names.

    Args:
        reward: the episode's.
        ours: numbers of the player.
        own: numbers of the environment.

    Raises:
        VoidReward: a number is not finite, or there are too many.
    """
    try:
        number, recorded = outcome_of({**_beside(own, {*ours, "reward"}), **ours, "reward": reward})
    except VoidReward as error:
        raise VoidReward(VoidCause.ENVIRONMENT, f"environment: {error}", retry=False) from error
    return EpisodeOutcome(number, None, metrics=recorded)


def _beside(own: Mapping[str, Any], taken: Collection[str]) -> dict[str, Any]:
    """Return an environment's numbers under names that are not taken, `own_NAME` where one is."""
    found = {name: value for name, value in own.items() if name not in taken}
    for name in own:
        if name in taken:
            free = f"own_{name}"
            while free in own:
                free = f"own_{free}"
            found[free] = own[name]
    return found
