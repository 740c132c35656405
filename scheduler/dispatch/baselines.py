"""Policies of other systems, for comparison: random, round-robin, two choices, least-loaded, longest-first."""

from __future__ import annotations

import heapq
import random
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Set

from scheduler.dispatch.policy import Assignment, DispatchPolicy, Request, TokenProgress
from scheduler.dispatch.policy_kinds import offer


class LeastLoaded(DispatchPolicy):
    """Data-parallel load balancing: every request is placed by load (see `Fleet`)."""

    def __init__(self, affinity: int = 0) -> None:
        super().__init__(affinity)
        self._waiting: deque[Request] = deque()

    @property
    def waiting(self) -> int:
        """Number of requests without an instance."""
        return len(self._waiting)

    def submit(self, requests: Iterable[Request]) -> None:
        """Add requests to be placed."""
        self._waiting.extend(requests)

    def withdraw(self, request_ids: Set[str]) -> None:
        """Drop requests that are no longer wanted; see `Fleet.withdraw`."""
        self._waiting = self.without(self._waiting, request_ids)
        super().withdraw(request_ids)

    def decide(self, produced: TokenProgress | None = None) -> list[Assignment]:
        """Place waiting requests while there are free slots."""
        return self.place_by_load(self._waiting)


class LongestFirst(DispatchPolicy):
    """Least-loaded dispatch that starts the longest expected request first; those without a forecast go last."""

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[float, int, Request]] = []
        self._count = 0

    @property
    def waiting(self) -> int:
        """Number of requests without an instance."""
        return len(self._heap)

    def submit(self, requests: Iterable[Request]) -> None:
        """Add requests to be placed."""
        for request in requests:
            self._count += 1
            heapq.heappush(self._heap, (-request.expected, self._count, request))

    def withdraw(self, request_ids: Set[str]) -> None:
        """Drop requests that are no longer wanted; see `Fleet.withdraw`."""
        self._heap = [entry for entry in self._heap if entry[2].request_id not in request_ids]
        heapq.heapify(self._heap)
        super().withdraw(request_ids)

    def decide(self, produced: TokenProgress | None = None) -> list[Assignment]:
        """Place waiting requests while there are free slots."""
        decisions = []
        while self._heap and (emptiest := self.next_free(len(self._heap))) is not None:
            decisions.append(self.start(heapq.heappop(self._heap)[2], emptiest))
        return decisions


class _InTurn(DispatchPolicy):
    """Binds each request to an instance at submission, whatever the load; first come, first served per instance."""

    def __init__(self) -> None:
        super().__init__()
        self._queues: dict[str, deque[Request]] = {}
        self._unbound: deque[Request] = deque()
        self._ready: set[str] = set()
        """Instances whose queue or slots have changed."""

    @property
    def waiting(self) -> int:
        """Number of requests without a slot."""
        return len(self._unbound) + sum(map(len, self._queues.values()))

    @abstractmethod
    def _choose(self, names: list[str]) -> str:
        """Return the instance that the next request is bound to."""

    def submit(self, requests: Iterable[Request]) -> None:
        """Bind requests to instances; if there are none, as soon as one has joined."""
        self._unbound.extend(requests)
        self._bind()

    def _bind(self) -> None:
        names = list(self.instances)
        while names and self._unbound:
            name = self._choose(names)
            self._queues.setdefault(name, deque()).append(self._unbound.popleft())
            self._ready.add(name)

    def leave(self, instance: str) -> list[str]:
        """Remove an instance; what waited for it is returned as well (see `Fleet.leave`)."""
        waiting = [request.request_id for request in self._queues.pop(instance, ())]
        return super().leave(instance) + waiting

    def withdraw(self, request_ids: Set[str]) -> None:
        """Drop requests that are no longer wanted; see `Fleet.withdraw`."""
        self._unbound = self.without(self._unbound, request_ids)
        self._queues = {name: self.without(queue, request_ids) for name, queue in self._queues.items()}
        super().withdraw(request_ids)

    def _release(self, request_id: str) -> None:
        if request_id in self.where:
            self._ready.add(self.where[request_id].name)
        super()._release(request_id)

    def decide(self, produced: TokenProgress | None = None) -> list[Assignment]:
        """Place waiting requests while their instances have free slots."""
        self._bind()
        decisions = []
        for name in sorted(self._ready):
            queue, instance = self._queues.get(name), self.instances.get(name)
            while queue and instance is not None and instance.free > 0:
                decisions.append(self.start(queue.popleft(), instance))
        self._ready.clear()
        return decisions


class RoundRobin(_InTurn):
    """Instances in turn, in the order in which they joined."""

    def __init__(self) -> None:
        super().__init__()
        self._turn = 0

    def _choose(self, names: list[str]) -> str:
        self._turn += 1
        return names[(self._turn - 1) % len(names)]


class Random(_InTurn):
    """Any instance, with equal probability."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def _choose(self, names: list[str]) -> str:
        return self._random.choice(names)


class TwoChoices(_InTurn):
    """The less loaded of two random instances (Mitzenmacher 2001, "The power of two choices").

    It needs the load of two instances only, so it suits many dispatchers that know little of each other.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def _choose(self, names: list[str]) -> str:
        drawn = self._random.sample(names, min(2, len(names)))
        return min(drawn, key=lambda name: len(self._queues.get(name, ())) + len(self.instances[name].running))


offer("random", "any instance", lambda _: Random(), blind=True)
offer("round-robin", "instances in turn", lambda _: RoundRobin(), blind=True)
offer("two-choices", "the less loaded of two random instances", lambda _: TwoChoices(), blind=True)
offer(
    "least-loaded",
    "the instance with the fewest running requests, or of unequal ones that with the shortest steps",
    lambda of: LeastLoaded(of.affinity),
    blind=True,
)
offer("longest-first", "least-loaded, the longest expected request first", lambda _: LongestFirst())
