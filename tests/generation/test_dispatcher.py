"""The dispatcher: what the policy decides reaches the instances, and moved requests keep their tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace

import pytest

from scheduler.cost.decode import StepCurve
from scheduler.cost.length_forecast import Forecast
from scheduler.dispatch.baselines import LeastLoaded
from scheduler.dispatch.planned import SkewAware
from scheduler.dispatch.policy import REGULAR, TAIL, Request
from scheduler.dispatch.registry import POLICIES, make_policy
from streamrl.protocol.message import parse
from streamrl.protocol.samples import request_from_wire
from streamrl.protocol.site_instance import GenerateSample
from tests.generation.dispatching import Scripted, Sent, dispatcher, end, give_back, part, requests


def test_a_moved_request_goes_on_with_its_tokens() -> None:
    policy = Scripted()
    told: dict[str, int] = {}
    work, sent = dispatcher(policy, told)

    async def body() -> None:
        await work.submit([(requests("g.0", "g.1"), None)])
        assert [(to, kind, b["sample_id"], b["route"]) for to, kind, b, _ in sent] == [
            ("a", "generate", "g.0", REGULAR),
            ("a", "generate", "g.1", REGULAR),
        ]
        sent.clear()
        told["g.1"] = 3
        policy.to_move = [("g.1", "b")]
        await end(work, "g.0", 7)
        assert policy.ended == [("g.0", 7)] and policy.seen == {"g.1": 3}
        assert sent == [("a", "release", {"sample_id": "g.1"}, {})]
        sent.clear()
        await give_back(work, part("g.1", 4))
        (to, kind, b, arrays) = sent.pop()
        assert (to, kind, b["route"]) == ("b", "generate", TAIL)
        again = request_from_wire(parse(GenerateSample, b), arrays)
        assert again.kept is not None and again.kept.completion_tokens.tolist() == [0, 1, 2, 3]
        assert (again.kept.t_dispatched, again.prompt_tokens.tolist()) == (1.0, [0, 1, 2, 3, 4])
        assert work.moves == 1
        await work.submit([])
        assert policy.seen == {"g.1": 4}  # what it had produced elsewhere counts until its instance tells more
        await end(work, "g.1", 9)
        assert not work.requests

    asyncio.run(body())


def test_a_request_that_ends_while_it_is_moved_has_ended() -> None:
    policy = Scripted()
    work, sent = dispatcher(policy)

    async def body() -> None:
        await work.submit([(requests("g.0", "g.1"), None)])
        policy.to_move = [("g.1", "b")]
        await end(work, "g.0", 1)
        await end(work, "g.1", 1)
        sent.clear()
        await give_back(work, part("g.1", 2))  # crossed on the way: of no use any more
        assert not sent and not work.requests and work.moves == 0

    asyncio.run(body())


def test_a_second_move_before_the_first_is_done_changes_the_target_only() -> None:
    policy = Scripted()
    work, sent = dispatcher(policy)

    async def body() -> None:
        await work.submit([(requests("g.0", "g.1", "g.2"), None)])
        sent.clear()
        policy.to_move = [("g.2", "b")]
        await end(work, "g.0", 1)
        policy.to_move = [("g.2", "c")]
        await end(work, "g.1", 1)
        assert [(to, kind) for to, kind, _, _ in sent] == [("a", "release")]
        await give_back(work, part("g.2", 2))
        assert [(to, kind) for to, kind, _, _ in sent] == [("a", "release"), ("c", "generate")]

    asyncio.run(body())


def least_loaded(*slots: int) -> LeastLoaded:
    policy = LeastLoaded()
    for number, count in enumerate(slots):
        policy.join("abc"[number], count)
    return policy


def told(sent: Sent) -> list[tuple[str, str, str]]:
    """What was sent since the last call: (instance, kind, sample)."""
    found = [(to, kind, body["sample_id"]) for to, kind, body, _ in sent]
    sent.clear()
    return found


def test_parked_requests_keep_their_tokens_until_they_are_resumed() -> None:
    work, sent = dispatcher(least_loaded(2))

    async def body() -> None:
        await work.submit([(requests("g.0", "g.1", "g.2"), None)])
        assert told(sent) == [("a", "generate", "g.0"), ("a", "generate", "g.1")]
        await work.park(["g.0", "g.2", "gone.0"])  # one runs, one waits, one is none
        assert told(sent) == [("a", "release", "g.0")] and work.parked == {"g.0", "g.2"}
        assert await give_back(work, part("g.0", 4)) is False  # nobody has to be told
        await work.park(["g.0"])
        assert told(sent) == []
        await work.resume(["g.0"], budget=10)
        (_, _, body, arrays) = sent[0]
        again = request_from_wire(parse(GenerateSample, body), arrays)
        assert told(sent) == [("a", "generate", "g.0")]
        assert again.kept is not None and len(again.kept.completion_tokens) == 4 and again.pause_at == 14
        await end(work, "g.1", 3)
        assert told(sent) == []  # g.2 is still parked
        await work.resume(["g.2", "g.1"])
        assert told(sent) == [("a", "generate", "g.2")] and not work.parked

    asyncio.run(body())


def test_a_request_that_ends_while_it_is_parked_has_ended_and_one_resumed_on_its_way_back_goes_on() -> None:
    work, sent = dispatcher(least_loaded(4))

    async def body() -> None:
        await work.submit([(requests("g.0", "g.1"), None)])
        await work.park(["g.0", "g.1"])
        await end(work, "g.0", 9)
        assert work.parked == {"g.1"}
        told(sent)
        await work.resume(["g.0", "g.1"])
        assert told(sent) == []  # its tokens are not here yet
        await give_back(work, part("g.1", 3))
        assert told(sent) == [("a", "generate", "g.1")]

    asyncio.run(body())


def test_a_request_that_has_used_its_budget_is_parked_by_itself_and_reported() -> None:
    work, sent = dispatcher(least_loaded(1))

    async def body() -> None:
        await work.submit([([replace(r, pause_at=4) for r in requests("g.0", "g.1")], None)])
        assert told(sent) == [("a", "generate", "g.0")]
        assert await give_back(work, part("g.0", 4)) is True
        assert told(sent) == [("a", "generate", "g.1")] and work.parked == {"g.0"}

    asyncio.run(body())


@pytest.mark.parametrize("policy", POLICIES)
def test_an_instance_that_loads_weights_hands_its_requests_back_and_gets_new_ones_afterwards(policy: str) -> None:
    work, sent = dispatcher(make_policy(policy, 100))

    async def body() -> None:
        for name in "ab":
            await work.join(name, 2, None, "regular")
        await work.submit([(requests("g.0", "g.1", "g.2", "g.3"), None)])
        for name in "ab":
            await work.hold(name, requeue=True, why="weights")
        seen = told(sent)
        started = {sample for _, kind, sample in seen if kind == "generate"}
        assert started == {sample for _, kind, sample in seen if kind == "release"} and len(started) >= 2
        for sample in sorted(started):
            await give_back(work, part(sample, 3))
        assert told(sent) == []  # nobody may work
        for name in "ab":
            await work.unhold(name, "weights")
        running = [sample for _, _, sample in told(sent)]
        for _ in range(4):  # all of them run again, and end
            await end(work, running.pop(), 9)
            running += [sample for _, _, sample in told(sent)]
        assert not work.requests and not running

    asyncio.run(body())


def test_instances_that_are_not_used_hand_their_requests_over_also_while_they_load_weights() -> None:
    work, sent = dispatcher(LeastLoaded())

    async def body() -> None:
        for name in "ab":
            await work.join(name, 4, None, REGULAR)
        await work.submit([(requests("g.0"), None), (requests("h.0"), None)])
        told(sent)
        await work.use(["a"])
        assert told(sent) == [("b", "release", "h.0")]
        await give_back(work, part("h.0", 2))
        assert told(sent) == [("a", "generate", "h.0")]
        await work.hold("b", requeue=True, why="weights")
        await work.unhold("b", "weights")
        await work.submit([(requests("k.0", "k.1"), None)])
        assert {to for to, _, _ in told(sent)} == {"a"}  # loading weights does not bring it back
        await work.hold("b", requeue=True, why="weights")
        await work.use(["a", "b"])
        await work.submit([(requests("l.0"), None)])
        assert told(sent) == []  # a is full, b still loads
        await work.unhold("b", "weights")
        assert told(sent) == [("b", "generate", "l.0")]

    asyncio.run(body())


def test_an_instance_that_is_not_used_gets_nothing_when_it_joins_later_or_anew() -> None:
    work, sent = dispatcher(LeastLoaded())

    async def body() -> None:
        await work.use(["a"])  # a service that was restarted hears this before any instance has joined
        await work.join("b", 4, None, REGULAR)
        await work.submit([(requests("g.0", "g.1"), None)])
        assert told(sent) == []
        await work.join("a", 4, None, REGULAR)
        assert {to for to, _, _ in told(sent)} == {"a"}
        await work.use(["a", "b"])
        await work.lost("b", lambda sample_id: None)
        await work.use(["a"])  # b is dead at that moment
        await work.join("b", 4, None, REGULAR)
        await work.submit([(requests("h.0"), None)])
        assert told(sent) == [("a", "generate", "h.0")]
        await work.use(["b"])
        assert {to for to, kind, _ in told(sent) if kind == "generate"} <= {"b"}
        await work.submit([(requests("k.0"), None)])
        assert told(sent) == [("b", "generate", "k.0")]

    asyncio.run(body())


def test_an_instance_may_finish_what_it_has_before_it_loads_weights() -> None:
    work, sent = dispatcher(LeastLoaded())

    async def body() -> None:
        for name in "ab":
            await work.join(name, 2, None, REGULAR)
        await work.submit([(requests("g.0"), None), (requests("h.0"), None)])
        told(sent)
        await work.hold("a", requeue=False, why="weights")
        await work.submit([(requests("k.0", "k.1"), None)])
        assert told(sent) == [("b", "generate", "k.0")]  # the other has one slot left
        await end(work, "g.0", 5)
        assert told(sent) == [] and "g.0" not in work.requests
        await work.unhold("a", "weights")
        assert told(sent) == [("a", "generate", "k.1")]

    asyncio.run(body())


def test_while_throttled_nothing_starts_and_what_runs_goes_on_elsewhere_too() -> None:
    policy = Scripted()
    work, sent = dispatcher(policy)

    async def body() -> None:
        await work.submit([(requests("g.0", "g.1", "g.2"), None)])
        policy.to_move = [("g.1", "b")]
        await end(work, "g.0", 7)
        told(sent)
        await work.throttle(True)
        await work.submit([(requests("h.0"), None)])
        policy.to_move = [("g.2", "c")]
        await end(work, "unknown", 1)
        assert told(sent) == []  # neither started nor moved
        await give_back(work, part("g.1", 4))
        assert told(sent) == [("b", "generate", "g.1")] and work.moves == 1
        await end(work, "g.1", 9)
        assert told(sent) == [] and policy.ended[-1] == ("g.1", 9)
        await work.throttle(False)
        assert told(sent) == [("a", "generate", "h.0"), ("a", "release", "g.2")]
        await work.submit([(requests("h.1"), None)])
        assert told(sent) == [("a", "generate", "h.1")]

    asyncio.run(body())


@pytest.mark.parametrize("policy", POLICIES)
def test_what_comes_back_or_is_new_while_throttled_starts_once_afterwards(policy: str) -> None:
    work, sent = dispatcher(make_policy(policy, 100))

    async def body() -> None:
        for name in "ab":
            await work.join(name, 8, None, "regular")
        await work.submit([(requests("g.0", "g.1", "g.2", "g.3", "g.4"), None)])
        at = {sample: to for to, _, sample in told(sent)}
        assert len(at) == 5
        await work.throttle(True)
        await work.submit([(requests("h.0", "h.1"), None)])
        await end(work, "g.0", 5)
        await work.park(["g.1", "g.2", "h.0"])
        for sample in ("g.1", "g.2"):
            await give_back(work, part(sample, 2))
        await work.resume(["g.1", "h.0"])
        held = at["g.3"]
        await work.hold(held, requeue=True, why="weights")
        await give_back(work, part("g.3", 3))
        await work.unhold(held, "weights")
        assert {kind for _, kind, _ in told(sent)} == {"release"}
        await work.throttle(True)
        assert told(sent) == []
        await work.throttle(False)
        back = {"g.1", "g.3", "h.0", "h.1"}  # g.4 may have been taken off as well, and is then not here yet
        started = [(kind, sample) for _, kind, sample in told(sent)]
        assert sorted(started) == [("generate", sample) for sample in sorted(back)]
        if at["g.4"] == held:
            await give_back(work, part("g.4", 3))
            assert [(kind, sample) for _, kind, sample in told(sent)] == [("generate", "g.4")]
        for sample in sorted(back | {"g.4"}):
            await end(work, sample, 9)
        assert told(sent) == [] and work.requests.keys() == work.parked == {"g.2"}

    asyncio.run(body())


@pytest.mark.parametrize("known", [True, False], ids=["forecasts", "none"])
def test_a_batch_is_planned_as_a_whole(known: bool) -> None:
    """One long group among short ones: with forecasts it gets an instance of its own, whatever its place."""
    policy = SkewAware(longest=1000)
    steep = StepCurve((1, 2, 32), (0.01, 0.02, 0.32))  # every request more costs as much again
    for name in ("a", "b"):
        policy.join(name, 32, steep)
    work, sent = dispatcher(policy)

    async def body() -> None:
        long, short = Forecast((1000.0,) * 16), Forecast((10.0,) * 16)
        await work.submit([(requests(f"{g}.0"), (long if g == 3 else short) if known else None) for g in range(8)])

    asyncio.run(body())
    at = {b["sample_id"]: to for to, _, b, _ in sent}
    beside = sum(where == at["3.0"] for where in at.values()) - 1
    assert len(at) == 8
    assert (beside == 0) if known else (beside == 3)


def test_what_a_dead_instance_had_goes_on_elsewhere_from_the_tokens_that_are_known() -> None:
    work, sent = dispatcher(LeastLoaded(), {})

    async def body() -> None:
        for name in ("a", "b"):
            await work.join(name, 4, None, REGULAR)
        await work.submit([(requests("g.0", "g.1", "g.2", "g.3"), None)])
        had = [b["sample_id"] for to, kind, b, _ in sent if to == "a"]
        assert len(had) == 2
        await work.park([had[1]])
        sent.clear()
        parked = await work.lost("a", lambda name: part(name, 3) if name == had[0] else None)
        assert parked == [] and work.works_on("a") == [] and not work.knows("a")
        [(to, kind, b, arrays)] = sent
        again = request_from_wire(parse(GenerateSample, b), arrays)
        assert (to, kind, again.sample_id) == ("b", "generate", had[0])
        assert again.kept is not None and again.kept.completion_tokens.tolist() == [0, 1, 2]
        sent.clear()
        await work.lost("a", lambda name: None)  # dead again before it had joined
        await work.resume([had[1]])
        assert [(to, b["sample_id"]) for to, kind, b, _ in sent] == [("b", had[1])]
        sent.clear()
        await work.join("a", 4, None, REGULAR)
        await work.submit([(requests("h.0"), None)])
        assert [to for to, *_ in sent] == ["a"]

    asyncio.run(body())


def test_a_request_that_had_used_its_budget_when_its_instance_died_is_parked() -> None:
    work, sent = dispatcher(LeastLoaded(), {})

    async def body() -> None:
        for name in ("a", "b"):
            await work.join(name, 4, None, REGULAR)
        limited = [replace(request, pause_at=3) for request in requests("g.0")]
        await work.submit([(limited, None)])
        [(to, *_)] = sent
        sent.clear()
        assert [one.sample_id for one in await work.lost(to, lambda name: part(name, 3))] == ["g.0"]
        assert work.parked == {"g.0"} and not sent

    asyncio.run(body())


def test_a_sample_from_an_instance_that_was_taken_for_dead_ends_its_second_life() -> None:
    work, sent = dispatcher(LeastLoaded(), {})

    async def body() -> None:
        for name in ("a", "b"):
            await work.join(name, 4, None, REGULAR)
        await work.submit([(requests("g.0"), None)])
        [(first, *_)] = sent
        other = "b" if first == "a" else "a"
        await work.lost(first, lambda name: None)
        sent.clear()
        await work.finished("g.0", 7, first)
        assert sent == [(other, "release", {"sample_id": "g.0"}, {})]
        assert not work.requests and work.works_on(other) == []

    asyncio.run(body())


def test_an_instance_is_held_until_every_reason_has_gone() -> None:
    work, sent = dispatcher(LeastLoaded(), {})

    async def body() -> None:
        await work.join("a", 4, None, REGULAR)
        await work.hold("a", requeue=False, why="silent")
        await work.hold("a", requeue=True, why="weights")
        await work.unhold("a", "silent")
        await work.submit([(requests("g.0"), None)])
        assert not sent
        await work.unhold("a", "weights")
        assert [to for to, *_ in sent] == ["a"]

    asyncio.run(body())


def test_a_slow_instance_stays_slow_while_it_is_held_and_is_forgotten_when_it_is_another_process() -> None:
    async def scenario() -> None:
        one, sent = dispatcher(LeastLoaded())
        curve = StepCurve.measured({1: 0.01, 8: 0.02})
        for name in ("a", "b"):
            await one.join(name, 8, curve, REGULAR)
        await one.slow("b", 3.0)
        await one.hold("b", requeue=False, why="weights")
        await one.unhold("b", "weights")
        await one.submit([([request], None) for request in requests("p", "q", "r", "s")])
        assert sorted(instance for instance, *_ in sent) == ["a", "a", "a", "b"]
        await one.lost("b", lambda _: None)
        await one.join("b", 8, curve, REGULAR)
        sent.clear()
        await one.submit([([request], None) for request in requests("t", "u", "v")])
        assert sorted(instance for instance, *_ in sent) == ["b", "b", "b"]

    asyncio.run(scenario())


def test_a_turn_is_given_to_the_policy_with_its_home_which_is_good_for_one_placement() -> None:
    policy = Scripted()
    work, _ = dispatcher(policy)
    asked: list[Request] = []
    submit = policy.submit

    def submitted(new: Iterable[Request]) -> None:
        asked.extend(new := list(new))
        submit(new)

    policy.submit = submitted  # type: ignore[method-assign]

    async def body() -> None:
        (one,) = requests("g.0/aa.1")
        await work.submit_turn(one, Forecast.exactly(9), "b", 4)
        assert asked == [Request("g.0/aa.1", "g", Forecast.exactly(9), 5, True, "b", 4)]
        await work.throttle(True)
        await work.hold("a", requeue=True, why="weights")
        await give_back(work, part("g.0/aa.1", 2))
        assert asked[1] == Request("g.0/aa.1", "g", Forecast.exactly(9), 5, True, "", 0)
        policy.join("a", 8)
        await work.throttle(False)
        await end(work, "g.0/aa.1", 3)
        assert not work.requests and not work._turns

    asyncio.run(body())


def test_what_nobody_waits_for_is_stopped_and_frees_its_slot_at_once() -> None:
    policy = LeastLoaded()
    work, sent = dispatcher(policy)

    async def body() -> None:
        await work.join("a", 1, None, REGULAR)
        await work.submit([(requests("g.0", "g.1", "g.2"), None)])
        await work.abandon(["g.0", "g.1", "never"])
        assert [(kind, b["sample_id"]) for _, kind, b, _ in sent] == [
            ("generate", "g.0"),
            ("release", "g.0"),
            ("generate", "g.2"),
        ]
        assert list(work.requests) == ["g.2"] and not work.has("a", "g.0")
        assert not await work.released(part("g.0", 3), "a")  # its instance gives back what it has
        await work.finished("g.0", 3, "a")  # or has just finished it
        assert list(work.requests) == ["g.2"] and work.has("a", "g.2") and policy.waiting == 0

    asyncio.run(body())


@pytest.mark.parametrize("forecast", [Forecast((4.0, 6.0)), None], ids=["forecasts", "none"])
@pytest.mark.parametrize("name", POLICIES)
def test_an_instance_that_was_silent_gets_no_more_than_its_free_slots(name: str, forecast: Forecast | None) -> None:
    work, sent = dispatcher(make_policy(name))

    async def scenario() -> None:
        await work.join("a", 2, None, REGULAR)
        await work.submit([(requests("g.0", "g.1", "g.2", "g.3"), forecast)])
        assert [b["sample_id"] for _, _, b, _ in sent] == ["g.0", "g.1"]
        sent.clear()
        await work.hold("a", requeue=False, why="silent")
        await end(work, "g.0", 5)
        await work.unhold("a", "silent")
        assert [b["sample_id"] for _, _, b, _ in sent] == ["g.2"], "g.1 still has a slot"
        await end(work, "g.1", 5)
        assert [b["sample_id"] for _, _, b, _ in sent] == ["g.2", "g.3"]
        await end(work, "g.2", 5)
        await work.hold("a", requeue=False, why="silent")
        await work.unhold("a", "silent")
        await work.abandon(["g.3"])
        assert not work.requests and not work.policy.where and not work.policy.waiting
        await work.submit([(requests("g.4", "g.5"), forecast)])
        await work.hold("a", requeue=False, why="silent")
        await work.unhold("a", "silent")
        await work.lost("a", lambda _: None)
        assert work.policy.waiting == 2
        await work.join("a", 2, None, REGULAR)
        await end(work, "g.4", 5)
        await end(work, "g.5", 5)
        assert not work.requests and not work.policy.where and not work.policy.waiting

    asyncio.run(scenario())


def test_what_an_instance_was_ordered_to_release_takes_no_slot_when_it_is_used_again() -> None:
    work, sent = dispatcher(LeastLoaded())

    async def scenario() -> None:
        await work.join("a", 1, None, REGULAR)
        await work.submit([(requests("g.0"), None)])
        await work.hold("a", requeue=False, why="silent")
        await work.hold("a", requeue=True, why="weights")
        await work.unhold("a", "silent")
        await work.unhold("a", "weights")
        sent.clear()
        await give_back(work, part("g.0", 3))
        assert [(to, kind, b["sample_id"]) for to, kind, b, _ in sent] == [("a", "generate", "g.0")]

    asyncio.run(scenario())
