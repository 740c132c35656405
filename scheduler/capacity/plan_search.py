"""Search for the best split: the allocator's candidates are timed, under `async` simulated, and refined. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from scheduler.capacity.allocation import ROWS_GAIN, Allocator, PlanObjective, Split, most_replicas, trainers_of
from scheduler.capacity.covering import LONGEST_STEP_S, Replicas
from scheduler.capacity.placement_plan import PlacementPlan, evaluate
from scheduler.capacity.plan_refinement import NOISE, Refinement, price, within_budget
from scheduler.capacity.problem import Problem
from scheduler.cost.training_cost import TrainerTime
from scheduler.schedule.schedules import KINDS

ALTERNATIVES = 3
"""Number of plans that are shown beside the best."""
SIMULATED = 3
"""Best plans by rates alone whose steps are simulated under `async`, besides the best of each further site that trains
and of each further assignment of GPU types to roles that may be shown."""
MOVE = 0.01
"""Share by which a plan that moves the trainer to another site must be better: moving it has a price of its own."""
FAR = 0.1
"""Share by which a site's best plan may be worse than the best of all and still be refined: a plan takes seconds."""
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
        made = [evaluate(allocator, split, objective) for split in splits.values()]
        if one.site_processes is not None and one.batch.environment_s:
            further = {more.key: more for split in splits.values() for more in _at_more_sites(allocator, split)}
            made += [evaluate(allocator, more, objective) for key, more in further.items() if key not in splits]
        return made

    def kept(some: list[PlacementPlan]) -> list[PlacementPlan]:
        return [one for one in some if within_budget(one)]

    made = found(problem)
    within = kept(made)
    if len(within) < len(made):
        # the search counts traffic at the pace that it asks for; a plan has its own, which may be a faster one
        within += kept(found(_without_paid_routes(problem)))
    if not within and math.isfinite(problem.budget):
        within = kept(found(replace(problem, budget=math.inf), "cost"))
        within += kept(_leanest(problem, schedule, objective, waiting))
    return list({one.split.key: one for one in within}.values())


def _at_more_sites(allocator: Allocator, split: Split) -> Iterator[Split]:
    """Yield splits with a replica at one, two and more further sites, for their environments; the cheapest first."""
    problem = allocator.problem
    generate = {problem.offers[pool.offer].site for pool in split.generation}
    further: dict[str, tuple[float, Replicas]] = {}
    for number in allocator.kinds:
        offer = problem.offers[number]
        if offer.site in generate:
            continue
        for replica in _single_replicas(allocator, number, split.trainer, split.time):
            usd = offer.rent(replica.gpus)
            if usd < further.get(offer.site, (math.inf,))[0]:
                further[offer.site] = usd, replica
    for _, replica in sorted(further.values(), key=lambda one: one[0]):
        split = replace(split, generation=tuple(sorted((*split.generation, replica), key=lambda one: one.offer)))
        yield split


def _without_paid_routes(problem: Problem) -> Problem:
    free = tuple((ends, route) for ends, route in problem.routes if not route.usd_per_gb)
    return replace(problem, routes=free)


def _leanest(problem: Problem, schedule: str, objective: PlanObjective, waiting: bool) -> list[PlacementPlan]:
    """Return plans with the fewest GPUs, of which one costs the fewest USD per hour.

    No trainer of the offer has fewer GPUs, and one replica generates: any more is rent, and a shorter step more traffic
    per hour.

    Args:
        problem: what to plan for; its budget limits none of them.
        schedule: determines which stages overlap.
        objective: what is to be small, for those that compare the plans.
        waiting: whether steps are simulated; traffic per hour depends on them.
    """
    allocator, offers = Allocator(problem, schedule), problem.offers
    splits = []
    for trainer, times in allocator.trainers.items():
        time = min((one for one in times if one is not None), key=lambda one: one.gpus)
        for number in allocator.kinds:
            splits += [Split(trainer, time, (one,)) for one in _single_replicas(allocator, number, trainer, time)]
    found: list[PlacementPlan] = []
    least = math.inf
    for split in sorted(splits, key=lambda one: one.rent(offers)):
        if split.rent(offers) >= least:
            break
        one = evaluate(allocator, split, objective)
        if one.makespan_s >= LONGEST_STEP_S:
            continue
        one = replace(one, simulated=waiting and one.egress_usd > 0)
        least = min(least, one.chosen.usd_per_hour)
        found.append(one)
    return found


def _single_replicas(allocator: Allocator, number: int, trainer: int, time: TrainerTime) -> list[Replicas]:
    """Return one replica of each kind that an offer holds beside a trainer; [] if no link leads there."""
    problem = allocator.problem
    offer, home = problem.offers[number], problem.offers[trainer].site
    if offer.site != home and problem.route(home, offer.site) is None:
        return []
    beside = time if number == trainer else None
    kinds = (kind for kind in allocator.kinds[number] if most_replicas(offer, kind.tensor_parallel, beside))
    return [Replicas(number, 1, kind) for kind in kinds]


def _cheapest(problem: Problem, schedule: str, waiting: bool) -> tuple[float, float] | None:
    """Return the USD per hour of the cheapest plan beyond a budget, and of its traffic; None: no budget, or no plan."""
    if math.isinf(problem.budget):
        return None
    unlimited = replace(problem, budget=math.inf)  # one within the budget would have been found
    each = (unlimited, _without_paid_routes(unlimited))
    made = [one for some in each for one in plans_within(some, schedule, "cost")]
    made += _leanest(problem, schedule, "cost", waiting)
    if not made:
        return None
    usd, rent = min((one.chosen.usd_per_hour, one.split.rent(problem.offers)) for one in made)
    return usd, usd - rent


def plans(problem: Problem, schedule: str, objective: PlanObjective, simulated: bool = True) -> list[PlacementPlan]:
    """Return the best plan, and the next-best ones that differ.

    The best plan that trains at `problem.home` comes first unless another site's is better by more than `MOVE`.

    Args:
        problem: what to plan for.
        schedule: determines which stages overlap.
        objective: `throughput`: the shortest step, of equal ones (simulated: within `NOISE`) the cheapest; `cost`: the
            fewest USD per sample.
        simulated: whether `async` is simulated (seconds); without, a study of many plans goes by rates alone.

    Raises:
        ValueError: no plan fits into memory, counts, links or budget; the message says what is missing.
    """
    from scheduler.capacity.misfit import explain

    waiting = KINDS[schedule].continuous and simulated

    def ranked(one: Problem, made: list[PlacementPlan]) -> list[PlacementPlan]:
        """Return plans with their steps, the best that stays at home first."""
        if waiting:
            made = _refined(made, Refinement(Allocator(one, schedule), objective))
        else:
            made = sorted((replace(plan, simulated=simulated) for plan in made), key=lambda plan: plan.worth)
        here = _first_at(one.home, made)
        if here is not None and here.worth[0] <= min(plan.worth[0] for plan in made) * (1 + MOVE):
            made.remove(here)
            made.insert(0, here)
        return made

    made = plans_within(problem, schedule, objective, waiting)
    found = ranked(problem, made) if made else []
    sharing = replace(problem, shares_rows=True)
    if trainers_of(sharing) != trainers_of(problem):
        others = plans_within(sharing, schedule, objective, waiting)
        # by rates first: they take no time, and simulated steps are seldom apart where rates are not
        if others and (not made or _clearly_better(min(others, key=_worth), min(made, key=_worth))):
            others = ranked(sharing, others)
            if not found or _clearly_better(others[0], found[0]):
                found = others
    if not found:
        raise ValueError(explain(sharing, schedule, _cheapest(sharing, schedule, waiting)))
    return _shown(found)


def _worth(one: PlacementPlan) -> tuple[float, float]:
    return one.worth


def _clearly_better(one: PlacementPlan, other: PlacementPlan) -> bool:
    """Return whether a plan whose GPUs share rows is worth it."""
    return one.worth[0] < other.worth[0] * (1 - ROWS_GAIN)


def _refined(made: Sequence[PlacementPlan], search: Refinement) -> list[PlacementPlan]:
    """Return simulated plans, the best first; for throughput, of those that are as fast as the fastest, the cheapest.

    The best plan of each site is refined before they are compared: rates do not say which is ahead.
    """
    least = {site: min(one.worth[0] for one in made if one.site == site) for site in {one.site for one in made}}
    kept = [search.simulated(one) for one in _worth_simulating(made, search.allocator.schedule, search.objective)]
    kept.sort(key=lambda one: one.worth)
    for site in dict.fromkeys(one.site for one in kept):
        first = next(place for place, one in enumerate(kept) if one.site == site)
        best = kept[0].worth[0]
        # no simulated step is shorter than one by rates
        if least[site] <= best * (1 + MOVE) and kept[first].worth[0] <= best * (1 + FAR):
            kept[first] = search.improved(kept[first])
            kept.sort(key=lambda one: one.worth)
    if search.objective == "cost":
        return kept
    while True:
        shortest = kept[0].chosen.seconds
        found = _cheapest_first(kept, search, shortest * (1 + NOISE))
        again = search.improved(found[0])  # a cheaper split has others beside it
        if again.chosen.seconds >= shortest * (1 - NOISE):
            return found
        kept = sorted([again, *found[1:]], key=lambda one: one.worth)


def _cheapest_first(kept: Sequence[PlacementPlan], search: Refinement, limit: float) -> list[PlacementPlan]:
    """Return plans with those first whose steps take at most `limit` seconds, by price; each site's is made cheaper."""
    found = list(kept)
    for site in dict.fromkeys(one.site for one in kept):
        first = next(place for place, one in enumerate(kept) if one.site == site)
        found[first] = search.cheaper(kept[first], limit)
    fast = sorted((one for one in found if one.chosen.seconds <= limit), key=price)
    return fast + sorted((one for one in found if one.chosen.seconds > limit), key=lambda one: one.worth)


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
    return next((one for one in made if one.site == site), None)


def _worth_simulating(made: Sequence[PlacementPlan], schedule: str, objective: PlanObjective) -> list[PlacementPlan]:
    """Return the best plans by the stages' times alone, and the best of some further assignments of roles."""

    def rough(one: PlacementPlan) -> float:
        seconds = one.least_seconds(schedule)
        return seconds if objective == "throughput" else seconds * one.split.rent(one.problem.offers)

    ranked = sorted(made, key=rough)
    by_waiting = sorted(made, key=lambda one: one.least_seconds("one_step_off"))
    kept = [*ranked[:SIMULATED], *by_waiting[:1]]
    for site in dict.fromkeys(one.site for one in ranked):
        kept += [first for some in (ranked, by_waiting) if (first := _first_at(site, some)) is not None]
    for one in ranked[SIMULATED:]:
        if len({_roles(other) for other in kept}) > ALTERNATIVES:
            break
        if all(_roles(one) != _roles(other) for other in kept):
            kept.append(one)
    return list({one.split.key: one for one in kept}.values())


def _roles(one: PlacementPlan) -> tuple[int, frozenset[int]]:
    return one.split.trainer, frozenset(pool.offer for pool in one.split.generation)
