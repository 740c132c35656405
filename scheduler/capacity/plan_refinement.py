"""Refinement of splits whose steps under `async` are simulated: faster ones beside them, then cheaper ones. Pure.

The search for splits knows rates, and not who waits for whom. So from a split that it found, others are simulated that
differ in one thing: the size of a pool or of the trainer, the offer that trains, an offer that generates as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from scheduler.capacity.allocation import Allocator, PlanObjective, Split, most_replicas
from scheduler.capacity.covering import Replicas
from scheduler.capacity.placement_plan import PlacementPlan, evaluate
from scheduler.cost.training_cost import TrainerTime

NOISE = 0.01
"""Share by which a simulated split must be better for GPUs that cost more: some of a difference is chance."""
STEP = 0.0025
"""The same of one change, for throughput: several add up, and the cheapest within `NOISE` is taken in the end."""
CLIMBS, TRIALS = 48, 32
"""Most splits that are simulated to find a faster one, and in the place of a fast one: a plan should take seconds."""
SMALLER = (1 / 4, 1 / 2, 3 / 4, 7 / 8)
"""Shares of a pool's GPUs that are tried, besides one replica fewer."""
LARGER = (2.0, math.inf)
"""Multiples of a trainer's GPUs that are tried, besides the next size; infinite: as many as help."""
WAITING = 0.5
"""Least share of a split's waiting that those beside it are expected to have: a plan should take seconds."""
PACES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7)
"""Shares of a step's time by which the stages of cheaper splits end, by rates alone; the rest is for waiting."""
ROUNDING = 1e-9
"""Share by which a price may be above the budget."""


class Refinement:
    """Finds better splits from one problem's; none is simulated twice."""

    def __init__(self, allocator: Allocator, objective: PlanObjective) -> None:
        self.allocator, self.objective = allocator, objective
        self.offers = allocator.problem.offers
        self._simulated: dict[tuple[object, ...], PlacementPlan] = {}
        self._climbs = self._trials = 0

    def simulated(self, one: PlacementPlan) -> PlacementPlan:
        """Return a plan with its simulated step."""
        return self._simulated.setdefault(one.split.key, replace(one, simulated=True))

    def improved(self, best: PlacementPlan) -> PlacementPlan:
        """Return the plan, or a better one that trains at the same site: until no split beside the best is better."""
        tried = {best.split.key}
        while True:
            better = best
            waiting = 1 + WAITING * (best.chosen.seconds / best.least_seconds(best.schedule) - 1)
            for split in self._beside(best):
                if self._climbs >= CLIMBS:
                    return better
                if split.key in tried:
                    continue
                tried.add(split.key)
                one = evaluate(self.allocator, split, self.objective)
                # no simulated step is shorter than one by rates
                if _better(one, better) and one.worth[0] * waiting < better.worth[0]:
                    self._climbs += split.key not in self._simulated
                    one = self.simulated(one)
                    better = one if _better(one, better) and allowed(one) else better
            if better is best:
                return best
            best = better

    def cheaper(self, plan: PlacementPlan, limit: float) -> PlacementPlan:
        """Return the cheapest plan found that trains at the same site and whose step is no longer than a limit.

        First splits that are the cheapest by rates, with any trainer of the site; from the best so far, each pool is
        left out, replaced by replicas of another offer or gets fewer GPUs, and the trainer as few as its own work
        allows, on any offer.

        Args:
            plan: a simulated plan.
            limit: seconds of the longest step; a longer `plan` is returned as it is.
        """
        if plan.chosen.seconds > limit:
            return plan
        site = plan.site
        known = [one for one in self._simulated.values() if one.site == site and one.chosen.seconds <= limit]
        best = min([plan, *filter(allowed, known)], key=price)

        def accepted(split: Split) -> bool:
            nonlocal best
            known = split.key in self._simulated  # and among those that `best` was chosen from, or refused here
            if self._trials >= TRIALS or known or split.rent(self.offers) > best.split.rent(self.offers):
                return False
            one = evaluate(self.allocator, split, self.objective)
            if one.chosen.seconds > limit:  # no simulated step is shorter than one by rates
                return False
            self._trials += 1
            one = self.simulated(one)
            if one.chosen.seconds > limit or price(one) >= price(best) or not allowed(one):
                return False
            best = one
            return True

        trainers = self._trainers(site)
        by_rates = [split for trainer in trainers for split in self._by_rates(trainer, limit)]
        any(accepted(split) for split in sorted(by_rates, key=lambda one: one.rent(self.offers)))
        before = None
        while before is not best:
            before = best
            for trainer in trainers:
                time = self.allocator.smallest(trainer, limit)
                if time is not None:
                    any(accepted(split) for split in self._trained_by(best.split, trainer, time))
            for pool in sorted(best.split.generation, key=lambda one: -one.gpus * self.offers[one.offer].usd_per_hour):
                any(accepted(split) for split in self._with_less_of(pool, best.split, limit))
        return best

    def _by_rates(self, trainer: int, limit: float) -> Iterator[Split]:
        """Yield the cheapest splits whose stages end some time before a limit; the trainer of some ends just at it."""
        for pace in PACES:
            ends = self.allocator.smallest(trainer, pace * limit), self.allocator.smallest(trainer, limit)
            for time in {one.gpus: one for one in ends if one is not None}.values():
                covered = self.allocator.cover(trainer, time, pace * limit)
                if covered is not None:
                    yield Split(trainer, time, covered[1])

    def _trainers(self, site: str) -> list[int]:
        return [number for number in self.allocator.trainers if self.offers[number].site == site]

    def _most(self, kind_of: Replicas, split: Split) -> int:
        """Return how many such replicas their offer holds beside a split's trainer."""
        beside = split.time if kind_of.offer == split.trainer else None
        return most_replicas(self.offers[kind_of.offer], kind_of.kind.tensor_parallel, beside)

    def _beside(self, plan: PlacementPlan) -> Iterator[Split]:
        """Yield splits that differ in one pool, in one more, or in the trainer."""
        split, larger = plan.split, self._larger_trainers(plan.split)
        yield from self._with_other_replicas(split)
        for time in larger:
            yield from self._trained_by(split, split.trainer, time)
        for other in self._trained_by(split, split.trainer, larger[0]) if larger else ():
            yield from self._with_other_replicas(other)
        for place in range(len(split.generation)) if len(split.generation) > 1 else ():
            yield replace(split, generation=split.generation[:place] + split.generation[place + 1 :])
        for trainer in self._trainers(plan.site):
            if trainer != split.trainer:
                ends = self.allocator.smallest(trainer, plan.chosen.seconds), self.allocator.trainers[trainer][-1]
                for time in {one.gpus: one for one in ends if one is not None}.values():
                    yield from self._trained_by(split, trainer, time)
        for pool in self._unused(split):
            most = self._most(pool, split)
            if most:
                yield _split(split.trainer, split.time, (*split.generation, replace(pool, count=most)))

    def _with_other_replicas(self, split: Split) -> Iterator[Split]:
        """Yield splits with another degree of tensor parallelism in one of the pools, or with all GPUs of its offer."""
        for place, pool in enumerate(split.generation):
            for kind in self.allocator.kinds[pool.offer]:
                most = self._most(Replicas(pool.offer, 1, kind), split)
                for count in {min(most, pool.gpus // kind.tensor_parallel), most} - {0}:
                    pools = list(split.generation)
                    pools[place] = Replicas(pool.offer, count, kind)
                    yield replace(split, generation=tuple(pools))

    def _larger_trainers(self, split: Split) -> list[TrainerTime]:
        """Return some of the sizes of an offer's trainer that are larger than a split's, the smallest first."""
        times = [one for one in self.allocator.trainers[split.trainer] if one is not None]
        sizes = {one.gpus: one for one in times if one.gpus > split.time.gpus}
        if not sizes:
            return []
        wanted = (0.0, *(share * split.time.gpus for share in LARGER))
        found = {next((gpus for gpus in sorted(sizes) if gpus >= least), max(sizes)) for least in wanted}
        return [sizes[gpus] for gpus in sorted(found)]

    def _unused(self, split: Split) -> Iterator[Replicas]:
        """Yield one replica of each kind of the offers that do not generate, at sites to which a link leads."""
        problem, home = self.allocator.problem, self.offers[split.trainer].site
        used = {pool.offer for pool in split.generation}
        for number, kinds in self.allocator.kinds.items():
            site = self.offers[number].site
            if number not in used and (site == home or problem.route(home, site) is not None):
                yield from (Replicas(number, 1, kind) for kind in kinds)

    def _trained_by(self, split: Split, trainer: int, time: TrainerTime) -> Iterator[Split]:
        """Yield splits with another trainer: replicas that it displaces are left out, or are where the trainer was."""
        moved = Split(trainer, time, ())
        fits = [replace(pool, count=min(pool.count, self._most(pool, moved))) for pool in split.generation]
        pools = tuple(pool for pool in fits if pool.count)
        displaced = sum(pool.gpus for pool in split.generation) - sum(pool.gpus for pool in pools)
        if trainer != split.trainer:
            rest = tuple(pool for pool in pools if pool.offer != split.trainer)
            before = sum(pool.gpus for pool in pools if pool.offer == split.trainer)
            for kind in self.allocator.kinds.get(split.trainer, []):
                most = self._most(Replicas(split.trainer, 1, kind), moved)
                wanted = math.ceil((before + displaced) / kind.tensor_parallel)
                for count in {min(wanted, most), most} - {0}:
                    yield _split(trainer, time, (*rest, Replicas(split.trainer, count, kind)))
        if pools:
            yield replace(moved, generation=pools)

    def _with_less_of(self, pool: Replicas, split: Split, limit: float) -> Iterator[Split]:
        """Yield splits without a pool, with replicas of another offer in its place, or with fewer GPUs of it."""
        rest = tuple(one for one in split.generation if one is not pool)
        if rest:
            yield replace(split, generation=rest)
        share = pool.count * pool.kind.share(limit, True)
        for other in (*rest, *self._unused(split)):
            each = other.kind.share(limit, True)
            if each > 0:
                # a pool may generate nothing by the limit: it is slow, and the batch has few samples
                more = max(1, math.ceil(share / each)) + (other.count if other in rest else 0)
                if more <= self._most(other, split):
                    apart = tuple(one for one in rest if one is not other)
                    yield _split(split.trainer, split.time, (*apart, replace(other, count=more)))
        for fewer in self._smaller(pool, split):
            yield _split(split.trainer, split.time, (*rest, fewer))

    def _smaller(self, pool: Replicas, split: Split) -> list[Replicas]:
        """Return pools of the same offer with fewer GPUs, the fewest first.

        These are some sizes and not a bisection: steps are shorter where samples divide well among replicas.
        """
        found = []
        for kind in self.allocator.kinds[pool.offer]:
            most = self._most(Replicas(pool.offer, 1, kind), split)
            fewer = (pool.gpus - 1) // kind.tensor_parallel
            sizes = {int(share * pool.gpus) // kind.tensor_parallel for share in SMALLER} | {fewer}
            found += [Replicas(pool.offer, count, kind) for count in sizes if 0 < count <= min(most, fewer)]
        return sorted(found, key=lambda one: (one.gpus, one.count))


def _split(trainer: int, time: TrainerTime, pools: Sequence[Replicas]) -> Split:
    """Return a split with its pools in the order of the offers: simulated steps differ by it."""
    return Split(trainer, time, tuple(sorted(pools, key=lambda one: one.offer)))


def price(one: PlacementPlan) -> tuple[float, float]:
    """Return a plan's USD per hour, and what decides between equal ones: the seconds of its step."""
    return one.chosen.usd_per_hour, one.chosen.seconds


def _better(one: PlacementPlan, other: PlacementPlan) -> bool:
    dearer = one.split.rent(one.problem.offers) > other.split.rent(one.problem.offers)
    least = STEP if one.objective == "throughput" else NOISE
    return one.worth[0] < other.worth[0] * (1 - least) if dearer else one.worth < other.worth


def allowed(one: PlacementPlan) -> bool:
    """Return whether a plan keeps to the budget, and its samples get over the links within a step."""
    problem, seconds = one.problem, one.chosen.seconds
    crossing: dict[str, float] = {}
    steady = one.steady_s < one.makespan_s
    # replicas that are simulated wait for no link: so much comes from each, and not what its link takes
    parts = [pool.count * pool.kind.share(one.steady_s, steady) for pool in one.split.generation]
    for pool, part in zip(one.split.generation, parts, strict=True):
        site = problem.offers[pool.offer].site
        crossing[site] = crossing.get(site, 0.0) + part / sum(parts) * problem.sample_bytes
    routes = [(problem.route(one.site, site), nbytes) for site, nbytes in crossing.items() if site != one.site]
    crosses = all(route is None or nbytes <= seconds * route.bytes_per_s for route, nbytes in routes)
    return crosses and within_budget(one)


def within_budget(one: PlacementPlan) -> bool:
    """Return whether a plan costs no more than the problem's budget."""
    return one.chosen.usd_per_hour <= one.problem.budget * (1 + ROUNDING)
