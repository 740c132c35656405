"""Candidate placements: which requests go to which instances. `partition.py` times them and chooses.

Requests are numbered by expected length, longest first. A placement is a list of queues, one per instance.

* `even`: dealt out in turn while there are slots, then in proportion to the slots, as load balancing does;
* `greedy`: the longest first, each to where the most loaded instance grows least;
* `blocks`: cut into stretches, each served by one or more identical instances (the long tail gets its own), by dynamic
  programming over the cuts, the longest on the type of instance that decodes a single request fastest;
* `packed`, for known lengths only: stretches of one instance each, by bisection of the makespan;
* `together`: any of them, with siblings brought together inside the stretches.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import groupby, islice, repeat
from math import gcd

import numpy as np
import numpy.typing as npt

from scheduler.cost.decode import Floats, StepCurve
from scheduler.cost.expected_time import Worker, context_seconds, expected_time, marginal_costs, step_cost

BUCKETS = 24
"""Number of cuts that dynamic programming considers; finer among the longest."""
GRID = 40
"""Number of times at which dynamic programming counts the running requests."""
PARTS = 4
"""Steps of its cost table per request."""
BISECTIONS = 16
"""Bisections of a makespan, starting from that of one instance doing everything: to a 65,000th of it."""
MOST_UNITS = 24
"""Number of instances that dynamic programming treats one by one; more of one kind are bundled."""


def even(count: int, slots: Sequence[int], running: Sequence[int] | None = None) -> list[list[int]]:
    """Deal 0 .. count - 1 out in turn, there and back, so that sums stay level.

    Every instance with a slot left gets one in each turn; once all slots are taken, instances get requests in
    proportion to their slots (a slot that becomes free takes the next request).

    Args:
        count: number of requests.
        slots: [workers] largest number of requests of each at once; for identical idle instances any number will do.
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
    """Yield, without end, the seats that get one request each, hand by hand (see `even`)."""
    for level in range(max(slots)):
        yield [seat for seat, (most, taken) in enumerate(zip(slots, running, strict=True)) if taken <= level < most]
    shares = [most // gcd(*slots) for most in slots]
    turns = sorted(((turn + 1) / share, seat) for seat, share in enumerate(shares) for turn in range(share))
    yield from repeat([seat for _, seat in turns])


def together(
    queues: Sequence[Sequence[int]],
    stretches: Sequence[Sequence[int]],
    groups: Sequence[str],
    means: Floats,
    ranks: Sequence[int],
) -> list[list[int]]:
    """Deal the requests of each stretch again, siblings to one instance as far as the queues' sizes allow.

    Args:
        queues: queues of a plan; their sizes stay.
        stretches: stretches of the plan.
        groups: [n] group of each request.
        means: [n] expected lengths.
        ranks: [n] places in the order in which requests start.
    """
    dealt: list[list[int]] = [list(queue) for queue in queues]
    for seats in stretches:
        members: dict[str, list[int]] = {}
        for request in sorted((r for seat in seats for r in queues[seat]), key=ranks.__getitem__):
            members.setdefault(groups[request], []).append(request)
        for seat in seats:
            dealt[seat] = []
        # the emptiest in proportion, so that long groups are spread as well: (share of its queue, load, place, seat)
        room = [(0.0, 0.0, place, seat) for place, seat in enumerate(seats) if queues[seat]]
        for siblings in members.values():
            while siblings:
                _, load, place, seat = room[0]
                free = len(queues[seat]) - len(dealt[seat])
                taken, siblings = siblings[:free], siblings[free:]
                dealt[seat] += taken
                if len(taken) == free:
                    heapq.heappop(room)
                    continue
                load += float(means[taken].sum())
                heapq.heapreplace(room, (len(dealt[seat]) / len(queues[seat]), load, place, seat))
        for seat in seats:
            dealt[seat].sort(key=ranks.__getitem__)
    return dealt


def greedy(means: Floats, workers: Sequence[Worker], running: Sequence[Floats] | None = None) -> list[list[int]]:
    """Give each request, longest first, to where the most loaded instance grows least (LPT with marginal step times).

    Args:
        means: [n] expected lengths.
        workers: instances.
        running: for each worker the expected remaining lengths of its running requests; None: no running requests.
    """
    beside = running or [means[:0]] * len(workers)
    count = len(means) + max(map(len, beside))
    marginal = {worker: marginal_costs(worker, count).tolist() for worker in set(workers)}
    queues: list[list[int]] = [[] for _ in workers]
    loads = np.asarray(
        [expected_time(part[:, None], w.curve, w.slots) for part, w in zip(beside, workers, strict=True)]
    )
    # what each worker's next request will add; only the chosen worker's value changes
    upcoming = [islice(marginal[worker], len(part), None) for worker, part in zip(workers, beside, strict=True)]
    rates = np.asarray([next(row, 0.0) for row in upcoming])
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


def packed(lengths: Floats, workers: Sequence[Worker]) -> list[list[int]] | None:
    """Return stretches of one instance each, as long as a bisected makespan allows.

    None: no makespan does that is shorter than that of the slowest instance doing everything.
    """
    count, order = len(lengths), quick_first(workers)
    costs = {worker: marginal_costs(worker, count) for worker in set(workers)}

    def fill(limit: float) -> list[list[int]] | None:
        queues: list[list[int]] = [[] for _ in workers]
        start = 0
        for seat in order:
            rest = lengths[start:]
            each = costs[workers[seat]][: len(rest)] * rest
            if workers[seat].curve.per_context_token:
                each += context_seconds(workers[seat].curve, rest)
            total = each.cumsum()
            taken = int(total.searchsorted(limit, side="right"))
            queues[seat] = list(range(start, start + taken))
            start += taken
        return queues if start == count else None

    last = workers[order[-1]]
    low, high, best = 0.0, float(costs[last] @ lengths + context_seconds(last.curve, lengths).sum()), None
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        found = fill(middle)
        low, high, best = (low, middle, found) if found else (middle, high, best)
    return best


def quick_first(workers: Sequence[Worker]) -> list[int]:
    """Return the workers' seats, identical ones side by side, those that decode a single request fastest first."""
    kinds: dict[tuple[StepCurve, int], list[int]] = {}
    for seat, worker in enumerate(workers):
        kinds.setdefault((worker.curve, worker.slots), []).append(seat)
    return [seat for kind in sorted(kinds, key=lambda kind: float(kind[0].base(1))) for seat in kinds[kind]]


@lru_cache(maxsize=64)
def _table(curve: StepCurve, slots: int, known: bool, largest: int) -> Floats:
    return step_cost(np.arange(largest * PARTS + 2) / PARTS, curve, slots, None if known else largest)


def blocks(values: Floats, workers: Sequence[Worker]) -> tuple[list[list[int]], list[list[int]]]:
    """Return (queues, stretches) by dynamic programming over stretches that share one or more identical instances."""
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
    order = quick_first(workers)
    runs = [list(run) for _, run in groupby(order, key=lambda seat: (workers[seat].curve, workers[seat].slots))]
    bundle = -(-len(order) // MOST_UNITS)
    units = [run[k : k + bundle] for run in runs for k in range(0, len(run), bundle)]
    of_run = [number for number, run in enumerate(runs) for _ in range(0, len(run), bundle)]

    @cache
    def cost(run: int, machines: int) -> Floats:
        worker = workers[runs[run][0]]
        table = _table(worker.curve, worker.slots, each == 1, count)
        matrix = np.full((len(cuts), len(cuts)), np.inf)
        # every request that runs at a time has produced that many tokens: its context at that time
        reading = stretch @ (middle * width) * (worker.curve.per_context_token / machines)
        matrix[first, last] = table[(stretch * (PARTS / machines)).astype(int)] @ width + reading
        np.fill_diagonal(matrix, 0.0)
        return matrix

    return _best_cuts(cuts, units, of_run, cost, len(workers))


def _best_cuts(
    cuts: npt.NDArray[np.int64],
    units: list[list[int]],
    of_run: list[int],
    cost: Callable[[int, int], Floats],
    workers: int,
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the queues and stretches with the least makespan.

    best[u][j] is the least makespan of the requests before cut j on the first u units; the last stretch takes units of
    one kind.
    """
    size, columns = len(cuts), np.arange(len(cuts))
    best = [np.where(np.arange(size) == 0, 0.0, np.inf)]
    choice = [(np.zeros(size, dtype=int), np.zeros(size, dtype=int))]
    for used in range(1, len(units) + 1):
        values, starts, begins = np.full(size, np.inf), np.zeros(size, dtype=int), np.zeros(size, dtype=int)
        machines = 0
        for start in range(used - 1, -1, -1):
            if of_run[start] != of_run[used - 1]:
                break
            machines += len(units[start])
            candidates = np.maximum(best[start][:, None], cost(of_run[start], machines))
            where = candidates.argmin(axis=0)
            least = candidates[where, columns]
            better = least < values
            np.copyto(values, least, where=better)
            np.copyto(starts, start, where=better)
            np.copyto(begins, where, where=better)
        best.append(values)
        choice.append((starts, begins))
    queues: list[list[int]] = [[] for _ in range(workers)]
    used, cut, parts = len(units), size - 1, []
    while used:
        start, begin = (int(chosen[cut]) for chosen in choice[used])
        seats = [seat for unit in units[start:used] for seat in unit]
        if begin < cut:
            parts.append(seats)
            for seat, hand in zip(seats, even(int(cuts[cut] - cuts[begin]), [1] * len(seats)), strict=True):
                queues[seat] = [int(cuts[begin]) + request for request in hand]
        used, cut = start, begin
    return queues, parts[::-1]
