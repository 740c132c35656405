"""Policies that plan a whole set of requests: StreamRL's Algorithm 2, and ours.

Both give every instance a queue, longest first. Ours also corrects itself while running:

* an instance that has emptied its queue takes over waiting requests of the one that would be last;
* when an instance has nothing left at all, running requests of the instance that is predicted to end last move over, if
  that makes both end clearly earlier, the reading in of the moved tokens included.

Forecasts are those of what is left of a request, given what it has produced. Without trusted forecasts (`None`) ours is
least-loaded dispatch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.cost import StepCurve
from scheduler.forecast import Forecast, stack
from scheduler.planning import Plan, Worker, even, expected_time, plan
from scheduler.policy import REGULAR, TAIL, Assignment, Fleet, Instance, Progress, Request

UNKNOWN_CURVE = StepCurve((1, 2), (1.0, 1.05))
"""Stands in for an instance whose step time nobody has measured: small batches are hardly faster (memory-bound)."""
MOVE_GAIN = 0.1
"""A running request moves only if the later of both ends comes earlier by this share of what is left: predictions are
not that good, and each move costs a pause."""
CORRECT_EVERY = 0.02
"""Share of the unfinished requests that must have ended before the plan is looked at again."""
MOVES_LOOKED_AT = 8
"""Numbers of requests (halves, quarters, ...) that a move is tried with."""


class Planned(Fleet):
    """Keeps a queue per instance and fills slots from it. Subclasses say what the queues are."""

    def __init__(self) -> None:
        super().__init__()
        self.queues: dict[str, deque[tuple[Request, str]]] = {}
        """Waiting requests with their route, by instance."""
        self._new: list[Request] = []

    @property
    def waiting(self) -> int:
        """Requests without an instance's slot."""
        return len(self._new) + sum(map(len, self.queues.values()))

    def submit(self, requests: Iterable[Request]) -> None:
        """Requests wait; the next `decide` plans them, together with what still waits."""
        self._new.extend(requests)

    def leave(self, instance: str) -> list[str]:
        """See `Fleet`; what waited for this instance is planned again."""
        self._new.extend(request for request, _ in self.queues.pop(instance, ()))
        return super().leave(instance)

    def decide(self, produced: Progress | None = None) -> list[Assignment]:
        """Plans what is new, then fills slots from the queues."""
        if self._new and self.instances:
            everything = [request for queue in self.queues.values() for request, _ in queue] + self._new
            self._new = []
            self.queues = {name: deque() for name in self.instances}
            self.make_queues(everything)
        decisions = self._fill()
        return decisions + self.correct(produced)

    def _fill(self) -> list[Assignment]:
        decisions = []
        for name, queue in self.queues.items():
            instance = self.instances[name]
            while queue and instance.free > 0:
                request, route = queue.popleft()
                decisions.append(self.start(request, instance, route))
        return decisions

    def make_queues(self, requests: Sequence[Request]) -> None:
        """Puts every request into a queue."""
        raise NotImplementedError

    def correct(self, produced: Progress | None) -> list[Assignment]:
        """Decisions beyond the plan, after slots were filled."""
        return []


def longest_first(requests: Sequence[Request]) -> list[Request]:
    """By expected length; requests without a forecast last, in their order."""
    return sorted(requests, key=lambda request: -(request.forecast.mean if request.forecast else 0.0))


class Algorithm2(Planned):
    """StreamRL's skew-aware dispatch (arXiv 2504.15930, Algorithm 2).

    The predicted longest 20 % are the tail, of length P90 of the predictions; the rest has P50. Over all
    N_tail + N_regular = N it minimises the latencies of the two pools, PTL(batch) x length x ceil(requests / batch)
    of an instance each: their sum as printed, or, with `combine="max"`, the later one. Requests are dealt out in turn
    inside a pool.
    """

    def __init__(self, combine: str = "sum", tail_share: float = 0.2) -> None:
        super().__init__()
        if combine not in ("sum", "max"):
            raise ValueError(f"combine must be 'sum' or 'max', got {combine!r}")
        self.combine, self.tail_share = combine, tail_share

    def make_queues(self, requests: Sequence[Request]) -> None:
        """See the class."""
        ordered = longest_first(requests)
        names = list(self.instances)
        lengths = np.asarray([request.forecast.mean if request.forecast else 0.0 for request in ordered])
        tail_size = math.ceil(self.tail_share * len(ordered))
        tail_instances = 0
        if len(names) > 1:
            tail_length, regular_length = np.percentile(lengths, (90, 50))

            def cost(count: int) -> float:
                tail = self._latency(names[:count], tail_size, tail_length)
                regular = self._latency(names[count:], len(ordered) - tail_size, regular_length)
                return tail + regular if self.combine == "sum" else max(tail, regular)

            tail_instances = min(range(1, len(names)), key=cost)
        for pool, part, route in (
            (names[:tail_instances], ordered[:tail_size] if tail_instances else [], TAIL),
            (names[tail_instances:], ordered[tail_size:] if tail_instances else ordered, REGULAR),
        ):
            for number, request in enumerate(part):
                self.queues[pool[number % len(pool)]].append((request, route))

    def _latency(self, names: list[str], requests: int, length: float) -> float:
        """Of the slowest instance of a pool."""
        share = math.ceil(requests / len(names))
        slowest = 0.0
        for name in names:
            instance = self.instances[name]
            batch = max(1, min(share, instance.slots))
            step = float((instance.curve or UNKNOWN_CURVE).base(batch))
            slowest = max(slowest, step * length * math.ceil(share / batch))
        return slowest


class SkewAware(Planned):
    """Ours: the cheapest plan of `planning.py`, corrected while it runs (see the module)."""

    def __init__(self, migrate: bool = True, longest: float = math.inf) -> None:
        """
        Args:
            migrate: whether running requests may move.
            longest: no request produces more tokens than this (the run's limit).
        """
        super().__init__()
        self.migrate, self.longest = migrate, longest
        self.plan: Plan | None = None
        """The newest plan, for whoever wants to show it."""
        self._corrected_at = -1
        """Unfinished requests when `correct` last looked."""

    def make_queues(self, requests: Sequence[Request]) -> None:
        """See the class."""
        names = list(self.instances)
        if any(request.forecast is None for request in requests):
            self.plan = None
            for name, dealt in zip(names, even(len(requests), len(names)), strict=True):
                self.queues[name].extend((requests[number], REGULAR) for number in dealt)
            return
        ordered = longest_first(requests)
        forecasts = [request.forecast for request in ordered if request.forecast is not None]
        known = all(len(forecast.lengths) == 1 for forecast in forecasts)
        values = np.asarray([f.lengths for f in forecasts]) if known else stack(forecasts)
        self.plan = plan(values, [self._worker(self.instances[name]) for name in names], limit=self.longest)
        for seat, (name, hand) in enumerate(zip(names, self.plan.queues, strict=True)):
            route = TAIL if seat in self.plan.tail else REGULAR
            self.queues[name].extend((ordered[number], route) for number in hand)

    def _worker(self, instance: Instance) -> Worker:
        return Worker(instance.name, instance.curve or UNKNOWN_CURVE, instance.slots)

    def correct(self, produced: Progress | None) -> list[Assignment]:
        """Brings instances that have a free slot and nothing waiting closer to the one that would be last."""
        unfinished = len(self.where) + self.waiting
        if len(self.instances) < 2 or abs(unfinished - self._corrected_at) < max(1, unfinished * CORRECT_EVERY):
            return []
        self._corrected_at = unfinished
        idle = [i for i in self.instances.values() if i.free > 0 and not self.queues.get(i.name)]
        decisions: list[Assignment] = []
        for target in sorted(idle, key=lambda instance: len(instance.running)):
            if donor := max((name for name, queue in self.queues.items() if queue), key=self._queued, default=None):
                # waiting requests first: nothing has to be read in twice
                decisions.extend(self._take_waiting(target, self.instances[donor], produced))
            elif self.migrate and produced is not None and not target.running and not decisions:
                decisions.extend(self._take_running(target, produced))
        return decisions

    def _queued(self, name: str) -> int:
        return len(self.queues[name])

    def _take_waiting(self, target: Instance, donor: Instance, produced: Progress | None) -> list[Assignment]:
        """Requests from the end of the donor's queue (its shortest)."""
        queue = self.queues[donor.name]
        there = self._rests(donor, produced) + [self._rest(request, 0.0) for request, _ in queue]
        candidates = there[: len(there) - len(queue) - 1 : -1] if queue else []
        count = self._best_count(
            target, donor, self._rests(target, produced), candidates, lambda n: there[: len(there) - n], moved=False
        )
        taken = [queue.pop() for _ in range(count)]
        return [self.start(request, target, route) for request, route in taken]

    def _take_running(self, target: Instance, produced: Progress) -> list[Assignment]:
        """Running requests, longest first, of the instance that would be last."""
        donors = [instance for instance in self.instances.values() if len(instance.running) > 1]
        if not donors:
            return []
        last = max(donors, key=lambda donor: _time(self._rests(donor, produced), donor))
        rests = sorted(self._rests(last, produced), key=lambda rest: -rest.forecast.mean)
        count = self._best_count(target, last, [], rests, lambda n: rests[n:], moved=True)
        return [self.start(rest.request, target, TAIL) for rest in rests[:count]]

    def _best_count(
        self,
        target: Instance,
        donor: Instance,
        here: list[_Rest],
        candidates: list[_Rest],
        stays: Callable[[int], list[_Rest]],
        moved: bool,
    ) -> int:
        """How many of the candidates, in their order, should go from donor to target: 0 unless the later of both ends
        then comes clearly earlier.

        Args:
            target: where they would go.
            donor: where they are.
            here: the target's requests.
            candidates: in the order in which they would go.
            stays: the donor's requests when so many of the candidates have gone.
            moved: they run already, so the target has to read them in.
        """
        best, chosen = _time(stays(0), donor) * (1 - MOVE_GAIN), 0
        most = min(len(candidates), target.free)
        per_token = (target.curve or UNKNOWN_CURVE).per_prefill_token if moved else 0.0
        for count in sorted({max(1, most >> shift) for shift in range(MOVES_LOOKED_AT)}) if most else ():
            reading = per_token * sum(rest.context for rest in candidates[:count])
            later = max(reading + _time(here + candidates[:count], target), _time(stays(count), donor))
            if later < best:
                best, chosen = later, count
        return chosen

    def _rests(self, instance: Instance, produced: Progress | None) -> list[_Rest]:
        """Of an instance's running requests."""
        return [self._rest(r, produced(r.request_id) if produced else 0.0) for r in instance.running.values()]

    def _rest(self, request: Request, produced: float) -> _Rest:
        forecast = request.forecast or Forecast.exactly(1.0)
        return _Rest(request, forecast.beyond(produced, self.longest), request.prompt_tokens + produced)


@dataclass(frozen=True)
class _Rest:
    """What is left of a request."""

    request: Request
    forecast: Forecast
    context: float
    """Tokens that it has: prompt and produced."""


def _time(rests: Sequence[_Rest], instance: Instance) -> float:
    """Expected seconds until an instance has finished these."""
    if not rests:
        return 0.0
    forecasts = [rest.forecast for rest in rests]
    known = all(len(forecast.lengths) == 1 for forecast in forecasts)
    values = np.asarray([f.lengths for f in forecasts]) if known else stack(forecasts)
    curve = instance.curve or UNKNOWN_CURVE
    reading = curve.per_context_token * sum(rest.context * rest.forecast.mean for rest in rests)
    return expected_time(values, curve, instance.slots) + reading
