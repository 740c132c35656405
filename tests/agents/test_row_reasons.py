"""Steps say why a call begins a row although its episode has turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from streamrl.agents.turns import Turn
from tests.agents.random_sessions import TOOL
from tests.agents.test_agent_host import CALL_TEXT, Model, over_http, play
from tests.agents.test_agent_host import call as ask
from tests.agents.test_session import MORE, USER, answered, call, session

SYSTEM = {"role": "system", "content": "Be brief."}
WHY = {"role": "user", "content": "Why?"}
Made = Callable[[Turn, Turn], list[Any]]


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda a, b: [SYSTEM, USER, appended(a), MORE], "messages[2] is the answer of turn 0 with text appended"),
        (lambda a, b: [SYSTEM, USER, {**a.answer, "content": "13"}], "messages[2] differs from the answer of turn 0 in"
        " its text"),
        (lambda a, b: [SYSTEM, USER, {**a.answer, "tool_calls": []}], "messages[2] differs from the answer of turn 0 in"
        " its calls of tools"),
        (lambda a, b: [SYSTEM, USER, MORE], "messages[2] is not the answer of turn 0, which is missing"),
        (lambda a, b: [{**SYSTEM, "content": "Hi."}, USER, a.answer, MORE], "another system text than turn 1"),
        (lambda a, b: [USER, a.answer, MORE], "another system text than turn 1"),
        (lambda a, b: [SYSTEM, WHY], "messages[1] differs from that of turn 0"),
        (lambda a, b: [SYSTEM, USER], "the messages of turn 0 once more"),
        (lambda a, b: [SYSTEM], "fewer messages than turn 0"),
        (lambda a, b: [WHY], ""),
        (lambda a, b: [SYSTEM, USER, a.answer, WHY], "messages[3] differs from that of turn 1"),
        (lambda a, b: [SYSTEM, USER, a.answer, MORE, appended(b), WHY], "messages[4] is the answer of turn 1 with text"
        " appended"),
        (lambda a, b: [SYSTEM, USER, a.answer, MORE, b.answer, WHY], ""),
    ],
)  # fmt: skip
def test_a_turn_says_in_what_it_differs_from_the_nearest_one(made: Made, reason: str) -> None:
    here = session()
    first = answered(here, call(SYSTEM, USER, tools=[TOOL]), f"Let me see.\n{CALL_TEXT}")
    assert first.answer["tool_calls"]
    second = answered(here, call(SYSTEM, USER, first.answer, MORE, tools=[TOOL]))
    assert (first.note, second.note) == ("", "")
    assert here.call(call(*made(first, second), tools=[TOOL]), 3.0)[0].note == reason


def appended(turn: Turn) -> dict[str, Any]:
    return {**turn.answer, "content": turn.answer["content"] + "\nCalling tools: none"}


def test_other_tools_a_cut_answer_and_one_that_is_not_there_yet_are_named() -> None:
    here = session()
    first = answered(here, call(USER))
    known = [USER, first.answer, MORE]
    assert answered(here, call(*known, tools=[TOOL])).note == "other tools than turn 0"
    here = session()
    first = answered(here, call(USER), reason="length")
    assert answered(here, call(USER, first.answer, MORE)).note == "the answer of turn 0 was cut"
    here = session()
    assert not here.call(call(USER), 1.0)[0].note
    assert (
        here.call(call(USER, {"role": "assistant", "content": "12"}, MORE), 1.0)[0].note == "turn 0 had no answer yet"
    )


def test_the_step_of_a_new_row_and_of_a_branch_has_the_reason() -> None:
    async def agent(client: httpx2.AsyncClient) -> None:
        first = (await ask(client, USER)).json()["choices"][0]["message"]
        await ask(client, USER, {**first, "content": first["content"] + "!"}, MORE)
        for question in (MORE, WHY):
            await ask(client, USER, first, question)

    episode = play(Model(), over_http(agent))
    begins = [step.detail.partition("; ")[2] for step in episode.steps]
    assert begins == [
        "begins a row",
        "begins a row: messages[1] is the answer of turn 0 with text appended",
        "continues turn 0",
        "continues turn 0 in a new row: messages[2] differs from that of turn 2",
    ]
