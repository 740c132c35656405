"""Dispatch across sites: every group once, where its samples are expected home soonest, and never for money alone."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from scheduler.cost.decode import PAPER_7B_H800, QWEN_7B, StepCurve, replica_time, roofline
from scheduler.cost.hardware import device
from scheduler.cost.length_forecast import Forecast
from scheduler.sites.site_candidates import SiteLoad, SitePrediction, SiteProblem, with_tails
from scheduler.sites.site_dispatch import BUNDLES, SiteDispatch, SiteGroup

LONGEST = 20_000
LINEAR = StepCurve((1, 2), (1e-3, 2e-3))
"""Of an instance that is not faster for taking several at once: its speed is its capacity."""


def near(name: str, curve: StepCurve = PAPER_7B_H800, count: int = 4, slots: int = 256, **facts: float) -> SiteLoad:
    return SiteLoad(name, ((slots, curve),) * count, **facts)


def test_a_site_with_more_instances_gets_more_and_keeps_what_it_has() -> None:
    policy = dispatch(near("a", LINEAR, 1), near("b", LINEAR, 1))
    policy.submit(known([100.0] * 20))
    before = Counter(site for _, site in policy.decide())
    assert before["a"] == before["b"] == 10
    had = policy.groups_of("a")
    policy.change(near("a", LINEAR, 3))
    assert policy.groups_of("a") == had
    policy.submit([SiteGroup(f"more{n}", 4, Forecast.exactly(100.0)) for n in range(40)])
    after = Counter(site for _, site in policy.decide())
    assert before["a"] + after["a"] == pytest.approx(3 * (before["b"] + after["b"]), rel=0.25)
    policy.change(near("a", LINEAR, 1))
    for group_id in had:
        for _ in range(4):
            policy.finished(group_id, 100.0)
    assert set(policy.groups_of("a")).isdisjoint(had)


def known(lengths: Sequence[float], size: int = 4, prompt: int = 0) -> list[SiteGroup]:
    return [SiteGroup(f"g{n}", size, Forecast.exactly(length), prompt) for n, length in enumerate(lengths)]


def uncertain(count: int, seed: int = 0, spread: float = 0.4) -> list[SiteGroup]:
    logs = np.random.default_rng(seed).normal(7, 0.8, count)
    return [SiteGroup(f"g{n}", 8, Forecast.lognormal(float(log), spread), 300) for n, log in enumerate(logs)]


def dispatch(*sites: SiteLoad, tolerance: float = 0.0, bytes_per_token: float = 10.0) -> SiteDispatch:
    policy = SiteDispatch(LONGEST, bytes_per_token, tolerance)
    for site in sites:
        policy.join(site)
    return policy


def placed(policy: SiteDispatch, groups: Sequence[SiteGroup]) -> dict[str, str]:
    policy.submit(groups)
    decisions = policy.decide()
    assert len(dict(decisions)) == len(decisions), "a group has been placed twice"
    return dict(decisions)


def predicted(policy: SiteDispatch) -> SitePrediction:
    assert policy.predicted is not None
    return policy.predicted


def mixed() -> tuple[SiteLoad, ...]:
    h20, l40s = (roofline(QWEN_7B, device(name)) for name in ("H20", "L40S"))
    return (
        near("home", roofline(QWEN_7B, device("H800")), price_per_hour=11.4),
        near("far", h20, 8, bytes_per_s=1e9, rtt_s=0.03, price_per_hour=8.0, price_per_gb=0.02),
        near("farther", l40s, 16, bytes_per_s=1e7, rtt_s=0.15, price_per_hour=6.0, price_per_gb=0.05),
    )


def test_every_group_is_placed_once_at_once() -> None:
    for groups in (uncertain(40), known([500.0] * 30), [SiteGroup(f"g{n}", 3) for n in range(700)]):
        policy = dispatch(*mixed())
        assert placed(policy, groups).keys() == {group.group_id for group in groups}
        assert policy.waiting == 0
        assert policy.decide() == []


def test_groups_wait_until_a_site_takes_work() -> None:
    policy = dispatch()
    assert placed(policy, known([100, 200])) == {}
    policy.join(near("a"))
    policy.hold("a")
    assert policy.decide() == []
    assert policy.waiting == 2
    policy.unhold("a")
    assert dict(policy.decide()) == {"g0": "a", "g1": "a"}


def test_with_one_site_everything_goes_there() -> None:
    groups = uncertain(50)
    assert set(placed(dispatch(mixed()[2]), groups).values()) == {"farther"}


def test_a_held_site_gets_nothing_and_keeps_what_it_has() -> None:
    policy = dispatch(near("a"), near("b"))
    first = placed(policy, known([1000] * 8))
    assert set(first.values()) == {"a", "b"}
    policy.hold("a")
    more = [SiteGroup(f"more{n}", 4, Forecast.exactly(1000)) for n in range(8)]
    assert set(placed(policy, more).values()) == {"b"}
    assert {group.group_id for group in policy.leave("a")} == {name for name, site in first.items() if site == "a"}


def test_a_site_that_leaves_gives_back_what_is_left_of_its_groups() -> None:
    policy = dispatch(near("a"), near("b"))
    where = placed(policy, known([1000] * 8, size=3))
    of_a = [name for name, site in where.items() if site == "a"]
    policy.finished(of_a[0], 1000)
    for _ in range(3):
        policy.finished(of_a[1], 1000)
    left = policy.leave("a")
    assert {group.group_id: group.size for group in left} == {of_a[0]: 2} | dict.fromkeys(of_a[2:], 3)
    again = placed(policy, left)
    assert again == {group.group_id: "b" for group in left}
    policy.join(near("a"))
    assert "a" in placed(policy, [SiteGroup("new", 1, Forecast.exactly(10))]).values()


def test_a_sample_that_comes_although_its_site_left_is_not_generated_again() -> None:
    policy = dispatch(near("a"))
    placed(policy, known([1000], size=2))
    policy.submit(policy.leave("a"))
    policy.finished("g0", 900)
    policy.join(near("b"))
    assert policy.decide() == [("g0", "b")]
    assert [group.size for group in policy.leave("b")] == [1]


def test_groups_that_are_withdrawn_are_forgotten() -> None:
    policy = dispatch(near("a"))
    placed(policy, known([1000] * 4))
    policy.submit([SiteGroup("late", 1)])
    policy.withdraw(["g0", "late", "nobody"])
    assert policy.waiting == 0
    assert [group.group_id for group in policy.leave("a")] == ["g1", "g2", "g3"]


@pytest.mark.parametrize("forecast", [Forecast.exactly(500), None])
def test_a_site_that_is_twice_as_fast_gets_twice_the_tokens(forecast: Forecast | None) -> None:
    groups = [SiteGroup(f"g{n}", 4, forecast) for n in range(90)]
    counts = Counter(placed(dispatch(near("slow", LINEAR), near("fast", LINEAR.scaled(0.5))), groups).values())
    assert counts["fast"] == pytest.approx(2 * counts["slow"], abs=3)


def test_sites_count_by_their_capacity_and_not_as_one_each() -> None:
    groups = [SiteGroup(f"g{n}", 4) for n in range(100)]
    counts = Counter(placed(dispatch(near("small", count=2), near("large", count=8)), groups).values())
    assert counts["large"] == pytest.approx(4 * counts["small"], abs=4)


def test_a_slow_link_gets_fewer_and_none_if_its_round_trip_alone_is_too_long() -> None:
    groups = known([1000] * 80)

    def share(bytes_per_s: float = 1e12, rtt_s: float = 0.0) -> int:
        far = near("far", LINEAR, bytes_per_s=bytes_per_s, rtt_s=rtt_s)
        where = placed(dispatch(near("home", LINEAR), far), groups)
        return sum(site == "far" for site in where.values())

    alone = dispatch(near("home", LINEAR))
    placed(alone, groups)
    end = predicted(alone).end
    assert share() == pytest.approx(40, abs=1)
    assert 0 < share(bytes_per_s=1e4) < share(bytes_per_s=2e4) < 35
    assert 0 < share(rtt_s=0.5 * end) < 25
    assert share(rtt_s=1.01 * end) == 0


@pytest.mark.parametrize("count", [1, 12, 600])
def test_a_doubtful_site_gets_the_shortest_groups_however_slow_it_seems_until_it_has_work(count: int) -> None:
    slow = SiteLoad("b", ((256, PAPER_7B_H800.scaled(1000)),), doubtful=True)
    policy = dispatch(near("a"), slow)
    groups = known([1000.0 + n for n in range(count)])
    sites = placed(policy, groups)
    bundle = -(-count // BUNDLES)  # groups that are placed together
    assert [group for group, site in sites.items() if site == "b"] == [group.group_id for group in groups[:bundle]]
    assert predicted(policy).end > 1000 * 1000 * float(PAPER_7B_H800.base(1)), "the prediction is of what was placed"
    more = [SiteGroup(f"more{n}", 4, Forecast.exactly(1000.0)) for n in range(12)]
    assert set(placed(policy, more).values()) == {"a"}, "it has work"
    for group in groups[:bundle]:
        for _ in range(4):
            policy.finished(group.group_id, 1000.0)
    policy.change(near("b", PAPER_7B_H800.scaled(1000), 1))
    last = [SiteGroup(f"last{n}", 4, Forecast.exactly(1000.0)) for n in range(12)]
    assert set(placed(policy, last).values()) == {"a"}, "it is known to be slow"


def test_sites_that_are_all_doubtful_share_as_others_do() -> None:
    one, other = (SiteLoad(name, ((8, LINEAR),), doubtful=True) for name in "ab")
    assert Counter(placed(dispatch(one, other), known([100.0] * 20)).values()) == {"a": 10, "b": 10}
    assert len(placed(dispatch(one, other), known([100.0]))) == 1


def test_what_a_site_has_to_do_counts_until_its_samples_come() -> None:
    policy = dispatch(near("a"), near("b"))
    policy.hold("b")
    placed(policy, known([4000] * 40))
    policy.unhold("b")
    first = placed(policy, [SiteGroup("x", 4, Forecast.exactly(4000))])
    assert first == {"x": "b"}
    for group in (f"g{n}" for n in range(40)):
        for _ in range(4):
            policy.finished(group, 4000)
    assert placed(policy, [SiteGroup("y", 8, Forecast.exactly(4000))]) == {"y": "a"}


def test_a_straggler_does_not_keep_short_groups_away() -> None:
    steep = StepCurve((1, 64), (10e-3, 200e-3))
    policy = dispatch(near("a", steep, 1), near("b", steep, 1))
    policy.hold("b")
    placed(policy, [SiteGroup("straggler", 1, Forecast.exactly(20_000))])
    policy.hold("a")
    policy.unhold("b")
    placed(policy, [SiteGroup(f"b{n}", 8, Forecast.exactly(2000)) for n in range(2)])
    policy.unhold("a")
    assert placed(policy, [SiteGroup("short", 4, Forecast.exactly(500))]) == {"short": "a"}


def test_samples_that_have_come_tell_how_far_the_others_are() -> None:
    policy = dispatch(near("a"), near("b"))
    policy.hold("b")
    placed(policy, [SiteGroup("old", 64, Forecast.exactly(5000)), SiteGroup("quick", 1, Forecast.exactly(4900))])
    policy.unhold("b")
    policy.hold("a")
    placed(policy, [SiteGroup("new", 48, Forecast.exactly(5000))])
    policy.unhold("a")
    policy.finished("quick", 4900)
    # a has more samples than b, but they are nearly through
    assert placed(policy, [SiteGroup("x", 64, Forecast.exactly(5000))]) == {"x": "a"}


def test_without_forecasts_the_lengths_that_came_are_expected() -> None:
    def far(lengths: float) -> int:
        policy = dispatch(near("home"), near("far", rtt_s=20.0))
        placed(policy, [SiteGroup("before", 40)])
        for _ in range(40):
            policy.finished("before", lengths)
        return list(placed(policy, [SiteGroup(f"g{n}", 4) for n in range(80)]).values()).count("far")

    assert far(100) == 0, "short samples are through at home before the round trip is over"
    assert far(10_000) > 10


def test_samples_that_still_run_count_as_longer_than_those_that_have_arrived() -> None:
    policy = dispatch(near("home"))
    placed(policy, [SiteGroup("before", 40)])
    for _ in range(16):
        policy.finished("before", 100)
    # 24 of 40 have gone 100 steps as well and go on: the first 40 % are at 100 tokens, the rest is longer
    assumed = policy._assumed()
    assert assumed == Forecast.observed([100.0] * 16, [100.0] * 24, policy.longest)
    assert [length > 100.1 for length in assumed.lengths] == [False] * 6 + [True] * 10
    placed(policy, [SiteGroup("later", 1)])  # it has gone no step
    assert policy._assumed() == Forecast.observed([100.0] * 16, [100.0] * 24 + [0.0], policy.longest)
    for _ in range(24):
        policy.finished("before", 200)
    assert policy._assumed().lengths[7] == pytest.approx(200.0, rel=0.2)


def test_forecasts_with_longer_tails_stay_off_the_slow_site() -> None:
    def longest_on_slow(spread: float) -> float:
        groups = uncertain(120, spread=spread)
        sites = near("quick", PAPER_7B_H800, 4), near("slow", PAPER_7B_H800.scaled(5), 8)
        where = placed(dispatch(*sites), groups)
        return max(group.forecast.mean for group in groups if group.forecast and where[group.group_id] == "slow")

    assert longest_on_slow(0.8) < 0.8 * longest_on_slow(0.1)


def test_tails_keep_the_mean_weight_and_the_order() -> None:
    values = np.stack([Forecast.lognormal(7, spread).sixteen for spread in (0.1, 0.5, 1.0)])
    with_more, weights = with_tails(values, np.full((3, 5), np.nan))
    assert with_more.shape == (3, 21)
    assert weights.sum() == pytest.approx(1.0)
    assert (np.diff(with_more, axis=1) > 0).all()
    exact = np.exp(7 + np.asarray([0.1, 0.5, 1.0]) ** 2 / 2)
    assert with_more @ weights == pytest.approx(exact, rel=0.02)


def problem_of(sites: Sequence[SiteLoad], groups: Sequence[SiteGroup]) -> SiteProblem:
    policy = dispatch(*sites)
    policy.submit(groups)
    return policy._problem(list(policy._sites.values()))[0]


@pytest.mark.parametrize("spread", [0.0, 0.4, 0.8])
@pytest.mark.parametrize("sites", [mixed(), (near("a"), near("b"), near("c"))])
def test_no_placement_is_predicted_worse_than_dealing_by_capacity(sites: tuple[SiteLoad, ...], spread: float) -> None:
    groups = uncertain(150, spread=spread) if spread else known(np.random.default_rng(0).lognormal(7, 1, 150).tolist())
    problem = problem_of(sites, groups)
    assert problem.solve()[1].end <= problem.predict(problem.by_capacity()).end


def test_planning_with_tails_ends_much_earlier_than_with_means_where_speeds_differ() -> None:
    problem = problem_of(mixed(), uncertain(150, spread=0.8))
    assert problem.solve()[1].end < 0.7 * problem.predict(problem.earliest_end(tails=False)).end


def test_no_time_is_paid_for_money_without_a_tolerance_and_little_with_one() -> None:
    groups = uncertain(100)
    outcomes = []
    for tolerance in (0.0, 0.1, 0.5):
        policy = dispatch(*mixed(), tolerance=tolerance)
        placed(policy, groups)
        outcomes.append(predicted(policy))
    free = dispatch(*(SiteLoad(site.name, site.instances, site.bytes_per_s, site.rtt_s) for site in mixed()))
    placed(free, groups)
    assert outcomes[0].end == predicted(free).end, "prices alone must not change how soon it ends"
    assert outcomes[1].end <= 1.1 * outcomes[0].end
    assert outcomes[2].end <= 1.5 * outcomes[0].end
    assert outcomes[2].usd < outcomes[0].usd
    assert outcomes[1].usd <= outcomes[0].usd


def test_of_two_like_sites_the_tolerance_prefers_the_cheaper_one() -> None:
    groups = known([1000] * 40)
    cheap, dear = near("cheap", LINEAR, price_per_hour=1.0), near("dear", LINEAR, price_per_hour=9.0)
    counts = [
        Counter(placed(dispatch(dear, cheap, tolerance=tolerance), groups).values()) for tolerance in (0, 0.25, 1.05)
    ]
    assert counts[0]["cheap"] == counts[0]["dear"] == 20
    assert 20 < counts[1]["cheap"] <= 25
    assert counts[2]["cheap"] == 40


def test_what_goes_over_a_link_is_paid_too() -> None:
    groups = known([1000] * 20)
    far = near("far", LINEAR, bytes_per_s=1e9, price_per_hour=0.5, price_per_gb=1e5)
    where = placed(dispatch(near("home", LINEAR, price_per_hour=1.0), far, tolerance=1.1), groups)
    assert set(where.values()) == {"home"}


def exact_end(lengths: Sequence[float], seats: Sequence[int], sites: Sequence[SiteLoad], size: int) -> float:
    """From the formulas, for sites of one instance, links without bandwidth limits."""
    ends = []
    for number, site in enumerate(sites):
        mine = [length for length, seat in zip(lengths, seats, strict=True) if seat == number for _ in range(size)]
        ends.append(site.rtt_s + replica_time(mine, site.instances[0][1]) if mine else 0.0)
    return max(ends)


@pytest.mark.parametrize("seed", range(12))
def test_few_groups_are_placed_within_eight_percent_of_the_best_of_all_placements(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.lognormal(7, 0.9, int(rng.integers(2, 9))), LONGEST).round().tolist()
    sites = (
        near("a", StepCurve((1, 8, 64), (10e-3, 20e-3, 90e-3)), 1),
        near("b", PAPER_7B_H800.scaled(rng.uniform(0.8, 3)), 1, rtt_s=rng.uniform(0, 3)),
    )
    policy = dispatch(*sites, bytes_per_token=0.0)
    where = placed(policy, known(lengths))
    seats = [("a", "b").index(where[f"g{n}"]) for n in range(len(lengths))]
    best = min(exact_end(lengths, some, sites, 4) for some in itertools.product((0, 1), repeat=len(lengths)))
    assert predicted(policy).end == pytest.approx(exact_end(lengths, seats, sites, 4))
    assert predicted(policy).end <= 1.08 * best


def test_decisions_do_not_depend_on_chance() -> None:
    assert placed(dispatch(*mixed()), uncertain(300)) == placed(dispatch(*mixed()), uncertain(300))


def test_what_cannot_be_is_refused() -> None:
    policy = dispatch(near("a"))
    placed(policy, known([100]))
    with pytest.raises(ValueError, match="joined already"):
        policy.join(near("a"))
    with pytest.raises(ValueError, match="submitted already"):
        policy.submit(known([100]))
    with pytest.raises(ValueError, match="0 samples"):
        policy.submit([SiteGroup("empty", 0)])
    with pytest.raises(ValueError, match="instances"):
        SiteLoad("none", ())
    with pytest.raises(ValueError, match="bandwidth"):
        near("cut off", bytes_per_s=0.0)
    with pytest.raises(ValueError, match="tolerance"):
        SiteDispatch(100, 1.0, -0.1)
