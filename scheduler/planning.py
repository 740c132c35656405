"""Plans: which requests go to which instances, chosen by predicted time. Pure functions of forecasts and step curves.

Requests are sorted by expected length, longest first. A set of requests whose lengths are known costs an instance
sum_k (tau(k) - tau(k - 1)) L_k (see `cost.py`). Where lengths are uncertain each request is 16 equally likely ones, of
weight 1/16; with A(t) of n requests expected to run at time t, the number that do is about binomial, and a step costs

    g(A) = P tau(A / P),   P = 1 - (1 - A / n)^n (that any runs),

and the instance needs sum_k (g(k / 16) - g((k - 1) / 16)) v_k over all values v_1 >= v_2 >= ... What exceeds the slots
runs later, at a full batch. Reading the context adds per_context_token * L^2 / 2 for every request (prompts left out).

The run ends when its last instance does, and a thousand uncertain lengths hold surprises. So plans are compared by
their mean makespan over scenarios, joint draws of all lengths. The cheapest wins that is cheaper than even dealing
beyond doubt (`SURE`), so none is predicted worse than that:

* `even`: dealt out in turn while there are slots, then to whichever has one, longest first, as balancing loads does;
* `greedy`: the longest first, each to where the most loaded instance grows least;
* `blocks`: cut into stretches, each served by one or more like instances (the long tail gets its own), by dynamic
  programming over the cuts; every order of instance types;
* `packed`, for known lengths only: stretches of one instance each, by bisection of the makespan.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby, islice, permutations, repeat
from math import gcd

import numpy as np
import numpy.typing as npt

from scheduler.cost import Floats, StepCurve, replica_time_with_refills
from scheduler.forecast import scenarios

SCENARIOS = 16
"""Joint draws of all lengths that plans are compared on."""
SURE = 1.0
"""Standard errors of the mean difference to even dealing, over the scenarios, by which a plan must be cheaper: of
several plans the one that looks best looks better than it is."""
BUCKETS = 24
"""Cuts that dynamic programming looks at; finer among the longest."""
GRID = 40
"""Times at which it counts who still runs."""
PARTS = 4
"""Steps of its cost table per request."""
MOST_UNITS = 24
"""Instances that it treats one by one; more of one kind are taken in bundles."""
MOST_TYPE_ORDERS = 6

_Costs = dict[tuple[int, int], Floats]
"""Predicted seconds by (kind of instance, how many share), for every stretch: [cuts, cuts]."""


@dataclass(frozen=True)
class Worker:
    """An instance to plan for."""

    name: str
    curve: StepCurve
    slots: int


@dataclass(frozen=True)
class Plan:
    """What each instance is to do."""

    kind: str
    queues: tuple[tuple[int, ...], ...]
    """For each worker, its requests, longest first."""
    stretches: tuple[tuple[int, ...], ...]
    """Workers that serve the same stretch of the requests: what waits for one of them may run on any. The first has the
    longest requests."""
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


def expected_time(values: Floats, curve: StepCurve, slots: int) -> float:
    """Seconds that one instance is expected to need for requests that it may all start now.

    Args:
        values: [n, v] equally likely lengths of each request; v = 1: known lengths.
        curve: of the instance.
        slots: most requests at once.
    """
    count, each = values.shape
    if count == 0:
        return 0.0
    context = _context(curve, values.ravel()).sum() / each
    if each == 1 and count > slots:
        return replica_time_with_refills(np.sort(values[:, 0])[::-1].tolist(), curve, slots) + float(context)
    flat = np.sort(values, axis=None)[::-1]
    return float(_steps(curve, slots, count, each) @ flat + context)


@lru_cache(maxsize=512)
def _steps(curve: StepCurve, slots: int, count: int, each: int) -> Floats:
    """[count * each] what every value counts, longest first (see the module)."""
    return np.diff(step_cost(np.arange(count * each + 1) / each, curve, slots, None if each == 1 else count))


def _context(curve: StepCurve, lengths: Floats) -> Floats:
    """Seconds that reading a request's own tokens adds to the steps, by length."""
    return curve.per_context_token / 2 * lengths * lengths


def step_cost(alive: npt.ArrayLike, curve: StepCurve, slots: int, uncertain: int | None = None) -> Floats:
    """Expected seconds of a step while `alive` requests are expected to run or wait (the module's g).

    Args:
        alive: expected numbers, any shape.
        curve: of the instance.
        slots: most requests at once.
        uncertain: of how many requests with uncertain lengths they are; None: the numbers are certain.
    """
    alive = np.asarray(alive, dtype=np.float64)
    running = np.minimum(alive, slots)
    if uncertain is None:
        cost = curve.base(running)
    else:
        any_runs = 1.0 - np.maximum(0.0, 1.0 - running / uncertain) ** uncertain
        cost = any_runs * curve.base(running / np.maximum(any_runs, 1e-12))
    over = alive - running
    if over.any():
        cost = cost + over * (float(curve.base(slots)) / slots)
    return cost


def marginal_costs(worker: Worker, count: int) -> Floats:
    """[count] seconds per step that the k-th of so many requests adds to an instance (see the module)."""
    return np.diff(step_cost(np.arange(count + 1), worker.curve, worker.slots))


def plan(
    values: Floats,
    workers: Sequence[Worker],
    seed: int = 0,
    limit: float = np.inf,
    running: Sequence[Floats] | None = None,
    tails: Floats | None = None,
) -> Plan:
    """The cheapest plan, beside what the workers do already.

    Args:
        values: [n, v] equally likely lengths of each request, requests sorted by mean, longest first.
        workers: at least one. Of like ones the first gets the longest requests.
        seed: of the scenarios.
        limit: no request is longer than this (the run's token limit).
        running: for each worker [its running requests, v] what is left of them; None: all are idle. Every plan is timed
            together with them; `blocks` and `packed` do not look at them.
        tails: [n, 3] what `forecast.tails_of` says of the requests; None: nothing.

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
    timed = _Timed(
        drawn, workers, [range(end - len(part), end) for part, end in zip(beside, ends.tolist(), strict=True)]
    )
    everyone, each = [list(range(len(workers)))], [[seat] for seat in range(len(workers))]
    dealt = even(len(values), [worker.slots for worker in workers], [len(part) for part in beside])
    level = timed("even", dealt, everyone)
    plans = [level]
    if len(values) and len(workers) > 1:
        means = [part.mean(axis=1) for part in beside]
        plans.append(timed("greedy", greedy(values.mean(axis=1), workers, means), each))
        plans.extend(timed("blocks", queues, stretches) for queues, stretches in blocks(values, workers))
        if known:
            plans.extend(timed("packed", queues, each) for queues in packed(values[:, 0], workers))
    return min((level, *(one for one in plans if _surely_cheaper(one, level))), key=lambda one: one.makespan)


def _surely_cheaper(one: Plan, other: Plan) -> bool:
    gain = other.times - one.times
    doubt = gain.std(ddof=1) / np.sqrt(len(gain)) if len(gain) > 1 else 0.0
    return bool(gain.mean() > SURE * doubt)


@dataclass(frozen=True)
class _Timed:
    """Times plans on the same scenarios."""

    drawn: Floats
    """[scenarios, n + running]."""
    workers: Sequence[Worker]
    running: Sequence[range]
    """For each worker, the columns of what it does already."""

    def __call__(self, kind: str, queues: Sequence[Sequence[int]], stretches: Sequence[Sequence[int]]) -> Plan:
        latest = np.zeros(len(self.drawn))
        for seats in stretches:
            at_once: list[list[int]] = []
            waiting: list[int] = []
            for seat in seats:
                free = self.workers[seat].slots - len(self.running[seat])
                at_once.append([*self.running[seat], *queues[seat][: max(free, 0)]])
                waiting += queues[seat][max(free, 0) :]
            workers = [self.workers[seat] for seat in seats]
            steps = self._steps(workers, at_once, sorted(waiting))
            beside = self.drawn[:, waiting]
            for worker, taken, ran in zip(workers, at_once, steps, strict=True):
                reading = _context(worker.curve, self.drawn[:, taken]).sum(axis=1)
                reading += _context(worker.curve, beside).sum(axis=1) / len(seats)
                times = -np.sort(-ran, axis=1) @ marginal_costs(worker, len(taken)) + reading
                latest = np.maximum(latest, times)
        return Plan(kind, tuple(map(tuple, queues)), tuple(map(tuple, stretches)), latest)

    def _steps(self, workers: Sequence[Worker], at_once: list[list[int]], waiting: list[int]) -> list[Floats]:
        """For each worker [scenarios, slots] the decode steps in which each of its slots is taken, when whatever slot
        falls free takes in the next one that waits. Times until then are those of full batches."""
        if not waiting:
            return [self.drawn[:, taken] for taken in at_once]
        first = np.concatenate([self.drawn[:, taken] for taken in at_once], axis=1)
        pace = [float(w.curve.base(len(taken))) for w, taken in zip(workers, at_once, strict=True) for _ in taken]
        rows = []
        for taken, lengths in zip(first.tolist(), self.drawn[:, waiting].tolist(), strict=True):
            ends = [(steps * seconds, slot) for slot, (steps, seconds) in enumerate(zip(taken, pace, strict=True))]
            heapq.heapify(ends)
            for length in lengths:
                end, slot = ends[0]
                taken[slot] += length
                heapq.heapreplace(ends, (end + length * pace[slot], slot))
            rows.append(taken)
        return np.split(np.asarray(rows), np.cumsum([len(taken) for taken in at_once])[:-1], axis=1)


def even(count: int, slots: Sequence[int], running: Sequence[int] | None = None) -> list[list[int]]:
    """Deals 0 .. count - 1 out in turn, there and back, so that sums stay level: to every instance with a slot left;
    when all slots are taken, in proportion to them (a slot that falls free takes in the next request).

    Args:
        count: of requests.
        slots: [workers] most requests of each at once; for like idle instances any one number will do.
        running: [workers] slots that are taken already; None: none.
    """
    queues: list[list[int]] = [[] for _ in slots]
    request = 0
    for number, hand in enumerate(_hands(slots, running or [0] * len(slots))):
        if request >= count:
            break
        for seat in hand if number % 2 == 0 else reversed(hand):
            if request < count:
                queues[seat].append(request)
                request += 1
    return queues


def _hands(slots: Sequence[int], running: Sequence[int]) -> Iterator[list[int]]:
    """Without end: the seats that get a request each, hand by hand (see `even`)."""
    for level in range(max(slots)):
        yield [seat for seat, (most, taken) in enumerate(zip(slots, running, strict=True)) if taken <= level < most]
    shares = [most // gcd(*slots) for most in slots]
    turns = sorted(((turn + 1) / share, seat) for seat, share in enumerate(shares) for turn in range(share))
    yield from repeat([seat for _, seat in turns])


def greedy(means: Floats, workers: Sequence[Worker], running: Sequence[Floats] | None = None) -> list[list[int]]:
    """Each request, longest first, to where the most loaded instance grows least (LPT with marginal step times).

    Args:
        means: [n] expected lengths.
        workers: instances.
        running: for each worker the expected rests of what it does already; None: nothing.
    """
    beside = running or [means[:0]] * len(workers)
    count = len(means) + max(map(len, beside))
    marginal = np.stack([marginal_costs(worker, count) for worker in workers])
    queues: list[list[int]] = [[] for _ in workers]
    loads = np.asarray(
        [expected_time(part[:, None], w.curve, w.slots) for part, w in zip(beside, workers, strict=True)]
    )
    # by worker, what its next request will add; only the chosen one's changes
    upcoming = [iter(row) for row in marginal.tolist()]
    rates = np.asarray([next(islice(row, len(part), None), 0.0) for row, part in zip(upcoming, beside, strict=True)])
    context = np.asarray([worker.curve.per_context_token / 2 for worker in workers])
    reads = bool(context.any())
    for request, length in enumerate(means.tolist()):
        grown = loads + rates * length
        if reads:
            grown += context * (length * length)
        chosen = int(grown.argmin())
        loads[chosen] = grown[chosen]
        rates[chosen] = next(upcoming[chosen], 0.0)
        queues[chosen].append(request)
    return queues


def packed(lengths: Floats, workers: Sequence[Worker]) -> Iterator[list[list[int]]]:
    """Stretches of one instance each, as long as a makespan allows; the makespan is bisected. One plan for each order
    of instance types."""
    count = len(lengths)
    costs = {worker: marginal_costs(worker, count) for worker in set(workers)}
    for order in _orders(workers):

        def fill(limit: float, order: list[int] = order) -> list[list[int]] | None:
            queues: list[list[int]] = [[] for _ in workers]
            start = 0
            for seat in order:
                rest = lengths[start:]
                total = np.cumsum(costs[workers[seat]][: len(rest)] * rest + _context(workers[seat].curve, rest))
                taken = int(np.searchsorted(total, limit, side="right"))
                queues[seat] = list(range(start, start + taken))
                start += taken
            return queues if start == count else None

        last = workers[order[-1]]
        low, high, best = 0.0, float(costs[last] @ lengths + _context(last.curve, lengths).sum()), None
        for _ in range(24):
            middle = (low + high) / 2
            found = fill(middle)
            low, high, best = (low, middle, found) if found else (middle, high, best)
        if best:
            yield best


def _orders(workers: Sequence[Worker]) -> list[list[int]]:
    """Seats of the workers, like ones side by side, in each order of the kinds (the first takes the longest)."""
    kinds: dict[tuple[StepCurve, int], list[int]] = {}
    for seat, worker in enumerate(workers):
        kinds.setdefault((worker.curve, worker.slots), []).append(seat)
    quick_first = sorted(kinds, key=lambda kind: float(kind[0].base(1)))
    orders = list(permutations(quick_first)) if len(kinds) <= 3 else [tuple(quick_first), tuple(reversed(quick_first))]
    return [[seat for kind in order for seat in kinds[kind]] for order in orders[:MOST_TYPE_ORDERS]]


@lru_cache(maxsize=64)
def _table(curve: StepCurve, slots: int, known: bool, largest: int) -> Floats:
    return step_cost(np.arange(largest * PARTS + 2) / PARTS, curve, slots, None if known else largest)


def blocks(values: Floats, workers: Sequence[Worker]) -> Iterator[tuple[list[list[int]], list[list[int]]]]:
    """Dynamic programming over stretches that share one or more like instances: (queues, stretches' workers)."""
    count, each = values.shape
    cuts = np.unique(np.round(count * (np.arange(min(BUCKETS, count) + 1) / min(BUCKETS, count)) ** 2).astype(int))
    flat = np.sort(values, axis=None)
    # half of the times by share of requests, half evenly spaced: the tail has few requests and much time
    grid = np.concatenate(
        [flat[np.linspace(0, len(flat) - 1, GRID // 2).astype(int)], np.linspace(0, flat[-1], GRID // 2)]
    )
    grid = np.unique(grid)
    width, middle = np.diff(grid, prepend=0.0), grid - np.diff(grid, prepend=0.0) / 2
    buckets = [np.sort(bucket, axis=None) for bucket in np.split(values, cuts[1:-1])]
    ended = np.stack([np.searchsorted(bucket, middle, "left") for bucket in buckets]) / each
    alive = np.diff(cuts)[:, None] - ended  # [buckets, grid]
    sums = np.concatenate([np.zeros((1, len(grid))), np.cumsum(alive, axis=0)])
    first, last = np.triu_indices(len(cuts), k=1)
    stretch = sums[last] - sums[first]  # [pairs, grid]
    for order in _orders(workers):
        runs = [list(run) for _, run in groupby(order, key=lambda seat: (workers[seat].curve, workers[seat].slots))]
        bundle = -(-len(order) // MOST_UNITS)
        units = [run[k : k + bundle] for run in runs for k in range(0, len(run), bundle)]
        of_run = [number for number, run in enumerate(runs) for _ in range(0, len(run), bundle)]
        firsts = [run[0] for run in runs]
        costs: _Costs = {}

        def cost(run: int, machines: int, firsts: list[int] = firsts, costs: _Costs = costs) -> Floats:
            if (run, machines) not in costs:
                worker = workers[firsts[run]]
                table = _table(worker.curve, worker.slots, each == 1, count)
                matrix = np.full((len(cuts), len(cuts)), np.inf)
                # whoever runs at a time has produced as many tokens: its context then
                reading = stretch @ (middle * width) * (worker.curve.per_context_token / machines)
                matrix[first, last] = table[(stretch * (PARTS / machines)).astype(int)] @ width + reading
                np.fill_diagonal(matrix, 0.0)
                costs[run, machines] = matrix
            return costs[run, machines]

        yield _best_cuts(cuts, units, of_run, cost, len(workers))


def _best_cuts(
    cuts: npt.NDArray[np.int64],
    units: list[list[int]],
    of_run: list[int],
    cost: Callable[[int, int], Floats],
    workers: int,
) -> tuple[list[list[int]], list[list[int]]]:
    """best[u][j] = least makespan of the requests before cut j on the first u units; the last stretch takes units
    of one kind."""
    size = len(cuts)
    best = [np.where(np.arange(size) == 0, 0.0, np.inf)]
    choice: list[npt.NDArray[np.int64]] = [np.zeros((size, 2), dtype=int)]
    for used in range(1, len(units) + 1):
        values, chosen = np.full(size, np.inf), np.zeros((size, 2), dtype=int)
        machines = 0
        for start in range(used - 1, -1, -1):
            if of_run[start] != of_run[used - 1]:
                break
            machines += len(units[start])
            candidates = np.maximum(best[start][:, None], cost(of_run[start], machines))
            where = candidates.argmin(axis=0)
            least = candidates[where, np.arange(size)]
            better = least < values
            values = np.where(better, least, values)
            chosen[better] = np.stack([np.full(size, start), where], axis=1)[better]
        best.append(values)
        choice.append(chosen)
    queues: list[list[int]] = [[] for _ in range(workers)]
    used, cut, parts = len(units), size - 1, []
    while used:
        start, begin = choice[used][cut]
        seats = [seat for unit in units[start:used] for seat in unit]
        if begin < cut:
            parts.append(seats)
            for seat, hand in zip(seats, even(int(cuts[cut] - cuts[begin]), [1] * len(seats)), strict=True):
                queues[seat] = [int(cuts[begin]) + request for request in hand]
        used, cut = int(start), int(begin)
    return queues, parts[::-1]


def best_partition(lengths: npt.ArrayLike, workers: Sequence[Worker]) -> Plan:
    """Reference, slow: the best cut of known lengths into one stretch per instance, over all orders of instance types,
    beside even dealing. Dynamic programming over every cut; needs all requests to fit into the slots' refills."""
    values = np.sort(np.asarray(lengths, dtype=np.float64))[::-1]
    count = len(values)
    timed = _Timed(values[None], workers, [range(0)] * len(workers))
    each = [[seat] for seat in range(len(workers))]
    plans = [timed("even", even(count, [worker.slots for worker in workers]), each)]
    for order in _orders(workers):
        best, choices = np.where(np.arange(count + 1) == 0, 0.0, np.inf), []
        for seat in order:
            worker = workers[seat]
            marginal = marginal_costs(worker, count)
            matrix = np.full((count + 1, count + 1), np.inf)
            for begin in range(count + 1):
                matrix[begin, begin] = best[begin]
                rest = values[begin:]
                total = np.cumsum(marginal[: len(rest)] * rest + _context(worker.curve, rest))
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
