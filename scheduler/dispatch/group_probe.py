"""Group probes: one completion of each prompt starts first, and its length improves the forecasts of its siblings.

Completions of one prompt (a group) have similar lengths, and the first one that ends predicts the others better than
the prompt's text does. So one request of each group, its probe, starts before everything else, on the emptiest
instance. The others are planned as in `SkewAware` with what is known of them. Whenever enough siblings have ended, the
forecasts of those that still wait or run are updated (`Forecast.given_siblings`), and the waiting ones are planned
again. Nothing is held back for a probe: a slot that no probe needs takes other requests.

A request without a forecast gets one as soon as a sibling and requests of another group have ended: its siblings'
lengths, with the lengths of everything that has ended or still runs as the prior (`Forecast.observed`). Until then it
is placed by load. Turns of episodes are neither probed nor learned from: those of one group are at different places of
their episodes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace

from scheduler.cost.length_forecast import Forecast
from scheduler.dispatch.dispatch_objective import MAKESPAN, DispatchObjective
from scheduler.dispatch.planned import SkewAware
from scheduler.dispatch.policy import REGULAR, Assignment, Instance, Request, TokenProgress
from scheduler.dispatch.policy_kinds import offer

LIKENESS = 0.5
"""Intraclass correlation of log lengths around their forecasts. Half of the variance is the prompt's and shared by
siblings, half is sampling noise.
"""
LENGTHS_KEPT = 4096
"""Number of latest lengths that the forecast of requests without one is made from."""
REPLAN_EVERY = 0.05
"""Share of the open groups that must have new lengths before waiting requests are planned again: a plan takes
milliseconds.
"""


@dataclass
class _Group:
    """Unfinished completions of one prompt, and the lengths of those that have ended."""

    open: dict[str, Request] = field(default_factory=dict)
    """Unfinished requests as they were submitted."""
    probe: str | None = None
    lengths: list[float] = field(default_factory=list)
    """Lengths of the requests that have ended."""


class GroupProbe(SkewAware):
    """Skew-aware dispatch that starts one probe of each group first and learns its siblings' lengths from it."""

    def __init__(
        self,
        longest: float = math.inf,
        affinity: int = 0,
        objective: DispatchObjective = MAKESPAN,
    ) -> None:
        """Create a policy without instances.

        Args:
            longest: largest number of tokens that a request may produce (the run's limit).
            affinity: affinity of probes and of requests without a forecast, see `Fleet`.
            objective: what plans make small.
        """
        super().__init__(True, longest, affinity, objective)
        self.likeness = LIKENESS
        self._groups: dict[str, _Group] = {}
        self._probes: deque[Request] = deque()
        self._news: set[str] = set()
        """Groups of which a request has ended since the last plan."""
        self._ended: deque[float] = deque(maxlen=LENGTHS_KEPT)
        """Lengths of the newest requests that have ended."""
        self._usual: Forecast | None = None
        """Forecast of a request of which nothing is known, as of the last plan; None: too few have ended."""

    @property
    def waiting(self) -> int:
        """Number of requests without an instance's slot."""
        return super().waiting + len(self._probes)

    def submit(self, requests: Iterable[Request]) -> None:
        """Add requests; the first request of a group without a probe or a known length becomes its probe."""
        others = []
        for request in requests:
            if request.turn:
                others.append(request)
                continue
            group = self._groups.setdefault(request.group_id, _Group())
            group.open[request.request_id] = request
            if group.probe is None and not group.lengths:
                group.probe = request.request_id
                self._probes.append(request)
            else:
                others.append(self._informed(request))
        super().submit(others)

    def start(self, request: Request, instance: Instance, route: str = REGULAR) -> Assignment:
        """Give a request a slot; see `Fleet.start`."""
        if not request.turn:  # one that went on while its instance was away starts again without being submitted
            self._groups.setdefault(request.group_id, _Group()).open.setdefault(request.request_id, request)
        return super().start(request, instance, route)

    def leave(self, instance: str) -> list[str]:
        """Remove an instance; a group whose probe ran there gets another one."""
        gone = self.instances[instance].running.values()
        self._forget({request.request_id: request.group_id for request in gone if not request.turn})
        return super().leave(instance)

    def withdraw(self, request_ids: Set[str]) -> None:
        """Drop requests that are no longer wanted; see `Fleet.withdraw`."""
        self._probes = self.without(self._probes, request_ids)
        self._forget({r: group_id for group_id, group in self._groups.items() for r in group.open if r in request_ids})
        super().withdraw(request_ids)

    def _forget(self, gone: Mapping[str, str]) -> None:
        """Forget requests that are gone, given as request -> group."""
        for request_id, group_id in gone.items():
            group = self._groups[group_id]
            del group.open[request_id]
            if group.probe == request_id:
                group.probe = None
            self._drop_empty(group_id)

    def finished(self, request_id: str, length: float | None = None) -> None:
        """Free a request's slot; its siblings learn from the length."""
        instance = self.where.get(request_id)
        if instance is not None and not (request := instance.running[request_id]).turn:
            group_id = request.group_id
            group = self._groups[group_id]
            del group.open[request_id]
            if length is not None:
                group.lengths.append(length)
                self._ended.append(length)
                self._news.add(group_id)
            self._drop_empty(group_id)
        super().finished(request_id, length)

    def _drop_empty(self, group_id: str) -> None:
        if not self._groups[group_id].open:
            del self._groups[group_id]
            self._news.discard(group_id)

    def decide(self, produced: TokenProgress | None = None) -> list[Assignment]:
        """Place probes first, then everything else as `SkewAware` does."""
        decisions = self.place_by_load(self._probes)
        if len(self._news) > REPLAN_EVERY * len(self._groups):
            if len(self._ended) > 1:
                running = [request for one in self.instances.values() for request in one.running.values()]
                progress = [produced(request.request_id) for request in running if not request.turn] if produced else []
                self._usual = Forecast.observed(self._ended, progress, self.longest)
            self._learn()
        return decisions + super().decide(produced)

    def _learn(self) -> None:
        """Update the forecasts of the siblings of requests that have ended."""
        waiting = [request for queue in self.queues.values() for request, _ in queue] + list(self._unplanned)
        if any(request.group_id in self._news for request in waiting):
            for queue in self.queues.values():
                queue.clear()
            self._unplanned.clear()
            super().submit(self._informed(self._groups[r.group_id].open[r.request_id]) for r in waiting)
        for group_id in self._news:
            for request in self._groups[group_id].open.values():
                if (instance := self.where.get(request.request_id)) is not None:
                    instance.running[request.request_id] = self._informed(request)
        self._news.clear()

    def _informed(self, request: Request) -> Request:
        """Return the request with a forecast that its siblings' lengths have updated."""
        lengths = self._groups[request.group_id].lengths
        # what is usual must be known of other groups, too
        prior = request.forecast or (self._usual if len(self._ended) > len(lengths) else None)
        if not lengths or prior is None:
            return request
        return replace(request, forecast=prior.given_siblings(lengths, self.likeness))


offer(
    "group-probe",
    "skew-aware, one completion of each prompt first: its length informs the others' forecasts",
    lambda of: GroupProbe(of.longest, of.affinity, of.objective),
    learns=True,
)
