"""Episodes that an environment plays with the model: messages, rewards, times, and what makes them void."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import httpx2
import pytest

from streamrl.agents import environment_player
from streamrl.agents.environment_player import EnvironmentPlayer
from streamrl.agents.episode import EpisodeOrder, EpisodeOutcome
from streamrl.agents.workers import EpisodeWorkers
from streamrl.config.tasks import AgentTask
from streamrl.environments.environment_pool import EnvironmentPlace
from streamrl.environments.environment_process import EnvironmentAnswer
from streamrl.environments.installed import InstalledEnvironment
from streamrl.errors import UserError
from streamrl.rollouts.trajectory import MOST_METRICS, MOST_NAME
from streamrl.rollouts.void import VoidCause
from streamrl.runtime.output_pipe import OutputLog
from streamrl.tasks.source import PromptSource
from streamrl.tasks.void_reward import VoidReward
from tests.agents.model_server import ModelServer
from tests.environments.own_environment import install
from tests.marks import descendants
from tests.waiting import scaled, until


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> InstalledEnvironment:
    return install(tmp_path_factory.mktemp("rooms"))


def task(room: InstalledEnvironment, **changes: Any) -> AgentTask:
    environment = {"name": str(room.folder), "processes": 1}
    values = {"kind": "agent", "name": "room", "environment": environment, "deadlines": {"tool_s": scaled(20)}}
    return AgentTask.model_validate({**values, **changes})


@contextlib.asynccontextmanager
async def started(one: AgentTask) -> AsyncIterator[tuple[EpisodeWorkers, ModelServer]]:
    owner = EpisodeWorkers([one], 1)
    async with ModelServer().running() as server:
        try:
            await owner.start(scaled(60))
            yield owner, server
        finally:
            await owner.close()


async def play(owner: EpisodeWorkers, server: ModelServer, name: str, prompt: str, **item: Any) -> EpisodeOutcome:
    order = EpisodeOrder(name, "g", "room", {"prompt": prompt, **item}, 1, None)
    return await asyncio.wait_for(owner.run(order, server.url, f"key of {name}"), scaled(60))


def test_the_model_answers_until_the_environment_is_over(room: InstalledEnvironment) -> None:
    async def scenario() -> None:
        async with started(task(room)) as (owner, server):
            outcome = await play(owner, server, "a", "echo", steps=3)
            assert (outcome.reward, outcome.void) == (1.5, None)
            assert [len(call["messages"]) for call in server.calls] == [2, 4, 6]  # it only appends
            assert [one["role"] for one in server.calls[2]["messages"]] == [
                "system",
                *["user", "assistant"] * 2,
                "user",
            ]
            assert {call["key"] for call in server.calls} == {"Bearer key of a"}
            times = {name: outcome.metrics.pop(name) for name in ("environment_s", "environment_wait_s", "model_s")}
            assert all(0 <= one < 60 for one in times.values()) and times["environment_s"] > 0 < times["model_s"]
            assert outcome.metrics == {"environment_steps": 3.0, "cut": 0.0, "words": 3 + 1 + 2 + 0.0}
            assert [(one.kind, one.name.split()[-1]) for one in outcome.steps] == [
                ("environment", "reset"),
                *[("environment", "step")] * 3,
            ]

    asyncio.run(scenario())


def test_half_a_character_of_an_environment_does_not_end_its_episode(room: InstalledEnvironment) -> None:
    async def scenario() -> None:
        async with started(task(room)) as (owner, server):
            outcome = await play(owner, server, "a", "echo", steps=2, title="\ud83d")
            assert (outcome.reward, outcome.void) == (1.0, None)
            assert server.calls[0]["messages"][0]["content"].startswith("\ud83d of ")  # the endpoint replaces it

    asyncio.run(scenario())


def test_a_limit_keeps_the_rewards_so_far(room: InstalledEnvironment) -> None:
    async def scenario() -> None:
        async with started(task(room, max_turns=2)) as (owner, server):
            outcome = await play(owner, server, "a", "echo", steps=9)
            assert (outcome.reward, outcome.metrics["cut"], len(server.calls)) == (1.0, 1.0, 2)
            full = await play(owner, server, "b", "refuse 400 context_length_exceeded", steps=9)
            assert (full.reward, full.metrics["cut"], full.void) == (0.0, 1.0, None)

    asyncio.run(scenario())


OWN = 5
"""Numbers of an episode that are the player's: three times, steps and `cut`."""


def test_numbers_that_cannot_be_recorded_void_their_episode(room: InstalledEnvironment) -> None:
    async def scenario() -> None:
        async with started(task(room)) as (owner, server):
            most = {f"number {n}": 1.0 for n in range(MOST_METRICS - OWN)}
            kept = await play(owner, server, "a", "echo", steps=1, numbers=most)
            assert (kept.void, kept.reward, len(kept.metrics)) == (None, 0.5, MOST_METRICS)
            wrong = {
                f"there are {MOST_METRICS + 1} numbers beside the reward": {"numbers": {**most, "another": 1.0}},
                "the reward must be finite, got inf": {"pays": 1e308},
                "'gold' must be finite, got inf": {"numbers": {"gold": 1e308}},
            }
            for text, item in wrong.items():
                void = await play(owner, server, text, "echo", steps=2, **item)
                assert void.void and void.void.cause == VoidCause.ENVIRONMENT and not void.again
                assert void.void.text.startswith(f"environment: {text}")
                assert len(void.steps) == 3 and void.metrics == {}

    asyncio.run(scenario())


def test_names_of_numbers_are_cut_and_none_takes_the_place_of_ours(room: InstalledEnvironment) -> None:
    async def scenario() -> None:
        async with started(task(room)) as (owner, server):
            own = {"reward": 7.0, "cut": 8.0, "model_s": 1e6, "environment_steps": 9.0, "own_cut": 6.0}
            numbers = {"n" * (MOST_NAME + 1): 2.0, "\ud83d": 3.0, **own}
            played = await play(owner, server, "a", "echo", steps=1, numbers=numbers)
            assert played.reward == 0.5 and played.void is None
            assert len(played.metrics) == OWN + len(numbers)
            assert (played.metrics["cut"], played.metrics["environment_steps"]) == (0.0, 1.0)
            assert 0 < played.metrics["model_s"] < 1e6 == played.metrics["own_model_s"]
            kept = {name: played.metrics[f"own_{name}"] for name in ("reward", "cut", "own_cut", "environment_steps")}
            assert kept == {"reward": 7.0, "cut": 6.0, "own_cut": 8.0, "environment_steps": 9.0}
            assert (played.metrics["n" * MOST_NAME], played.metrics["\ufffd"]) == (2.0, 3.0)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("reward", "metrics", "text"),
    [
        (0.5, None, None),
        (0.5, {"solved": 1.0}, None),
        (0.5, {"own_reward": 1.0, "cut": 1.0}, None),
        (float("inf"), {}, "the reward must be finite, got inf"),
        (1e13, {}, r"the reward must be between -1e\+12 and 1e\+12, got 1e\+13"),
        (0.5, {str(n): 0.0 for n in range(MOST_METRICS + 1)}, "101 numbers beside the reward"),
    ],
)
def test_what_an_environment_tells_that_plays_by_itself_is_looked_at_too(
    reward: float, metrics: dict[str, float] | None, text: str | None
) -> None:
    answer = EnvironmentAnswer({"reward": reward, "metrics": metrics}, 0.0, 0.0, 0.0)
    place = cast(EnvironmentPlace, SimpleNamespace(plays=True, play=AsyncMock(return_value=answer)))
    one = AgentTask.model_validate({"kind": "agent", "name": "room", "environment": {"name": "room"}})
    game = environment_player._Game(one, Mock(), Mock())
    order = EpisodeOrder("s", "g", "room", {"prompt": "p"}, 1, None)
    if text is None:
        played = asyncio.run(game.play(place, order))
        assert (played.reward, played.void, played.metrics) == (reward, None, metrics or {})
        return
    with pytest.raises(VoidReward, match=text) as raised:
        asyncio.run(game.play(place, order))
    assert raised.value.cause is VoidCause.ENVIRONMENT


def test_what_fails_voids_its_episode_with_its_cause(room: InstalledEnvironment) -> None:
    async def scenario() -> None:
        async with started(task(room)) as (owner, server):
            raised = await play(owner, server, "a", "raises at once")
            assert raised.void and raised.void.cause == VoidCause.ENVIRONMENT and not raised.again
            assert raised.void.text == "environment: KeyError: 'no such room'" and "in reset" in raised.traceback
            died = await play(owner, server, "b", "dies")
            assert died.void and died.void.cause == VoidCause.ENVIRONMENT and not died.again
            assert "exit code 9" in died.void.text
            refused = await play(owner, server, "d", "refuse 500 oops")
            assert refused.void and refused.void.cause == VoidCause.PROVIDER

    asyncio.run(scenario())


def test_a_process_that_is_killed_costs_only_another_attempt(room: InstalledEnvironment) -> None:
    async def scenario() -> None:
        async with started(task(room)) as (owner, server):
            together = asyncio.gather(*(play(owner, server, name, "together 3") for name in "ab"))
            await until(lambda: len(server.calls) == 2, scaled(20))  # both wait for the model
            for one, words in descendants():
                if words[:1] == [str(room.python)]:
                    one.kill()
            last = await play(owner, server, "c", "together 3")
            while last.void:  # its place may be in the process that has just been killed
                last = await play(owner, server, "c", "together 3")
            assert [(one.void.cause, one.again) for one in await together if one.void] == [
                (VoidCause.ENVIRONMENT, True)
            ] * 2
            assert last.reward == 1.0
            assert [(await play(owner, server, name, "echo")).reward for name in "ab"] == [1.0, 1.0]

    asyncio.run(scenario())


def test_episodes_step_while_the_model_answers_others(room: InstalledEnvironment) -> None:
    async def scenario() -> None:
        async with started(task(room)) as (owner, server):
            blocked = asyncio.ensure_future(play(owner, server, "a", "together 2"))
            await until(lambda: len(server.calls) == 1, scaled(20))
            assert (await play(owner, server, "b", "echo")).reward == 1.0  # whole episodes, meanwhile
            assert not blocked.done()
            await play(owner, server, "c", "together 2")
            assert (await blocked).reward == 1.0

    asyncio.run(scenario())


class Playing:
    """A stand-in for the processes of an environment that calls the model itself, and never ends."""

    plays = True

    @contextlib.asynccontextmanager
    async def place(self, episode: str) -> AsyncIterator[Playing]:
        yield self

    async def play(self, *given: Any) -> None:
        await asyncio.Event().wait()


def test_turns_of_an_environment_that_calls_the_model_itself_have_no_limit() -> None:
    limits = {"turn_s": scaled(0.1), "episode_s": scaled(0.3)}
    values = {"kind": "agent", "name": "room", "environment": {"name": "room"}, "deadlines": limits}
    one = AgentTask.model_validate(values)
    player = EnvironmentPlayer([one], OutputLog(None))
    player._pools[one.environment_key] = cast(Any, Playing())

    async def scenario() -> EpisodeOutcome:
        player._connections = httpx2.AsyncHTTPTransport()
        order = EpisodeOrder("a", "g", one.key, {}, 1, None)
        return await asyncio.wait_for(player.play(order, "http://127.0.0.1:9/v1", "key"), scaled(30))

    outcome = asyncio.run(scenario())
    assert outcome.void is not None and outcome.void.cause == VoidCause.TIMEOUT
    assert outcome.void.text.startswith("the episode took more than")


def test_an_environment_makes_its_items_from_numbers_and_seeds(room: InstalledEnvironment) -> None:
    source = PromptSource([task(room)], 3)
    first, second = source.prompt(0), source.prompt(1)
    assert first.agent and first.text == "room 0"
    assert (first.reward_input["index"], second.reward_input["index"]) == (0, 1)
    assert second.reward_input["seed"] == first.reward_input["seed"] + 1
    assert PromptSource([task(room)], 4).prompt(0).reward_input["seed"] != first.reward_input["seed"]


def test_an_environment_that_is_not_installed_is_reported_at_the_start(
    room: InstalledEnvironment, tmp_path: Path
) -> None:
    async def scenario(environment: dict[str, Any]) -> None:
        async with started(task(room, environment=environment)):
            raise AssertionError("it started")

    with pytest.raises(UserError, match="'no/maze' is not installed"):
        asyncio.run(scenario({"name": "no/maze"}))
    with pytest.raises(UserError, match="does not start: RuntimeError: X11"):
        asyncio.run(scenario({"name": str(room.folder), "config": {"wants": "a display"}}))
