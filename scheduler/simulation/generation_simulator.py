"""Discrete-event simulation of generation: the policy objects of the live service, on modelled instances.

An instance decodes its running requests together, one token each per step; a step takes `tau(batch, context)` of its
curve. Nothing changes between two events, so whole stretches of steps are taken at once:

    n steps at batch b from context c take   n base(b) + per_context_token (n c + b n^2 / 2)   seconds.

When a request is admitted, its prompt is prefilled first, which stalls the whole instance (siblings that come to an
instance that has their prompt pay nothing); a request that is moved has its prompt and tokens prefilled at its new
instance.
"""

from __future__ import annotations

import gc
import heapq
import math
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from scheduler.cost.decode import StepCurve
from scheduler.cost.length_forecast import Forecast
from scheduler.dispatch.policy import REGULAR, DispatchPolicy, Request


@dataclass(frozen=True)
class SimulatedRequest:
    """A completion to simulate."""

    request_id: str
    length: float
    """Tokens that it will produce."""
    group_id: str = ""
    prompt_tokens: int = 0
    arrival: float = 0.0
    """Arrival time in seconds."""
    forecast: Forecast | None = None
    """Forecast that the policy gets."""
    kept: float = 0.0
    """Tokens of its `length` that it kept when it was withdrawn; they are prefilled when it is admitted."""


@dataclass(frozen=True)
class SimulatedInstance:
    """An instance to simulate."""

    name: str
    curve: StepCurve
    slots: int
    pool: str = REGULAR
    doubtful: bool = False
    """Whether its step times are unreliable: measured beside other load, and not yet replaced by what work shows."""


@dataclass
class Outcome:
    """Result of a simulation; times in seconds from its start."""

    makespan: float
    """End of the last request."""
    finished: dict[str, float]
    """End of every request."""
    busy: dict[str, float]
    """Time in which each instance had something to do."""
    moves: int
    """Number of moves of running requests."""
    tokens: float
    """Tokens generated in all."""

    def ends(self) -> npt.NDArray[np.float64]:
        """Return the ends of all requests, ascending."""
        return np.sort(np.fromiter(self.finished.values(), dtype=np.float64))


@dataclass(slots=True)
class _Running:
    """A request on an instance."""

    request: SimulatedRequest
    end_step: float
    """The instance's step count at which it ends."""


@dataclass
class _Engine:
    """State of one simulated instance."""

    spec: SimulatedInstance
    tau: list[float]
    """base(b) for b = 0 .. slots."""
    now: float = 0.0
    steps: float = 0.0
    """Decode steps since the start."""
    context: float = 0.0
    """Tokens of context of all running requests."""
    stall: float = 0.0
    """Seconds of prefill or of a pause that are still to come."""
    busy: float = 0.0
    running: dict[str, _Running] = field(default_factory=dict)
    by_end: list[tuple[float, str]] = field(default_factory=list)
    """Heap of (end step, request), including entries of requests that were moved away."""
    prompts: dict[str, int] = field(default_factory=dict)
    """Groups whose prompt is in the KV cache, with the number of requests of each that run here."""
    epoch: int = 0
    """Number of changes, by which a planned end that is out of date is recognized."""

    def seconds_for(self, steps: float) -> float:
        """Return the seconds that this many steps take from here."""
        batch = len(self.running)
        extra = self.spec.curve.per_context_token
        return steps * self.tau[batch] + extra * (steps * self.context + batch * steps * steps / 2)

    def advance(self, now: float) -> None:
        """Work until `now`."""
        elapsed = now - self.now
        self.now = now
        if elapsed <= 0:
            return
        read = min(self.stall, elapsed)
        self.stall -= read
        if not self.running:
            return
        self.busy += elapsed
        elapsed -= read
        if elapsed <= 0:
            return
        batch, extra = len(self.running), self.spec.curve.per_context_token
        linear = self.tau[batch] + extra * self.context
        square = extra * batch / 2
        # square n^2 + linear n = elapsed
        steps = 2 * elapsed / (linear + math.sqrt(linear**2 + 4 * square * elapsed))
        self.steps += steps
        self.context += steps * batch

    def first(self) -> str | None:
        """Return the request that ends next if nothing changes."""
        by_end, running = self.by_end, self.running
        while by_end:
            end_step, request_id = by_end[0]
            found = running.get(request_id)
            if found is not None and found.end_step == end_step:
                return request_id
            heapq.heappop(by_end)
        return None

    def next_end(self) -> float | None:
        """Return the time of the next end; None: nothing runs."""
        if self.first() is None:
            return None
        return self.now + self.stall + self.seconds_for(max(0.0, self.by_end[0][0] - self.steps))

    def admit(self, request: SimulatedRequest, produced: float) -> None:
        """Start a request that has produced so many tokens elsewhere."""
        key = request.group_id or request.request_id
        shared = self.prompts.get(key, 0)
        read = produced if shared else request.prompt_tokens + produced
        self.prompts[key] = shared + 1
        self.stall += read * self.spec.curve.per_prefill_token
        end_step = self.steps + request.length - produced
        self.running[request.request_id] = _Running(request, end_step)
        heapq.heappush(self.by_end, (end_step, request.request_id))
        self.context += request.prompt_tokens + produced
        self.epoch += 1

    def remove(self, request_id: str) -> float:
        """Remove a request and return the tokens that it has produced."""
        gone = self.running.pop(request_id)
        produced = gone.request.length - max(0.0, gone.end_step - self.steps)
        self.context -= gone.request.prompt_tokens + produced
        key = gone.request.group_id or request_id
        self.prompts[key] -= 1
        if not self.prompts[key]:
            del self.prompts[key]
        self.epoch += 1
        return produced


@contextmanager
def uncollected() -> Iterator[None]:
    """Simulate without the garbage collector: a million objects live here, none in a cycle, and it would scan all."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class Simulation:
    """Simulates one fleet under one policy."""

    def __init__(self, policy: DispatchPolicy, instances: Sequence[SimulatedInstance]) -> None:
        """Add all instances to the policy.

        Raises:
            ValueError: there are no instances, or two have the same name.
        """
        if not instances:
            raise ValueError("nothing can be simulated: the list of instances is empty")
        self.policy = policy
        self.engines: dict[str, _Engine] = {}
        for spec in instances:
            policy.join(spec.name, spec.slots, spec.curve, spec.pool)
            self.engines[spec.name] = _Engine(spec, spec.curve.table(spec.slots).tolist())
        self.where: dict[str, _Engine] = {}
        self.requests: dict[str, SimulatedRequest] = {}
        self.moves = 0
        self._events: list[tuple[float, int, str]] = []  # (end, engine's epoch, engine)

    def run(self, requests: Iterable[SimulatedRequest]) -> Outcome:
        """Simulate until every request has ended.

        Raises:
            ValueError: two requests have the same id.
            RuntimeError: the policy leaves requests waiting although nothing runs.
        """
        arriving = sorted(requests, key=lambda request: request.arrival)
        with uncollected():
            ends = self._run(arriving)
        busy = {name: engine.busy for name, engine in self.engines.items()}
        tokens = sum(request.length for request in arriving)
        return Outcome(max(ends.values(), default=0.0), ends, busy, self.moves, tokens)

    def _run(self, arriving: Sequence[SimulatedRequest]) -> dict[str, float]:
        """Return the end of every request; `arriving` is sorted by arrival."""
        ends: dict[str, float] = {}
        position = 0
        while len(ends) < len(arriving):
            arrival = arriving[position].arrival if position < len(arriving) else math.inf
            if self.next_end() <= arrival < math.inf or position == len(arriving):
                now, request_id = self.finish_next()
                ends[request_id] = now
            else:
                first = position
                while position < len(arriving) and arriving[position].arrival == arrival:
                    position += 1
                self.submit(arriving[first:position], arrival)
        return ends

    def submit(self, requests: Sequence[SimulatedRequest], now: float) -> None:
        """Submit requests to the policy; their `arrival` is ignored.

        Raises:
            ValueError: two requests have the same id.
        """
        for request in requests:
            if request.request_id in self.requests:
                raise ValueError(f"two simulated requests have one id, {request.request_id!r}")
            self.requests[request.request_id] = request
        self.policy.submit(
            Request(
                r.request_id,
                r.group_id,
                r.forecast.beyond(r.kept) if r.forecast and r.kept else r.forecast,
                r.prompt_tokens + round(r.kept),
            )
            for r in requests
        )
        self._place(now)

    def next_end(self) -> float:
        """Return when the next request ends if nothing is submitted or withdrawn before; infinite: nothing runs."""
        while self._events and self.engines[self._events[0][2]].epoch != self._events[0][1]:
            heapq.heappop(self._events)
        return self._events[0][0] if self._events else math.inf

    def finish_next(self) -> tuple[float, str]:
        """Advance to the next end and return (time, request).

        Raises:
            RuntimeError: nothing runs.
        """
        if self.next_end() == math.inf:
            raise RuntimeError(f"{self.policy.waiting} requests wait, nothing runs, and the policy places none")
        now, _, name = heapq.heappop(self._events)
        engine = self.engines[name]
        request_id = self._finish(engine, now)
        self._place(now, [engine])
        return now, request_id

    def withdraw(self, request_ids: Set[str], now: float) -> dict[str, float]:
        """Remove waiting or running requests and return the tokens that each has, those of `kept` included."""
        kept, changed = {}, {}
        for request_id in sorted(request_ids):
            kept[request_id] = self.requests.pop(request_id).kept
            if (engine := self.where.pop(request_id, None)) is not None:
                engine.advance(now)
                kept[request_id] = engine.remove(request_id)
                changed[engine.spec.name] = engine
        self.policy.withdraw(request_ids)
        self._place(now, changed.values())
        return kept

    def pause(self, seconds: float, now: float) -> None:
        """Stop decoding on all instances for so many seconds; what an idle one is given meanwhile begins after them."""
        for engine in self.engines.values():
            engine.advance(now)
            engine.stall += seconds
            if engine.running:
                engine.epoch += 1
                self._plan(engine)

    def _finish(self, engine: _Engine, now: float) -> str:
        engine.advance(now)
        request_id = engine.first()
        assert request_id is not None
        engine.steps = max(engine.steps, engine.running[request_id].end_step)  # rounding
        engine.remove(request_id)
        del self.where[request_id]
        self.policy.finished(request_id, self.requests[request_id].length)
        return request_id

    def _place(self, now: float, touched: Iterable[_Engine] = ()) -> None:
        """Carry out the policy's decisions; `touched` are instances whose next end has changed already."""

        def produced(request_id: str) -> float:
            engine = self.where.get(request_id)
            if engine is None:
                return 0.0  # placed by this very decision
            engine.advance(now)
            running = engine.running[request_id]
            return running.request.length - max(0.0, running.end_step - engine.steps) - running.request.kept

        changed = {engine.spec.name: engine for engine in touched}
        for decision in self.policy.decide(produced):
            request = self.requests[decision.request_id]
            target = self.engines[decision.instance]
            tokens = request.kept
            if decision.moved:
                source = self.where[decision.request_id]
                source.advance(now)
                tokens = source.remove(decision.request_id)
                changed[source.spec.name] = source
                self.moves += 1
            target.advance(now)
            target.admit(request, tokens)
            self.where[decision.request_id] = target
            changed[target.spec.name] = target
        for engine in changed.values():
            self._plan(engine)

    def _plan(self, engine: _Engine) -> None:
        if (end := engine.next_end()) is not None:
            heapq.heappush(self._events, (end, engine.epoch, engine.spec.name))


def simulate(
    policy: DispatchPolicy, requests: Iterable[SimulatedRequest], instances: Sequence[SimulatedInstance]
) -> Outcome:
    """Simulate one fleet under one policy; see `Simulation`."""
    return Simulation(policy, instances).run(requests)
