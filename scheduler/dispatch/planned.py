"""Policies that plan a whole set of requests: StreamRL's Algorithm 2, and skew-aware dispatch.

Both give every instance a queue, longest first. Skew-aware dispatch also corrects itself while it runs:

* what waits for one instance may start on any that serves the same stretch of the plan, in the plan's order;
* an instance that has emptied its queue takes over waiting requests of the one that is predicted to end last;
* when an instance has nothing left at all, running requests move to it from the instance that is predicted to end
  last, if both then end clearly earlier, the prefill of the moved tokens included.

Forecasts are of what is left of a request, given what it has produced: a waiting one may bring tokens from before. A
request without one (`None`: nothing is known, or nothing that is trusted) is neither planned nor moved: it waits in one
queue for all instances and is placed by load when no planned request can use the slot. So without forecasts skew-aware
dispatch *is* least-loaded dispatch.

Turns of episodes are not planned either: they come one at a time, and a plan for each would take longer than it saves.
They are placed by load, before the planned requests; plans count them, by their forecasts, among what runs.

Where no plan is surely cheaper than placement by load, or requests are too many to plan (`MOST_PLANNED`), planned
requests are placed by load, too: then it is least-loaded dispatch that may move what runs.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace

import numpy as np

from scheduler.cost.expected_time import Worker
from scheduler.cost.length_forecast import equally_likely, same_width, tails_of
from scheduler.dispatch.dispatch_objective import MAKESPAN, DispatchObjective, Streamed
from scheduler.dispatch.partition import BY_LOAD, LONGEST_BY_LOAD, Plan, PromptGroups, plan
from scheduler.dispatch.policy import REGULAR, TAIL, Assignment, DispatchPolicy, Instance, Request, TokenProgress
from scheduler.dispatch.policy_kinds import offer
from scheduler.dispatch.remaining_length import Remaining

TAIL_SHARE = 0.2
"""Share of the requests that Algorithm 2 takes for the tail."""
MOVE_GAIN = 0.1
"""Share of the remaining time by which a move must bring the later of both ends forward: predictions are inexact, and
each move costs a pause.
"""
CORRECT_EVERY = 0.02
"""Share of the unfinished requests that must have ended before the plan is corrected again."""
MOST_PLANNED = 65_536
"""Number of requests, running and waiting, beyond which all that wait are placed by load: a plan of so many takes
seconds, in which the service does nothing else.
"""
MOVES_LOOKED_AT = 8
"""How many numbers of requests (all, half, a quarter, ...) a move is tried with."""


class Planned(DispatchPolicy):
    """Keeps a queue per instance and fills slots from it; subclasses fill the queues."""

    def __init__(self, affinity: int = 0) -> None:
        super().__init__(affinity)
        self.queues: dict[str, deque[tuple[Request, str]]] = {}
        """Waiting requests with their route, by instance."""
        self.ranks: dict[str, int] = {}
        """Place of each waiting request in the order in which they start, where queues are shared."""
        self._new: list[Request] = []

    @property
    def waiting(self) -> int:
        """Number of requests without an instance's slot."""
        return len(self._new) + sum(map(len, self.queues.values()))

    def submit(self, requests: Iterable[Request]) -> None:
        """Add requests; the next `decide` plans them together with what still waits."""
        self._new.extend(requests)

    def leave(self, instance: str) -> list[str]:
        """Remove an instance; what waited for it is planned again (see `Fleet.leave`)."""
        self._new.extend(request for request, _ in self.queues.pop(instance, ()))
        return super().leave(instance)

    def withdraw(self, request_ids: Set[str]) -> None:
        """Drop requests that are no longer wanted; see `Fleet.withdraw`."""
        self._new = [request for request in self._new if request.request_id not in request_ids]
        for name, queue in self.queues.items():
            self.queues[name] = deque(entry for entry in queue if entry[0].request_id not in request_ids)
        super().withdraw(request_ids)

    def decide(self, produced: TokenProgress | None = None) -> list[Assignment]:
        """Plan new requests, then fill slots from the queues."""
        decisions = []
        if self._new and self.instances:
            everything = [request for queue in self.queues.values() for request, _ in queue] + self._new
            self._new = []
            self.queues = {name: deque() for name in self.instances}
            self.make_queues(everything, produced)
            decisions = [start for name in self.queues for start in self._fill_from(name, [name])]
        return decisions + self.fill() + self.correct(produced)

    def fill(self) -> list[Assignment]:
        """Give free slots to waiting requests."""
        return [start for name in self.queues for start in self._fill_from(name, [name])]

    def _fill_from(self, name: str, sources: Iterable[str]) -> list[Assignment]:
        """Fill an instance from the given instances' queues, in the plan's order."""
        instance, decisions = self.instances[name], []
        while instance.free > 0 and (queues := [queue for source in sources if (queue := self.queues[source])]):
            request, route = min(queues, key=lambda queue: self.ranks.get(queue[0][0].request_id, 0)).popleft()
            decisions.append(self.start(request, instance, route))
        return decisions

    @abstractmethod
    def make_queues(self, requests: Sequence[Request], produced: TokenProgress | None) -> None:
        """Put every request into a queue; `produced` as in `decide`."""

    def correct(self, produced: TokenProgress | None) -> list[Assignment]:
        """Return decisions beyond the plan, after slots were filled."""
        return []


def ahead_of(requests: Iterable[Request], produced: TokenProgress | None, longest: float = math.inf) -> list[Request]:
    """Return waiting requests as if each began where it will go on: with the tokens that it has as part of its prompt.

    Args:
        requests: any number, in any order.
        produced: as in `decide`.
        longest: largest number of tokens that a request may produce.
    """
    return [_going_on(request, produced(request.request_id) if produced else 0.0, longest) for request in requests]


def _going_on(request: Request, tokens: float, longest: float) -> Request:
    if tokens <= 0:
        return request
    left = request.forecast.beyond(tokens, longest) if request.forecast else None
    return replace(request, forecast=left, prompt_tokens=request.prompt_tokens + round(tokens))


def longest_first(requests: Sequence[Request]) -> list[Request]:
    """Sort by expected length, siblings side by side where lengths are equal; requests without a forecast last."""
    return sorted(requests, key=lambda request: (-request.expected, request.group_id))


class Algorithm2(Planned):
    """StreamRL's skew-aware dispatch (arXiv 2504.15930, Algorithm 2).

    The predicted longest 20 % (`TAIL_SHARE`) are the tail, of length P90 of the predictions; the rest has P50. Over all
    N_tail + N_regular = N it minimises the latencies of the two pools, PTL(batch) x length x ceil(requests / batch)
    of an instance each: their sum as printed, or, with `combine="max"`, the later one. Requests are dealt out in turn
    inside a pool.
    """

    def __init__(self, combine: str = "sum") -> None:
        super().__init__()
        if combine not in ("sum", "max"):
            raise ValueError(f"combine must be 'sum' or 'max', got {combine!r}")
        self.combine = combine

    def make_queues(self, requests: Sequence[Request], produced: TokenProgress | None) -> None:
        """Split instances and requests into the two pools and deal the requests out."""
        ordered = longest_first(ahead_of(requests, produced))
        own = {request.request_id: request for request in requests}
        names = list(self.instances)
        lengths = np.asarray([request.expected for request in ordered])
        tail_size = math.ceil(TAIL_SHARE * len(ordered))
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
                self.queues[pool[number % len(pool)]].append((own[request.request_id], route))

    def _latency(self, names: list[str], requests: int, length: float) -> float:
        """Return the latency in seconds of the slowest instance of a pool."""
        share = math.ceil(requests / len(names))
        slowest = 0.0
        for name in names:
            instance = self.instances[name]
            batch = max(1, min(share, instance.slots))
            step = float(instance.assumed_curve.base(batch))
            slowest = max(slowest, step * length * math.ceil(share / batch))
        return slowest


class SkewAware(Planned):
    """Skew-aware dispatch: the cheapest plan of `partition.py`, corrected while it runs (see the module).

    Its objective (`dispatch_objective.py`) is the makespan, which `colocated`, `sync` and `one_step_off` wait for, or
    the end of training's last group, which `stream` waits for. It has none for `async`.
    """

    def __init__(
        self,
        migrate: bool = True,
        longest: float = math.inf,
        affinity: int = 0,
        objective: DispatchObjective = MAKESPAN,
    ) -> None:
        """Create a policy without instances.

        Args:
            migrate: whether running requests may move.
            longest: largest number of tokens that a request may produce (the run's limit).
            affinity: affinity of requests without a forecast, see `Fleet`.
            objective: what plans make small.
        """
        super().__init__(affinity)
        self.migrate, self.longest, self.objective = migrate, longest, objective
        self.plan: Plan | None = None
        """The newest plan, for display; None: there is none, or what came last was too much to plan."""
        self._mates: dict[str, list[str]] = {}
        """Instances that serve the same stretch of the plan as the key, itself included."""
        self._unplanned: deque[Request] = deque()
        """Waiting requests that are placed by load: those without a forecast, and those of a plan that says so."""
        self._turns: deque[Request] = deque()
        """Waiting turns of episodes."""
        self._corrected_at = -1
        """Number of unfinished requests at the last correction."""
        self._looked_at: dict[str, Remaining] = {}
        """Remaining lengths of running requests, by instance; see `_remaining`."""
        self._ends: dict[str, float] = {}

    @property
    def waiting(self) -> int:
        """Number of requests without an instance's slot."""
        return super().waiting + len(self._unplanned) + len(self._turns)

    def submit(self, requests: Iterable[Request]) -> None:
        """Add requests; turns and those without a forecast are kept out of the plan."""
        for request in requests:
            if request.turn:
                self._turns.append(request)
            else:
                (self._unplanned if request.forecast is None else self._new).append(request)

    def training_at(self, tokens_s: float) -> None:
        """Record the trainer's rate; see `Fleet.training_at`."""
        if self.objective is not None:
            self.objective = Streamed(tokens_s)

    def withdraw(self, request_ids: Set[str]) -> None:
        """Drop requests that are no longer wanted; see `Fleet.withdraw`."""
        self._unplanned = self.without(self._unplanned, request_ids)
        self._turns = self.without(self._turns, request_ids)
        super().withdraw(request_ids)

    def decide(self, produced: TokenProgress | None = None) -> list[Assignment]:
        """Place turns by load, plan new requests, then fill slots from the queues."""
        if self._new:  # what a plan has left to load is planned again beside them
            self._new = [request for request in self._unplanned if request.forecast is not None] + self._new
            self._unplanned = deque(request for request in self._unplanned if request.forecast is None)
        return self.place_by_load(self._turns) + super().decide(produced)

    def fill(self) -> list[Assignment]:
        """Fill each instance from the queues of its whole stretch, then place unplanned requests by load."""
        decisions = []
        if any(self.queues.values()):
            able = [name for name in self.queues if self.instances[name].free > 0]
            for name in sorted(able, key=lambda name: len(self.instances[name].running)):
                decisions += self._fill_from(name, [mate for mate in self._mates.get(name, ()) if mate in self.queues])
        return decisions + self.place_by_load(self._unplanned)

    def make_queues(self, requests: Sequence[Request], produced: TokenProgress | None) -> None:
        """Plan the requests beside those that run, and fill the queues from the plan.

        If these are more than `MOST_PLANNED` together, all are left to placement by load.
        """
        if len(requests) + len(self.where) > MOST_PLANNED:
            self.plan = None
            self._unplanned.extend(requests)
            return
        # of identical instances the first gets the longest requests, so those of the tail pool come first
        names = sorted(self.instances, key=lambda name: self.instances[name].pool != TAIL)
        instances = [self.instances[name] for name in names]
        ordered = longest_first(ahead_of(requests, produced, self.longest))
        own = {request.request_id: request for request in requests}
        forecasts = [request.forecast for request in ordered if request.forecast is not None]
        self._changed(*self.instances.values())
        running = [self._remaining(instance, produced) for instance in instances]
        waiting, *beside = same_width([equally_likely(forecasts), *(some.values for some in running)])
        workers = [Worker(instance.assumed_curve, instance.slots) for instance in instances]
        arrived = {request.request_id: place for place, request in enumerate(requests)}
        alone = [own[request.request_id].prompt_tokens for request in ordered]
        kept = [request.prompt_tokens - prompt for request, prompt in zip(ordered, alone, strict=True)]
        prompts = PromptGroups([request.group_id for request in ordered], alone, kept)
        self.plan = plan(
            waiting,
            workers,
            limit=self.longest,
            running=beside,
            tails=tails_of(forecasts),
            prompts=prompts,
            arrivals=[arrived[request.request_id] for request in ordered],
            objective=self.objective,
            contexts=np.concatenate([prompts.begin, *(some.contexts for some in running)]),
            by_load=self._dealt_by_load(names, requests, ordered),
            longest_by_load=None if self._alike else self._dealt_by_load(names, ordered, ordered),
        )
        if self.plan.kind == BY_LOAD:
            self._unplanned.extend(requests)
            return
        if self.plan.kind == LONGEST_BY_LOAD:
            self._unplanned.extend(own[request.request_id] for request in ordered)
            return
        self.ranks = {request.request_id: rank for request, rank in zip(ordered, self.plan.ranks, strict=True)}
        self._mates = {names[seat]: [names[mate] for mate in mates] for mates in self.plan.stretches for seat in mates}
        for seat, (name, hand) in enumerate(zip(names, self.plan.queues, strict=True)):
            route = TAIL if seat in self.plan.tail else REGULAR
            self.queues[name].extend((own[ordered[number].request_id], route) for number in hand)

    def _dealt_by_load(
        self, names: Sequence[str], requests: Sequence[Request], ordered: Sequence[Request]
    ) -> list[list[int]]:
        """Return, by instance, the places in `ordered` of the requests that placement by load would give it."""
        trial, waiting = self.trial(), deque(requests)
        place = {request.request_id: number for number, request in enumerate(ordered)}
        dealt: dict[str, list[int]] = {name: [] for name in names}
        for start in trial.place_by_load(waiting):
            dealt[start.instance].append(place[start.request_id])
        full = [name for name in names if trial.instances[name].free < 1] or names
        for number, request in enumerate(waiting):  # any of them may start it
            dealt[full[number % len(full)]].append(place[request.request_id])
        return list(dealt.values())

    def correct(self, produced: TokenProgress | None) -> list[Assignment]:
        """Move requests of the instance that is predicted to end last to instances with free slots and nothing
        waiting."""
        unfinished = len(self.where) + self.waiting
        if len(self.instances) < 2 or abs(unfinished - self._corrected_at) < max(1, unfinished * CORRECT_EVERY):
            return []
        self._corrected_at = unfinished
        self._looked_at.clear()
        self._ends.clear()
        idle = [i for i in self.instances.values() if i.free > 0 and not self.queues.get(i.name)]
        decisions: list[Assignment] = []
        for target in sorted(idle, key=lambda instance: len(instance.running)):
            if donor := max((name for name, queue in self.queues.items() if queue), key=self._queued, default=None):
                # waiting requests first: they need no second prefill
                decisions.extend(self._take_waiting(target, self.instances[donor], produced))
            elif self.migrate and produced is not None and not target.running and not decisions:
                decisions.extend(self._take_running(target, produced))
        return decisions

    def _queued(self, name: str) -> int:
        return len(self.queues[name])

    def _take_waiting(self, target: Instance, donor: Instance, produced: TokenProgress | None) -> list[Assignment]:
        """Move requests from the end of the donor's queue (its shortest) to the target."""
        queue = self.queues[donor.name]
        waiting = [request for request, _ in reversed(queue)]
        done = [produced(request.request_id) if produced else 0.0 for request in waiting]
        going = Remaining.of(waiting, done, self.longest)
        running = self._remaining(donor, produced)
        count = self._best_count(target, donor, self._remaining(target, produced), going, running, moved=False)
        taken = [queue.pop() for _ in range(count)]
        self._changed(target, donor)
        return [self.start(request, target, route) for request, route in taken]

    def _take_running(self, target: Instance, produced: TokenProgress) -> list[Assignment]:
        """Move running requests, longest first, from the instance that is predicted to end last to the target."""
        donors = [
            instance
            for instance in self.instances.values()
            if len(instance.running) > 1 and any(request.forecast for request in instance.running.values())
        ]
        if not donors:
            return []
        last = max(donors, key=lambda donor: self._end(donor, produced))
        rests = self._remaining(last, produced)
        order = np.argsort(-rests.values.mean(axis=1), kind="stable")
        known = np.asarray([request.forecast is not None for request in rests.requests])
        going, fixed = rests.take(order[known[order]]), rests.take(order[~known[order]])
        count = self._best_count(target, last, rests.take([]), going, fixed, moved=True)
        self._changed(target, last)
        return [self.start(request, target, TAIL) for request in going.requests[:count]]

    def _best_count(
        self,
        target: Instance,
        donor: Instance,
        here: Remaining,
        going: Remaining,
        fixed: Remaining,
        moved: bool,
    ) -> int:
        """Return how many requests should go from donor to target.

        0 unless the later of both ends then comes earlier, for running requests by `MOVE_GAIN`.

        Args:
            target: instance that they would go to.
            donor: instance that they are on.
            here: the target's requests.
            going: requests that may go, in this order.
            fixed: the donor's other requests.
            moved: whether they already run, so that the target has to prefill them.
        """
        best, chosen = (fixed + going).time_on(donor) * (1 - (MOVE_GAIN if moved else 0.0)), 0
        most = min(len(going), target.free)
        per_token = target.assumed_curve.per_prefill_token if moved else 0.0
        for count in sorted({max(1, most >> shift) for shift in range(MOVES_LOOKED_AT)}) if most else ():
            gone, stays = going.take(range(count)), fixed + going.take(range(count, len(going)))
            reading = per_token * float(gone.contexts.sum())
            later = reading + (here + gone).time_on(target)
            if later < best and (later := max(later, stays.time_on(donor))) < best:
                best, chosen = later, count
        return chosen

    def _remaining(self, instance: Instance, produced: TokenProgress | None) -> Remaining:
        """Return what is left of an instance's running requests, cached during one correction."""
        if instance.name not in self._looked_at:
            running = list(instance.running.values())
            done = [produced(request.request_id) if produced else 0.0 for request in running]
            self._looked_at[instance.name] = Remaining.of(running, done, self.longest)
        return self._looked_at[instance.name]

    def _end(self, instance: Instance, produced: TokenProgress | None) -> float:
        """Return the expected seconds until an instance's running requests have ended, cached during one correction."""
        if instance.name not in self._ends:
            self._ends[instance.name] = self._remaining(instance, produced).time_on(instance)
        return self._ends[instance.name]

    def _changed(self, *instances: Instance) -> None:
        for instance in instances:
            self._looked_at.pop(instance.name, None)
            self._ends.pop(instance.name, None)


offer("algorithm2", "StreamRL's Algorithm 2 as printed (sum of both pools)", lambda _: Algorithm2())
offer("algorithm2-max", "Algorithm 2 with the later of both pools", lambda _: Algorithm2("max"))
offer(
    "skew-aware-static",
    "skew-aware without moving running requests",
    lambda of: SkewAware(False, of.longest, of.affinity, of.objective),
)
offer(
    "skew-aware",
    "the cheapest plan by predicted lengths for what the schedule waits for, corrected while it runs",
    lambda of: SkewAware(True, of.longest, of.affinity, of.objective),
)
