"""Dispatch policies: which request goes to which instance, and when.

A policy is a pure state machine: it is told what happens (`submit`, `started`, `finished`, `join`, `leave`) and asked
for decisions (`decide`). It has no clock and does no I/O; the live service, a simulator and tests run the same object.
A request is handed out only when its instance has a free slot, so the policy keeps the choice until it matters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Request:
    """What a policy knows of a completion to be generated."""

    request_id: str
    group_id: str
    """Siblings share a prompt, so an instance that has one has the prompt's KV cache already."""


@dataclass(frozen=True)
class Assignment:
    """A decision."""

    request_id: str
    instance: str
    route: str
    """'regular' or 'tail' (the predicted long ones)."""


@dataclass
class InstanceLoad:
    """A policy's view of an instance."""

    slots: int
    """Most requests at once."""
    running: set[str] = field(default_factory=set)


class DispatchPolicy(Protocol):
    """What the service needs of a policy."""

    def join(self, instance: str, slots: int) -> None:
        """An instance is ready for work."""

    def leave(self, instance: str) -> list[str]:
        """An instance is gone; returns the requests that it had."""

    def submit(self, requests: Iterable[Request]) -> None:
        """Requests wait to be placed."""

    def finished(self, request_id: str) -> None:
        """A request has ended; its slot is free."""

    def decide(self) -> list[Assignment]:
        """Places as many waiting requests as there are slots; each is returned once and counts as running."""


class LeastLoaded:
    """Data-parallel load balance: first come first served, to the instance with the fewest running requests.

    Siblings follow their group to the instance that already has it, as long as that instance is not more than
    `affinity` requests fuller than the emptiest one: a shared prompt is computed once per instance.
    """

    def __init__(self, affinity: int = 0) -> None:
        self.affinity = affinity
        self.instances: dict[str, InstanceLoad] = {}
        self._waiting: deque[Request] = deque()
        self._where: dict[str, tuple[str, str]] = {}  # request -> (instance, group)
        self._groups: dict[str, str] = {}  # group -> instance that has it

    @property
    def waiting(self) -> int:
        """Requests without an instance."""
        return len(self._waiting)

    def join(self, instance: str, slots: int) -> None:
        """An instance is ready for work.

        Raises:
            ValueError: it has no slots, or is known already.
        """
        if slots < 1:
            raise ValueError(f"instance {instance} has {slots} slots")
        if instance in self.instances:
            raise ValueError(f"instance {instance} has joined already")
        self.instances[instance] = InstanceLoad(slots)

    def leave(self, instance: str) -> list[str]:
        """An instance is gone; returns the requests that it had, for the caller to submit again."""
        load = self.instances.pop(instance)
        for request_id in load.running:
            del self._where[request_id]
        self._groups = {group: where for group, where in self._groups.items() if where != instance}
        return sorted(load.running)

    def submit(self, requests: Iterable[Request]) -> None:
        """Requests wait to be placed."""
        self._waiting.extend(requests)

    def finished(self, request_id: str) -> None:
        """A request has ended; one that is unknown (its instance left) is ignored."""
        place = self._where.pop(request_id, None)
        if place is not None:
            self.instances[place[0]].running.discard(request_id)

    def decide(self) -> list[Assignment]:
        """Places waiting requests while there are free slots."""
        decisions = []
        while self._waiting:
            free = {name: load for name, load in self.instances.items() if len(load.running) < load.slots}
            if not free:
                break
            request = self._waiting.popleft()
            emptiest = min(free, key=lambda name: (len(free[name].running), name))
            home = self._groups.get(request.group_id)
            if home in free and len(free[home].running) <= len(free[emptiest].running) + self.affinity:
                chosen = home
            else:
                chosen = emptiest
            self.instances[chosen].running.add(request.request_id)
            self._where[request.request_id] = (chosen, request.group_id)
            self._groups[request.group_id] = chosen
            decisions.append(Assignment(request.request_id, chosen, "regular"))
        if not self._waiting and not self._where:
            self._groups.clear()  # nothing is under way: no group can have more siblings to place
        return decisions
