"""The dispatcher: instances that get no requests for a while, and what happens while its orders are being sent."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from scheduler.cost.length_forecast import Forecast
from scheduler.dispatch.baselines import LeastLoaded
from scheduler.dispatch.policy import REGULAR, DispatchPolicy
from scheduler.dispatch.registry import POLICIES, make_policy
from streamrl.generation.site.dispatcher import Dispatcher
from streamrl.transport.wire import Arrays
from tests.generation.dispatching import Scripted, dispatcher, give_back, part, requests

Told = list[tuple[str, str, str]]


def interrupted(policy: DispatchPolicy) -> tuple[Dispatcher, Told, list[Callable[[], Awaitable[None]]]]:
    """A dispatcher, (instance, kind, sample) of what it sends, and what happens after its next message."""
    told: Told = []
    meanwhile: list[Callable[[], Awaitable[None]]] = []

    async def send(instance: str, kind: str, body: dict[str, Any], arrays: Arrays) -> None:
        told.append((instance, kind, body["sample_id"]))
        if meanwhile:
            await meanwhile.pop()()

    return Dispatcher(policy, send, lambda instance, sample_id: 0), told, meanwhile


@pytest.mark.parametrize("forecast", [Forecast((4.0, 6.0)), None], ids=["forecasts", "none"])
@pytest.mark.parametrize("name", POLICIES)
def test_an_instance_that_is_admitted_anew_gets_no_more_than_its_free_slots(
    name: str, forecast: Forecast | None
) -> None:
    """It was silent, has missed weights, and still works on what it had."""
    work, sent = dispatcher(make_policy(name))

    async def body() -> None:
        await work.join("a", 3, None, REGULAR)
        await work.submit([(requests(*(f"g.{n}" for n in range(6))), forecast)])
        started = [b["sample_id"] for _, _, b, _ in sent]
        assert started == ["g.0", "g.1", "g.2"]
        sent.clear()
        await work.hold("a", requeue=False, why="silent")
        await work.park(["g.2"])  # it is released, and takes no slot any more
        work.leave("a")
        await work.join("a", 3, None, REGULAR)
        assert [(kind, b["sample_id"]) for _, kind, b, _ in sent] == [("release", "g.2"), ("generate", "g.3")]
        await work.finished("g.0", 5, "a")
        assert [b["sample_id"] for _, _, b, _ in sent][2:] == ["g.4"]

    asyncio.run(body())


def test_nothing_is_placed_on_an_instance_that_is_about_to_be_unused() -> None:
    work, told, meanwhile = interrupted(LeastLoaded())

    async def body() -> None:
        for name in "abc":
            await work.join(name, 4, None, REGULAR)
        await work.submit([(requests("g.0", "h.0", "i.0", "k.0"), None)])
        assert told == [(name, "generate", f"{one}.0") for name, one in zip("abca", "ghik", strict=True)]
        told.clear()

        async def come_back() -> None:
            await work.released(part("h.0", 2), "b")

        meanwhile.append(come_back)
        await work.use(["a"])  # c has the least, but is not used either
        assert told == [("b", "release", "h.0"), ("a", "generate", "h.0"), ("c", "release", "i.0")]

    asyncio.run(body())


def test_a_request_that_is_moved_and_parked_is_ordered_once_and_moves_no_more() -> None:
    policy = Scripted()
    work, told, _ = interrupted(policy)

    async def body() -> None:
        await work.submit([(requests("g.0", "g.1"), None)])
        policy.to_move = [("g.1", "b")]
        await work.finished("g.0", 1, "a")
        told.clear()
        await work.park(["g.1"])
        await work.resume(["g.1"])
        await work.hold("a", requeue=True, why="weights")
        assert told == []  # the order was given when it was moved
        policy.join("a", 8)
        await give_back(work, part("g.1", 4))
        assert told == [("a", "generate", "g.1")] and work.moves == 0

    asyncio.run(body())


@pytest.mark.parametrize("again", [False, True], ids=["runs there", "is released elsewhere"])
def test_what_has_come_back_before_its_order_was_sent_is_not_released(again: bool) -> None:
    policy = Scripted()
    work, told, meanwhile = interrupted(policy)

    async def come_back() -> None:
        """It has used up its budget, and is resumed."""
        await work.released(part("g.1", 4), "a")
        await work.resume(["g.1"])
        if again:
            policy.to_move = [("g.1", "b")]
            await work.submit([])
            await give_back(work, part("g.1", 6))
            await work.park(["g.1"])

    async def body() -> None:
        await work.submit([([replace(one, pause_at=4) for one in requests("g.0", "g.1")], None)])
        told.clear()
        meanwhile.append(come_back)
        await work.park(["g.0", "g.1"])
        moved = [("a", "release", "g.1"), ("b", "generate", "g.1"), ("b", "release", "g.1")]
        assert told == [("a", "release", "g.0"), ("a", "generate", "g.1"), *(moved if again else [])]

    asyncio.run(body())


def test_the_end_of_a_reason_that_an_instance_is_not_held_for_changes_nothing() -> None:
    work, told, _ = interrupted(LeastLoaded())

    async def body() -> None:
        await work.join("a", 1, None, REGULAR)
        await work.hold("a", requeue=False, why="silent")
        await work.submit([(requests("g.0"), None)])
        await work.unhold("a", "weights")
        assert told == []
        for _ in range(2):
            await work.unhold("a", "silent")
        assert told == [("a", "generate", "g.0")]
        await work.lost("a", lambda _: None)
        await work.unhold("a", "silent")  # it has left meanwhile
        await work.join("a", 1, None, REGULAR)
        assert told == [("a", "generate", "g.0")] * 2

    asyncio.run(body())


def test_what_a_silent_instance_has_released_meanwhile_is_not_ordered_from_it() -> None:
    """An order that comes late could meet the request's next start there."""
    work, told, meanwhile = interrupted(LeastLoaded())

    async def come_back() -> None:
        assert not await work.released(part("g.1", 3), "a")

    async def body() -> None:
        await work.join("a", 2, None, REGULAR)
        await work.submit([(requests("g.0", "g.1"), None)])
        await work.join("b", 2, None, REGULAR)
        await work.hold("a", requeue=False, why="silent")
        told.clear()
        meanwhile.append(come_back)
        assert await work.hand_over("a", lambda _: None) == []
        assert told == [("a", "release", "g.0"), ("b", "generate", "g.0"), ("b", "generate", "g.1")]
        assert work.owes("a") == 1
        await work.lost("a", lambda _: None)
        assert work.owes("a") == 0, "its next process has none of them"

    asyncio.run(body())


@pytest.mark.parametrize(("known", "tokens"), [(None, 5), (3, 5), (7, 7)])
def test_a_request_goes_on_elsewhere_from_the_most_tokens_that_are_known(known: int | None, tokens: int) -> None:
    work, sent = dispatcher(LeastLoaded())

    async def body() -> None:
        await work.join("a", 1, None, REGULAR)
        await work.submit([([replace(one, kept=part("g.0", 5)) for one in requests("g.0")], None)])
        await work.join("b", 1, None, REGULAR)
        await work.lost("a", lambda _: None if known is None else part("g.0", known))
        to, _, _, arrays = sent[-1]
        assert to == "b" and len(arrays["kept.completion_tokens"]) == tokens

    asyncio.run(body())


def test_an_instance_is_told_how_long_a_request_is_expected_to_be() -> None:
    work, sent = dispatcher(LeastLoaded())

    async def body() -> None:
        await work.join("a", 2, None, REGULAR)
        await work.submit([(requests("g.0"), Forecast((4.0, 6.0))), (requests("h.0"), None)])
        assert [(b["sample_id"], b.get("expected")) for _, _, b, _ in sent] == [("g.0", 5.0), ("h.0", None)]

    asyncio.run(body())
