"""Which turns are part of an episode: those whose answer an agent may know; and which refusals are its end."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx2
import numpy as np
import pytest

from streamrl.agents.agent_host import NO_ANSWERS, AgentHost
from streamrl.agents.chat_endpoint import UNSEEN, ChatEndpoint
from streamrl.agents.episode import Episode, GeneratedTurn
from streamrl.agents.open_session import TRANSPORT, OpenSession
from streamrl.rollouts.void import Void, VoidCause
from tests.agents.test_agent_host import ORDER, TOKENIZER, USER, Model, call, hosting, over_http, until
from tests.agents.test_session import MORE, answered, lose, session
from tests.agents.test_session import call as asked
from tests.waiting import scaled

LONG = {"role": "user", "content": "Think long."}


def generated(logprob: float) -> GeneratedTurn:
    tokens = np.asarray(TOKENIZER.encode("12") + TOKENIZER.encode("<|im_end|>"), np.int32)
    size = len(tokens)
    return GeneratedTurn(tokens, np.full(size, logprob, np.float32), np.full(size, 3, np.int32), "stop", "12")


def trained(episode: Episode) -> list[str]:
    return [TOKENIZER.decode(row.tokens[row.sampled]).removesuffix("<|im_end|>") for row in episode.rows]


def test_a_turn_that_nobody_got_is_in_no_row_and_is_not_the_conversation() -> None:
    here = session()
    got = answered(here, asked(USER))
    lost = answered(here, asked(MORE), reason="length")
    lose(lost)
    (row,) = here.rows()
    assert row.tokens.tolist() == got.tokens.tolist()
    assert here.conversation() == [USER, got.answer] and not here.cut
    lost.become_known(2.0)  # a stream that ended early
    assert len(here.rows()) == 2 and here.cut


def test_a_turn_that_a_call_goes_on_from_counts_however_its_answer_came_to_be_known() -> None:
    here = session()
    first = answered(here, asked(USER))
    lose(first)
    second = answered(here, asked(USER, first.answer, MORE))
    lose(second)
    (row,) = here.rows()
    assert row.tokens.tolist() == first.tokens.tolist()


def test_a_turn_that_nobody_got_leaves_its_row_to_the_next_one() -> None:
    here = session()
    first = answered(here, asked(USER))
    lose(answered(here, asked(USER, first.answer, MORE)))
    again = answered(here, asked(USER, first.answer, {"role": "user", "content": "Why?"}))
    (row,) = here.rows()
    assert row.tokens.tolist() == again.tokens.tolist()


@pytest.mark.parametrize("got", [0, 1, 2])
@pytest.mark.parametrize("tokens", [False, True])
def test_a_call_goes_on_from_the_answer_that_a_client_got_and_not_from_an_equal_one(got: int, tokens: bool) -> None:
    here = session()
    begun = [here.call(asked(USER), 1.0)[0]]
    for _ in range(2):  # the agent asks again without having got the first answer
        begun[-1].clients = 1
        begun.append(here.call(asked(USER), 1.0)[0])
    for turn in reversed(begun):
        here.finish(turn, generated(-0.1 * (1 + turn.number)), 2.0)
    for turn in begun[got:]:
        turn.deliver(2.0)
    known = asked(USER, begun[0].answer, MORE)
    if tokens:
        known = replace(known, messages=[], prompt_tokens=np.append(begun[0].tokens, begun[0].tokens[:1]))
    assert answered(here, known).parent is begun[got]
    (row, *others) = here.rows()
    assert len(others) == 2 - got and row.logprobs[row.sampled][0] == np.float32(-0.1 * (1 + got))


def test_a_call_goes_on_from_an_answer_that_nobody_got_if_there_is_no_equal_one() -> None:
    here = session()
    lost = answered(here, asked(USER))
    lose(lost)
    assert answered(here, asked(USER, lost.answer, MORE)).parent is lost and lost.counts


def given_up(model: Model, agent: Callable[[httpx2.AsyncClient], Any], stream: bool) -> Episode:
    """Play an agent that then gives up a call, whose turn is finished before its episode ends."""

    async def main() -> Episode:
        async def play(client: httpx2.AsyncClient) -> None:
            (open_session,) = host._endpoint.sessions.values()
            await agent(client)
            model.gate.clear()
            before = len(model.orders)
            leaving = asyncio.ensure_future(call(client, LONG, stream=stream))
            await until(lambda: len(model.orders) > before)
            leaving.cancel()
            turn = open_session.session.turns[-1]
            await until(lambda: turn.clients == 0)
            model.gate.set()
            await until(lambda: turn.generated is not None)

        host: AgentHost
        async with hosting(model, over_http(play)) as host:
            return await host.run(ORDER)

    return asyncio.run(asyncio.wait_for(main(), scaled(60)))


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_whose_client_gave_up_is_not_trained_and_a_step_says_so(stream: bool) -> None:
    async def agent(client: httpx2.AsyncClient) -> None:
        assert (await call(client)).status_code == 200

    episode = given_up(Model("12", "an answer that nobody got"), agent, stream)
    assert (trained(episode), episode.reward) == (["12"], 1.0)
    assert [message["content"] for message in episode.messages] == [USER["content"], "12"]
    assert [step.detail for step in episode.steps if step.name == "turn 1 left out"] == [UNSEEN]


async def at_once(*_: object) -> None:
    """End without a wait."""


def test_an_answer_is_not_delivered_to_a_client_that_goes_away_as_it_is_finished() -> None:
    async def gone() -> dict[str, str]:
        return {"type": "http.disconnect"}

    turn = lose(answered(session(), asked(USER)))
    endpoint: Any = SimpleNamespace(_finished=at_once)
    request: Any = SimpleNamespace(receive=gone)
    open_session = OpenSession("", session(), 0.0)
    assert not asyncio.run(ChatEndpoint._wait_for(endpoint, open_session, turn, request))
    assert not turn.delivered and turn.clients == 0


def test_an_answer_is_not_delivered_to_a_client_whose_end_the_event_loop_has_not_read_yet() -> None:
    here, there = socket.socketpair()
    transport = SimpleNamespace(is_closing=lambda: False, get_extra_info=lambda name: here)

    async def silence() -> dict[str, str]:
        return await asyncio.Event().wait() and {}

    def delivered() -> bool:
        turn = lose(answered(session(), asked(USER)))
        endpoint: Any = SimpleNamespace(_finished=at_once)
        request: Any = SimpleNamespace(receive=silence, scope={"state": {TRANSPORT: transport}})
        told = asyncio.run(ChatEndpoint._wait_for(endpoint, OpenSession("", session(), 0.0), turn, request))
        assert told == turn.delivered
        return told

    with here:
        with there:
            assert delivered()
        assert not delivered()


@pytest.mark.parametrize("stream", [False, True])
def test_a_retry_that_is_read_together_with_the_end_of_the_call_that_it_repeats_begins_no_turn(stream: bool) -> None:
    model = Model()
    model.gate.clear()

    async def agent(base_url: str, api_key: str) -> float:
        at = urlsplit(base_url)
        body = json.dumps({"model": "policy", "messages": [USER], "stream": stream})
        head = f"POST {at.path}/chat/completions HTTP/1.1\r\nhost: here\r\ncontent-length: {len(body)}\r\n\r\n"
        connected = partial(socket.create_connection, (at.hostname, at.port))
        with connected() as first, connected() as idle:  # a client keeps such in its pool
            first.sendall((head + body).encode())
            await until(lambda: len(model.orders) == 1)
            (open_session,) = host._endpoint.sessions.values()
            await until(lambda: len(host._server.server_state.connections) == 2)
            first.close()
            idle.sendall((head + body).encode())
            await until(lambda: open_session.calls == 2)
            model.gate.set()
            idle.setblocking(False)
            answer = b""
            while b'"stop"' not in answer:
                part = await asyncio.get_running_loop().sock_recv(idle, 65_536)
                assert part and b"error" not in part
                answer += part
        return 1.0

    async def main() -> Episode:
        nonlocal host
        async with hosting(model, agent, max_turns=1) as host:
            return await host.run(ORDER)

    host: AgentHost
    episode = asyncio.run(asyncio.wait_for(main(), scaled(60)))
    assert (len(model.orders), trained(episode), episode.reward) == (1, ["12"], 1.0)


@pytest.mark.parametrize(("parts", "known"), [(1, False), (2, True), (3, True)])
def test_an_answer_counts_from_the_first_part_of_a_stream_that_has_some_of_it(parts: int, known: bool) -> None:
    turn = lose(answered(session(), asked(USER)))

    async def read() -> None:
        dialect: Any = SimpleNamespace(begin=lambda turn: ["begin"], end=lambda turn, renderer, body: ["12", "end"])
        open_session = OpenSession("", session(), 0.0, tasks={turn: asyncio.ensure_future(at_once())})
        endpoint: Any = SimpleNamespace(_finished=at_once, _renderer=None)
        stream: Any = ChatEndpoint._stream(endpoint, open_session, turn, dialect, {})
        for _ in range(parts):
            await anext(stream)
        await stream.aclose()  # its client has gone

    asyncio.run(read())
    assert turn.counts == known and not turn.delivered


def test_an_episode_none_of_whose_answers_was_got_is_void() -> None:
    async def agent(client: httpx2.AsyncClient) -> None:
        pass

    episode = given_up(Model(), agent, stream=False)
    assert (episode.void, episode.rows) == (Void(VoidCause.ENVIRONMENT, NO_ANSWERS), [])
