"""Episodes over real HTTP: agents that know a URL and a key, a model with given answers, and what is recorded."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import numpy as np
import openai
import pytest

from streamrl.agents.agent_host import ALL_REFUSED, NO_CALLS, AgentHost
from streamrl.agents.episode import Episode, EpisodeOrder, EpisodeOutcome, GeneratedTurn, TurnOrder
from streamrl.agents.open_session import EpisodeWait, OpenSession
from streamrl.agents.session import SessionLimits
from streamrl.config.run import RunConfig
from streamrl.errors import UserError
from streamrl.rollouts.void import Void, VoidCause
from tests.agents.random_sessions import TOOL, small_tokenizer
from tests.waiting import scaled

TOKENIZER = small_tokenizer()
USER = {"role": "user", "content": "What is 7 + 5?"}
CALL_TEXT = '<tool_call>\n{"name": "calculate", "arguments": {"x": 1}}\n</tool_call>'
Agent = Callable[[str, str], Awaitable[float]]


class Model:
    """Answers with given texts, one after the other, and keeps what it was asked."""

    def __init__(self, *texts: str) -> None:
        self.texts, self.orders = list(texts), list[TurnOrder]()
        self.gate = asyncio.Event()
        self.gate.set()
        self.cancelled = 0
        self.finish: Any = "stop"
        self.error: Exception | None = None

    async def generate(self, order: TurnOrder) -> GeneratedTurn:
        self.orders.append(order)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        text = self.texts.pop(0) if self.texts else "12"
        ids = np.asarray(TOKENIZER.encode(text) + TOKENIZER.encode("<|im_end|>"), np.int32)
        return GeneratedTurn(
            ids, np.full(len(ids), -0.5, np.float32), np.full(len(ids), 4, np.int32), self.finish, text
        )


class Agents:
    """Runs agents here in place of worker processes."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent

    async def run(self, order: EpisodeOrder, base_url: str, api_key: str) -> EpisodeOutcome:
        return EpisodeOutcome(await self.agent(base_url, api_key), None, metrics={"guesses": 2.0})


@asynccontextmanager
async def hosting(model: Model, agent: Agent, **limits: int) -> AsyncIterator[AgentHost]:
    task = {"kind": "agent", "name": "sums", "run": "m:f", "items": "m:g", "max_turns": limits.pop("max_turns", 8)}
    run = RunConfig.model_validate({"model": {"path": "some/model", **limits}, "tasks": [task]})
    host = AgentHost(run, TOKENIZER, model.generate, Agents(agent))
    await host.start()
    try:
        yield host
    finally:
        await host.close()


ORDER = EpisodeOrder("s.000", "s", "sums", {}, 7, None)


def play(model: Model, agent: Agent, **limits: int) -> Episode:
    async def main() -> Episode:
        async with hosting(model, agent, **limits) as host:
            return await host.run(ORDER)

    episode = asyncio.run(main())
    assert episode.void is None or "AssertionError" not in episode.void.text, episode.void
    return episode


def call(client: httpx2.AsyncClient, *messages: Any, **more: Any) -> Awaitable[httpx2.Response]:
    return client.post("chat/completions", json={"model": "policy", "messages": messages or [USER], **more})


def over_http(agent: Callable[[httpx2.AsyncClient], Awaitable[None]]) -> Agent:
    async def run(base_url: str, api_key: str) -> float:
        headers = {"Authorization": f"Bearer {api_key}"}
        async with httpx2.AsyncClient(
            base_url=base_url, headers=headers, trust_env=False, timeout=scaled(60)
        ) as client:
            await agent(client)
        return 1.0

    return run


@pytest.mark.parametrize("stream", [False, True])
def test_an_unmodified_openai_agent_calls_tools_over_two_turns_and_its_row_is_exact(stream: bool) -> None:
    model = Model(CALL_TEXT, "It is 12.")

    async def agent(base_url: str, api_key: str) -> float:
        # as a program would that knows OPENAI_BASE_URL without the session, and OPENAI_API_KEY
        base_url = base_url if stream else base_url.split("/sessions/")[0] + "/v1"
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        messages: list[Any] = [USER]
        for _ in range(2):
            asked: Any = {
                "model": "policy",
                "messages": messages,
                "tools": [TOOL],
                "temperature": 0.1,
                "stream": stream,
            }
            if stream:
                text, calls, reason = "", [], None
                async for chunk in await client.chat.completions.create(**asked):
                    choice = chunk.choices[0]
                    text += choice.delta.content or ""
                    calls += [c.model_dump(exclude={"index"}) for c in choice.delta.tool_calls or ()]
                    reason = choice.finish_reason or reason
                message: dict[str, Any] = {
                    "role": "assistant",
                    "content": text,
                    **({"tool_calls": calls} if calls else {}),
                }
            else:
                answer = await client.chat.completions.create(**asked)
                message, reason = answer.choices[0].message.model_dump(), answer.choices[0].finish_reason
            messages.append(message)
            if message.get("tool_calls"):
                assert reason == "tool_calls"
                result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "12<|im_end|>"}
                messages.append(result)
        assert (reason, message["content"]) == ("stop", "It is 12.")
        await client.close()
        return 0.5

    episode = play(model, agent)
    assert (episode.reward, episode.void, episode.metrics) == (0.5, None, {"guesses": 2.0})
    (row,) = episode.rows
    second = model.orders[1].prompt_tokens
    assert row.tokens[: len(second)].tolist() == second.tolist()
    assert TOKENIZER.decode(row.tokens[row.sampled]) == f"{CALL_TEXT}<|im_end|>It is 12.<|im_end|>"
    assert set(row.versions.tolist()) == {-1, 4}
    assert [step.name for step in episode.steps if step.kind == "generate"] == ["turn 0", "turn 1"]
    assert [step.detail.count("temperature") for step in episode.steps] == [1, 0]  # said once
    assert "continues turn 0" in episode.steps[1].detail
    assert [message["role"] for message in episode.messages] == ["user", "assistant", "tool", "assistant"]
    assert model.orders[0].temperature is None


BAD_CALLS: list[tuple[dict[str, Any], int, str]] = [
    ({"n": 2}, 400, "one answer per call"),
    ({"model": "gpt-4"}, 404, "the model that is trained is called"),
    ({"messages": []}, 400, "at least one message"),
    ({"messages": [{"role": "critic", "content": ""}]}, 400, "expected one of system"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, 400, "'image_url'"),
    ({"messages": [{"role": "user", "content": 3}]}, 400, "a text or a list of parts"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]}, 400, "both texts"),
    ({"tools": [{"type": "web"}]}, 400, "tools[0]"),
    ({"tools": 3}, 400, "expected a list"),
    ({"top_logprobs": 3}, 400, "sampled tokens"),
    ({"response_format": {"type": "json_object"}}, 400, "only text"),
    ({"functions": []}, 400, "use tools"),
    ({"modalities": ["audio"]}, 400, "answers are text"),
    ({"messages": [{"role": "user", "content": "x " * 4000}]}, 400, "no room for an answer"),
]


def test_bad_calls_get_errors_that_an_openai_client_understands_and_cost_no_turn() -> None:
    model = Model()

    async def agent(client: httpx2.AsyncClient) -> None:
        for change, status, text in BAD_CALLS:
            answer = await call(client, **change)
            error = answer.json()["error"]
            assert (answer.status_code, text in error["message"]) == (status, True), (change, error)
        for body, status in ((b"{", 400), (b"[" * 100_000, 400), (b"[]", 400), (b" " * (2 << 20), 400)):
            assert (await client.post("chat/completions", content=body)).status_code == status
        unknown = (await client.post("embeddings", json={})).json()["error"]["message"]
        assert "POST /sessions/.../v1/embeddings: Not Found; there are /v1/chat/completions" in unknown
        stranger = await client.post(
            client.base_url.join("/v1/chat/completions"), json={}, headers={"Authorization": "Bearer no"}
        )
        assert (stranger.status_code, stranger.json()["error"]["code"]) == (401, "invalid_api_key")

    episode = play(model, over_http(agent), max_context=400)
    assert model.orders == []
    assert episode.void == Void(VoidCause.ENVIRONMENT, ALL_REFUSED + "invalid_request: the body is not JSON")
    assert episode.finish_reason == "length" and episode.rows == []
    assert sum(step.name == "call refused" for step in episode.steps) > 9


KEY = "KEY"
"""Stands for the key of the session."""


@pytest.mark.parametrize(
    ("path", "headers", "status", "text", "recorded"),
    [
        ("/sessions/KEY/v1/v1/chat/completions", {}, 404, "/sessions/.../v1/v1/chat/completions: Not Found", True),
        ("/chat/completions", {"x-api-key": KEY}, 404, "POST /chat/completions: Not Found", True),
        ("/chat/completions", {}, 404, "Not Found", False),
        ("/sessions/old/v1/chat/completions", {"authorization": "Bearer KEY"}, 401, "session of this URL", True),
        ("/v1/chat/completions", {"authorization": "Bearer old"}, 401, "no running episode has this key", False),
        ("/v1/chat/completions", {}, 401, "no key came: send it as `Authorization: Bearer KEY` or `x-api-key", False),
        ("/v1/chat/completions", {"api-key": KEY}, 401, "that is read (there is api-key): send it as", False),
        ("/v1/chat/completions", {"authorization": "Basic KEY"}, 401, "(there is authorization): send it", False),
        ("/sessions/KEY/v1/chat/completions", {"content-encoding": "gzip"}, 415, "gzip, which is not read", True),
    ],
)
def test_a_call_that_finds_no_model_says_why_and_so_does_its_episode_if_it_names_one(
    path: str, headers: dict[str, str], status: int, text: str, recorded: bool
) -> None:
    async def agent(base_url: str, api_key: str) -> float:
        address = base_url.partition("/sessions/")[0]
        given = {name: value.replace(KEY, api_key) for name, value in headers.items()}
        async with httpx2.AsyncClient(trust_env=False) as client:
            answer = await client.post(address + path.replace(KEY, api_key), json={}, headers=given)
        assert (answer.status_code, text in answer.json()["error"]["message"]) == (status, True), answer.text
        return 1.0

    void = play(Model(), agent).void
    assert void is not None and (void.text.startswith(ALL_REFUSED) and text in void.text) == recorded
    assert recorded or void.text == NO_CALLS


def test_a_first_prompt_that_the_context_does_not_hold_is_named() -> None:
    async def agent(client: httpx2.AsyncClient) -> None:
        assert (await call(client, {**USER, "content": "a b " * 400})).json()["error"][
            "code"
        ] == "context_length_exceeded"

    void = play(Model(), over_http(agent), max_context=200).void
    assert void is not None and void.cause is VoidCause.ENVIRONMENT and void.text.startswith(ALL_REFUSED)
    told = r": context_length_exceeded: the prompt is too long: \d+ tokens .* is 200 tokens \(model.max_context\)$"
    assert re.search(told, void.text)


def test_an_agent_that_calls_no_model_is_void() -> None:
    async def agent(client: httpx2.AsyncClient) -> None:
        pass

    assert play(Model(), over_http(agent)).void == Void(VoidCause.ENVIRONMENT, NO_CALLS)


def test_a_client_that_goes_away_loses_nothing_and_gets_its_turn_when_it_calls_again() -> None:
    model = Model("first", "second")

    async def main() -> Episode:
        async def agent(client: httpx2.AsyncClient) -> None:
            (session,) = host._endpoint.sessions.values()
            for number, text in enumerate(("first", "second"), 1):
                question = {"role": "user", "content": f"Say {text}."}
                model.gate.clear()
                leaving = asyncio.ensure_future(call(client, question, stream=text == "second"))
                await until(lambda expected=number: len(model.orders) == expected)  # type: ignore[misc]
                leaving.cancel()
                await until(lambda: session.session.turns[-1].clients == 0)
                again = asyncio.ensure_future(call(client, question))
                await until(lambda: session.session.turns[-1].clients == 1)
                model.gate.set()
                assert (await again).json()["choices"][0]["message"]["content"] == text

        async with hosting(model, over_http(agent)) as host:
            return await host.run(ORDER)

    episode = asyncio.run(asyncio.wait_for(main(), 60))
    assert episode.reward == 1.0 and len(model.orders) == 2 and model.cancelled == 0
    assert [step.tokens for step in episode.steps] == [int(row.sampled.sum()) for row in episode.rows]


def in_process(
    agent: Callable[[AgentHost, httpx2.AsyncClient], Awaitable[None]], model: Model, **limits: int
) -> Episode:
    """Play an agent that calls the endpoint without a connection: all it sends at once is read before any answer."""

    async def main() -> Episode:
        async def run(base_url: str, api_key: str) -> float:
            door = httpx2.ASGITransport(app=host._endpoint.app)
            async with httpx2.AsyncClient(base_url=base_url, transport=door) as client:
                await agent(host, client)
            return 1.0

        async with hosting(model, run, **limits) as host:
            return await host.run(ORDER)

    episode = asyncio.run(asyncio.wait_for(main(), scaled(60)))
    assert episode.reward == 1.0, episode.void
    return episode


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
def test_equal_streams_begun_at_once_are_samples_of_their_own(path: str) -> None:
    words = ["one", "two", "three"]
    body = {"model": "policy", "stream": True, "messages": [USER], "input": "What?", "max_tokens": 9}
    del body["messages" if path == "responses" else "input"]

    async def agent(host: AgentHost, client: httpx2.AsyncClient) -> None:
        answers = await asyncio.gather(*(client.post(path, json=body) for _ in words))
        assert [[word for word in words if f'"{word}"' in answer.text] for answer in answers] == [[w] for w in words]
        (session,) = host._endpoint.sessions.values()
        assert [turn.clients for turn in session.session.turns] == [0, 0, 0]

    assert len(in_process(agent, Model(*words)).rows) == 3


def test_a_stream_whose_client_goes_away_before_it_begins_is_given_to_the_same_call_again() -> None:
    model = Model("first", "second")
    body = {"model": "policy", "messages": [USER], "stream": True}

    async def agent(host: AgentHost, client: httpx2.AsyncClient) -> None:
        (session,) = host._endpoint.sessions.values()
        received = [{"type": "http.request", "body": json.dumps(body).encode()}, {"type": "http.disconnect"}]

        async def receive() -> Any:
            return received.pop(0)

        async def send(message: Any) -> None:
            await asyncio.Event().wait()  # not even the header goes out, so that no part is asked for

        path = f"/sessions/{session.id}/v1/chat/completions"
        await host._endpoint.app({"type": "http", "method": "POST", "path": path, "headers": []}, receive, send)
        assert session.session.turns[0].clients == 0
        assert "first" in (await call(client, stream=True)).text

    assert len(in_process(agent, model).rows) == 1 and model.texts == ["second"]


def test_what_a_client_library_repeats_by_itself_gets_the_turn_that_it_has_asked_for() -> None:
    model = Model("first", "second")

    async def agent(client: httpx2.AsyncClient) -> None:
        for count, text in (("0", "first"), ("1", "first"), ("0", "second")):
            client.headers["x-stainless-retry-count"] = count
            assert (await call(client)).json()["choices"][0]["message"]["content"] == text

    assert len(play(model, over_http(agent)).rows) == 2


class Losing(httpx2.AsyncHTTPTransport):
    """Connections that lose answers once they have come."""

    lose = 0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        answer = await super().handle_async_request(request)
        if self.lose:
            self.lose -= 1
            await answer.aread()
            await answer.aclose()
            raise httpx2.ReadError("lost")
        return answer


def test_a_client_that_gave_up_takes_nothing_from_the_retries_of_later_equal_calls() -> None:
    model = Model("first", "second")

    async def agent(base_url: str, api_key: str) -> float:
        doors = Losing()
        http = httpx2.AsyncClient(transport=doors, timeout=scaled(60))
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http, max_retries=1)

        async def ask() -> str | None:
            answer = await client.chat.completions.create(model="policy", messages=[USER])  # type: ignore[list-item]
            return answer.choices[0].message.content

        model.error = RuntimeError("no instance is left")
        with pytest.raises(openai.InternalServerError):  # also of the retry
            await ask()
        model.error, doors.lose = None, 1
        assert await ask() == "first"
        assert await ask() == "second"
        await client.close()
        return 1.0

    episode = play(model, agent)
    assert (episode.reward, len(episode.rows), len(model.orders)) == (1.0, 2, 4), episode.void


async def left_alone(host: AgentHost, session: OpenSession, body: dict[str, Any]) -> int:
    """Make a call whose client goes away at once, and return the status of its answer."""
    received = [{"type": "http.request", "body": json.dumps(body).encode()}, {"type": "http.disconnect"}]
    sent: list[Any] = []

    async def receive() -> Any:
        return received.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    path = f"/sessions/{session.id}/v1/chat/completions"
    await host._endpoint.app({"type": "http", "method": "POST", "path": path, "headers": []}, receive, send)
    return int(sent[0]["status"])


def test_calls_beyond_those_that_may_run_at_once_wait_and_are_samples_of_their_own() -> None:
    model = Model(*map(str, range(20)))
    model.gate.clear()
    body = {"model": "policy", "messages": [USER]}

    async def agent(host: AgentHost, client: httpx2.AsyncClient) -> None:
        (session,) = host._endpoint.sessions.values()
        asked = [asyncio.ensure_future(client.post("chat/completions", json=body)) for _ in range(20)]
        await until(lambda: session.calls == 20 and len(model.orders) == 16)
        assert await left_alone(host, session, body) == 499
        model.gate.set()
        texts = [answer.json()["choices"][0]["message"]["content"] for answer in await asyncio.gather(*asked)]
        assert sorted(texts, key=int) == list(map(str, range(20)))

    assert len(in_process(agent, model, max_turns=30).rows) == 20


def test_a_call_that_waits_when_its_episode_ends_has_no_turn() -> None:
    model = Model()
    model.gate.clear()
    answers: list[asyncio.Future[httpx2.Response]] = []

    async def main() -> None:
        async with hosting(model, never) as host:
            session = host._endpoint.open(ORDER, SessionLimits(max_context=500, max_turns=9, max_in_flight=1))
            door = httpx2.ASGITransport(app=host._endpoint.app)
            url = f"http://here/sessions/{session.id}/v1"
            async with httpx2.AsyncClient(base_url=url, transport=door) as client:
                answers.extend(asyncio.ensure_future(call(client)) for _ in range(2))
                await until(lambda: session.calls == 2 and len(model.orders) == 1)
                await host._endpoint.close(session)
                found = await asyncio.gather(*answers)
                assert [answer.json()["error"]["code"] for answer in found] == ["episode_over"] * 2

    asyncio.run(asyncio.wait_for(main(), scaled(60)))
    assert len(model.orders) == 1


def test_a_turn_that_runs_when_its_episode_ends_is_cancelled_and_no_part_of_it() -> None:
    model = Model()

    async def agent(client: httpx2.AsyncClient) -> None:
        await call(client)
        model.gate.clear()
        late = asyncio.ensure_future(call(client, {"role": "user", "content": "late"}))
        await until(lambda: len(model.orders) == 2)
        late.cancel()

    episode = play(model, over_http(agent))
    assert model.cancelled == 1 and len(episode.rows) == 1


def test_limits_end_an_episode_by_rule_and_say_so() -> None:
    model = Model()

    async def agent(client: httpx2.AsyncClient) -> None:
        answers = [await call(client, {"role": "user", "content": str(n)}) for n in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 400]
        assert answers[2].json()["error"]["code"] == "max_turns_exceeded"
        codes = [(await call(client)).json()["error"]["code"] for _ in range(100)]
        assert codes[0] == "max_turns_exceeded" and codes[-1] == "too_many_calls"  # a flood

    episode = play(model, over_http(agent), max_turns=2)
    assert len(model.orders) == 2 and episode.finish_reason == "stop" and len(episode.steps) < 20


def test_an_answer_cut_by_a_limit_is_said_to_be_and_its_calls_are_not_read() -> None:
    model = Model(CALL_TEXT)
    model.finish = "length"

    async def agent(client: httpx2.AsyncClient) -> None:
        (choice,) = (await call(client, tools=[TOOL])).json()["choices"]
        assert choice["finish_reason"] == "length" and choice["message"]["content"] == CALL_TEXT
        path = client.base_url.join("../inference/v1/generate")
        (choice,) = (await client.post(path, json={"token_ids": [7]})).json()["choices"]
        assert choice["finish_reason"] == "length"

    assert play(model, over_http(agent)).finish_reason == "length"


def test_a_malformed_call_comes_back_as_text_with_a_remark() -> None:
    model = Model("<tool_call>calculate(1)</tool_call>")

    async def agent(client: httpx2.AsyncClient) -> None:
        answer = await call(client, tools=[TOOL], seed=3, stop=["x"])
        (choice,) = answer.json()["choices"]
        assert choice["message"]["content"].startswith("<tool_call>") and "tool_calls" not in choice["message"]
        assert "Expecting value" in answer.headers["x-streamrl-malformed-call"]
        assert answer.headers["x-streamrl-ignored"] == "seed, stop"

    episode = play(model, over_http(agent))
    assert "malformed call of a tool" in episode.steps[0].detail


def test_a_turn_that_cannot_be_generated_is_an_error_of_the_server_and_can_be_repeated() -> None:
    model = Model()

    async def agent(client: httpx2.AsyncClient) -> None:
        model.error = RuntimeError("no instance is left")
        failed = [await call(client), await call(client, stream=True)]
        assert failed[0].status_code == 503 and "no instance is left" in failed[0].json()["error"]["message"]
        assert "no instance is left" in failed[1].text and "[DONE]" not in failed[1].text
        model.error = None
        assert (await call(client)).status_code == 200

    episode = play(model, over_http(agent))
    assert len(episode.rows) == 1 and [step.name for step in episode.steps][:2] == ["generation failed"] * 2


def test_tokens_in_give_tokens_out_and_continue_their_row() -> None:
    model = Model("a", "b")

    async def agent(client: httpx2.AsyncClient) -> None:
        path = str(client.base_url).replace("/v1/", "/inference/v1/generate")
        tokens = [7, 8, 9]
        for _ in range(2):
            body = {"token_ids": tokens, "sampling_params": {"temperature": 0.3}}
            answer = await client.post(path, json=body)
            (choice,) = answer.json()["choices"]
            assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) and choice["finish_reason"] == "stop"
            assert answer.headers["x-streamrl-ignored"] == "temperature"
            tokens = [*tokens, *choice["token_ids"], 11]
        assert (await client.post(path, json={"token_ids": [10**6], "sampling_params": {}})).status_code == 400

    (row,) = play(model, over_http(agent)).rows
    assert row.prompt_length == 3 and TOKENIZER.decode(row.tokens[row.sampled]) == "a<|im_end|>b<|im_end|>"


def test_what_an_episode_waits_for_is_known() -> None:
    model = Model(CALL_TEXT)
    seen: list[EpisodeWait] = []

    async def main() -> None:
        async def agent(client: httpx2.AsyncClient) -> None:
            seen.extend(host.waiting())
            model.gate.clear()
            asked = asyncio.ensure_future(call(client, tools=[TOOL]))
            await until(lambda: len(model.orders) == 1)
            seen.extend(host.waiting())
            model.gate.set()
            await asked
            seen.extend(host.waiting())

        async with hosting(model, over_http(agent)) as host:
            await host.run(ORDER)
            assert host.waiting() == []

    asyncio.run(main())
    assert [wait.kind for wait in seen] == ["agent", "model", "tool"]
    assert seen[1].name == model.orders[0].turn_id and seen[2].name == "calculate"


def test_workers_that_fail_make_the_episode_void_and_close_its_session() -> None:
    async def agent(base_url: str, api_key: str) -> float:
        raise RuntimeError("the pipe is broken")

    episode = play(Model(), agent)
    assert episode.void == Void(VoidCause.CRASH, "RuntimeError: the pipe is broken") and episode.reward is None


def test_a_model_without_a_chat_template_is_refused_before_anything_starts() -> None:
    tokenizer = small_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(UserError, match=r"model\.path: some/model: the tokenizer has no chat template"):
        AgentHost(
            RunConfig.model_validate({"model": {"path": "some/model"}}), tokenizer, Model().generate, Agents(never)
        )


async def never(base_url: str, api_key: str) -> float:
    raise AssertionError


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0)
