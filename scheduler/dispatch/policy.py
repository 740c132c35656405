"""What every dispatch policy is: a pure state machine that places requests on instances.

It is told what happens (`join`, `leave`, `submit`, `finished`) and asked for decisions (`decide`). It has no clock and
does no I/O: the live service, the simulator and the tests run the same object. A request is handed out only when its
instance has a free slot, so a policy keeps the choice until it matters. It may also move a request that runs
(`Assignment.moved`): its tokens are kept, its prompt and tokens are read in again.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from typing import Protocol

from scheduler.cost.decode import UNKNOWN_CURVE, StepCurve
from scheduler.cost.length_forecast import Forecast

REGULAR, TAIL = "regular", "tail"
"""Routes: where a request goes that is not, or is, predicted to be long."""

TokenProgress = Callable[[str], float]
"""Tokens that a running request has produced; 0 for one that has just been placed."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a policy knows of a completion to be generated."""

    request_id: str
    group_id: str
    """Siblings share a prompt, so an instance that has one has the prompt's KV cache already."""
    forecast: Forecast | None = None
    """Of its output length; None: nothing is known, or nothing that is trusted."""
    prompt_tokens: int = 0

    @property
    def expected(self) -> float:
        """Expected output length in tokens; 0 without a forecast, so that it sorts after all others."""
        return self.forecast.mean if self.forecast else 0.0


@dataclass(frozen=True, slots=True)
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
    """Its step time, as it is now; None: not known."""
    pool: str = REGULAR
    slowness: float = 1.0
    """Times as long as its steps take as they did when it joined."""
    running: dict[str, Request] = field(default_factory=dict)

    @property
    def assumed_curve(self) -> StepCurve:
        """Its step time, or a guess."""
        return self.curve or UNKNOWN_CURVE

    @property
    def load(self) -> float:
        """Requests that it would have with one more, each counted as often as it is slow."""
        return (len(self.running) + 1) * self.slowness

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

    def slow(self, instance: str, factor: float) -> None:
        """An instance's steps take `factor` times as long as the curve that it has joined with says (1: as long), so it
        is to get less (no less any more). One that is unknown is ignored."""

    def measured(self, instance: str, curve: StepCurve) -> None:
        """An instance's steps take as long as this curve says, in place of the one that it has joined with. One that is
        unknown is ignored."""

    def submit(self, requests: Iterable[Request]) -> None:
        """Requests wait to be placed."""

    def finished(self, request_id: str, length: float | None = None) -> None:
        """A request has ended; its slot is free.

        Args:
            request_id: which.
            length: tokens that it has produced, where the caller knows: its siblings' forecasts may learn from it.
        """

    def withdraw(self, request_ids: Set[str]) -> None:
        """These are wanted no more, whether they wait or run (put off to a later round, aborted); their slots are free.
        Unknown ones are ignored."""

    def decide(self, produced: TokenProgress | None = None) -> list[Assignment]:
        """Places as many waiting requests as there are slots; each is returned once and counts as running.

        Args:
            produced: tokens that a running request has produced, where the caller knows; moves need it.
        """

    @property
    def waiting(self) -> int:
        """Requests without an instance."""


class Fleet:
    """The bookkeeping that policies share: instances, who runs where, which instance is emptiest, and placing by load.

    Placing by load is first come first served, to the instance with the fewest running requests (`Instance.load`: one
    that is slow counts each of them for more). Siblings follow their group to the instance that already has it, as long
    as that instance is not more than `affinity` requests fuller than the emptiest one: a shared prompt is computed once
    per instance.
    """

    def __init__(self, affinity: int = 0) -> None:
        self.affinity = affinity
        self.instances: dict[str, Instance] = {}
        self.where: dict[str, Instance] = {}
        """Instance of every running request."""
        self._by_load: list[tuple[float, str]] = []
        """Heap of (load, name), with entries that are out of date: see `emptiest`."""
        self._homes: dict[str, str] = {}
        """Instance that a group was last placed on by load."""

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
        self._note_load(self.instances[instance])

    def leave(self, instance: str) -> list[str]:
        """An instance is gone; returns the requests that it had, for the caller to submit again."""
        gone = self.instances.pop(instance)
        self._homes = {group: home for group, home in self._homes.items() if home != instance}
        for request_id in gone.running:
            del self.where[request_id]
        return sorted(gone.running)

    def slow(self, instance: str, factor: float) -> None:
        """See `DispatchPolicy`."""
        if (known := self.instances.get(instance)) is not None and factor != known.slowness:
            known.curve = known.assumed_curve.scaled(factor / known.slowness)
            known.slowness = factor
            self._note_load(known)

    def measured(self, instance: str, curve: StepCurve) -> None:
        """See `DispatchPolicy`."""
        if (known := self.instances.get(instance)) is not None:
            known.curve = curve.scaled(known.slowness)
            self._note_load(known)

    def finished(self, request_id: str, length: float | None = None) -> None:
        """A request has ended; one that is unknown (its instance left) is ignored."""
        self._release(request_id)

    def withdraw(self, request_ids: Set[str]) -> None:
        """Frees the slots of those that run; a policy takes those that wait out of its own queues."""
        for request_id in request_ids:
            self._release(request_id)

    def _release(self, request_id: str) -> None:
        """Frees a request's slot."""
        instance = self.where.pop(request_id, None)
        if instance is not None:
            del instance.running[request_id]
            self._note_load(instance)

    def start(self, request: Request, instance: Instance, route: str = REGULAR) -> Assignment:
        """Gives a request a slot; one that runs elsewhere leaves its slot there."""
        moved = request.request_id in self.where
        if moved:
            self._release(request.request_id)
        instance.running[request.request_id] = request
        self.where[request.request_id] = instance
        self._note_load(instance)
        return Assignment(request.request_id, instance.name, route, moved)

    def emptiest(self) -> Instance | None:
        """The instance with the fewest running requests that has a free slot (ties: by name), or None."""
        while self._by_load:
            load, name = self._by_load[0]
            instance = self.instances.get(name)
            if instance is not None and instance.load == load and instance.free > 0:
                return instance
            heapq.heappop(self._by_load)  # out of date, or full: then it comes back when a request ends
        return None

    def place_by_load(self, waiting: deque[Request]) -> list[Assignment]:
        """Starts requests from the queue's head while there are free slots (see the class)."""
        decisions = []
        while waiting and (emptiest := self.emptiest()) is not None:
            request = waiting.popleft()
            home = self.instances.get(self._homes.get(request.group_id, ""))
            stays = home is not None and home.free > 0 and home.load <= emptiest.load + self.affinity
            chosen = home if stays and home is not None else emptiest
            self._homes[request.group_id] = chosen.name
            decisions.append(self.start(request, chosen))
        if not waiting and not self.where:
            self._homes.clear()  # nothing is under way: no group can have more siblings to place
        return decisions

    @staticmethod
    def without(waiting: Iterable[Request], request_ids: Set[str]) -> deque[Request]:
        """A queue, in its order, less these."""
        return deque(request for request in waiting if request.request_id not in request_ids)

    def _note_load(self, instance: Instance) -> None:
        if len(self._by_load) > 64 + 8 * len(self.instances):
            # a policy that never asks for the emptiest would let entries that are out of date pile up
            self._by_load = [(other.load, other.name) for other in self.instances.values()]
            heapq.heapify(self._by_load)
        else:
            heapq.heappush(self._by_load, (instance.load, instance.name))
