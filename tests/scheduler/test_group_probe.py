"""Group probes: one of each group first, and what it shows reaches its siblings."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.cost.decode import PAPER_7B_H800
from scheduler.cost.length_forecast import MIDPOINTS, Forecast
from scheduler.dispatch.group_probe import GroupProbe
from scheduler.dispatch.policy import Request
from scheduler.dispatch.registry import make_policy

WIDE = Forecast.lognormal(np.log(200), 0.6)


def policy(slots: int = 4, machines: str = "ab") -> GroupProbe:
    made = make_policy("group-probe", longest=5000)
    assert isinstance(made, GroupProbe)
    for name in machines:
        made.join(name, slots, PAPER_7B_H800)
    return made


def some(groups: int, size: int, forecast: Forecast | None = WIDE) -> list[Request]:
    return [Request(f"g{g}.{n}", f"g{g}", forecast) for g in range(groups) for n in range(size)]


@pytest.mark.parametrize("forecast", [WIDE, None], ids=["forecasts", "none"])
def test_one_of_each_group_goes_first_on_the_emptiest_instance(forecast: Forecast | None) -> None:
    probing = policy()
    probing.submit(some(6, 4, forecast))
    started = probing.decide()
    assert [d.request_id for d in started[:6]] == [f"g{n}.0" for n in range(6)]
    assert [d.instance for d in started[:6]] == list("ababab")
    assert len(started) == 8, "slots that no probe needs take others"


@pytest.mark.parametrize(
    ("forecast", "then"),
    # g1's probe ends before g2's; without a forecast a request is not planned before its own has
    [(WIDE, ["g2.1", "g1.1", "g0.1"]), (None, ["g1.1", "g2.1", "g0.1"])],
    ids=["forecasts", "once another group has been seen"],
)
def test_a_probes_length_orders_its_waiting_siblings(forecast: Forecast | None, then: list[str]) -> None:
    probing = policy(slots=1)
    probing.likeness = 1.0  # siblings are alike, so no other plan is as good
    probing.submit(some(3, 2, forecast))
    order: list[str] = []
    lengths = {"g0": 100.0, "g1": 150.0, "g2": 3000.0}
    while decisions := probing.decide():
        order += [d.request_id for d in decisions]
        ended = order[-2] if len(order) < 5 else order[-1]
        probing.finished(ended, lengths[ended.split(".")[0]])
    assert order == ["g0.0", "g1.0", "g2.0", *then]


def test_a_running_sibling_is_expected_to_be_as_long_as_the_probe() -> None:
    probing = policy()
    probing.submit(some(1, 3))
    probing.decide()
    before = probing.where["g0.1"].running["g0.1"].expected
    probing.finished("g0.0", 2000.0)
    probing.decide()
    assert probing.where["g0.1"].running["g0.1"].expected > 1.5 * before


def test_a_group_whose_probe_was_lost_gets_another() -> None:
    probing = policy(slots=1)
    probing.submit(some(2, 2))
    where = {d.instance: d.request_id for d in probing.decide()}
    assert probing.leave("a") == [where["a"]]
    lost = probing._groups[where["a"].split(".")[0]]
    assert lost.probe is None and where["a"] not in lost.open
    probing.finished(where["b"], 10.0)
    probing.submit(some(2, 2)[:1] if where["a"] == "g0.0" else some(2, 2)[2:3])
    assert [d.request_id for d in probing.decide()] == [where["a"]]


def test_a_prior_is_of_all_lengths_and_of_what_runs_if_one_is_not_a_siblings() -> None:
    probing = policy(slots=1, machines="abcd")
    probing.submit(some(4, 2, None))
    produced = {"g2.0": 500.0, "g3.0": 200.0}.get
    for number, length in enumerate((100.0, 400.0)):
        probing.decide(lambda name: produced(name, 0.0))
        assert probing._informed(Request("g0.1", "g0", None)).forecast is None, "none, or its sibling's alone"
        probing.finished(f"g{number}.0", length)
    started = probing.decide(lambda name: produced(name, 0.0))
    prior = Forecast.observed([100.0, 400.0], [500.0, 200.0], 5000)
    assert probing._usual == prior and prior.mean > Forecast.observed([100.0, 400.0], [], 5000).mean
    assert started and probing._informed(Request("g0.1", "g0", None)).forecast == prior.given_siblings([100.0], 0.5)
    probing._groups["g0"].lengths.append(100.0)
    assert probing._informed(Request("g0.1", "g0", None)).forecast is None, "both may be siblings'"


def test_a_length_of_none_and_lengths_that_nobody_knows_are_no_trouble() -> None:
    probing = policy(slots=1, machines="ab")
    probing.submit(some(2, 3, None))
    probing.decide()
    probing.finished("g0.0", 0.0)
    probing.finished("g1.0")
    assert list(probing._ended) == [0.0] and probing._groups["g0"].lengths == [0.0]
    assert probing._groups["g1"].lengths == [] and probing._news == {"g0"}


def test_what_waits_is_planned_again_when_more_than_a_twentieth_of_the_groups_has_news() -> None:
    probing = policy(slots=40, machines="a")
    probing.submit(some(40, 2))
    probing.decide()
    for number, news in enumerate(({"g0"}, {"g0", "g1"}, set())):
        probing.finished(f"g{number}.0", 100.0)
        probing.decide()
        assert probing._news == news


def test_a_group_is_forgotten_with_its_last_request() -> None:
    probing = policy(slots=4, machines="a")
    probing.submit(some(2, 2))
    probing.decide()
    probing.finished("g0.0", 10.0)
    probing.finished("g0.1", 10.0)
    assert set(probing._groups) == {"g1"} and probing._news == set()
    probing.withdraw({"g1.0"})
    assert probing._groups["g1"].probe is None and set(probing._groups["g1"].open) == {"g1.1"}
    probing.withdraw({"g1.1"})
    assert probing._groups == {} and probing.where == {} and probing.waiting == 0


def test_probes_that_wait_are_counted_and_can_be_withdrawn() -> None:
    probing = policy(slots=1, machines="a")
    probing.submit(some(3, 2))
    assert probing.waiting == 6
    assert [d.request_id for d in probing.decide()] == ["g0.0"] and probing.waiting == 5
    probing.withdraw({"g1.0"})
    assert probing.waiting == 4
    probing.finished("g0.0")
    assert [d.request_id for d in probing.decide()] == ["g2.0"]


def test_running_requests_may_move_and_siblings_are_not_kept_together_unless_told_otherwise() -> None:
    assert GroupProbe().migrate and GroupProbe().affinity == 0 and GroupProbe(affinity=2).affinity == 2


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("likeness", [0.0, 0.3, 0.8])
def test_forecasts_given_siblings_are_those_of_the_random_effects_model(likeness: float, count: int) -> None:
    rng = np.random.default_rng(0)
    shared = rng.standard_normal((400_000, 1)) * np.sqrt(likeness)
    own = rng.standard_normal((400_000, count + 1)) * np.sqrt(1 - likeness)
    logs = 5.0 + 0.8 * (shared + own)
    alike = logs[np.abs(logs[:, :count].mean(axis=1) - 6.0) < 0.05, count]
    told = Forecast.lognormal(5.0, 0.8).given_siblings([np.exp(6.0)] * count, likeness)
    assert np.log(told.lengths).mean() == pytest.approx(alike.mean(), abs=0.03)
    assert np.log(told.lengths) == pytest.approx(np.quantile(alike, MIDPOINTS), abs=0.12)


def test_a_known_length_is_not_changed_by_siblings() -> None:
    assert Forecast.exactly(70.0).given_siblings([1000.0], 0.5) == Forecast.exactly(70.0)
    assert WIDE.given_siblings([], 0.5) == WIDE
