"""What every dispatch policy is: a pure state machine that places requests on instances.

It is told what happens (`join`, `leave`, `submit`, `finished`) and asked for decisions (`decide`). It has no clock and
does no I/O: the live service, the simulator and the tests run the same object. A request is handed out only when its
instance has a free slot, so a policy keeps the choice until it matters. It may also move a request that runs
(`Assignment.moved`): its tokens are kept, its prompt and tokens are read in again.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from scheduler.cost import StepCurve
from scheduler.forecast import Forecast

REGULAR, TAIL = "regular", "tail"
"""Routes: where a request goes that is not, or is, predicted to be long."""

Progress = Callable[[str], float]
"""Tokens that a running request has produced; 0 for one that has just been placed."""


@dataclass(frozen=True)
class Request:
    """What a policy knows of a completion to be generated."""

    request_id: str
    group_id: str
    """Siblings share a prompt, so an instance that has one has the prompt's KV cache already."""
    forecast: Forecast | None = None
    """Of its output length; None: nothing is known, or nothing that is trusted."""
    prompt_tokens: int = 0


@dataclass(frozen=True)
class Assignment:
    """A decision."""

    request_id: str
    instance: str
    route: str
    """'regular' or 'tail' (the predicted long ones)."""
    moved: bool = False
    """The request runs already, on another instance, and goes on at this one."""


@dataclass
class Instance:
    """A policy's view of an instance."""

    name: str
    slots: int
    """Most requests at once."""
    curve: StepCurve | None = None
    """Its step time; None: not known."""
    pool: str = REGULAR
    running: dict[str, Request] = field(default_factory=dict)

    @property
    def free(self) -> int:
        """Slots without a request."""
        return self.slots - len(self.running)


class DispatchPolicy(Protocol):
    """What the service and the simulator need of a policy."""

    def join(self, instance: str, slots: int, curve: StepCurve | None = None, pool: str = REGULAR) -> None:
        """An instance is ready for work."""

    def leave(self, instance: str) -> list[str]:
        """An instance is gone; returns the requests that it had."""

    def submit(self, requests: Iterable[Request]) -> None:
        """Requests wait to be placed."""

    def finished(self, request_id: str) -> None:
        """A request has ended; its slot is free."""

    def decide(self, produced: Progress | None = None) -> list[Assignment]:
        """Places as many waiting requests as there are slots; each is returned once and counts as running.

        Args:
            produced: tokens that a running request has produced, where the caller knows; moves need it.
        """

    @property
    def waiting(self) -> int:
        """Requests without an instance."""


class Fleet:
    """The bookkeeping that policies share: instances, who runs where, and which instance is emptiest."""

    def __init__(self) -> None:
        self.instances: dict[str, Instance] = {}
        self.where: dict[str, Instance] = {}
        """Instance of every running request."""
        self._by_load: list[tuple[int, str]] = []
        """Heap of (running, name), with entries that are out of date: see `emptiest`."""

    def join(self, instance: str, slots: int, curve: StepCurve | None = None, pool: str = REGULAR) -> None:
        """An instance is ready for work.

        Raises:
            ValueError: it has no slots, or is known already.
        """
        if slots < 1:
            raise ValueError(f"instance {instance} has {slots} slots")
        if instance in self.instances:
            raise ValueError(f"instance {instance} has joined already")
        self.instances[instance] = Instance(instance, slots, curve, pool)
        heapq.heappush(self._by_load, (0, instance))

    def leave(self, instance: str) -> list[str]:
        """An instance is gone; returns the requests that it had, for the caller to submit again."""
        gone = self.instances.pop(instance)
        for request_id in gone.running:
            del self.where[request_id]
        return sorted(gone.running)

    def finished(self, request_id: str) -> None:
        """A request has ended; one that is unknown (its instance left) is ignored."""
        instance = self.where.pop(request_id, None)
        if instance is not None:
            del instance.running[request_id]
            heapq.heappush(self._by_load, (len(instance.running), instance.name))

    def start(self, request: Request, instance: Instance, route: str = REGULAR) -> Assignment:
        """Gives a request a slot; one that runs elsewhere leaves its slot there."""
        moved = request.request_id in self.where
        if moved:
            self.finished(request.request_id)
        instance.running[request.request_id] = request
        self.where[request.request_id] = instance
        heapq.heappush(self._by_load, (len(instance.running), instance.name))
        return Assignment(request.request_id, instance.name, route, moved)

    def emptiest(self) -> Instance | None:
        """The instance with the fewest running requests that has a free slot (ties: by name), or None."""
        while self._by_load:
            load, name = self._by_load[0]
            instance = self.instances.get(name)
            if instance is not None and len(instance.running) == load and instance.free > 0:
                return instance
            heapq.heappop(self._by_load)  # out of date, or full: then it comes back when a request ends
        return None
