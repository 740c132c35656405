"""Find the best partition of known lengths into one stretch per instance: a slow reference for plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations

import numpy as np
import numpy.typing as npt

from scheduler.cost.decode import StepCurve
from scheduler.cost.expected_time import Worker, context_seconds, marginal_costs
from scheduler.dispatch.partition import Plan, _Timed
from scheduler.dispatch.partition_candidates import even


def best_partition(lengths: npt.ArrayLike, workers: Sequence[Worker]) -> Plan:
    """Return the best cut of known lengths into one stretch per instance, or even dealing; a slow reference.

    Dynamic programming over every cut and all orders of instance types; all requests must fit into the slots' refills.
    """
    values = np.sort(np.asarray(lengths, dtype=np.float64))[::-1]
    count = len(values)
    timed = _Timed(values[None], workers, [range(0)] * len(workers))
    each = [[seat] for seat in range(len(workers))]
    plans = [timed("even", even(count, [worker.slots for worker in workers]), each)]
    for order in _orders_of_kinds(workers):
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


def _orders_of_kinds(workers: Sequence[Worker]) -> Iterator[list[int]]:
    """Yield the workers' seats, identical ones side by side, in each order of the kinds."""
    kinds: dict[tuple[StepCurve, int], list[int]] = {}
    for seat, worker in enumerate(workers):
        kinds.setdefault((worker.curve, worker.slots), []).append(seat)
    for order in permutations(kinds.values()):
        yield [seat for seats in order for seat in seats]
