"""What every dispatch policy keeps of its instances, and the baselines' choices, step by step."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import pytest

from scheduler.cost.decode import QWEN_7B, UNKNOWN_CURVE, StepCurve, roofline
from scheduler.cost.hardware import device
from scheduler.cost.length_forecast import Forecast
from scheduler.dispatch.baselines import LeastLoaded, LongestFirst, Random, RoundRobin, TwoChoices
from scheduler.dispatch.dispatch_objective import MAKESPAN, Streamed
from scheduler.dispatch.group_probe import GroupProbe
from scheduler.dispatch.planned import Algorithm2, SkewAware
from scheduler.dispatch.policy import HOMES_KEPT, REGULAR, TAIL, Assignment, DispatchPolicy, Fleet, Instance, Request
from scheduler.dispatch.registry import AUTO, BLIND, POLICIES, make_policy, objective_of, policy_for
from scheduler.simulation.generation_simulator import SimulatedInstance, SimulatedRequest, simulate

CURVE = StepCurve((1, 2), (1.0, 3.0))


def singles(*names: str) -> list[Request]:
    """Requests of a group each."""
    return [Request(name, f"group of {name}") for name in names]


def placed(decisions: list[Assignment]) -> list[tuple[str, str]]:
    return [(one.request_id, one.instance) for one in decisions]


def seats(policy: DispatchPolicy) -> str:
    """The instances of the next decisions, in order."""
    return "".join(one.instance for one in policy.decide())


def test_the_load_is_what_runs_and_one_more_times_slowness() -> None:
    instance = Instance("a", 3)
    assert (instance.load, instance.free, instance.assumed_curve) == (1.0, 3, UNKNOWN_CURVE)
    instance.running = {"x": Request("x", "g"), "y": Request("y", "g")}
    instance.slowness, instance.curve = 1.5, CURVE
    assert (instance.load, instance.free, instance.assumed_curve) == (4.5, 1, CURVE)


def test_a_slow_instance_gets_less_until_its_factor_falls() -> None:
    policy = LeastLoaded()
    policy.join("a", 9)
    policy.join("b", 9)
    policy.slow("a", 2.0)
    policy.submit(singles(*"123456"))
    assert seats(policy) == "babbab"  # loads 2 1, 2 2, 4 2, 4 3, 4 4, 6 4
    policy.slow("a", 1.0)
    policy.submit(singles("7", "8"))
    assert seats(policy) == "aa"  # 3 5, 4 5
    policy.slow("unknown", 3.0)
    assert "unknown" not in policy.instances


QUICK = StepCurve((1, 2, 4), (1.0, 2.0, 4.0))


def test_of_unequal_instances_the_one_with_the_shortest_steps_gets_the_next_request() -> None:
    policy = LeastLoaded()
    policy.join("a", 9, QUICK.scaled(3.0))
    policy.join("b", 9, QUICK)
    policy.submit(singles(*"1234567"))
    assert seats(policy) == "bbabbba"  # steps of 3 1, 3 2, 3 3: fewer there, 6 3, 6 4, 6 5, 6 6
    policy.join("c", 9)
    policy.submit(singles("8", "9"))
    assert seats(policy) == "cc", "its step time is unknown, so requests are counted"
    policy.leave("c")
    policy.submit(singles("10"))
    assert seats(policy) == "b"  # steps of 9 6
    policy.measured("a", QUICK)
    policy.submit(singles(*"xyz"))
    assert seats(policy) == "aaa"  # requests 3 7, 4 7, 5 7


def test_step_times_that_measurements_may_differ_by_make_no_instance_the_faster_one() -> None:
    flat = StepCurve((4,), (1.0,))
    for ratio, expected in ((1.0, "aaababab"), (1.2, "aaababab"), (1.3, "bbbaaaab")):
        policy = LeastLoaded()
        policy.join("a", 9, flat.scaled(ratio))
        policy.join("b", 9, flat)
        policy.start(Request("1", "g"), policy.instances["b"])
        policy.start(Request("2", "g"), policy.instances["b"])
        policy.submit(singles(*"stuvwxyz"))
        assert seats(policy) == expected


@pytest.mark.parametrize("factor", [1.5, 2.0, 3.7])
def test_what_became_slow_counts_for_more_requests_whatever_the_curve(factor: float) -> None:
    placements = set()
    for curve in (None, CURVE, StepCurve((8,), (1.0,)), QUICK):
        policy = LeastLoaded()
        for name in "abc":
            policy.join(name, 9, curve)
        policy.slow("b", factor)
        policy.submit(singles(*map(str, range(20))))
        placements.add(seats(policy))
        assert (policy.instances["b"].curve is None) == (curve is None)
        policy.slow("b", 1.0)
        assert policy.instances["b"].curve == curve
    assert len(placements) == 1


@pytest.mark.parametrize("make", [LeastLoaded, LongestFirst, SkewAware])
def test_requests_wait_for_a_faster_instance_if_they_would_end_earlier_there(
    make: Callable[[], DispatchPolicy],
) -> None:
    policy = make()
    policy.join("a", 4, StepCurve((1, 4), (5.0, 5.3)))
    policy.join("b", 4, StepCurve((1, 4), (1.0, 2.0)))
    policy.submit(singles(*"123456789"))
    # two more end after 2 / 4 steps of 2 s, and 2 s, which is less than 5 s; so would 5, in 4.5 s
    assert seats(policy) == "bbbb" and policy.waiting == 5
    policy.submit(singles(*"uvw"))  # the last of 7 or more would not
    assert seats(policy) == "aa" and policy.waiting == 6
    policy.finished("1")
    assert seats(policy) == "b" and policy.waiting == 5
    for number in "234":
        policy.finished(number)
    assert seats(policy) == "bbb" and policy.waiting == 2


@pytest.mark.parametrize(("ratio", "expected"), [(1.2, "b"), (1.3, "")])
def test_no_request_waits_for_a_full_instance_that_is_hardly_faster(ratio: float, expected: str) -> None:
    """A batch that has just begun frees no slot for as long as its answers take."""
    policy = LeastLoaded()
    policy.join("a", 40, StepCurve((1, 40), (0.1, 1.0)))
    policy.join("b", 40, StepCurve((1, 40), (ratio, ratio)))
    policy.submit(singles(*map(str, range(40))))
    assert seats(policy) == 40 * "a"
    policy.submit(singles("another"))
    assert seats(policy) == expected


def test_a_batch_does_not_queue_for_the_faster_instance_while_others_are_idle() -> None:
    fast, slow = (roofline(QWEN_7B, device(gpu)) for gpu in ("H200", "H20"))
    fleet = [SimulatedInstance("a", fast, 64), *(SimulatedInstance(f"b{n}", slow, 64) for n in range(4))]
    ends = {
        count: simulate(LeastLoaded(), [SimulatedRequest(f"{n}", 2000.0) for n in range(count)], fleet).makespan
        for count in (64, 72, 96)
    }
    assert max(ends.values()) < 1.1 * ends[64], ends


def test_no_request_waits_for_a_full_instance_of_the_same_speed() -> None:
    for curve in (None, QUICK, StepCurve((4,), (1.0,))):
        policy = LeastLoaded()
        policy.join("a", 2, curve)
        policy.join("b", 40, curve)
        policy.submit(singles(*map(str, range(42))))
        assert len(policy.decide()) == 42


def test_the_least_loaded_is_found_after_many_changes_of_load() -> None:
    policy = LeastLoaded()
    policy.join("a", 9)
    policy.join("b", 9)
    policy.submit(singles("1"))
    assert seats(policy) == "a"
    for _ in range(200):  # as notes of loads that are out of date are thrown away
        policy.slow("b", 1.0)
        policy._note_load(policy.instances["b"])
        assert len(policy._by_load) <= 64 + 8 * 2 + 1
        assert policy._by_load[0] <= min(policy._by_load)
    policy.submit(singles("2"))
    assert seats(policy) == "b"


def test_slowness_scales_the_curve_once_and_a_measured_curve_as_well() -> None:
    policy = Fleet()
    policy.join("a", 2, CURVE)
    known = policy.instances["a"]
    for factor, seconds in ((2.0, (2.0, 6.0)), (2.0, (2.0, 6.0)), (4.0, (4.0, 12.0)), (1.0, (1.0, 3.0))):
        policy.slow("a", factor)
        assert (known.slowness, known.assumed_curve.seconds) == (factor, seconds)
    policy.slow("a", 2.0)
    policy.measured("a", StepCurve((1,), (5.0,)))
    assert known.assumed_curve.seconds == (10.0,)
    policy.slow("a", 1.0)
    assert known.assumed_curve.seconds == (5.0,)
    policy.measured("unknown", CURVE)
    assert list(policy.instances) == ["a"]


def test_one_slot_is_enough_to_join_and_the_pool_is_kept() -> None:
    policy = Fleet()
    policy.join("a", 1, CURVE, TAIL)
    policy.join("b", 1)
    assert (policy.instances["a"].pool, policy.instances["a"].curve) == (TAIL, CURVE)
    assert (policy.instances["b"].pool, policy.instances["b"].curve) == (REGULAR, None)


def test_who_leaves_gives_back_what_it_ran_and_is_home_to_no_group() -> None:
    policy = LeastLoaded(affinity=9)
    policy.join("a", 9)
    policy.join("b", 9)
    policy.submit([Request("y", "g"), Request("x", "g")])
    assert placed(policy.decide()) == [("y", "a"), ("x", "a")]
    assert policy.leave("a") == ["x", "y"] and policy.where == {}
    policy.join("a", 9)
    policy.submit([*singles("1"), Request("z", "g")])
    assert placed(policy.decide()) == [("1", "a"), ("z", "b")]  # not to its old home


@pytest.mark.parametrize(("affinity", "expected"), [(0, "abba"), (1, "aabb"), (2, "aaab")])
def test_siblings_follow_their_group_as_far_as_the_affinity(affinity: int, expected: str) -> None:
    policy = LeastLoaded(affinity)
    policy.join("a", 9)
    policy.join("b", 9)
    policy.submit([Request(str(n), "g") for n in range(4)])
    assert seats(policy) == expected


@pytest.mark.parametrize("policy", [LeastLoaded(), SkewAware(), GroupProbe()])
def test_without_affinity_siblings_stay_only_where_it_makes_no_difference(policy: LeastLoaded | SkewAware) -> None:
    policy.join("a", 9)
    policy.join("b", 9)
    policy.submit([Request(str(n), "g") for n in range(4)])
    assert seats(policy) == "abba"  # the third: both have one, and the second is on b


def test_siblings_do_not_follow_to_a_full_instance_and_the_last_placement_is_home() -> None:
    policy = LeastLoaded(affinity=9)
    policy.join("a", 2)
    policy.join("b", 9)
    policy.submit([Request(str(n), "g") for n in range(4)])
    assert seats(policy) == "aabb"
    policy.finished("0")
    policy.submit([Request("5", "g")])
    assert seats(policy) == "b"  # a has room again, but the group's newest one runs on b


def test_homes_are_forgotten_when_nothing_waits_or_runs() -> None:
    policy = LeastLoaded(affinity=9)
    policy.join("a", 9)
    policy.join("b", 9)
    policy.submit([*singles("1"), Request("2", "g")])
    assert seats(policy) == "ab"
    policy.finished("1")
    policy.decide()
    policy.submit([Request("3", "g")])
    assert seats(policy) == "b"  # its group still runs there
    policy.withdraw({"2", "3"})
    assert policy.decide() == [] and policy.where == {}
    policy.submit([Request("4", "g")])
    assert seats(policy) == "a"


def test_what_is_withdrawn_frees_its_slot_or_its_place_in_the_queue() -> None:
    policy = LeastLoaded()
    policy.join("a", 2)
    policy.submit(singles(*"1234"))
    assert seats(policy) == "aa" and policy.waiting == 2
    policy.withdraw({"2", "3", "unknown"})
    assert policy.waiting == 1 and placed(policy.decide()) == [("4", "a")]
    policy.finished("unknown")
    assert set(policy.where) == set(policy.instances["a"].running) == {"1", "4"}


def test_a_moved_request_frees_the_slot_that_it_had() -> None:
    policy = Fleet()
    policy.join("a", 1)
    policy.join("b", 1)
    one = Request("1", "g")
    assert policy.start(one, policy.instances["a"]) == Assignment("1", "a", REGULAR, moved=False)
    assert policy.start(one, policy.instances["b"], TAIL) == Assignment("1", "b", TAIL, moved=True)
    assert (policy.instances["a"].free, policy.instances["b"].free, policy.where["1"].name) == (1, 0, "b")
    emptiest = policy.emptiest()
    assert emptiest is not None and emptiest.name == "a"


def test_homes_are_known_of_the_groups_placed_last_alone() -> None:
    policy = Fleet(affinity=8)
    policy.join("a", 8)
    policy.join("b", 8)
    policy.place_by_load(deque([Request("one", "old"), Request("two", "used")]))
    for number in range(HOMES_KEPT - 1):
        again = [Request("again", "used")] if number % 100 == 0 else []
        policy.place_by_load(deque([Request(f"{number}", f"g{number}"), *again]))
        policy.withdraw({f"{number}", "again"})
    policy.finished("two")
    found = policy.place_by_load(deque([Request("three", "old"), Request("four", "used")]))
    assert [one.instance for one in found] == ["b", "b"], "the emptiest one, and that of its sibling"
    assert len(policy._homes) == HOMES_KEPT


def test_a_policy_that_never_asks_for_the_emptiest_keeps_few_loads_and_the_right_ones() -> None:
    policy = Fleet()
    policy.join("a", 9)
    policy.join("b", 9)
    for number in range(500):
        policy.start(Request(str(number), "g"), policy.instances["a"])
        policy.finished(str(number))
    assert len(policy._by_load) <= 64 + 8 * 2 + 1
    policy.start(Request("last", "g"), policy.instances["a"])
    emptiest = policy.emptiest()
    assert emptiest is not None and emptiest.name == "b"


def test_round_robin_takes_instances_in_the_order_in_which_they_joined() -> None:
    policy = RoundRobin()
    policy.submit(singles("0"))
    assert policy.decide() == [] and policy.waiting == 1  # there is none yet
    for name in "cab":
        policy.join(name, 2)
    policy.submit(singles(*"1234567"))
    where = {one.request_id: one.instance for one in policy.decide()}
    assert where == {"0": "c", "1": "a", "2": "b", "3": "c", "4": "a", "5": "b"}
    assert policy.waiting == 2
    policy.finished("1")  # 6 waits for c, 7 for a
    assert placed(policy.decide()) == [("7", "a")]
    assert policy.leave("c") == ["0", "3", "6"] and policy.waiting == 0


def test_what_waits_for_an_instance_in_turn_can_be_withdrawn() -> None:
    policy = RoundRobin()
    policy.join("a", 1)
    policy.submit(singles(*"1234"))
    assert seats(policy) == "a"
    policy.withdraw({"1", "3"})
    assert policy.waiting == 2 and placed(policy.decide()) == [("2", "a")]


def test_policies_of_a_turn_bind_when_a_request_is_submitted_and_not_later() -> None:
    policy = RoundRobin()
    policy.join("a", 1)
    policy.submit(singles(*"12"))
    policy.join("b", 1)
    assert seats(policy) == "a" and policy.waiting == 1


def test_what_is_withdrawn_before_it_is_bound_never_starts() -> None:
    policy = RoundRobin()
    policy.submit(singles(*"12"))
    policy.withdraw({"1"})
    policy.join("a", 2)
    assert placed(policy.decide()) == [("2", "a")]


def test_two_choices_draw_two_of_three_instances_and_a_random_choice_any() -> None:
    def bound(policy: TwoChoices | Random) -> str:
        for name in "abc":
            policy.join(name, 30)
        policy.submit(singles(*map(str, range(30))))
        return "".join(one.instance for one in sorted(policy.decide(), key=lambda one: int(one.request_id)))

    two, random = bound(TwoChoices(0)), bound(Random(0))
    assert set(two) == set(random) == set("abc") and bound(Random(0)) == random != bound(Random(1))
    turns = {frozenset(two[at : at + 3]) for at in range(0, 30, 3)}
    assert turns != {frozenset("abc")}  # the least loaded of all three would go round


def test_two_choices_count_what_waits_and_what_runs() -> None:
    policy = TwoChoices(seed=0)
    policy.join("a", 1)
    policy.join("b", 9)
    policy.submit(singles(*"123456"))  # of two instances both are drawn, so loads stay level
    assert sorted(seats(policy)) == ["a", "b", "b", "b"] and policy.waiting == 2
    for number in list(policy.instances["b"].running):
        policy.finished(number)
    policy.submit(singles("7", "8"))
    assert seats(policy) == "bb"  # a has three


def test_two_choices_see_what_runs_already() -> None:
    policy = TwoChoices()
    policy.join("a", 9)
    policy.submit(singles(*"123"))
    assert seats(policy) == "aaa"
    policy.join("b", 9)
    policy.submit(singles(*"456"))
    assert seats(policy) == "bbb"  # the last one: 2 on b, 3 on a


def test_what_was_submitted_before_any_instance_starts_as_soon_as_one_has_joined() -> None:
    for policy in (RoundRobin(), TwoChoices(), LeastLoaded(), LongestFirst()):
        policy.submit(singles("1"))
        assert policy.decide() == [] and policy.waiting == 1
        policy.join("a", 1)
        assert placed(policy.decide()) == [("1", "a")] and policy.waiting == 0


def test_withdrawing_what_runs_makes_room_for_the_next_longest() -> None:
    policy = LongestFirst()
    policy.join("a", 1)
    policy.submit(Request(str(length), "g", Forecast.exactly(length)) for length in (10, 90))
    assert placed(policy.decide()) == [("90", "a")]
    policy.withdraw({"90"})
    assert placed(policy.decide()) == [("10", "a")]


def test_the_longest_is_first_also_after_a_longer_one_was_withdrawn() -> None:
    policy = LongestFirst()
    policy.submit(Request(str(length), "g", Forecast.exactly(length)) for length in (100, 10, 90))
    policy.withdraw({"100"})
    policy.join("a", 2)
    assert [one.request_id for one in policy.decide()] == ["90", "10"]


def test_longest_first_is_by_expected_length_then_by_arrival_then_without_a_forecast() -> None:
    policy = LongestFirst()
    lengths = {"none": None, "short": 5.0, "first": 9.0, "second": 9.0, "long": 70.0}
    requests = {
        name: Request(name, "g", None if length is None else Forecast.exactly(length))
        for name, length in lengths.items()
    }
    policy.submit(requests.values())
    policy.join("a", 1)
    order = []
    while policy.waiting:
        (decision,) = policy.decide()
        order.append(decision.request_id)
        policy.finished(decision.request_id)
        if decision.request_id == "long":
            policy.withdraw({"short"})
            assert policy.waiting == 3
    assert order == ["long", "first", "second", "none"]


def test_names_make_the_policies_with_their_settings() -> None:
    objective = Streamed(100.0)
    for name in POLICIES:
        policy = make_policy(name, 50.0, 3, objective)
        assert isinstance(policy, Fleet) and type(policy) is type(make_policy(name))
        assert policy.affinity == (3 if name in {"least-loaded", "group-probe"} or name.startswith("skew") else 0)
        if isinstance(policy, SkewAware):
            assert (policy.longest, policy.objective) == (50.0, objective)
            assert policy.migrate == (name != "skew-aware-static")
            default = make_policy(name)
            assert isinstance(default, SkewAware)
            assert (default.longest, default.objective, default.affinity) == (math.inf, MAKESPAN, 0)
        assert isinstance(policy, GroupProbe) == (name == "group-probe")
    combined = {name: make_policy(name) for name in ("algorithm2", "algorithm2-max")}
    assert [one.combine for one in combined.values() if isinstance(one, Algorithm2)] == ["sum", "max"]
    assert set(POLICIES) >= BLIND
    with pytest.raises(ValueError, match=r"unknown policy 'best'; known: .*random, round-robin"):
        make_policy("best")


def test_schedules_that_wait_for_a_batch_plan_and_others_go_by_load() -> None:
    planned = {"colocated", "sync", "stream", "one_step_off"}
    assert all(policy_for(name, AUTO) == "skew-aware" for name in planned)
    assert policy_for("async") == policy_for("a new one") == "least-loaded"
    assert policy_for("sync", "random") == "random"
    assert objective_of("stream", 7.0) == Streamed(7.0) and objective_of("stream") == Streamed(math.inf)
    assert all(objective_of(name, 7.0) is MAKESPAN for name in ("colocated", "sync", "one_step_off", "async"))


def test_a_trial_places_beside_the_same_work_and_starts_nothing() -> None:
    policy = LeastLoaded(affinity=1)
    for name in "ab":
        policy.join(name, 3)
    policy.submit([Request("first", "g")])
    assert placed(policy.decide()) == [("first", "a")]
    siblings = [Request("sibling", "g"), Request("other", "h")]
    expected = [("sibling", "a"), ("other", "b")]  # one follows its group, one goes to the emptier instance
    trial = policy.trial()
    assert placed(trial.place_by_load(deque(siblings))) == expected
    assert list(trial.instances["a"].running) == ["first", "sibling"]
    assert list(policy.instances["a"].running) == ["first"] == list(policy.where)
    policy.submit(siblings)
    assert placed(policy.decide()) == expected


def test_a_request_of_which_nothing_is_known_is_no_turn_and_has_no_length() -> None:
    one = Request("r", "g")
    assert (one.expected, one.prompt_tokens, one.turn, one.home, one.cached_tokens) == (0.0, 0, False, "", 0)
    assert not Assignment("r", "a", REGULAR).moved
