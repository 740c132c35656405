"""Search for the best split: the allocator's candidates are timed, under `async` simulated, and refined. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from scheduler.capacity.allocation import Allocator, Offer, PlanObjective, Problem, Split, most_replicas
from scheduler.capacity.covering import Replicas
from scheduler.capacity.placement_plan import PlacementPlan, evaluate
from scheduler.cost.training_cost import TrainerTime
from scheduler.schedule.schedules import KINDS

ALTERNATIVES = 3
"""Number of plans that are shown beside the best."""
SIMULATED = 3
"""Best plans by rates alone whose steps are simulated under `async`, besides the best of each further assignment of GPU
types to roles that may be shown."""
NOISE = 0.01
"""Share by which a simulated split must be better for GPUs that cost more: some of a difference is chance."""
TRIALS = 32
"""Most cheaper splits that are simulated in the place of a fast one: a plan should take seconds."""
SMALLER = (1 / 4, 1 / 2, 3 / 4, 7 / 8)
"""Shares of a pool's GPUs that are tried, besides one replica fewer."""
PACES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7)
"""Shares of a step's time by which the stages of cheaper splits end, by rates alone; the rest is for waiting."""
MOVE = 0.01
"""Share by which a plan that moves the trainer to another site must be better: moving it has a price of its own."""
ROUNDING = 1e-9
"""Share by which a price may be above the budget."""
ALIKE = 0.02
"""Share by which plans with the same GPU types in the same roles must differ to be shown separately."""


def plans_within(
    problem: Problem, schedule: str, objective: PlanObjective, waiting: bool = False
) -> list[PlacementPlan]:
    """Return plans of which one is the best; [] if none keeps to the budget.

    Args:
        problem: what to plan for.
        schedule: determines which stages overlap.
        objective: what is to be small.
        waiting: whether groups may be waited for, so that rates alone give generation too little.
    """
    allocator = Allocator(problem, schedule)

    def found(one: Problem, aim: PlanObjective = objective) -> list[PlacementPlan]:
        splits = {split.key: split for split in Allocator(one, schedule).candidates(aim)}
        if waiting:
            splits |= {split.key: split for split in Allocator(one, "one_step_off").candidates("throughput")}
        return [evaluate(allocator, split, objective) for split in splits.values()]

    def kept(some: list[PlacementPlan]) -> list[PlacementPlan]:
        return [one for one in some if _within_budget(one)]

    made = found(problem)
    within = kept(made)
    if len(within) < len(made):
        # the search counts traffic at the pace that it asks for; a plan has its own, which may be a faster one
        within += kept(found(_without_paid_routes(problem)))
    if not within and math.isfinite(problem.budget):
        within = kept(found(replace(problem, budget=math.inf), "cost"))
    return list({one.split.key: one for one in within}.values())


def _without_paid_routes(problem: Problem) -> Problem:
    free = tuple((ends, route) for ends, route in problem.routes if not route.usd_per_gb)
    return replace(problem, routes=free)


def _cheapest(problem: Problem, schedule: str) -> tuple[float, float] | None:
    """Return the USD per hour of the cheapest plan beyond a budget, and of its traffic; None: no budget, or no plan."""
    if math.isinf(problem.budget):
        return None
    unlimited = replace(problem, budget=math.inf)  # one within the budget would have been found
    each = (unlimited, _without_paid_routes(unlimited))
    made = [(one.chosen.usd_per_hour, one) for some in each for one in plans_within(some, schedule, "cost")]
    if not made:
        return None
    price, plan = min(made, key=lambda one: one[0])
    return price, price - plan.split.rent(problem.offers)


def plans(problem: Problem, schedule: str, objective: PlanObjective, simulated: bool = True) -> list[PlacementPlan]:
    """Return the best plan, and the next-best ones that differ.

    The best plan that trains at `problem.home` comes first unless another site's is better by more than `MOVE`.

    Args:
        problem: what to plan for.
        schedule: determines which stages overlap.
        objective: `throughput`: the shortest step, of equal ones (simulated: within `NOISE`) the cheapest; `cost`: the
            fewest USD per sample.
        simulated: whether `async` is simulated (a second or so); without, a study of many plans goes by rates alone.

    Raises:
        ValueError: no plan fits into memory, counts, links or budget; the message says what is missing.
    """
    from scheduler.capacity.misfit import explain

    made = plans_within(problem, schedule, objective, KINDS[schedule].continuous and simulated)
    if not made:
        raise ValueError(explain(problem, schedule, _cheapest(problem, schedule)))

    if simulated:
        if KINDS[schedule].continuous:
            made = _worth_simulating(made, schedule, objective)
        made = [replace(one, simulated=True) for one in made]
    made.sort(key=lambda one: one.worth)
    if simulated and KINDS[schedule].continuous:
        allocator, here = Allocator(problem, schedule), _first_at(problem.home, made)
        begin = [one for one in made if one is made[0] or one is here]
        made = [_improved(one, allocator) if one in begin else one for one in made]
        made.sort(key=lambda one: one.worth)
        if objective == "throughput":
            made = _cheapest_first(made, allocator)
    here = _first_at(problem.home, made)
    if here is not None and here.worth[0] <= min(one.worth[0] for one in made) * (1 + MOVE):
        made.remove(here)
        made.insert(0, here)
    return _shown(made)


def _shown(made: Sequence[PlacementPlan]) -> list[PlacementPlan]:
    """Return the first plan and the next ones that differ from it and each other and have something to offer."""
    shown = list(made[:1])
    for one in made[1:]:
        if len(shown) > ALTERNATIVES:
            break
        differs = (_roles(one) != _roles(other) or one.worth[0] > other.worth[0] * (1 + ALIKE) for other in shown)
        if all(differs) and not any(_beaten(one, other) for other in shown):
            shown.append(one)
    return shown


def _beaten(one: PlacementPlan, other: PlacementPlan) -> bool:
    """Return whether a plan is slower or dearer than another and not the other way round; `NOISE` counts as equal."""
    slower = one.chosen.seconds / other.chosen.seconds
    dearer = one.chosen.usd_per_hour / other.chosen.usd_per_hour
    return min(slower, dearer) >= 1 - NOISE and max(slower, dearer) > 1 + NOISE


def _first_at(site: str, made: Sequence[PlacementPlan]) -> PlacementPlan | None:
    """Return the first plan that trains at a site; None: there is none."""
    return next((one for one in made if one.problem.offers[one.split.trainer].site == site), None)


def _improved(best: PlacementPlan, allocator: Allocator) -> PlacementPlan:
    """Return the plan, or a better one found from it: the search for splits knows rates, and not who waits for whom.

    From the best plan so far, each of its pools is tried with replicas of other sizes, until none of these is better.
    """
    tried = {best.split.key}
    while True:
        better = best
        for split in _beside(best, allocator):
            if split.key in tried:
                continue
            tried.add(split.key)
            one = evaluate(allocator, split, best.objective)
            if _better(one, better):  # no simulated step is shorter than one by rates
                one = replace(one, simulated=True)
                better = one if _better(one, better) and _allowed(one) else better
        if better is best:
            return best
        best = better


def _better(one: PlacementPlan, other: PlacementPlan) -> bool:
    dearer = one.split.rent(one.problem.offers) > other.split.rent(one.problem.offers)
    return one.worth[0] < other.worth[0] * (1 - NOISE) if dearer else one.worth < other.worth


def _cheapest_first(made: Sequence[PlacementPlan], allocator: Allocator) -> list[PlacementPlan]:
    """Return plans with those first that are as fast as the fastest, by price; the fastest and home's made cheaper."""
    limit = made[0].chosen.seconds * (1 + NOISE)
    begin = made[0], _first_at(allocator.problem.home, made)
    found = [_cheaper(one, allocator, limit) if one in begin else one for one in made]
    fast = [one for one in found if one.chosen.seconds <= limit]
    fast.sort(key=lambda one: (one.chosen.usd_per_hour, one.chosen.seconds))
    return fast + [one for one in found if one.chosen.seconds > limit]


def _cheaper(plan: PlacementPlan, allocator: Allocator, limit: float) -> PlacementPlan:
    """Return the cheapest plan found with the same site's trainer whose step is no longer than a limit, in seconds.

    First splits that are the cheapest by rates; from the best so far, each pool is left out or gets fewer GPUs, and the
    trainer as few as its own work allows.
    """
    if plan.chosen.seconds > limit:
        return plan
    offers, best, tried = plan.problem.offers, plan, 0

    def accepted(split: Split) -> bool:
        nonlocal best, tried
        if tried >= TRIALS or split.rent(offers) >= best.split.rent(offers):
            return False
        one = evaluate(allocator, split, plan.objective)
        if one.chosen.seconds > limit:  # no simulated step is shorter than one by rates
            return False
        tried += 1
        one = replace(one, simulated=True)
        if one.chosen.seconds > limit or one.chosen.usd_per_hour >= best.chosen.usd_per_hour or not _allowed(one):
            return False
        best = one
        return True

    for pace in PACES:
        found = allocator.split(plan.split.trainer, pace * limit)
        if found is not None and accepted(found[1]):
            break
    before = None
    while before is not best:
        before = best
        time = allocator.smallest(best.split.trainer, limit)
        if time is not None and _fits_beside(time, best.split, offers):
            accepted(replace(best.split, time=time))
        for pool in sorted(best.split.generation, key=lambda one: -one.gpus * offers[one.offer].usd_per_hour):
            split = best.split
            rest = tuple(one for one in split.generation if one is not pool)
            fewer = [(*rest, one) for one in _smaller(pool, split, allocator)]
            any(accepted(replace(split, generation=pools)) for pools in ([rest] if rest else []) + fewer)
    return best


def _fits_beside(time: TrainerTime, split: Split, offers: Sequence[Offer]) -> bool:
    """Return whether a split's replicas on the trainer's offer have room beside another trainer there."""
    same = [pool for pool in split.generation if pool.offer == split.trainer]
    return all(pool.count <= most_replicas(offers[pool.offer], pool.kind.tensor_parallel, time) for pool in same)


def _smaller(pool: Replicas, split: Split, allocator: Allocator) -> list[Replicas]:
    """Return pools of the same offer with fewer GPUs, the fewest first.

    These are some sizes and not a bisection: steps are shorter where samples divide well among replicas.
    """
    trainer = split.time if pool.offer == split.trainer else None
    found = []
    for kind in allocator.kinds[pool.offer]:
        most = most_replicas(allocator.problem.offers[pool.offer], kind.tensor_parallel, trainer)
        fewer = (pool.gpus - 1) // kind.tensor_parallel
        sizes = {int(share * pool.gpus) // kind.tensor_parallel for share in SMALLER} | {fewer}
        found += [Replicas(pool.offer, count, kind) for count in sizes if 0 < count <= min(most, fewer)]
    return sorted(found, key=lambda one: (one.gpus, one.count))


def _beside(plan: PlacementPlan, allocator: Allocator) -> Iterator[Split]:
    """Yield splits with another degree of tensor parallelism in one of the pools, or with all GPUs of its offer."""
    split = plan.split
    for place, pool in enumerate(split.generation):
        trainer = split.time if pool.offer == split.trainer else None
        for kind in allocator.kinds[pool.offer]:
            most = most_replicas(plan.problem.offers[pool.offer], kind.tensor_parallel, trainer)
            for count in {min(most, pool.gpus // kind.tensor_parallel), most} - {0}:
                changed = Replicas(pool.offer, count, kind)
                pools = (*split.generation[:place], changed, *split.generation[place + 1 :])
                yield Split(split.trainer, split.time, pools)


def _allowed(one: PlacementPlan) -> bool:
    """Return whether a plan keeps to the budget, and its samples get over the links within a step."""
    problem, home, seconds = one.problem, one.problem.offers[one.split.trainer].site, one.chosen.seconds
    crossing: dict[str, float] = {}
    for pool, share in zip(one.split.generation, one.shares, strict=True):
        site = problem.offers[pool.offer].site
        crossing[site] = crossing.get(site, 0.0) + share * problem.sample_bytes
    routes = [(problem.route(home, site), nbytes) for site, nbytes in crossing.items() if site != home]
    crosses = all(route is None or nbytes <= seconds * route.bytes_per_s for route, nbytes in routes)
    return crosses and _within_budget(one)


def _within_budget(one: PlacementPlan) -> bool:
    return one.chosen.usd_per_hour <= one.problem.budget * (1 + ROUNDING)


def _worth_simulating(made: Sequence[PlacementPlan], schedule: str, objective: PlanObjective) -> list[PlacementPlan]:
    """Return the best plans by the stages' times alone, and the best of some further assignments of roles."""

    def rough(one: PlacementPlan) -> float:
        seconds = one.least_seconds(schedule)
        return seconds if objective == "throughput" else seconds * one.split.rent(one.problem.offers)

    ranked = sorted(made, key=rough)
    by_waiting = sorted(made, key=lambda one: one.least_seconds("one_step_off"))
    kept = [*ranked[:SIMULATED], *by_waiting[:1]]
    for one in ranked[SIMULATED:]:
        if len({_roles(other) for other in kept}) > ALTERNATIVES:
            break
        if all(_roles(one) != _roles(other) for other in kept):
            kept.append(one)
    return list({one.split.key: one for one in kept}.values())


def _roles(one: PlacementPlan) -> tuple[int, frozenset[int]]:
    return one.split.trainer, frozenset(pool.offer for pool in one.split.generation)
