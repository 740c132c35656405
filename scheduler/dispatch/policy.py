"""Common parts of all dispatch policies: pure state machines that place requests on instances.

A policy is informed of events (`join`, `leave`, `submit`, `finished`) and asked for decisions (`decide`). It has no
clock and does no I/O, so the live service, the simulator and the tests run the same object. A request is handed out
only when its instance has a free slot, so the policy can change its choice until then. It may also move a running
request (`Assignment.moved`): its tokens are kept, and the new instance prefills its prompt and tokens again.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from scheduler.cost.decode import UNKNOWN_CURVE, StepCurve
from scheduler.cost.length_forecast import Forecast

REGULAR, TAIL = "regular", "tail"
"""Routes of requests that are not (regular) or are (tail) predicted to be long."""

HOMES_KEPT = 4096
"""Groups placed by load, the newest ones, of which it is known where they went: under `async` requests run all the time
until the run ends."""
LOOK_AHEAD = 32
"""Waiting turns among which one is looked for that may return to the instance with a free slot."""

ALIKE = 1.25
"""Ratio of the step times of two instances up to which placement by load takes them for equally fast: what two sound
measurements of one kind of instance may differ by."""

TokenProgress = Callable[[str], float]
"""Returns the number of tokens that a request has produced; a waiting one may bring some to its next instance."""


@dataclass(frozen=True, slots=True)
class Request:
    """A completion to generate, as far as a policy knows it."""

    request_id: str
    group_id: str
    """Group of the request. Siblings share a prompt, so an instance that has one already has the prompt's KV cache."""
    forecast: Forecast | None = None
    """Forecast of the output length; None if there is none that is trusted."""
    prompt_tokens: int = 0
    turn: bool = False
    """Whether it is a turn of an agent's episode. Turns come one at a time and go on as soon as they can: they are
    placed by load, before anything that waits for a plan."""
    home: str = ""
    """Instance that has the KV cache of the turn that this one extends; '': none has."""
    cached_tokens: int = 0
    """Prompt tokens that `home` need not prefill."""

    @property
    def expected(self) -> float:
        """Expected output length in tokens; 0 without a forecast, so that the request sorts after all others."""
        return self.forecast.mean if self.forecast else 0.0


@dataclass(frozen=True, slots=True)
class Assignment:
    """A decision to run a request on an instance."""

    request_id: str
    instance: str
    route: str
    """'regular', or 'tail' for requests that are predicted to be long."""
    moved: bool = False
    """True if the request already runs on another instance and continues on this one."""


@dataclass
class Instance:
    """A policy's view of an instance."""

    name: str
    slots: int
    """Largest number of requests that it runs at once."""
    curve: StepCurve | None = None
    """Its current step time; None if unknown."""
    pool: str = REGULAR
    slowness: float = 1.0
    """Ratio of its current step time to `usual`."""
    running: dict[str, Request] = field(default_factory=dict)
    usual: StepCurve | None = None
    """Its step time without `slowness`; None if unknown."""

    def __post_init__(self) -> None:
        self.usual = self.usual or self.curve

    @property
    def assumed_curve(self) -> StepCurve:
        """Its step time, or a default where it is unknown."""
        return self.curve or UNKNOWN_CURVE.scaled(self.slowness)

    @property
    def load(self) -> float:
        """Number of requests that it would run with one more, multiplied by its slowness."""
        return (len(self.running) + 1) * self.slowness

    def step_at(self, load: float) -> float:
        """Return the seconds of a step that it usually needs with so many requests; 0: its step time is unknown."""
        return _step_seconds(self.usual, load) if self.usual is not None else 0.0

    @property
    def free(self) -> int:
        """Number of slots without a request."""
        return self.slots - len(self.running)


def worth_returning(request: Request, home: Instance, other: Instance, affinity: int) -> bool:
    """Return whether a turn should go to the instance that has its KV cache, and not to a less loaded one.

    It should unless home is overloaded: full, or so much slower that the turn, expected to have n tokens, would lose
    more time there than the other instance needs to prefill what home has in its cache:

        n (base_home(b_home + 1) - base_other(b_other + 1)) <= cached_tokens * per_prefill_token_other

    Where length, step times or prefill time are not known, home may be at most `affinity` requests fuller (`near`).

    Args:
        request: the turn.
        home: the instance that has its KV cache.
        other: the emptiest instance with a free slot; may be the same.
        affinity: see `Fleet`.
    """
    if home.free < 1:
        return False
    here, there = home.curve, other.curve
    if request.forecast is None or here is None or there is None or not there.per_prefill_token:
        return near(home, other, affinity)
    slower = float(here.base(len(home.running) + 1) - there.base(len(other.running) + 1))
    return request.expected * slower <= request.cached_tokens * there.per_prefill_token


def near(home: Instance, other: Instance, affinity: int) -> bool:
    """Return whether home is at most `affinity` requests fuller than the other instance.

    If they differ in speed: whether a step with one more takes at most as long there as one of the other with
    `affinity` beyond it.
    """
    most = other.load + affinity
    if alike({home.usual, other.usual}):
        return home.load <= most
    return home.step_at(home.load) <= other.step_at(most)


def alike(curves: Set[StepCurve | None]) -> bool:
    """Return whether placement by load takes instances with these usual step times for equally fast.

    It does if one of them is unknown, or if all agree within `ALIKE` at each batch size of a curve.
    """
    return len(curves) < 2 or _agree(frozenset(curves))


@lru_cache(maxsize=4096)
def _step_seconds(curve: StepCurve, load: float) -> float:
    return float(curve.base(load))


@lru_cache(maxsize=256)
def _agree(curves: frozenset[StepCurve | None]) -> bool:
    known = [curve for curve in curves if curve is not None]
    sizes = sorted({size for curve in known for size in curve.batches})
    seconds = np.asarray([curve.base(sizes) for curve in known])
    return len(known) < len(curves) or bool(np.all(seconds.max(axis=0) <= ALIKE * seconds.min(axis=0)))


class Fleet:
    """Bookkeeping that policies share: instances, each request's instance, the emptiest instance, placement by load.

    Placement by load is first come, first served, on the instance with the fewest running requests (`Instance.load`: on
    one that became slow each request counts for more). Where instances differ in speed (`alike`), it is the instance
    whose steps are shortest with one request more; if clearly faster ones are full, requests wait for these as long as
    they are likely to end earlier there. Siblings follow their group to the instance that already has it, as long as
    that instance is at most `affinity` requests fuller than the emptiest one (`near`), so that a shared prompt is
    computed once per instance. Turns of episodes return to the instance that has their KV cache (`worth_returning`).
    """

    def __init__(self, affinity: int = 0) -> None:
        self.affinity = affinity
        self.instances: dict[str, Instance] = {}
        self.where: dict[str, Instance] = {}
        """Instance of every running request."""
        self._by_load: list[tuple[float, float, str]] = []
        """Heap of (seconds of a step, load, name), some entries out of date: see `emptiest`."""
        self._alike = True
        """Whether all instances are equally fast; the seconds are then 0."""
        self._homes: dict[str, str] = {}
        """Instance on which each group was last placed by load, of the last `HOMES_KEPT` groups."""

    def join(self, instance: str, slots: int, curve: StepCurve | None = None, pool: str = REGULAR) -> None:
        """Add an instance that is ready for work.

        Raises:
            ValueError: it has no slots, or has joined already.
        """
        if slots < 1:
            raise ValueError(f"instance {instance} has {slots} slots")
        if instance in self.instances:
            raise ValueError(f"instance {instance} has joined already")
        self.instances[instance] = Instance(instance, slots, curve, pool)
        self._compare()

    def leave(self, instance: str) -> list[str]:
        """Remove an instance that is gone and return the requests that it had, for the caller to submit again."""
        gone = self.instances.pop(instance)
        self._homes = {group: home for group, home in self._homes.items() if home != instance}
        for request_id in gone.running:
            del self.where[request_id]
        self._compare()
        return sorted(gone.running)

    def slow(self, instance: str, factor: float) -> None:
        """Record that an instance's steps take `factor` times as long as the curve that it joined with (1: as long).

        A slow instance gets less work until its factor falls again. An unknown instance is ignored.
        """
        if (known := self.instances.get(instance)) is not None and factor != known.slowness:
            known.curve = known.usual.scaled(factor) if known.usual is not None else None
            known.slowness = factor
            self._note_load(known)

    def measured(self, instance: str, curve: StepCurve) -> None:
        """Replace the curve that an instance joined with by a measured one. An unknown instance is ignored."""
        if (known := self.instances.get(instance)) is not None:
            known.usual, known.curve = curve, curve.scaled(known.slowness)
            self._compare()

    def training_at(self, tokens_s: float) -> None:
        """Record how many tokens, prompts included, the trainer processes per second.

        Plans whose objective is the end of a streamed training use it from the next requests on; others ignore it.
        """

    def finished(self, request_id: str, length: float | None = None) -> None:
        """Free the slot of a request that has ended; an unknown one (its instance left) is ignored.

        Args:
            request_id: the request.
            length: tokens that it has produced, if the caller knows; the forecasts of its siblings may learn from it.
        """
        self._release(request_id)

    def withdraw(self, request_ids: Set[str]) -> None:
        """Drop requests that are no longer wanted (deferred to a later round, or aborted), waiting or running.

        Slots of those that run become free; each policy removes those that wait from its own queues. Unknown requests
        are ignored.
        """
        for request_id in request_ids:
            self._release(request_id)

    def _release(self, request_id: str) -> None:
        """Free a request's slot."""
        instance = self.where.pop(request_id, None)
        if instance is not None:
            del instance.running[request_id]
            self._note_load(instance)

    def start(self, request: Request, instance: Instance, route: str = REGULAR) -> Assignment:
        """Give a request a slot; if it runs elsewhere, free its slot there."""
        moved = request.request_id in self.where
        if moved:
            self._release(request.request_id)
        instance.running[request.request_id] = request
        self.where[request.request_id] = instance
        self._note_load(instance)
        return Assignment(request.request_id, instance.name, route, moved)

    def emptiest(self) -> Instance | None:
        """Return the least loaded instance that has a free slot (see the class; ties: by name), or None."""
        while self._by_load:
            entry = self._by_load[0]
            instance = self.instances.get(entry[-1])
            if instance is not None and instance.free > 0 and self._loaded(instance) == entry:
                return instance
            heapq.heappop(self._by_load)  # out of date, or full: a full instance gets a new entry when a request ends
        return None

    def next_free(self, waiting: int) -> Instance | None:
        """Return the instance on which one of so many waiting requests should start now.

        None: no instance has a free slot, or the slots of faster instances that are full are worth waiting for. They
        are if their steps are so short that even the last of the waiting requests would end earlier there, all having
        the same length and a slot becoming free as often as it does on average. A batch that has just begun frees
        none until its first answers end, so what is faster by less than `ALIKE` is not waited for.
        """
        found = self.emptiest()
        if found is None or self._alike:
            return found
        step = found.step_at(found.load)
        faster = [
            one
            for one in self.instances.values()
            if one.free < 1 and ALIKE * one.step_at(max(one.slots * one.slowness, found.load)) < step
        ]
        rate = sum(one.slots / one.step_at(one.slots * one.slowness) for one in faster)
        return None if faster and waiting + sum(one.slots for one in faster) < rate * step else found

    def place_by_load(self, waiting: deque[Request]) -> list[Assignment]:
        """Start requests from the head of the queue while there are free slots (see the class)."""
        decisions = []
        while waiting:
            at_home = waiting[0].home in self.instances  # its KV cache is there: it waits for no faster instance
            emptiest = self.emptiest() if at_home else self.next_free(len(waiting))
            if emptiest is None:
                break
            request = self._next(waiting, emptiest)
            chosen = emptiest
            if (home := self.instances.get(request.home)) is not None:
                chosen = home if worth_returning(request, home, emptiest, self.affinity) else emptiest
            elif (home := self.instances.get(self._homes.get(request.group_id, ""))) is not None:
                chosen = home if home.free > 0 and near(home, emptiest, self.affinity) else emptiest
            self._homes.pop(request.group_id, None)  # the one placed last comes last
            self._homes[request.group_id] = chosen.name
            if len(self._homes) > HOMES_KEPT:
                del self._homes[next(iter(self._homes))]
            decisions.append(self.start(request, chosen))
        if not waiting and not self.where:
            self._homes.clear()  # nothing runs, so no group can have more siblings to place
        return decisions

    def trial(self) -> Fleet:
        """Return a fleet with the same work, to place requests on that do not start."""
        made = Fleet(self.affinity)
        made._homes = dict(self._homes)
        for name, instance in self.instances.items():
            made.instances[name] = replace(instance, running=dict(instance.running))
        made._compare()
        return made

    def _next(self, waiting: deque[Request], emptiest: Instance) -> Request:
        """Remove and return the request to place next: the first one.

        If that is a turn whose home is full, a turn near it whose home is the emptiest instance goes before it. So
        where all slots are taken, turns still return; and the first one waits no longer than until its home is free.
        """
        home = self.instances.get(waiting[0].home)
        if home is not None and home.free < 1:
            for place in range(1, min(len(waiting), LOOK_AHEAD)):
                if waiting[place].home == emptiest.name:
                    request = waiting[place]
                    del waiting[place]
                    return request
        return waiting.popleft()

    @staticmethod
    def without(waiting: Iterable[Request], request_ids: Set[str]) -> deque[Request]:
        """Return a queue without the given requests, in its order."""
        return deque(request for request in waiting if request.request_id not in request_ids)

    def _loaded(self, instance: Instance) -> tuple[float, float, str]:
        load = instance.load
        return 0.0 if self._alike else instance.step_at(load), load, instance.name

    def _compare(self) -> None:
        """Note all loads anew, after instances or their step times have changed."""
        self._alike = alike({instance.usual for instance in self.instances.values()})
        self._by_load = [self._loaded(instance) for instance in self.instances.values()]
        heapq.heapify(self._by_load)

    def _note_load(self, instance: Instance) -> None:
        if len(self._by_load) > 64 + 8 * len(self.instances):
            # a policy that never calls `emptiest` would otherwise accumulate entries that are out of date
            self._by_load = [self._loaded(other) for other in self.instances.values()]
            heapq.heapify(self._by_load)
        else:
            heapq.heappush(self._by_load, self._loaded(instance))


class DispatchPolicy(Fleet, ABC):
    """A policy, as the service and the simulator use it."""

    @abstractmethod
    def submit(self, requests: Iterable[Request]) -> None:
        """Add requests to be placed."""

    @abstractmethod
    def decide(self, produced: TokenProgress | None = None) -> list[Assignment]:
        """Place as many waiting requests as there are slots; each is returned once and counts as running.

        Args:
            produced: returns the tokens that a request has produced, if the caller knows; moves need it.
        """

    @abstractmethod
    def withdraw(self, request_ids: Set[str]) -> None:
        """Drop requests that are no longer wanted: those that wait from the policy's own queues, others as here."""
        super().withdraw(request_ids)

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Number of requests without an instance."""
