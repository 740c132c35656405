"""Plans: which requests go to which instances, chosen by predicted time. Pure functions of forecasts and step curves.

A run ends when its last instance does, and among a thousand uncertain lengths some are much longer than expected. So
the candidates of `partition_candidates.py` are compared by their mean cost over scenarios, joint draws of all lengths.
The cost is what the schedule waits for (`dispatch_objective.py`): the makespan, or the end of a training that takes
groups as they become complete. The winner is the cheapest of those that are significantly cheaper (`SURE`) than what
least-loaded dispatch would do with the same requests, or that itself. Instances that serve the same stretch share what
waits, in the plan's order; siblings on one instance have their prompt prefilled once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scheduler.cost.decode import Floats, StepCurve
from scheduler.cost.expected_time import Worker, context_seconds, marginal_costs
from scheduler.cost.length_forecast import scenarios
from scheduler.dispatch.dispatch_objective import MAKESPAN, DispatchObjective
from scheduler.dispatch.partition_candidates import blocks, even, greedy, packed, together
from scheduler.dispatch.slot_filling import fill_slots

SCENARIOS = 16
"""Number of joint draws of all lengths on which plans are compared."""
SURE = 2.0
"""Standard errors of the mean difference to placement by load, over the scenarios, by which a plan must be cheaper.
The margin is needed because the plan that looks best of several looks better than it is.
"""
SAME = 1e-9
"""Relative difference of costs below which it is rounding."""
BY_LOAD = "by load"
"""Kind of the plan that leaves every request to least-loaded dispatch."""
LONGEST_BY_LOAD = "longest first by load"
"""Kind of the plan that does so as well, the longest expected request first."""


@dataclass(frozen=True)
class PromptGroups:
    """Prompts of the requests; siblings on one instance have theirs prefilled once."""

    groups: Sequence[str]
    """[n] group of each request; requests of one group share a prompt."""
    tokens: Sequence[int]
    """[n] prompt tokens of each request."""
    kept: Sequence[int] = ()
    """[n] tokens that each request has already, which it shares with none; (): none has any."""

    @property
    def begin(self) -> list[int]:
        """[n] tokens with which each request begins."""
        return [tokens + more for tokens, more in zip(self.tokens, self.kept or [0] * len(self.tokens), strict=True)]

    def tokens_once(self, requests: Sequence[int]) -> int:
        """Return the tokens that one instance prefills for the given requests."""
        prompts = sum({self.groups[request]: self.tokens[request] for request in requests}.values())
        return prompts + (sum(self.kept[request] for request in requests) if self.kept else 0)


@dataclass(frozen=True)
class Plan:
    """Work of every instance: which requests it runs, and in which order."""

    kind: str
    queues: tuple[tuple[int, ...], ...]
    """Requests of each worker, in the order in which they start."""
    stretches: tuple[tuple[int, ...], ...]
    """Workers that serve the same stretch of the requests: what waits for one of them may run on any. The first stretch
    has the longest requests.
    """
    ranks: tuple[int, ...]
    """[requests] place of each in the order in which waiting requests start."""
    times: Floats = field(repr=False, compare=False)
    """[scenarios] predicted seconds until all is generated."""
    costs: Floats = field(repr=False, compare=False)
    """[scenarios] predicted seconds until what the objective waits for; `times` if that is the makespan."""

    @property
    def makespan(self) -> float:
        """Predicted seconds until all is generated: mean over the scenarios."""
        return float(self.times.mean())

    @property
    def cost(self) -> float:
        """Predicted seconds until what the objective waits for: mean over the scenarios."""
        return float(self.costs.mean())

    @property
    def tail(self) -> frozenset[int]:
        """Workers that hold an isolated tail."""
        isolates = self.kind == "blocks" and len(self.stretches) > 1
        return frozenset(self.stretches[0]) if isolates else frozenset()


def plan(
    values: Floats,
    workers: Sequence[Worker],
    seed: int = 0,
    limit: float = np.inf,
    running: Sequence[Floats] | None = None,
    tails: Floats | None = None,
    prompts: PromptGroups | None = None,
    arrivals: Sequence[int] | None = None,
    objective: DispatchObjective = MAKESPAN,
    contexts: Floats | None = None,
    by_load: Sequence[Sequence[int]] | None = None,
    longest_by_load: Sequence[Sequence[int]] | None = None,
) -> Plan:
    """Return the cheapest plan, given what the workers already run.

    Args:
        values: [n, v] equally likely lengths of each request, requests sorted by mean, longest first.
        workers: at least one. Of identical ones the first gets the longest requests.
        seed: seed of the scenarios.
        limit: no request is longer than this (the run's token limit).
        running: for each worker [its running requests, v] their remaining lengths; None: all are idle. Every plan is
            timed together with them; `blocks` and `packed` ignore them.
        tails: [n, 5] result of `length_forecast.tails_of` for the requests; None: no tails.
        prompts: prompts of the requests; None: prefilling them costs nothing.
        arrivals: [n] places in the order of arrival; None: unknown.
        objective: what is made small; a streamed training needs `prompts`, whose groups it trains.
        contexts: [n + running] tokens of context with which each request begins, the running ones worker by worker;
            None: none.
        by_load: for each worker the requests that least-loaded dispatch would give it, those that start at once first;
            other plans must be cheaper than this one, whose kind is `BY_LOAD`. None: than dealing evenly.
        longest_by_load: the same if the longest expected requests came first; None: no such plan is tried, as for
            known lengths, of which the other plans make more.

    Raises:
        ValueError: there is no worker, or a streamed objective has no groups.
    """
    if not workers:
        raise ValueError("nothing can be planned: the list of instances is empty")
    if objective is not None and prompts is None:
        raise ValueError("a streamed training cannot be planned without the requests' groups")
    known = values.shape[1] == 1
    beside = [values[:0]] * len(workers) if running is None else list(running)
    everything = np.concatenate([values, *beside])
    if tails is not None:
        tails = np.concatenate([tails, np.full((len(everything) - len(values), tails.shape[1]), np.nan)])
    drawn = scenarios(everything, 1 if known else SCENARIOS, seed, limit, tails)
    ends = len(values) + np.cumsum([len(part) for part in beside])
    columns = [range(end - len(part), end) for part, end in zip(beside, ends.tolist(), strict=True)]
    timed = _Timed(drawn, workers, columns, prompts, objective, contexts)
    everyone, each = [list(range(len(workers)))], [[seat] for seat in range(len(workers))]
    slots, taken = [worker.slots for worker in workers], [len(part) for part in beside]
    dealt = even(len(values), slots, taken)
    means = values.mean(axis=1)
    orders = _orders_of_start(means, sum(slots) - sum(taken), prompts.groups if objective and prompts else None)
    plans = [
        min(timed.both("even", [[order[k] for k in queue] for queue in dealt], everyone, means, order), key=_cost)
        for order in orders
    ]
    if by_load is None:
        level = plans.pop(0)
    else:
        arrived = sorted(range(len(means)), key=arrivals.__getitem__) if arrivals is not None else None
        level = timed(BY_LOAD, by_load, everyone, arrived)
    if longest_by_load is not None and not known:
        plans.append(timed(LONGEST_BY_LOAD, longest_by_load, everyone))
    if len(values) and len(workers) > 1:
        plans.append(timed("greedy", greedy(means, workers, [part.mean(axis=1) for part in beside]), each))
        plans.extend(timed.both("blocks", *blocks(values, workers), means))
        if known and (queues := packed(values[:, 0], workers)):
            plans.append(timed("packed", queues, each))
    return min((level, *(one for one in plans if _surely_cheaper(one, level))), key=_cost)


def _orders_of_start(means: Floats, free: int, groups: Sequence[str] | None) -> list[Sequence[int]]:
    """Return the orders in which requests that are dealt out evenly may start.

    Longest first is best for the makespan where lengths are known. Where nearly any request may run to the limit, the
    last one to start determines the end, so the queue should be worked off early: shortest first. A streamed training
    (`groups` given) needs whole groups early, so there they start one after the other, those of the smallest expected
    maximum first.
    """
    longest = range(len(means))
    if len(means) <= free:
        return [longest]
    if groups is None:
        return [longest, longest[::-1]]
    largest: dict[str, float] = {}
    for request in reversed(longest):
        largest[groups[request]] = float(means[request])
    return [sorted(longest, key=lambda request: (largest[groups[request]], groups[request]))]


def _cost(one: Plan) -> float:
    return one.cost


def _surely_cheaper(one: Plan, other: Plan) -> bool:
    gain = other.costs - one.costs
    doubt = gain.std(ddof=1) / np.sqrt(len(gain)) if len(gain) > 1 else 0.0
    return bool(gain.mean() > max(SURE * doubt, SAME * other.cost))


@dataclass(frozen=True)
class _Timed:
    """Times plans on the same scenarios."""

    drawn: Floats
    """[scenarios, n + running] lengths."""
    workers: Sequence[Worker]
    running: Sequence[range]
    """Columns, by worker, of the requests that it already runs."""
    prompts: PromptGroups | None = None
    objective: DispatchObjective = MAKESPAN
    contexts: Floats | None = None
    """[n + running] tokens of context with which each begins; None: none."""

    def both(
        self,
        kind: str,
        queues: Sequence[Sequence[int]],
        stretches: Sequence[Sequence[int]],
        means: Floats,
        order: Sequence[int] | None = None,
    ) -> list[Plan]:
        """Time a plan as given and, where prefill costs time, with siblings brought together inside the stretches."""
        plans = [self(kind, queues, stretches, order)]
        if self.prompts is not None and any(worker.curve.per_prefill_token for worker in self.workers):
            gathered = together(queues, stretches, self.prompts.groups, means, plans[0].ranks)
            plans.append(self(kind, gathered, stretches, order))
        return plans

    def __call__(
        self,
        kind: str,
        queues: Sequence[Sequence[int]],
        stretches: Sequence[Sequence[int]],
        order: Sequence[int] | None = None,
    ) -> Plan:
        """Time a plan whose requests start in the given order (None: longest first)."""
        ranks = list(range(sum(map(len, queues))))
        for rank, request in enumerate(order or ()):
            ranks[request] = rank
        latest = np.zeros(len(self.drawn))
        ends = np.zeros_like(self.drawn)
        context = np.zeros(self.drawn.shape[1]) if self.contexts is None else self.contexts
        for seats in stretches:
            at_once: list[list[int]] = []
            waiting: list[int] = []
            for seat in seats:
                free = self.workers[seat].slots - len(self.running[seat])
                at_once.append([*self.running[seat], *queues[seat][: max(free, 0)]])
                waiting += queues[seat][max(free, 0) :]
            workers = [self.workers[seat] for seat in seats]
            waiting.sort(key=ranks.__getitem__)
            later = np.asarray(waiting, dtype=np.int64)
            steps, begun = self._steps(workers, at_once, waiting)
            beside = self.drawn[:, waiting]
            shared: dict[StepCurve, Floats] = {}  # identical workers read the same
            for place, (seat, worker, taken, ran) in enumerate(zip(seats, workers, at_once, steps, strict=True)):
                reading = np.zeros(len(self.drawn))
                if worker.curve.per_context_token:
                    reading += context_seconds(worker.curve, self.drawn[:, taken], context[taken]).sum(axis=1)
                    if worker.curve not in shared:
                        shared[worker.curve] = context_seconds(worker.curve, beside, context[waiting]).sum(axis=1)
                    reading += shared[worker.curve] / len(seats)
                if self.prompts is not None and worker.curve.per_prefill_token:
                    reading += worker.curve.per_prefill_token * self.prompts.tokens_once(queues[seat])
                times = -np.sort(-ran, axis=1) @ marginal_costs(worker, len(taken)) + reading
                latest = np.maximum(latest, times)
                if self.objective is not None and taken:
                    slower = times / np.maximum(times - reading, 1e-12)
                    clock = _Clock.of(ran, worker.curve, slower)
                    ends[:, taken] = clock.seconds(self.drawn[:, taken])
                    if waiting:
                        drawn, here = np.nonzero(begun[0] == place)
                        ends[drawn, later[here]] = clock.seconds_in(drawn, begun[1][drawn, here])
        queued, spread = tuple(map(tuple, queues)), tuple(map(tuple, stretches))
        return Plan(kind, queued, spread, tuple(ranks), latest, self._costs(ends, latest))

    def _costs(self, ends: Floats, latest: Floats) -> Floats:
        """Return [scenarios] the objective, from the ends of all requests (those that ran before are not trained)."""
        if self.objective is None or self.prompts is None:
            return latest
        count = len(self.prompts.groups)
        tokens = self.drawn[:, :count] + np.asarray(self.prompts.begin, dtype=np.float64)
        return np.maximum(latest, self.objective.seconds(ends[:, :count], self.prompts.groups, tokens))

    def _steps(
        self, workers: Sequence[Worker], at_once: list[list[int]], waiting: list[int]
    ) -> tuple[list[Floats], tuple[npt.NDArray[np.int64], Floats]]:
        """Return, for each worker, [scenarios, slots] decode steps for which each of its slots is occupied.

        A slot that becomes free takes the next waiting request. When it becomes free is computed with the step times of
        full batches. Also returned, for a streamed objective, are [scenarios, waiting] the worker of each waiting
        request and its decode steps until that request ends.
        """
        shape = (len(self.drawn), len(waiting))
        on, until = np.zeros(shape, dtype=np.int64), np.zeros(shape)
        if not waiting:
            return [self.drawn[:, taken] for taken in at_once], (on, until)
        taken_for = np.concatenate([self.drawn[:, taken] for taken in at_once], axis=1)  # [scenarios, slots]
        full = [float(w.curve.base(len(taken))) for w, taken in zip(workers, at_once, strict=True)]
        pace = np.repeat(full, [len(taken) for taken in at_once])
        worker_of = np.repeat(np.arange(len(workers)), [len(taken) for taken in at_once])
        ends = np.ascontiguousarray(taken_for * pace)  # column indexing leaves another memory order
        slots, ended = fill_slots(ends, pace, self.drawn[:, waiting])
        if self.objective is not None:
            on, until = worker_of[slots], ended / pace[slots]
        taken_for = ends / pace
        return np.split(taken_for, np.cumsum([len(taken) for taken in at_once])[:-1], axis=1), (on, until)


@dataclass(frozen=True)
class _Clock:
    """Seconds at which one worker has done a number of decode steps, by scenario."""

    steps: Floats
    """[scenarios, 1 + slots] 0, and the steps after which each slot is empty, ascending."""
    at: Floats
    """[scenarios, 1 + slots] seconds until then."""

    @classmethod
    def of(cls, occupied: Floats, curve: StepCurve, slower: Floats) -> _Clock:
        """Compute the clock of a worker.

        Args:
            occupied: [scenarios, slots] steps for which each of its slots is occupied.
            curve: its step times.
            slower: [scenarios] factor for what steps do not include: reading contexts and prompts.
        """
        count, slots = occupied.shape
        steps, at = np.zeros((2, count, 1 + slots))
        steps[:, 1:] = np.sort(occupied, axis=1)
        each = np.diff(steps, axis=1) * curve.base(np.arange(slots, 0, -1))
        at[:, 1:] = each.cumsum(axis=1) * slower[:, None]
        return cls(steps, at)

    def seconds(self, steps: Floats) -> Floats:
        """Return [scenarios, n] seconds until so many steps."""
        drawn = np.repeat(np.arange(len(steps)), steps.shape[1])
        return self.seconds_in(drawn, steps.ravel()).reshape(steps.shape)

    def seconds_in(self, drawn: npt.NDArray[np.int64], steps: Floats) -> Floats:
        """Return [n] seconds until so many steps, each in the scenario beside it."""
        # one interpolation for all scenarios: each has a stretch of the axis to itself
        width = self.steps.max() + 1.0
        shift = np.arange(len(self.steps))[:, None] * width
        within = np.minimum(steps, self.steps[drawn, -1]) + drawn * width
        return np.interp(within, (self.steps + shift).ravel(), self.at.ravel())
