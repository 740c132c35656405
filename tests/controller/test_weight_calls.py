"""The trainer's calls to instances that it pushes weights to, on their way through the controller."""

from __future__ import annotations

import asyncio
from typing import Any

from streamrl.controller.weight_calls import WeightCalls
from streamrl.protocol.controller_site import Member, WeightAnswer, WeightCall
from streamrl.protocol.message import TypedMessage, parse

MEMBERS = [Member("a", 1, 1), Member("b", 2, 1)]


class Ends:
    """Both ends of the calls: what the service and the trainer get."""

    def __init__(self) -> None:
        self.told: list[TypedMessage] = []
        self.got: list[WeightAnswer] = []
        self.there = True
        ends: Any = self
        self.calls = WeightCalls(ends, ends, "trainer-0")

    async def tell(self, message: TypedMessage) -> None:
        self.told.append(message)

    async def send(self, peer: str, kind: str, body: dict[str, Any]) -> None:
        assert (peer, kind) == ("trainer-0", "weight_answer")
        if not self.there:
            raise KeyError(peer)
        self.got.append(parse(WeightAnswer, body))


def call(name: str, step: Any) -> WeightCall:
    return WeightCall(call=name, step=step, number=3, members=[] if step == "members" else MEMBERS)


def test_calls_go_to_the_service_and_answers_to_the_trainer_with_signs_of_life_in_between() -> None:
    ends = Ends()

    async def body() -> None:
        assert ends.calls.since_sign_s == float("inf")
        await ends.calls.ask(call("load-1", "load"))
        assert ends.told == [call("load-1", "load")] and ends.calls.since_sign_s < 60
        answers = [WeightAnswer(call="load-1", pending=True), WeightAnswer(call="load-1", done={"a": (0.0, 1.0)})]
        for one in answers:
            await ends.calls.answered(one)
        await ends.calls.answered(WeightAnswer(call="load-1"))  # to nothing that is open
        assert ends.got == answers
        await ends.calls.ask(call("load-2", "load"))
        await ends.calls.answered(WeightAnswer(call="load-1", lost={"a": "late"}))
        assert ends.got == answers
        ends.there = False
        await ends.calls.answered(WeightAnswer(call="load-2"))  # the trainer has gone

    asyncio.run(body())


def test_after_a_restart_of_the_service_the_trainer_is_told_that_all_members_are_lost_or_asks_again() -> None:
    ends = Ends()

    async def body() -> None:
        await ends.calls.service_returned()
        assert not ends.told and not ends.got
        await ends.calls.ask(call("members-0", "members"))
        await ends.calls.service_returned()
        assert ends.told == [call("members-0", "members")] * 2 and not ends.got
        await ends.calls.answered(WeightAnswer(call="members-0", members=MEMBERS))
        await ends.calls.ask(call("pause-1", "pause"))
        await ends.calls.service_returned()
        await ends.calls.service_returned()
        _, lost = ends.got
        assert lost.call == "pause-1" and set(lost.lost) == {"a", "b"} and not lost.done

    asyncio.run(body())
