"""Find when a second site pays: the cheapest plan that keeps up with a given pace, and the value of an input from
which one placement beats another. Pure.

`plans` finds the fewest USD per sample however long a step takes, or the shortest step whatever it costs. Neither
compares placements: a plan that may be slow hardly notices a link. So here a step's duration is limited, and
the objective is USD per sample.

    async, one_step_off   the smallest trainer and the cheapest generation that both end by the limit, and by some
                          shorter times (`SHORTER`): GPUs are whole, so a little less time may cost less per sample
    sync, stream          for every size of the trainer, the cheapest generation that leaves the whole step within the
                          limit: the latest deadline of the generation, by bisection

`Comparison` does this for single sites with one GPU type and for two sites, at the pace of a given number of GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import numpy as np

from scheduler.capacity.allocation import SYNC_SIZES, Allocator, Split
from scheduler.capacity.placement_plan import PlacementPlan, colocated, evaluate
from scheduler.capacity.plan_search import plans, plans_within
from scheduler.capacity.problem import DELTA_RATIO, Offer, Problem, Route
from scheduler.cost.generation_cost import Batch
from scheduler.cost.hardware import Device
from scheduler.cost.model_shapes import Transformer
from scheduler.cost.trainer_work import TrainingWork
from scheduler.schedule.schedules import KINDS

SHORTER = (*(0.995**k for k in range(24)), *(0.88 * 0.98**k for k in range(108)))
"""Step times to try, as shares of the longest one: closely spaced near it, down to a tenth."""
EARLIER = (0.97, 0.94, 0.91, 0.88)
"""Deadlines of a generation to try beside the latest, as shares of it."""
LATEST = 10
"""Bisections of a generation's deadline: to a thousandth of the limit."""
ROUNDING = 1e-6
"""Share by which a step may exceed its limit: plans come from bisections."""
BANDWIDTHS, PRICES = (0.01, 1000.0), (1e-3, 100.0)
"""Ranges in Gbit/s and in USD (per GB, per hour of a GPU) in which a break-even is searched."""

InputKind = Literal["always", "from", "up_to", "never"]


@dataclass(frozen=True)
class Threshold:
    """Value in a range at which something begins or ceases to hold."""

    kind: InputKind
    """Where it holds: in the whole range; from a value on; up to a value; nowhere in the range."""
    value: float | None = None
    """The value, on the side where it holds; None: there is none within the range."""


def threshold(
    holds: Callable[[float], bool], low: float, high: float, upwards: bool = True, precision: float = 0.01
) -> Threshold:
    """Return the value of an input at which something begins to hold (`upwards`), or up to which it holds.

    Bisection on the logarithm. What holds at a value must hold at all larger ones (all smaller ones); if it does not,
    the result is one of the changes.

    Args:
        holds: the condition, evaluated at both ends, and then between them.
        low: lower end of the range, above 0.
        high: upper end of the range.
        upwards: whether larger values help; otherwise smaller ones do.
        precision: relative precision of the result.

    Raises:
        ValueError: the range is empty or not positive.
    """
    if not 0 < low < high < math.inf or not precision > 0:
        raise ValueError(f"a threshold needs a range of positive values, got {low:g} .. {high:g}, to {precision:g}")
    worst, best = (low, high) if upwards else (high, low)
    if not holds(best):
        return Threshold("never")
    if holds(worst):
        return Threshold("always")
    while max(best / worst, worst / best) > 1 + precision:
        middle = math.sqrt(best * worst)
        worst, best = (worst, middle) if holds(middle) else (middle, best)
    return Threshold("from" if upwards else "up_to", best)


def cheapest_within(problem: Problem, schedule: str, limit_s: float) -> PlacementPlan | None:
    """Return the plan with the fewest USD per sample among those whose step takes at most `limit_s`; None: none does.

    Args:
        problem: what to plan for; its budget applies too.
        schedule: determines which stages overlap.
        limit_s: seconds of a step.
    """
    allocator = Allocator(problem, schedule)
    overlapping = KINDS[schedule].overlaps
    best: PlacementPlan | None = None
    for trainer in allocator.trainers:
        found = _overlapping(allocator, trainer, limit_s) if overlapping else _following(allocator, trainer, limit_s)
        for one in found:
            step = one.chosen
            if step.seconds > limit_s * (1 + ROUNDING) or step.usd_per_hour > problem.budget:
                continue
            if best is None or (step.usd_per_1k, step.seconds) < (best.chosen.usd_per_1k, best.chosen.seconds):
                best = one
    return best


def _overlapping(allocator: Allocator, trainer: int, limit_s: float) -> Iterator[PlacementPlan]:
    """Yield plans whose stages both end by the same time; the pause to load new weights shortens the generation's
    time."""
    for shorter in SHORTER:
        found = allocator.split(trainer, limit_s * shorter)
        if found is None:
            return
        plan = evaluate(allocator, found[1], "cost")
        over = plan.chosen.seconds - limit_s * shorter
        yield plan
        if over > 0 and (again := allocator.split(trainer, limit_s * shorter - over)) is not None:
            yield evaluate(allocator, again[1], "cost")


def _following(allocator: Allocator, trainer: int, limit_s: float) -> Iterator[PlacementPlan]:
    """Yield plans for every size of the trainer, with the cheapest generation that leaves the step within the limit."""
    sizes = sorted({one.gpus: one for one in allocator.trainers[trainer] if one is not None}.items())
    if len(sizes) > SYNC_SIZES:
        wanted = set(np.geomspace(1, len(sizes), SYNC_SIZES).round().astype(int).tolist())
        sizes = [one for place, one in enumerate(sizes, 1) if place in wanted]
    for _, time in sizes:
        high = limit_s - (time.seconds if allocator.schedule == "sync" else 0.0)
        if time.seconds >= limit_s or high <= 0:
            continue
        low = 0.0
        for turn in range(LATEST):
            deadline = high if turn == 0 else (low + high) / 2
            covered = allocator.cover(trainer, time, deadline)
            if covered is None:
                if turn == 0:
                    break  # not possible even in the whole time
                low = deadline
                continue
            plan = evaluate(allocator, Split(trainer, time, covered[1]), "cost")
            if plan.chosen.seconds > limit_s:
                high = deadline
                continue
            yield plan
            low = deadline
            if turn == 0:
                break
        for earlier in EARLIER if low else ():
            covered = allocator.cover(trainer, time, low * earlier)
            if covered is not None:
                yield evaluate(allocator, Split(trainer, time, covered[1]), "cost")


@dataclass(frozen=True)
class Cost:
    """Times and costs of a split, or of GPUs in turns."""

    split: str
    seconds: float
    """Seconds of a step."""
    generation_s: float
    training_s: float
    weights_s: float
    """Seconds of new weights over the link, to every GPU, and of their load; in turns: of both changes."""
    usd_per_hour: float
    """Rent and traffic."""
    traffic_usd: float
    """USD of traffic per 1,000 samples, included in `usd`."""
    usd: float
    """USD per 1,000 samples."""

    @classmethod
    def of(cls, plan: PlacementPlan) -> Cost:
        """Compute the cost of a plan under its schedule."""
        offers, step = plan.problem.offers, plan.chosen
        parts = [(one.count, one.kind.tensor_parallel, offers[one.offer].device.name) for one in plan.split.generation]
        pools = " + ".join(f"{count} x {degree} {name}" for count, degree, name in parts)
        return cls(
            f"{plan.split.time.gpus} {offers[plan.split.trainer].device.name} > {pools}",
            step.seconds,
            plan.steady_s if KINDS[plan.schedule].continuous else plan.makespan_s,
            plan.training_s,
            plan.transfer_s + plan.load_s,
            step.usd_per_hour,
            plan.egress_usd / plan.problem.batch.samples * 1000,
            step.usd_per_1k,
        )


def in_turns(problem: Problem, counts: Sequence[int]) -> list[Cost]:
    """Return the costs of so many GPUs of a problem's only offer that all generate and then all train, where they fit.

    Raises:
        ValueError: there are several offers.
    """
    if len(problem.offers) != 1:
        raise ValueError(f"GPUs in turns need exactly one offer, got {len(problem.offers)}")
    made = []
    for count in counts:
        one = colocated(replace(problem, offers=(replace(problem.offers[0], count=count),)), "cost")
        if one is not None:
            times = (one.step.seconds, one.generation_s, one.training_s, one.switch_s)
            name = f"{count} {problem.offers[0].device.name} in turns"
            made.append(Cost(name, *times, one.step.usd_per_hour, 0.0, one.step.usd_per_1k))
    return made


def shortest_step(problem: Problem, schedule: str) -> float:
    """Return the seconds of the shortest step within the budget, by rates as `plans` finds it; infinite: no plan."""
    made = plans_within(problem, schedule, "throughput")
    return min((one.chosen.seconds for one in made), default=math.inf)


@dataclass(frozen=True)
class Point:
    """Inputs at which placements are compared."""

    gpus: int
    """GPUs of the training type; one site of them sets the pace and the money."""
    lengths: str
    """Name of the answer lengths, as in the comparison's batches."""
    schedule: str
    gbit_s: float = 1.0
    """Bandwidth of the link."""
    rtt_ms: float = 0.0
    egress: float = 0.0
    """USD per 10^9 bytes over the link, either way."""
    delta: bool = True
    """Whether new weights cross the link as deltas; otherwise whole."""
    remote_usd: float | None = None
    """USD per hour of a GPU of the second site; None: the price of its type."""

    def local(self) -> Point:
        """Return the same point for placements without a link."""
        return Point(self.gpus, self.lengths, self.schedule)


class Comparison:
    """Compares single sites of one GPU type with two sites: the trainer here, all generation on a partner's type there.

    Costs are those of the cheapest plan that keeps up with the shortest step of `Point.gpus` GPUs of the training type
    in one site under the same schedule (`limit`); step times are the shortest for the rent of these GPUs. Results are
    cached.

    Args:
        model: the model to train.
        work: models that an optimizer step trains and evaluates.
        batches: returns a batch by the name of its lengths.
        devices: devices by name, each with a price.
        trains: the type that sets the pace, and trains where there are two sites.
        supply: GPUs of every other type that could be rented.
        turns: numbers of GPUs of every other type that are tried in turns; of the training type, all up to its own.

    Raises:
        ValueError: a type has no price.
    """

    def __init__(
        self,
        model: Transformer,
        work: TrainingWork,
        batches: Callable[[str], Batch],
        devices: Mapping[str, Device],
        trains: str,
        supply: int,
        turns: Sequence[int],
    ) -> None:
        self.model, self.work, self.devices, self.trains, self.supply = model, work, devices, trains, supply
        self.prices = {name: one.price.usd_per_hour for name, one in devices.items() if one.price is not None}
        if missing := devices.keys() - self.prices.keys():
            raise ValueError(f"no price is known of {', '.join(sorted(missing))}")
        self._counts = turns
        self.batch, self._turns, self.reference = cache(batches), cache(self._find_turns), cache(self._find_reference)
        self.one_type, self.two_sites = cache(self._find_one_type), cache(self._find_two_sites)
        self.single, self.single_step = cache(self._find_single), cache(self._find_single_step)

    def _problem(self, at: Point, *offers: Offer) -> Problem:
        route = Route(at.gbit_s * 1e9 / 8, at.rtt_ms / 1e3, at.egress)
        routes, ratio = ((frozenset(("here", "there")), route),), DELTA_RATIO if at.delta else 1.0
        return Problem(self.model, self.batch(at.lengths), self.work, offers, routes, delta_ratio=ratio)

    def _offer(self, at: Point, gpu: str) -> Offer:
        return Offer("here", self.devices[gpu], at.gpus if gpu == self.trains else self.supply, self.prices[gpu])

    def here(self, at: Point, *gpus: str) -> Problem:
        """Return the problem of one site with these types."""
        return self._problem(at, *(self._offer(at, gpu) for gpu in gpus))

    def across(self, at: Point, partner: str) -> Problem:
        """Return the problem with the trainer here and the partner's GPUs there."""
        usd = self.prices[partner] if at.remote_usd is None else at.remote_usd
        there = Offer("there", self.devices[partner], self.supply, usd, trains=False)
        return self._problem(at, replace(self._offer(at, self.trains), generates=False), there)

    def _find_reference(self, at: Point) -> Cost:
        """Return the cost of the placement that sets the pace.

        Raises:
            ValueError: its GPUs do not hold both trainer and generation.
        """
        return Cost.of(plans(self.here(at, self.trains), at.schedule, "throughput", simulated=False)[0])

    def limit(self, at: Point) -> float:
        """Return the seconds of a step that every placement must keep up with."""
        return self.reference(at.local()).seconds

    def cheapest(self, problem: Problem, at: Point) -> Cost | None:
        """Return the cheapest plan's cost; None: no plan keeps up."""
        plan = cheapest_within(problem, at.schedule, self.limit(at))
        return None if plan is None else Cost.of(plan)

    def _find_one_type(self, at: Point, gpu: str) -> Cost | None:
        """Return the cost of one site of one type, split."""
        found = self.cheapest(self.here(at, gpu), at)
        return _cheapest([found, self.reference(at.local())]) if gpu == self.trains else found

    def _find_turns(self, at: Point, gpu: str) -> list[Cost]:
        return in_turns(self.here(at, gpu), range(1, at.gpus + 1) if gpu == self.trains else self._counts)

    def in_turns(self, at: Point, types: Iterable[str]) -> Cost | None:
        """Return the cheapest of these types, in any number, that keeps up in turns; GPUs in turns have no schedule."""
        found = [one for gpu in types for one in self._turns(replace(at.local(), schedule="sync"), gpu)]
        return _cheapest(one for one in found if one.seconds <= self.limit(at))

    def _find_single(self, at: Point) -> Cost:
        """Return the cost of the best site of one type, split or in turns."""
        found = _cheapest([*(self.one_type(at, gpu) for gpu in self.devices), self.in_turns(at, self.devices)])
        assert found is not None  # one of them sets the pace
        return found

    def mixed(self, at: Point, partner: str) -> Cost:
        """Return the cost of both types in one site, at the same prices; using one of them alone is allowed."""
        both, alone = self.cheapest(self.here(at, self.trains, partner), at), self.one_type(at, self.trains)
        found = _cheapest([both, alone, self.in_turns(at, (self.trains, partner))])
        assert found is not None
        return found

    def _find_two_sites(self, at: Point, partner: str) -> Cost | None:
        return self.cheapest(self.across(at, partner), at)

    def usd(self, at: Point, partner: str) -> float:
        """Return the USD per 1,000 samples of two sites; infinite: they cannot keep up."""
        found = self.two_sites(at, partner)
        return math.inf if found is None else found.usd

    def ratio(self, at: Point, partner: str) -> float:
        """Return the cost of two sites divided by that of the best single one."""
        return self.usd(at, partner) / self.single(at.local()).usd

    def _money(self, at: Point) -> float:
        """Return the USD per hour of the GPUs that set the pace."""
        return at.gpus * self.prices[self.trains] * (1 + ROUNDING)

    def two_sites_step(self, at: Point, partner: str) -> float:
        """Return the seconds of the shortest step of two sites for the money; infinite: there is none."""
        return shortest_step(replace(self.across(at, partner), budget=self._money(at)), at.schedule)

    def _find_single_step(self, at: Point) -> float:
        """Return the seconds of the shortest step of the best single site of one type for the money."""
        found = [one for gpu in self.devices for one in self._turns(replace(at, schedule="sync"), gpu)]
        times = [one.seconds for one in found if one.usd_per_hour <= self._money(at)]
        split = [replace(self.here(at, gpu), budget=self._money(at)) for gpu in self.devices]
        return min(times + [shortest_step(one, at.schedule) for one in split])

    def bandwidth(self, at: Point, partner: str) -> tuple[Threshold, str]:
        """Return the Gbit/s from which two sites cost less, and why they do not below it (or anywhere): `slow` or
        `dear`."""
        found = threshold(lambda gbit: self.ratio(replace(at, gbit_s=gbit), partner) < 1, *BANDWIDTHS)
        below = BANDWIDTHS[1] if found.value is None else found.value / 1.02
        return found, "slow" if math.isinf(self.usd(replace(at, gbit_s=below), partner)) else "dear"

    def bandwidth_for_time(self, at: Point, partner: str) -> Threshold:
        """Return the Gbit/s from which two sites have the shorter step."""
        best = self.single_step(at.local())
        return threshold(lambda gbit: self.two_sites_step(replace(at, gbit_s=gbit), partner) < best, *BANDWIDTHS)

    def dearest_egress(self, at: Point, partner: str) -> Threshold:
        """Return the USD per GB up to which two sites cost less."""
        return threshold(lambda usd: self.ratio(replace(at, egress=usd), partner) < 1, *PRICES, upwards=False)

    def dearest_gpu(self, at: Point, partner: str) -> Threshold:
        """Return the USD per hour of the second site's GPUs up to which two sites cost less."""
        return threshold(lambda usd: self.ratio(replace(at, remote_usd=usd), partner) < 1, *PRICES, upwards=False)


def _cheapest(found: Iterable[Cost | None]) -> Cost | None:
    """Return the cheapest cost; None: there is none."""
    return min((one for one in found if one is not None), key=lambda one: one.usd, default=None)
