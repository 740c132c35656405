"""Algorithm 2's objective and the sums behind a move, computed by hand: each figure here decides a placement."""

from __future__ import annotations

from collections import deque

import pytest

from scheduler.cost.decode import StepCurve
from scheduler.cost.length_forecast import Forecast
from scheduler.dispatch.planned import Algorithm2, SkewAware
from scheduler.dispatch.policy import REGULAR, TAIL, Request

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
    curve = StepCurve(*STEEP)
    for name in ("full", "fuller"):
        policy.join(name, 1, curve)
    policy.submit([request("r0", 100.0), request("r1", 100.0)])
    policy.decide(lambda _: 0.0)
    policy.queues = {
        "full": deque([(request("w0", 90.0), REGULAR)]),
        "fuller": deque((request(f"w{n}", 90.0 - n), REGULAR) for n in (1, 2, 3)),
    }
    policy.join("idle", 1, curve)
    (start,) = policy.decide(lambda _: 10.0)
    assert (start.request_id, start.instance, start.moved) == ("w3", "idle", False)
