"""Group probes: one completion of each prompt goes first, and what it turns out to be tells about its siblings.

Completions of one prompt (a group) have lengths that are alike, and the first that ends is the best predictor of the
others, better than the prompt's text. So of each group one request, its probe, starts before everything else, on the
emptiest instance. The others are planned as in `SkewAware` with what is known of them; whenever enough siblings have
ended, the forecasts of those that still wait or run are updated (`Forecast.given_siblings`), and the waiting ones are
planned again. Nothing is held back for a probe: a slot that no probe needs takes other requests.

A request without a forecast has, as soon as a sibling and requests of another group have ended, one from them: siblings
around the lengths of all that have ended so far. Before that it is placed by load.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace

from scheduler.cost.length_forecast import Forecast
from scheduler.dispatch.planned import SkewAware
from scheduler.dispatch.policy import Assignment, Request, TokenProgress

LIKENESS = 0.5
"""Intraclass correlation of log lengths around their forecasts: half of what a forecast misses is the prompt's, and
shared by siblings, half is sampling noise."""
REPLAN_EVERY = 0.05
"""Share of the groups under way that must have news before waiting requests are planned again: a plan takes
milliseconds."""


@dataclass
class _Group:
    """Completions of one prompt that have not ended, and what the others have shown."""

    open: dict[str, Request] = field(default_factory=dict)
    """As they were submitted."""
    probe: str | None = None
    lengths: list[float] = field(default_factory=list)
    """Of those that have ended."""


class GroupProbe(SkewAware):
    """See the module."""

    def __init__(
        self, migrate: bool = True, longest: float = math.inf, affinity: int = 0, likeness: float = LIKENESS
    ) -> None:
        """
        Args:
            migrate: whether running requests may move.
            longest: no request produces more tokens than this (the run's limit).
            affinity: of probes and of requests without a forecast, see `Fleet`.
            likeness: of siblings, see `Forecast.given_siblings`.
        """
        super().__init__(migrate, longest, affinity)
        self.likeness = likeness
        self._groups: dict[str, _Group] = {}
        self._probes: deque[Request] = deque()
        self._news: set[str] = set()
        """Groups of which a request has ended since the last plan."""
        self._seen = (0, 0.0, 0.0)
        """Of the log lengths of all that have ended: number, sum, sum of squares."""

    @property
    def waiting(self) -> int:
        """Requests without an instance's slot."""
        return super().waiting + len(self._probes)

    def submit(self, requests: Iterable[Request]) -> None:
        """See `SkewAware`; the first request of a group that nothing is known of becomes its probe."""
        others = []
        for request in requests:
            group = self._groups.setdefault(request.group_id, _Group())
            group.open[request.request_id] = request
            if group.probe is None and not group.lengths:
                group.probe = request.request_id
                self._probes.append(request)
            else:
                others.append(self._informed(request))
        super().submit(others)

    def leave(self, instance: str) -> list[str]:
        """See `SkewAware`; a group whose probe was there gets another one."""
        gone = self.instances[instance].running.values()
        self._forget({request.request_id: request.group_id for request in gone})
        return super().leave(instance)

    def withdraw(self, request_ids: Set[str]) -> None:
        """See `DispatchPolicy`."""
        self._probes = self.without(self._probes, request_ids)
        self._forget({r: group_id for group_id, group in self._groups.items() for r in group.open if r in request_ids})
        super().withdraw(request_ids)

    def _forget(self, gone: Mapping[str, str]) -> None:
        """gone: request -> group."""
        for request_id, group_id in gone.items():
            group = self._groups[group_id]
            del group.open[request_id]
            if group.probe == request_id:
                group.probe = None
            self._drop_empty(group_id)

    def finished(self, request_id: str, length: float | None = None) -> None:
        """See `Fleet`; siblings learn from the length."""
        if (instance := self.where.get(request_id)) is not None:
            group_id = instance.running[request_id].group_id
            group = self._groups[group_id]
            del group.open[request_id]
            if length is not None:
                group.lengths.append(length)
                log = math.log(max(length, 1.0))
                count, total, squares = self._seen
                self._seen = (count + 1, total + log, squares + log * log)
                self._news.add(group_id)
            self._drop_empty(group_id)
        super().finished(request_id, length)

    def _drop_empty(self, group_id: str) -> None:
        if not self._groups[group_id].open:
            del self._groups[group_id]
            self._news.discard(group_id)

    def decide(self, produced: TokenProgress | None = None) -> list[Assignment]:
        """Probes first, then as `SkewAware`."""
        decisions = self.place_by_load(self._probes)
        if len(self._news) > REPLAN_EVERY * len(self._groups):
            self._learn()
        return decisions + super().decide(produced)

    def _learn(self) -> None:
        """Updates the forecasts of the siblings of what has ended."""
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
        """With what its siblings have shown."""
        lengths = self._groups[request.group_id].lengths
        prior = request.forecast or self._prior(len(lengths))
        if not lengths or prior is None:
            return request
        return replace(request, forecast=prior.given_siblings(lengths, self.likeness))

    def _prior(self, siblings: int) -> Forecast | None:
        """Of a request without a forecast: the lengths of all that have ended, unless those are its siblings' alone."""
        count, total, squares = self._seen
        if count < max(2, siblings + 1):
            return None
        mean = total / count
        return Forecast.lognormal(mean, math.sqrt(max(0.0, squares / count - mean * mean)))
