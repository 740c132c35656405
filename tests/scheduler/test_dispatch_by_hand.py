"""Algorithm 2's objective and the sums behind a move, computed by hand: each figure here decides a placement."""

from __future__ import annotations

from collections import deque

import pytest

from scheduler.cost.decode import StepCurve
from scheduler.cost.length_forecast import Forecast
from scheduler.dispatch.planned import Algorithm2, SkewAware
from scheduler.dispatch.policy import REGULAR, TAIL, Instance, Request
from scheduler.dispatch.remaining_length import Remaining

LINEAR = StepCurve((1, 4), (4.0, 7.0))
"""4, 5, 6, 7 seconds for 1, 2, 3, 4 requests."""
STEEP = (1, 2), (1.0, 2.0)
"""A second per request: two together take twice as long as one."""


def request(name: str, length: float, group: str = "g") -> Request:
    return Request(name, group, Forecast.exactly(length))


@pytest.mark.parametrize(("combine", "tail_instances"), [("sum", 3), ("max", 4)])
def test_algorithm_2_chooses_the_split_of_least_latency(combine: str, tail_instances: int) -> None:
    """The longest 8 of 40 requests are the tail: P90 is 1500 tokens, P50 100. At most 4 run at once. By tail instances:

    | tail | its latency     | rest: share, latency | sum   | max   |
    |------|-----------------|----------------------|-------|-------|
    | 1    | 7 x 1500 x 8/4  | 8,   7 x 100 x 8/4   | 22400 | 21000 |
    | 2    | 7 x 1500        | 11,  7 x 100 x 3     | 12600 | 10500 |
    | 3    | 6 x 1500        | 16,  7 x 100 x 4     | 11800 |  9000 |
    | 4    | 5 x 1500        | 32,  7 x 100 x 8     | 13100 |  7500 |

    With P50 for the tail, P90 for the rest, or without the rounds of ceil(share / 4), another split would win.
    """
    policy = Algorithm2(combine)
    for name in "abcde":
        policy.join(name, 4, LINEAR)
    policy.submit([request(f"{n}", 1500.0 if n % 5 == 0 else 100.0, f"{n}") for n in range(40)])
    decisions = policy.decide()
    assert len({d.instance for d in decisions if d.route == TAIL}) == tail_instances
    assert all((int(d.request_id) % 5 == 0) == (d.route == TAIL) for d in decisions)


def test_algorithm_2_rounds_the_tail_up() -> None:
    policy = Algorithm2()
    for name in "ab":
        policy.join(name, 8, LINEAR)
    policy.submit([request(f"{n}", 100.0 - n, f"{n}") for n in range(6)])
    assert [d.request_id for d in policy.decide() if d.route == TAIL] == ["0", "1"]  # 20 % of 6 are 1.2


def both_on_one(per_prefill_token: float) -> SkewAware:
    """Two requests of 150 tokens run on `a`; `b` has just come."""
    policy = SkewAware()
    policy.join("a", 2, StepCurve(*STEEP, per_prefill_token=per_prefill_token))
    policy.submit([request("x", 150.0), request("y", 150.0)])
    assert {d.instance for d in policy.decide(lambda _: 0.0)} == {"a"}
    policy.join("b", 2, StepCurve(*STEEP, per_prefill_token=per_prefill_token))
    return policy


@pytest.mark.parametrize(("per_prefill_token", "moves"), [(0.0, 1), (1.5, 1), (1.7, 0), (1.9, 0), (2.1, 0)])
def test_a_move_pays_for_its_prefill_and_must_gain_a_tenth(per_prefill_token: float, moves: int) -> None:
    # 100 tokens are left of each: together 200 s, alone 100 s and 50 tokens to prefill again. A tenth earlier is 180 s,
    # so a token may cost up to 1.6 s
    decisions = both_on_one(per_prefill_token).decide(lambda _: 50.0)
    assert [(d.moved, d.instance) for d in decisions] == [(True, "b")] * moves


def test_the_longest_running_request_moves_first() -> None:
    policy = SkewAware()
    policy.join("a", 3, StepCurve((1, 3), (1.0, 3.0)))
    policy.submit([request("short", 100.0), request("long", 160.0), request("middle", 150.0)])
    assert {d.instance for d in policy.decide(lambda _: 0.0)} == {"a"}
    policy.join("b", 3, StepCurve((1, 3), (1.0, 3.0)))
    (move,) = policy.decide(lambda _: 0.0)  # 410 s as they are; 250 and 160 without the longest
    assert move.moved and (move.request_id, move.instance) == ("long", "b")


def test_running_requests_leave_the_instance_that_ends_last() -> None:
    policy = SkewAware()
    curve = StepCurve(*STEEP)
    policy.join("late", 2, curve)
    policy.submit([request("x", 500.0), request("y", 500.0)])
    policy.decide(lambda _: 0.0)
    policy.join("early", 3, curve)
    policy.submit([request(name, 200.0) for name in "uvw"])
    assert {d.instance for d in policy.decide(lambda _: 0.0)} == {"early"}
    policy.join("idle", 2, curve)
    policy.finished("w", 10.0)  # nothing is corrected before something has ended
    (move,) = policy.decide(lambda _: 10.0)
    assert move.request_id in {"x", "y"} and move.moved and move.instance == "idle"


def test_waiting_requests_leave_the_longest_queue_the_shortest_first() -> None:
    policy = SkewAware()
    curve = StepCurve(*STEEP, per_prefill_token=10.0)  # they pay for their prompts wherever they start

    def waiting(name: str, length: float) -> tuple[Request, str]:
        return Request(name, "g", Forecast.exactly(length), prompt_tokens=50), REGULAR

    for name in ("full", "fuller"):
        policy.join(name, 1, curve)
    policy.submit([request("r0", 100.0), request("r1", 100.0)])
    policy.decide(lambda _: 0.0)
    policy.queues = {
        "full": deque([waiting("w0", 90.0)]),
        "fuller": deque(waiting(f"w{n}", 90.0 - n) for n in (1, 2, 3)),
    }
    policy.join("idle", 1, curve)
    (start,) = policy.decide(lambda _: 10.0)
    assert (start.request_id, start.instance, start.moved) == ("w3", "idle", False)


SUMS = StepCurve((1, 64), (1.0, 64.0))
"""A second per request and step: an instance needs the sum of its lengths."""


def left(*lengths: float, prompt: int = 0) -> Remaining:
    requests = [Request(str(length), "g", Forecast.exactly(length), prompt) for length in lengths]
    return Remaining.of(requests, [0.0] * len(lengths), float("inf"))


@pytest.mark.parametrize(
    ("here", "free", "count"),
    [
        ((), 4, 3),  # 250 s; one goes: 60 and 190; all three: 150 and 100
        ((80.0,), 4, 1),  # 140 and 190; 230 and 100
        ((70.0,), 2, 2),  # one: 130 and 190; two: 180 and 140
        ((80.0,), 2, 1),  # two end as late as with one: 190 and 140
        ((250.0,), 4, 0),
        ((190.0,), 4, 0),  # 250 and 190: no earlier
        ((189.0,), 4, 1),
        ((), 0, 0),
    ],
)
def test_as_many_go_as_bring_the_later_end_forward(here: tuple[float, ...], free: int, count: int) -> None:
    target, donor = Instance("target", free, SUMS), Instance("donor", 9, SUMS)
    going, fixed = left(60.0, 50.0, 40.0), left(100.0)
    assert SkewAware()._best_count(target, donor, left(*here), going, fixed, moved=False) == count


def test_numbers_of_requests_are_halved_down_to_one() -> None:
    target, donor = Instance("target", 64, SUMS), Instance("donor", 64, SUMS)
    going = left(*[10.0] * 9)  # 9, 4, 2 or 1: 4 leave 50 + 10 s, 9 make 90
    assert SkewAware()._best_count(target, donor, left(), going, left(10.0), moved=False) == 4
    assert SkewAware()._best_count(target, donor, left(25.0), going, left(10.0), moved=False) == 4  # 65 and 60
    assert SkewAware()._best_count(target, donor, left(41.0), going, left(10.0), moved=False) == 2  # 81, 60; 61, 80


def test_what_runs_pays_for_its_context_on_the_target_and_must_gain_a_tenth() -> None:
    for per_prefill_token, prompt, count in ((0.0, 0, 1), (1.0, 79, 1), (1.0, 80, 0), (2.0, 40, 0)):
        target = Instance("target", 9, StepCurve((1, 64), (1.0, 64.0), per_prefill_token=per_prefill_token))
        donor = Instance("donor", 9, SUMS)
        # 200 s, a tenth less is 180; it takes 100 s there
        going, fixed = left(100.0, prompt=prompt), left(100.0)
        assert SkewAware()._best_count(target, donor, left(), going, fixed, moved=True) == count
        assert SkewAware()._best_count(target, donor, left(), going, fixed, moved=False) == 1  # it waits: no prefill


def test_the_tail_starts_on_an_instance_of_its_own_also_of_two() -> None:
    policy = Algorithm2()
    for name in "ab":
        policy.join(name, 9, LINEAR)
    policy.submit([request(str(n), 1000.0 if n < 2 else 10.0, str(n)) for n in range(10)])
    where = {one.request_id: (one.instance, one.route) for one in policy.decide()}
    assert where == {str(n): ("a", TAIL) if n < 2 else ("b", REGULAR) for n in range(10)}


def test_the_rest_is_what_the_tail_leaves() -> None:
    """Two of 10 requests are the tail (500 tokens; the others have 100), on 1, 2 or 3 of four instances.

    5 x 500 + 6 x 100 = 3100; 4 x 500 + 7 x 100 = 2700; 4 x 500 + 7 x 100 x 2 = 3400. With 10 or 12 requests in the rest
    it would take 7 x 100 x 2 on two instances, and one for the tail would win.
    """
    policy = Algorithm2()
    for name in "abcd":
        policy.join(name, 4, LINEAR)
    policy.submit([request(str(n), 500.0 if n < 2 else 100.0, str(n)) for n in range(10)])
    assert {one.instance for one in policy.decide() if one.route == TAIL} == {"a", "b"}


@pytest.mark.parametrize("policy", [Algorithm2(), SkewAware()])
def test_what_is_withdrawn_before_it_is_planned_or_while_it_waits_never_starts(policy: Algorithm2 | SkewAware) -> None:
    policy.submit([request(str(n), 10.0, str(n)) for n in range(6)])
    assert policy.decide() == [] and policy.waiting == 6  # no instance yet, and nothing is lost
    policy.withdraw({"0"})
    assert policy.waiting == 5
    policy.join("a", 2, SUMS)
    assert {one.request_id for one in policy.decide()} == {"1", "2"} and policy.waiting == 3
    policy.withdraw({"1", "3"})
    assert policy.waiting == 2
    assert [one.request_id for one in policy.decide()] == ["4"] and policy.waiting == 1


def test_requests_of_every_kind_wait_for_the_first_instance() -> None:
    policy = SkewAware()
    policy.submit([request("planned", 10.0), Request("unknown", "g"), Request("turn", "g", turn=True)])
    assert policy.decide() == [] and policy.waiting == 3
    policy.join("a", 2, SUMS)
    assert policy.decide()[0].request_id == "turn" and policy.waiting == 1


def test_what_waited_for_an_instance_that_leaves_is_planned_again() -> None:
    policy = Algorithm2()
    for name in "ab":
        policy.join(name, 1, LINEAR)
    policy.submit([request(str(n), 10.0, str(n)) for n in range(6)])
    ran = {one.instance: one.request_id for one in policy.decide()}
    waiting = {entry[0].request_id for entry in policy.queues["b"]}
    assert policy.leave("b") == [ran["b"]] and policy.waiting == 4
    started = []
    while policy.where:
        policy.finished(next(iter(policy.where)))
        started += [one.request_id for one in policy.decide()]
    assert len(started) == 4 and waiting <= set(started)


def test_a_plan_is_corrected_once_a_fiftieth_of_what_is_unfinished_has_ended() -> None:
    policy = SkewAware()
    policy.join("a", 200, SUMS)
    policy.submit([request(str(n), 1000.0 + n, str(n)) for n in range(200)])
    policy.decide(lambda _: 0.0)
    policy.join("b", 1, SUMS)
    policy.decide(lambda _: 0.0)  # a first correction with two instances
    assert policy._corrected_at == 200
    others = [name for name in policy.instances["a"].running]
    for number, name in enumerate(others[:4]):
        policy.finished(name)
        policy.decide(lambda _: 0.0)
        assert policy._corrected_at == (200 if number < 3 else 196)  # 3 of 197 are fewer than 3.94, 4 of 196 are not
