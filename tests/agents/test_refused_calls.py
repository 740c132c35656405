"""A conversation that context or turns ended is over until it goes on."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest

from streamrl.agents.agent_host import AgentHost
from streamrl.agents.episode import Episode, EpisodeOrder, EpisodeOutcome
from streamrl.agents.session import Session
from streamrl.agents.turns import CallError
from streamrl.config.run import RunConfig
from streamrl.rollouts.void import Void, VoidCause
from tests.agents.test_agent_host import ORDER, TOKENIZER, USER, Model, call, over_http, play
from tests.agents.test_session import MORE, answered, session
from tests.agents.test_session import call as asked

FULL = {"role": "user", "content": "x " * 600}
LARGE = {"role": "user", "content": "x " * (1 << 20)}
SHORT = {"role": "user", "content": "x " * 20}
SYSTEM = {"role": "system", "content": "Be brief."}


def refused(here: Session, *messages: dict[str, Any]) -> None:
    with pytest.raises(CallError):
        here.call(asked(*messages), 1.0)


def test_a_refusal_is_taken_back_by_a_turn_of_a_shorter_conversation() -> None:
    here = session()
    refused(here, SYSTEM, FULL)
    assert here.cut
    answered(here, asked(SYSTEM, USER))  # of another one
    assert here.cut
    answered(here, asked(SYSTEM, SHORT))
    assert not here.cut


@pytest.mark.parametrize("goes_on", ["from the same turn", "from an earlier one", "elsewhere"])
def test_a_refusal_of_a_conversation_that_goes_on_is_known_by_its_turns(goes_on: str) -> None:
    here = session()
    first = answered(here, asked(USER))
    other = answered(here, asked(MORE))
    known = [USER, first.answer]
    second = answered(here, asked(*known, MORE))
    refused(here, *known, MORE, second.answer, FULL)
    told = {"role": "user", "content": "Why?"}
    shorter = {
        "from the same turn": [*known, MORE, second.answer, told],
        "from an earlier one": [*known, told],
        "elsewhere": [MORE, other.answer, told],
    }
    answered(here, asked(*shorter[goes_on]))
    assert here.cut == (goes_on == "elsewhere")


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("system", ["You check.", SYSTEM["content"]])
def test_a_refusal_stays_whenever_another_conversation_asks_the_same_question(first: bool, system: str) -> None:
    here = session()
    other = asked({"role": "system", "content": system}, USER, {"role": "user", "content": "Once more."})
    if first:
        answered(here, other)
    turn = answered(here, asked(SYSTEM, USER))
    refused(here, SYSTEM, USER, turn.answer, FULL)
    if not first:
        answered(here, other)
    assert here.cut
    answered(here, asked(SYSTEM, MORE, SHORT))  # what it was told last, behind a new beginning
    assert not here.cut


TOLD = {"role": "user", "content": "Find the file that the test needs."}


@pytest.mark.parametrize(
    ("then", "cut"),
    [
        ([{"role": "user", "content": "x"}], True),  # many texts begin with it
        ([{"role": "system", "content": "Check."}, SHORT], True),
        ([{**SHORT, "role": "tool", "tool_call_id": "a"}], True),
        ([MORE, SHORT], False),
        ([{**TOLD, "content": TOLD["content"] + " Be brief."}], False),
    ],
    ids=["short", "system", "role", "shortened", "longer"],
)
def test_a_message_is_another_one_shortened_if_enough_of_it_is_left(then: list[dict[str, Any]], cut: bool) -> None:
    here = session()
    refused(here, TOLD, FULL)
    answered(here, asked(*then))
    assert here.cut == cut


def test_a_refusal_is_taken_back_where_its_conversation_had_gone_on_already() -> None:
    here = session()
    first = answered(here, asked(USER))
    second = answered(here, asked(USER, first.answer, MORE))
    refused(here, USER, first.answer, FULL)
    answered(here, asked(USER, first.answer, MORE, second.answer, MORE))
    assert not here.cut


def test_an_agent_that_shortens_its_conversation_and_goes_on_is_not_cut() -> None:
    async def agent(client: httpx2.AsyncClient) -> None:
        assert (await call(client, FULL)).json()["error"]["code"] == "context_length_exceeded"
        assert (await call(client, SHORT)).status_code == 200

    episode = play(Model("12"), over_http(agent), max_context=500)
    assert (episode.reward, episode.finish_reason) == (1.0, "stop")


@pytest.mark.parametrize(
    ("mib", "shortened", "finish"), [(2, True, "stop"), (2, False, "length"), (9, False, "length")]
)
def test_a_call_of_which_no_tokens_are_made_because_it_is_too_large_has_used_up_the_context(
    mib: int, shortened: bool, finish: str
) -> None:
    async def agent(client: httpx2.AsyncClient) -> None:
        first = (await call(client, USER)).json()["choices"][0]["message"]
        answer = await call(client, USER, first, {"role": "user", "content": "x " * (mib << 19)})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert f"too long: the call has more than {1 << 20 if mib == 2 else 8 << 20} bytes" in answer.text
        assert (await call(client, *([USER, first, SHORT] if shortened else [MORE]))).status_code == 200

    episode = play(Model(), over_http(agent), max_context=500)
    assert (episode.reward, episode.finish_reason, len(episode.rows)) == (1.0, finish, 1 if shortened else 2)


def test_a_large_call_with_something_else_than_text_is_told_so() -> None:
    async def agent(client: httpx2.AsyncClient) -> None:
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "a" * (2 << 20)}}
        assert (
            "reads text only" in (await call(client, {"role": "user", "content": [image]})).json()["error"]["message"]
        )

    assert play(Model(), over_http(agent), max_context=500).void is not None


@pytest.mark.parametrize(
    ("questions", "reward"),
    [
        ([LARGE, USER], 0.0),
        ([FULL, USER], 0.0),  # another thread's call comes later
        ([USER, FULL], 0.0),
        ([FULL, SHORT], None),  # it goes on, and then fails for a reason of its own
        ([USER], None),
    ],
)
@pytest.mark.parametrize("use", [{"command": ["python"]}, {"run": "m:f"}])
def test_an_agent_whose_error_does_not_say_that_its_context_is_full_ends_by_rule_whichever_call_comes_last(
    questions: list[dict[str, Any]], reward: float | None, use: dict[str, Any]
) -> None:
    cause = VoidCause.CRASH if "command" in use else VoidCause.PROVIDER

    class Agents:
        async def run(self, order: EpisodeOrder, base_url: str, api_key: str) -> EpisodeOutcome:
            async with httpx2.AsyncClient(base_url=base_url, trust_env=False) as client:
                for question in questions:
                    assert (await call(client, question)).is_success != (question in (FULL, LARGE))
            return EpisodeOutcome(None, Void(cause, "it failed"), refused=True)

    async def main() -> Episode:
        task = {"kind": "agent", "name": "sums", "items": "m:g", **use}
        run = RunConfig.model_validate({"model": {"path": "some/model", "max_context": 500}, "tasks": [task]})
        host = AgentHost(run, TOKENIZER, Model().generate, Agents())
        await host.start()
        try:
            return await host.run(ORDER)
        finally:
            await host.close()

    episode = asyncio.run(main())
    assert (episode.reward, episode.void and episode.void.cause) == (reward, None if reward == 0 else cause)
