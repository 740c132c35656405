"""Plans: which requests go to which instances, chosen by predicted time. Pure functions of forecasts and step curves.

A run ends when its last instance does, and among a thousand uncertain lengths some are much longer than expected. So
the candidates of `partition_candidates.py` are compared by their mean makespan over scenarios, joint draws of all
lengths. The winner is the cheapest of those that are significantly cheaper than even dealing (`SURE`), or even dealing
itself. Instances that serve the same stretch share what waits, in the plan's order; siblings on one instance have
their prompt prefilled once.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scheduler.cost.decode import Floats
from scheduler.cost.expected_time import Worker, context_seconds, marginal_costs
from scheduler.cost.length_forecast import scenarios
from scheduler.dispatch.partition_candidates import blocks, even, greedy, packed, together, type_orders

SCENARIOS = 16
"""Number of joint draws of all lengths on which plans are compared."""
SURE = 1.0
"""Standard errors of the mean difference to even dealing, over the scenarios, by which a plan must be cheaper. The
margin is needed because the plan that looks best of several looks better than it is.
"""


@dataclass(frozen=True)
class PromptGroups:
    """Prompts of the requests; siblings on one instance have theirs prefilled once."""

    groups: Sequence[str]
    """[n] group of each request; requests of one group share a prompt."""
    tokens: Sequence[int]
    """[n] prompt tokens of each request."""

    def tokens_once(self, requests: Sequence[int]) -> int:
        """Return the tokens that one instance prefills for the given requests."""
        return sum({self.groups[request]: self.tokens[request] for request in requests}.values())


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
    """[scenarios] predicted seconds until all is done."""

    @property
    def makespan(self) -> float:
        """Predicted seconds until all is done: mean over the scenarios."""
        return float(self.times.mean())

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

    Raises:
        ValueError: there is no worker.
    """
    if not workers:
        raise ValueError("nothing can be planned: the list of instances is empty")
    known = values.shape[1] == 1
    beside = [values[:0]] * len(workers) if running is None else list(running)
    everything = np.concatenate([values, *beside])
    if tails is not None:
        tails = np.concatenate([tails, np.full((len(everything) - len(values), tails.shape[1]), np.nan)])
    drawn = scenarios(everything, 1 if known else SCENARIOS, seed, limit, tails)
    ends = len(values) + np.cumsum([len(part) for part in beside])
    columns = [range(end - len(part), end) for part, end in zip(beside, ends.tolist(), strict=True)]
    timed = _Timed(drawn, workers, columns, prompts)
    everyone, each = [list(range(len(workers)))], [[seat] for seat in range(len(workers))]
    slots, taken = [worker.slots for worker in workers], [len(part) for part in beside]
    dealt = even(len(values), slots, taken)
    means = values.mean(axis=1)
    level, *plans = [
        min(timed.both("even", [[order[k] for k in queue] for queue in dealt], everyone, means, order), key=_makespan)
        for order in _orders_of_start(len(values), sum(slots) - sum(taken), arrivals)
    ]
    if len(values) and len(workers) > 1:
        plans.append(timed("greedy", greedy(means, workers, [part.mean(axis=1) for part in beside]), each))
        for queues, stretches in blocks(values, workers):
            plans.extend(timed.both("blocks", queues, stretches, means))
        if known:
            plans.extend(timed("packed", queues, each) for queues in packed(values[:, 0], workers))
    return min((level, *(one for one in plans if _surely_cheaper(one, level))), key=_makespan)


def _orders_of_start(count: int, free: int, arrivals: Sequence[int] | None) -> list[Sequence[int]]:
    """Return the orders in which requests may start: longest first, by arrival, shortest first.

    Longest first is best where lengths are known. Where nearly any request may run to the limit, the last one to start
    determines the end, so the queue should be worked off early: shortest first. Arrival order is in between, and is
    what least-loaded dispatch uses.
    """
    longest = range(count)
    if count <= free:
        return [longest]
    arrived = [] if arrivals is None else [sorted(longest, key=arrivals.__getitem__)]
    return [longest, *arrived, longest[::-1]]


def _makespan(one: Plan) -> float:
    return one.makespan


def _surely_cheaper(one: Plan, other: Plan) -> bool:
    gain = other.times - one.times
    doubt = gain.std(ddof=1) / np.sqrt(len(gain)) if len(gain) > 1 else 0.0
    return bool(gain.mean() > SURE * doubt)


@dataclass(frozen=True)
class _Timed:
    """Times plans on the same scenarios."""

    drawn: Floats
    """[scenarios, n + running] lengths."""
    workers: Sequence[Worker]
    running: Sequence[range]
    """Columns, by worker, of the requests that it already runs."""
    prompts: PromptGroups | None = None

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
        for seats in stretches:
            at_once: list[list[int]] = []
            waiting: list[int] = []
            for seat in seats:
                free = self.workers[seat].slots - len(self.running[seat])
                at_once.append([*self.running[seat], *queues[seat][: max(free, 0)]])
                waiting += queues[seat][max(free, 0) :]
            workers = [self.workers[seat] for seat in seats]
            steps = self._steps(workers, at_once, sorted(waiting, key=ranks.__getitem__))
            beside = self.drawn[:, waiting]
            for seat, worker, taken, ran in zip(seats, workers, at_once, steps, strict=True):
                reading = np.zeros(len(self.drawn))
                if worker.curve.per_context_token:
                    reading += context_seconds(worker.curve, self.drawn[:, taken]).sum(axis=1)
                    reading += context_seconds(worker.curve, beside).sum(axis=1) / len(seats)
                if self.prompts is not None and worker.curve.per_prefill_token:
                    reading += worker.curve.per_prefill_token * self.prompts.tokens_once(queues[seat])
                times = -np.sort(-ran, axis=1) @ marginal_costs(worker, len(taken)) + reading
                latest = np.maximum(latest, times)
        return Plan(kind, tuple(map(tuple, queues)), tuple(map(tuple, stretches)), tuple(ranks), latest)

    def _steps(self, workers: Sequence[Worker], at_once: list[list[int]], waiting: list[int]) -> list[Floats]:
        """Return, for each worker, [scenarios, slots] decode steps for which each of its slots is occupied.

        A slot that becomes free takes the next waiting request. When it becomes free is computed with the step times of
        full batches.
        """
        if not waiting:
            return [self.drawn[:, taken] for taken in at_once]
        taken_for = np.concatenate([self.drawn[:, taken] for taken in at_once], axis=1)  # [scenarios, slots]
        full = [float(w.curve.base(len(taken))) for w, taken in zip(workers, at_once, strict=True)]
        pace = np.repeat(full, [len(taken) for taken in at_once])
        ends = np.ascontiguousarray(taken_for * pace)  # column indexing leaves another memory order
        if len(ends) == 1:
            _refill(taken_for[0], ends[0], pace, self.drawn[0, waiting])
            waiting = []
        flat, rows = ends.reshape(-1), np.arange(len(ends)) * ends.shape[1]
        for lengths in np.ascontiguousarray(self.drawn[:, waiting].T):
            slots = ends.argmin(axis=1)
            flat[rows + slots] += lengths * pace[slots]
        if waiting:
            taken_for = ends / pace
        return np.split(taken_for, np.cumsum([len(taken) for taken in at_once])[:-1], axis=1)


def _refill(taken_for: Floats, ends: Floats, pace: Floats, lengths: Floats) -> None:
    """Compute one scenario of `_Timed._steps`, where a heap is faster than arrays; adds to `taken_for` in place.

    Args:
        taken_for: [slots] steps for which each is occupied.
        ends: [slots] seconds until it is free.
        pace: [slots] seconds per step.
        lengths: [waiting] in the order in which they start.
    """
    heap = list(zip(ends.tolist(), range(len(ends)), strict=True))
    paces, steps = pace.tolist(), taken_for.tolist()
    heapq.heapify(heap)
    for length in lengths.tolist():
        end, slot = heap[0]
        heapq.heapreplace(heap, (end + length * paces[slot], slot))
        steps[slot] += length
    taken_for[:] = steps


def best_partition(lengths: npt.ArrayLike, workers: Sequence[Worker]) -> Plan:
    """Return the best cut of known lengths into one stretch per instance, or even dealing; a slow reference.

    Dynamic programming over every cut and all orders of instance types; all requests must fit into the slots' refills.
    """
    values = np.sort(np.asarray(lengths, dtype=np.float64))[::-1]
    count = len(values)
    timed = _Timed(values[None], workers, [range(0)] * len(workers))
    each = [[seat] for seat in range(len(workers))]
    plans = [timed("even", even(count, [worker.slots for worker in workers]), each)]
    for order in type_orders(workers):
        best, choices = np.where(np.arange(count + 1) == 0, 0.0, np.inf), []
        for seat in order:
            worker = workers[seat]
            marginal = marginal_costs(worker, count)
            matrix = np.full((count + 1, count + 1), np.inf)
            for begin in range(count + 1):
                matrix[begin, begin] = best[begin]
                rest = values[begin:]
                total = np.cumsum(marginal[: len(rest)] * rest + context_seconds(worker.curve, rest))
                matrix[begin, begin + 1 :] = np.maximum(best[begin], total)
            choices.append(matrix.argmin(axis=0))
            best = matrix.min(axis=0)
        queues: list[list[int]] = [[] for _ in workers]
        end = count
        for seat, choice in zip(reversed(order), reversed(choices), strict=True):
            begin = int(choice[end])
            queues[seat], end = list(range(begin, end)), begin
        plans.append(timed("partition", queues, each))
    return min(plans, key=lambda candidate: candidate.makespan)
