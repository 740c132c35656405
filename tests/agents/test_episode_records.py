"""Records of episodes as the controller gets them: what an agent returns, why it is void, and text that UTF-8 lacks."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx2
import numpy as np
import pytest

from streamrl.agents.agents_process import AgentsProcess, episode_to_wire
from streamrl.agents.episode import Episode, EpisodeOrder, EpisodeOutcome, TrajectoryRow
from streamrl.agents.session import Session
from streamrl.controller.arrivals import read_sample
from streamrl.generation.site.site_episodes import SiteEpisodes
from streamrl.protocol.controller_site import IssuedEpisode
from streamrl.protocol.message import parse, wire
from streamrl.protocol.samples import IncomingGroup
from streamrl.protocol.site_agents import EpisodeDone, RunEpisode
from streamrl.protocol.site_instance import FinishedSample
from streamrl.rollouts.trajectory import MOST_ROWS, NOT_SAMPLED
from streamrl.rollouts.types import Sample, SampleRequest
from streamrl.rollouts.void import LONGEST_TEXT, LONGEST_TRACEBACK, Void, VoidCause
from tests.agents.random_sessions import TOOL
from tests.agents.test_agent_host import CALL_TEXT, ORDER, USER, Model, call, hosting, never, over_http, play


def over_the_site(episode: Episode) -> Sample:
    """The episode as the controller reads it: from the agents process over the service of its site."""
    site = SiteEpisodes("here", 512, 64, lambda _: None)
    request = SampleRequest("s.000", "s", np.arange(3, dtype=np.int32), 7, 1.5, None)
    site.begin([IncomingGroup([request], None, IssuedEpisode("sums", {}))])
    message, arrays = episode_to_wire(episode)
    found = site.end(parse(EpisodeDone, wire(message)[1]))
    assert isinstance(found, FinishedSample)
    return read_sample(wire(found)[1], arrays)


def test_what_an_agent_returns_beside_its_reward_reaches_the_controller() -> None:
    async def agent(client: httpx2.AsyncClient) -> None:
        await call(client)

    told = over_the_site(play(Model(), over_http(agent))).trajectory
    assert told is not None and (told.reward, told.metrics) == (1.0, {"guesses": 2.0})
    assert (told.void, told.void_traceback) == (None, "")


def test_why_an_episode_is_void_reaches_the_controller_with_the_end_of_its_traceback() -> None:
    async def fail(order: EpisodeOrder, base_url: str, api_key: str) -> EpisodeOutcome:
        void = Void(VoidCause.VERIFIER, "\ud800" + "x" * 9_999)
        return EpisodeOutcome(None, void, traceback="Traceback\n" + "y" * 3_000 + "\ud800 the end")

    async def main() -> Episode:
        async with hosting(Model(), never) as host:
            host._workers.run = fail  # type: ignore[method-assign]
            return await host.run(ORDER)

    told = over_the_site(asyncio.run(main())).trajectory
    assert told is not None and told.void is not None and told.void.cause == VoidCause.VERIFIER
    assert told.void.text == "\ufffd" + "x" * (LONGEST_TEXT - 1)
    assert len(told.void_traceback) == LONGEST_TRACEBACK and told.void_traceback.endswith("y\ufffd the end")


def test_a_conversation_with_halves_of_surrogate_pairs_in_it_can_be_sent() -> None:
    half = "\ud83d"
    calls = [{"id": half, "type": "function", "function": {"name": half, "arguments": half}}]

    async def agent(client: httpx2.AsyncClient) -> None:
        messages = [USER, {"role": "assistant", "content": half, "tool_calls": calls}]
        messages.append({"role": "tool", "tool_call_id": half, "content": half, "name": half})
        body = json.dumps({"model": "policy", "messages": messages, "tools": [TOOL]})  # a client escapes them
        response = await client.post("chat/completions", content=body)
        assert response.status_code == 200, response.text

    told = over_the_site(play(Model(), over_http(agent))).trajectory
    assert told is not None and told.messages[1]["tool_calls"][0]["id"] == "\ufffd"


def test_halves_of_surrogate_pairs_in_a_call_of_the_model_and_in_the_keys_of_a_body_can_be_sent() -> None:
    text = CALL_TEXT.replace("1", '"\\ud83d"').replace("calculate", "calculate\\ud83d")
    tool = {"name": "calculate", "parameters": {"type": "object"}}

    async def agent(client: httpx2.AsyncClient) -> None:
        bodies = {
            "chat/completions": {"messages": [USER], "tools": [TOOL], "\ud83d": 1},
            "responses": {"input": "hi", "tools": [{"type": "function", **tool}]},
            "messages": {"messages": [USER], "tools": [{"name": "calculate", "input_schema": tool["parameters"]}]},
        }
        for path, body in bodies.items():
            response = await client.post(path, content=json.dumps({"model": "policy", **body}))
            assert response.status_code == 200 and "calculate\ufffd" in response.text, response.text

    told = over_the_site(play(Model(text, text, text), over_http(agent))).trajectory
    assert told is not None and told.reward == 1.0 and "\ufffd" in told.steps[0].detail
    assert told.messages[-1]["tool_calls"][0]["function"] == {"name": "calculate\ufffd", "arguments": '{"x": "\ufffd"}'}


def test_an_episode_of_more_rows_than_the_controller_takes_has_no_record() -> None:
    sampled = np.array([NOT_SAMPLED, 3], np.int32)
    row = TrajectoryRow(np.array([5, 6], np.int32), np.zeros(2, np.float32), sampled, 1)
    rows = [row] * (MOST_ROWS + 1)
    whole = Episode("s.000", rows[1:], 1.0, None, "stop", [], [], 1.0, None, 2.0)
    assert len(over_the_site(whole).trajectory.rows) == MOST_ROWS  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"its turns are 1001 rows, at most 1000 are taken: .* a smaller max_turns"):
        episode_to_wire(replace(whole, rows=rows))


def test_an_episode_whose_record_cannot_be_made_is_void_and_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[EpisodeDone] = []

    class Service:
        async def send(self, kind: str, body: Any, arrays: Any) -> None:
            sent.append(parse(EpisodeDone, body))
            assert not any(map(len, arrays.values()))

    async def agent(client: httpx2.AsyncClient) -> None:
        await call(client)

    async def main() -> AgentsProcess:
        async with hosting(Model(), over_http(agent)) as host:
            process = AgentsProcess(SimpleNamespace(name="agents-here"))  # type: ignore[arg-type]
            process.host, process.link = host, Service()  # type: ignore[assignment]
            monkeypatch.setattr(Session, "conversation", lambda _: [{"role": "user", "content": "\ud83d"}])
            await process._lead(RunEpisode("s.000", "s", "sums", {}, 7, None))
            return process

    process = asyncio.run(main())
    (told,) = [one.trajectory for one in sent]
    assert told is not None and told.void is not None and told.void.cause == VoidCause.CRASH
    assert told.void.text.startswith("the record of the episode cannot be made: UnicodeEncodeError: ")
    assert (process.ended, process.void.total(), told.rows) == (1, 1, [])


def test_an_episode_that_is_ordered_twice_is_led_once_and_again_for_a_new_service() -> None:
    led: list[asyncio.Event] = []

    class Host:
        async def run(self, order: Any) -> None:
            led.append(asyncio.Event())
            try:
                await led[-1].wait()
            finally:
                await asyncio.sleep(0)  # its end takes a moment

    def ordered() -> Any:
        return SimpleNamespace(body=RunEpisode("s.000", "s", "sums", {}, 7, None), arrays={})

    async def main() -> None:
        process = AgentsProcess(SimpleNamespace(name="agents-here"))  # type: ignore[arg-type]
        process.host, process.link = Host(), SimpleNamespace(forget_sent=lambda: None)  # type: ignore[assignment]
        async with asyncio.TaskGroup() as tasks:
            for _ in range(2):  # as the site began it, and at the hello of this process
                process._handle(ordered(), tasks)
            await asyncio.sleep(0)
            assert len(led) == 1
            process._new_service()
            process._handle(ordered(), tasks)  # before the first one has ended
            for _ in range(4):
                await asyncio.sleep(0)
            assert len(led) == 2 and len(process._episodes) == 1
            process._new_service()

    asyncio.run(main())
