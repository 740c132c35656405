"""Agents that speak OpenAI's Responses or Anthropic's Messages, with the unmodified packages, over real HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx2
import numpy as np
import openai
import pytest

from streamrl.agents import chat_endpoint
from streamrl.agents.agent_host import ALL_REFUSED, NO_CALLS
from streamrl.agents.chat_calls import check_variables, read_chat
from streamrl.agents.client import is_over
from streamrl.agents.dialects import DIALECTS, Dialect
from streamrl.agents.episode import Episode
from streamrl.agents.rendering import ChatRenderer
from streamrl.agents.session import Session
from streamrl.agents.turns import CallError
from streamrl.rollouts.void import Void, VoidCause
from tests.agents.random_sessions import small_tokenizer
from tests.agents.test_agent_host import CALL_TEXT, TOKENIZER, USER, Model, call, over_http, play
from tests.waiting import scaled

PARAMETERS = {"type": "object", "properties": {}}
FUNCTION: Any = {"type": "function", "name": "calculate", "parameters": PARAMETERS, "description": "Compute."}
CUSTOM: Any = {"name": "calculate", "input_schema": PARAMETERS, "description": "Compute."}


def one_row(episode: Episode, model: Model, *texts: str) -> str:
    """Check that an episode of several turns is one row, exact to the token; return what it was shown beside them."""
    assert episode.reward == 1.0, episode.void
    (row,) = episode.rows
    assert TOKENIZER.decode(row.tokens[row.sampled]) == "".join(f"{text}<|im_end|>" for text in texts)
    last = model.orders[-1].prompt_tokens
    assert np.array_equal(row.tokens[: len(last)], last)
    return str(TOKENIZER.decode(row.tokens[~row.sampled]))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stored", [False, True])
def test_an_agent_that_speaks_responses_calls_tools_in_one_row(stream: bool, stored: bool) -> None:
    model = Model(f"Let me see.\n{CALL_TEXT}", "It is 12.", "Yes.")

    async def agent(base_url: str, api_key: str) -> float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            items: list[Any] = [USER]
            before, kinds = None, []
            for number in range(3):
                asked: Any = {"model": "policy", "input": items, "instructions": "Be brief.", "tools": [FUNCTION]}
                asked |= {"previous_response_id": before, "temperature": 0.1, "max_output_tokens": 3}
                if stream:
                    events = [event async for event in await client.responses.create(**asked, stream=True)]
                    assert [event.sequence_number for event in events] == list(range(len(events)))
                    response = events[-1].response
                    told = "".join(event.delta for event in events if event.type == "response.output_text.delta")
                    assert told == response.output_text
                else:
                    response = await client.responses.create(**asked)
                assert response.status == "completed" and response.usage is not None
                assert response.usage.input_tokens == len(model.orders[-1].prompt_tokens)
                kinds.append([item.type for item in response.output])
                new: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Sure?"}]}]
                if number == 0:
                    call = response.output[1]
                    assert (call.name, json.loads(call.arguments)) == ("calculate", {"x": 1})
                    new = [{"type": "function_call_output", "call_id": call.call_id, "output": "twelve"}]
                before = response.id if stored else None
                items = new if stored else [*items, *(item.to_dict() for item in response.output), *new]
            assert kinds == [["message", "function_call"], ["message"], ["message"]]
        return 1.0

    episode = play(model, agent, max_context=2000)
    shown = one_row(episode, model, f"Let me see.\n{CALL_TEXT}", "It is 12.", "Yes.")
    assert all(text in shown for text in ("Be brief.", "What is 7 + 5?", "twelve", "Sure?"))
    assert "ignored, because the run decides: max_output_tokens, temperature" in episode.steps[0].detail


def test_an_answer_of_calls_alone_is_not_joined_to_a_text_that_precedes_it() -> None:
    model = Model("I will compute it.", CALL_TEXT, "It is 12.")

    async def agent(base_url: str, api_key: str) -> float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            items: list[Any] = [USER]
            for _ in range(3):
                response = await client.responses.create(model="policy", input=items, tools=[FUNCTION])
                items += [item.to_dict() for item in response.output]
                calls = [item for item in response.output if item.type == "function_call"]
                items += [{"type": "function_call_output", "call_id": one.call_id, "output": "twelve"} for one in calls]
        return 1.0

    one_row(play(model, agent, max_context=3000), model, "I will compute it.", CALL_TEXT, "It is 12.")


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_that_speaks_messages_calls_tools_in_one_row(stream: bool) -> None:
    model = Model(CALL_TEXT, "It is 12.", "Yes.")

    async def agent(base_url: str, api_key: str) -> float:
        # as a program would that knows ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY; or the key alone
        base_url = base_url.removesuffix("/v1") if stream else base_url.split("/sessions/")[0]
        async with anthropic.AsyncAnthropic(base_url=base_url, api_key=api_key) as client:
            messages: list[Any] = [USER]
            reasons = []
            for number in range(3):
                asked: Any = {"model": "policy", "messages": messages, "max_tokens": 3, "tools": [CUSTOM]}
                asked |= {"system": [{"type": "text", "text": "Be brief."}], "extra_body": {"temperature": 0.1}}
                if stream:
                    async with client.messages.stream(**asked) as events:
                        answer = await events.get_final_message()
                else:
                    answer = await client.messages.create(**asked)
                reasons.append(answer.stop_reason)
                assert answer.usage.input_tokens == len(model.orders[-1].prompt_tokens)
                new: Any = "Sure?"
                if number == 0:
                    (call,) = answer.content
                    assert (call.name, call.input) == ("calculate", {"x": 1})
                    new = [{"type": "tool_result", "tool_use_id": call.id, "content": "twelve"}]
                messages += [
                    {"role": "assistant", "content": [block.to_dict() for block in answer.content]},
                    {"role": "user", "content": new},
                ]
            assert reasons == ["tool_use", "end_turn", "end_turn"]
        return 1.0

    episode = play(model, agent, max_context=2000)
    shown = one_row(episode, model, CALL_TEXT, "It is 12.", "Yes.")
    assert all(text in shown for text in ("Be brief.", "What is 7 + 5?", "twelve", "Sure?"))
    assert episode.steps[0].detail.endswith("ignored, because the run decides: temperature")


def test_a_conversation_is_the_same_one_in_every_api() -> None:
    model = Model("first", "second", "third")

    async def agent(client: httpx2.AsyncClient) -> None:
        first = {"role": "assistant", "content": "first"}
        told = [USER, first, USER, {"role": "assistant", "content": "second"}, USER]
        for path, body in (
            ("messages", {"messages": told[:1], "max_tokens": 1}),
            ("responses", {"input": told[:3]}),
            ("chat/completions", {"messages": told}),
        ):
            assert (await client.post(path, json={"model": "policy", **body})).is_success

    one_row(play(model, over_http(agent), max_context=2000), model, "first", "second", "third")


ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": [USER]},
}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}
REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    ("responses", {"input": [{"type": "reasoning", "summary": []}]}, 400, "input[0]: the model reads messages"),
    ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400, "not 'input_image'"),
    ("responses", {"input": []}, 400, "input: expected"),
    ("responses", {"input": [{"role": "robot", "content": "x"}]}, 400, "role: expected one of"),
    ("responses", {"input": [{"type": "function_call", "name": 3}]}, 400, "a function with a name and arguments"),
    ("responses", {"input": "x", "tools": [{"type": "web_search"}]}, 400, "the agent has to call its tools itself"),
    ("responses", {"input": "x", "text": {"format": {"type": "json_object"}}}, 400, "text.format"),
    ("responses", {"input": "x", "text": 3}, 400, "text.format"),
    ("responses", {"input": "x", "previous_response_id": "resp_1"}, 400, "has no response 'resp_1'"),
    ("responses", {"input": "x", "previous_response_id": [1]}, 400, "has no response [1]"),
    ("responses", {"input": "x", "background": True}, 400, "background"),
    ("responses", {"input": "x", "model": "gpt"}, 404, "there is no model 'gpt'"),
    ("messages", {}, 400, "messages: expected"),
    ("messages", {"messages": [USER], "model": "claude"}, 404, "there is no model 'claude'"),
    ("messages", {"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "results of tools only, not 'image'"),
    ("messages", {"messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0].role"),
    ("messages", {"messages": [{"role": "user", "content": 3}]}, 400, "a text or a list of blocks"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, 400, "not 'tool_use'"),
    ("messages", {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, 400, "with a name"),
    ("messages", {"messages": [USER], "tools": [{"type": "bash_20250124", "name": "bash"}]}, 400, "itself"),
    ("messages", {"messages": [USER], "tools": [{"name": "x"}]}, 400, "input_schema"),
    ("messages", {"messages": [USER], "tool_choice": "auto"}, 400, "tool_choice.type"),
    ("messages", {"messages": [USER], "tool_choice": {"type": ["auto"]}}, 400, "tool_choice.type"),
    ("messages", {"messages": [USER, {"role": "assistant", "content": "It is"}]}, 400, "cannot be begun"),
    ("messages", {"messages": [USER], "output_config": {"format": {}}}, 400, "output_config"),
    ("messages", {"messages": [{"role": "user", "content": "x " * 500}]}, 400, "leaves no room"),
    ("chat/completions", {"messages": [USER], "model": ["policy"]}, 404, "there is no model ['policy']"),
    ("chat/completions", {"messages": [USER], "stream": True, "stream_options": "x"}, 400, "stream_options: expected"),
    ("chat/completions", {"messages": [USER], "continue_final_message": True}, 400, "cannot be begun"),
    ("chat/completions", {"messages": [USER], "add_generation_prompt": False}, 400, "cannot be begun"),
    (
        "chat/completions",
        {"messages": [USER, {"role": "assistant", "function_call": {"name": "f"}}]},
        400,
        "tool_calls",
    ),
    ("chat/completions", {"messages": [{"role": "assistant", "reasoning": 3}]}, 400, "reasoning_content: expected"),
    ("chat/completions", {"messages": [USER], "guided_json": {}}, 400, "guided_json: only text is generated"),
    ("chat/completions", {"messages": [USER], "guided_choice": ["a"]}, 400, "guided_choice"),
    ("chat/completions", {"messages": [USER], "guided_regex": "a"}, 400, "guided_regex"),
    ("chat/completions", {"messages": [USER], "guided_grammar": "a"}, 400, "guided_grammar"),
    ("messages", {"messages": [USER], "structured_outputs": {"choice": ["a"]}}, 400, "structured_outputs"),
    ("chat/completions", {"messages": [USER], "documents": [{"text": "a"}]}, 400, "documents"),
    ("responses", {"input": "x", "chat_template": "{{ messages }}"}, 400, "chat_template: the run renders"),
    ("chat/completions", {"messages": [USER], "chat_template_kwargs": {"x": 1}}, 400, "the run decides them"),
    ("messages", {"messages": [USER], "chat_template_kwargs": [1]}, 400, "the run decides them"),
    ("../inference/v1/generate", {"token_ids": [1], "sampling_params": {"guided_json": {}}}, 400, "guided_json"),
    ("messages/count_tokens", {"messages": [USER]}, 404, "there are /v1/chat/completions, /v1/responses, /v1/messages"),
]


def test_what_cannot_be_given_is_refused_in_the_form_of_its_api_and_costs_no_turn() -> None:
    model = Model()

    async def agent(client: httpx2.AsyncClient) -> None:
        for path, body, status, text in REFUSED:
            answer = await client.post(path, json={"model": "policy", **body})
            told = answer.json()
            assert (answer.status_code, text in told["error"]["message"]) == (status, True), (path, body, told)
            assert (told.get("type") == "error") == (path == "messages")

    episode = play(model, over_http(agent), max_context=400)
    assert episode.rows == [] and model.orders == []
    assert episode.void is not None and episode.void.text.startswith(ALL_REFUSED)  # nothing else has ended it


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda one: one.path)
def test_a_failure_of_the_endpoint_is_told_in_the_form_of_its_api(
    dialect: Dialect, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(session: Session, call: Any, now: float) -> Any:
        raise RecursionError("too deep")

    monkeypatch.setattr(Session, "call", fail)

    async def agent(client: httpx2.AsyncClient) -> None:
        answer = await client.post(dialect.path.removeprefix("/v1/"), json={"model": "policy", **ASKED[dialect.path]})
        told = answer.json()
        assert (answer.status_code, told["error"]["code"]) == (500, "internal_error")
        assert "RecursionError: too deep" in told["error"]["message"]
        assert (told.get("type") == "error") == (dialect.path == "/v1/messages")

    assert play(Model(), over_http(agent)).void == Void(VoidCause.ENVIRONMENT, NO_CALLS)


def test_keys_that_no_header_can_have_are_ignored_as_others() -> None:
    async def agent(client: httpx2.AsyncClient) -> None:
        answer = await call(client, **{"a\r\nb": 1, "\x1bé": 1, "continue_final_message": False, "stop": ["x"]})
        assert answer.headers["x-streamrl-ignored"] == "??, a b, stop"

    assert play(Model(), over_http(agent)).reward == 1.0


@pytest.mark.parametrize("given", [None, {}, {"thinks": False}])
def test_variables_of_the_template_that_are_the_runs_are_no_other_prompt(given: Any) -> None:
    tokenizer = small_tokenizer()
    tokenizer.chat_template += "{% if thinks %}{% endif %}"
    body = {"model": "policy", "messages": [USER], "chat_template_kwargs": given}
    call = read_chat(json.dumps(body).encode(), {}, {"policy"})[0]
    check_variables(body, ChatRenderer(tokenizer, variables={"thinks": False}).variables)
    assert call.ignored == ()
    with pytest.raises(CallError, match="the run decides them"):
        check_variables({"chat_template_kwargs": {"thinks": True}}, {"thinks": False})


def test_what_the_model_is_not_shown_of_an_earlier_answer_is_named() -> None:
    fields = {"refusal": "no", "thinking_blocks": [{"thinking": "x"}], "audio": None, "annotations": [], "id": "a"}
    empty = {"provider_specific_fields": {"refusal": None}, "reasoning": None, "reasoning_content": ""}

    async def agent(client: httpx2.AsyncClient) -> None:
        for _ in range(2):
            answer = await call(client, USER, {"role": "assistant", "content": "12", **fields, **empty}, USER, seed=1)
            assert answer.headers["x-streamrl-ignored"] == "seed, messages.refusal, messages.thinking_blocks"

    steps = play(Model(), over_http(agent), max_context=2000).steps
    told = "not shown to the model, of earlier answers: refusal, thinking_blocks"
    assert [step.detail.count(told) for step in steps] == [1, 0]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_that_an_agent_sends_is_shown_to_the_model(name: str) -> None:
    model = Model()

    async def agent(client: httpx2.AsyncClient) -> None:
        assert (await call(client, USER, {"role": "assistant", "content": "12", name: "7 + 5"}, USER)).is_success

    assert play(model, over_http(agent), max_context=2000).reward == 1.0
    assert "<think>\n7 + 5\n</think>\n\n12" in TOKENIZER.decode(model.orders[0].prompt_tokens)


def test_reasoning_that_comes_in_the_text_and_in_a_field_is_shown_once() -> None:
    model = Model("<think>\nSeven and five.\n</think>\n\nIt is 12.")
    texts = ["<think>7 + 5</think>12"]

    async def agent(client: httpx2.AsyncClient) -> None:
        answer = (await call(client)).json()["choices"][0]["message"]
        texts.append(answer["content"])
        for text in texts:
            both = {**answer, "content": text, "reasoning_content": "Seven and five."}
            assert (await call(client, USER, both, USER)).is_success

    episode = play(model, over_http(agent), max_context=2000)
    shown = [TOKENIZER.decode(order.prompt_tokens) for order in model.orders[1:]]
    assert [text.count("</think>") for text in shown] == [1, 1] and "Seven" not in shown[0]
    assert len(episode.rows) == 2  # the second goes on from the answer


def test_parameters_that_are_empty_where_nothing_is_asked_for_are_not_refused() -> None:
    async def agent(client: httpx2.AsyncClient) -> None:
        answer = await call(client, documents=[], structured_outputs={})
        assert answer.is_success and "x-streamrl-ignored" not in answer.headers

    assert play(Model(), over_http(agent)).reward == 1.0


def test_the_models_that_are_listed_can_be_asked_for_by_name() -> None:
    async def agent(base_url: str, api_key: str) -> float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            names = [model.id async for model in client.models.list()]
            assert names == ["policy", "some/model"]
            assert [(await client.models.retrieve(name)).id for name in names] == names
            with pytest.raises(openai.NotFoundError, match="there is no model 'gpt' here"):
                await client.models.retrieve("gpt")
        return 0.0

    assert play(Model(), agent).void == Void(VoidCause.ENVIRONMENT, NO_CALLS)


def test_the_end_by_rule_is_told_to_every_package() -> None:
    over = []

    async def agent(base_url: str, api_key: str) -> float:
        asked: Any = {"model": "policy", "messages": [USER], "max_tokens": 1}
        async with anthropic.AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key) as client:
            await client.messages.create(**asked)
            for given in (asked, {**asked, "model": "other"}):
                with pytest.raises(anthropic.APIStatusError) as refused:
                    await client.messages.create(**given)
                over.append(is_over(refused.value, base_url))
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as other:
            with pytest.raises(openai.BadRequestError) as ended:
                await other.responses.create(model="policy", input="hello")
            over.append(is_over(ended.value, base_url))
        return 1.0

    assert play(Model(), agent, max_turns=1).reward == 1.0
    assert over == [True, False, True]


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda one: one.path)
def test_a_stream_shows_signs_of_life_while_its_turn_is_generated_and_packages_skip_them(
    dialect: Dialect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_endpoint, "STREAM_WAITS_S", 0.001)
    model = Model("It is 12.", "It is 12.")
    sent, real = [], chat_endpoint.ChatEndpoint._stream

    async def watched(*of: Any) -> AsyncIterator[str]:
        async for part in real(*of):
            sent.append(part)
            if sent.count(dialect.waits) == 3:
                model.gate.set()
            yield part

    monkeypatch.setattr(chat_endpoint.ChatEndpoint, "_stream", watched)

    async def text(base_url: str, api_key: str) -> str:
        asked: Any = {"model": "policy", **ASKED[dialect.path]}
        if dialect.path == "/v1/messages":
            async with (
                anthropic.AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key) as client,
                client.messages.stream(**asked, max_tokens=3) as events,
            ):
                return str(await events.get_final_text())
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as other:
            if dialect.path == "/v1/responses":
                parts = [event async for event in await other.responses.create(**asked, stream=True)]
                return str(parts[-1].response.output_text)
            chunks = [chunk async for chunk in await other.chat.completions.create(**asked, stream=True)]
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    async def agent(base_url: str, api_key: str) -> float:
        model.gate.clear()
        assert await asyncio.wait_for(text(base_url, api_key), scaled(60)) == "It is 12."
        return 1.0

    assert play(model, agent).reward == 1.0
    assert sent.count(dialect.waits) >= 3 and model.gate.is_set()


@pytest.mark.parametrize("path", ["responses", "messages"])
def test_a_cut_answer_is_said_to_be_cut_and_a_failed_turn_ends_its_stream_with_an_error(path: str) -> None:
    model = Model("a b")
    model.finish = "length"

    async def agent(client: httpx2.AsyncClient) -> None:
        body = {"model": "policy", "input": "x"} if path == "responses" else {"model": "policy", "messages": [USER]}
        answer = (await client.post(path, json=body)).json()
        if path == "responses":
            assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        else:
            assert answer["stop_reason"] == "max_tokens"
        model.error = RuntimeError("no instance is left")
        failed = (await client.post(path, json={**body, "stream": True})).text
        (last,) = [line for line in failed.splitlines() if line.startswith("data: ")][-1:]
        assert json.loads(last.removeprefix("data: "))["type"] == "error" and "no instance is left" in last

    assert len(play(model, over_http(agent)).rows) == 1


@pytest.mark.parametrize(
    ("path", "body", "nothing"),
    [
        ("chat/completions", {"messages": [USER]}, {"user": "b", "metadata": {"run": "2"}, "store": False}),
        ("responses", {"input": "Hi."}, {"include": ["x"], "max_tool_calls": 3, "safety_identifier": "b"}),
        ("messages", {"messages": [USER], "max_tokens": 5}, {"metadata": {"user_id": "b"}, "service_tier": "auto"}),
        ("../inference/v1/generate", {"token_ids": [1, 2]}, {"request_id": "b"}),
    ],
)
def test_a_repeated_key_is_known_though_what_has_no_effect_differs(
    path: str, body: dict[str, Any], nothing: dict[str, Any]
) -> None:
    model = Model("12", "13")

    async def agent(client: httpx2.AsyncClient) -> None:
        url = str(client.base_url).removesuffix("v1/") + path.removeprefix("../") if ".." in path else path
        for more, status in (({}, 200), (nothing, 200), ({"temperature": 0.5, "stop": ["x"]}, 400)):
            asked = {"model": "policy", **body, **more}
            assert (await client.post(url, json=asked, headers={"Idempotency-Key": "k"})).status_code == status

    play(model, over_http(agent))
    assert len(model.orders) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_responses_have_log_probabilities_if_asked_and_what_else_is_asked_for_in_vain_is_named(stream: bool) -> None:
    async def agent(base_url: str, api_key: str) -> float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            asked: Any = {"model": "policy", "input": "Hi.", "truncation": "auto"}
            asked["include"] = ["message.output_text.logprobs", "reasoning.encrypted_content"]
            raw = await client.responses.with_raw_response.create(**asked, stream=stream)
            assert raw.headers["x-streamrl-ignored"] == "include reasoning.encrypted_content, truncation"
            response = raw.parse()
            if stream:
                events = [event async for event in response]
                told = [event.logprobs for event in events if event.type.startswith("response.output_text.")]
                assert [[one.logprob for one in part] for part in told] == [[-0.5] * 2] * 2
                response = events[-1].response
            (part,) = response.output[0].content
            assert [one.token for one in part.logprobs] == ["12", "<|im_end|>"]
            plain = await client.responses.create(model="policy", input="Hi.", truncation="disabled")
            assert plain.output[0].content[0].logprobs == []
        return 1.0

    episode = play(Model("12", "12"), agent)
    assert episode.reward == 1.0 and "include reasoning.encrypted_content, truncation" in episode.steps[0].detail
