"""Discrete-event simulation of whole iterations: generate, reward, train, send the weights, for every schedule.

Generation is `simulator.py`'s, under any dispatch policy. A sample has its reward `reward_s` after its end (rewards run
side by side). A group is complete when all its samples have theirs. One trainer works through groups one after the
other, at a rate of tokens per second, and ends a step with `optimizer_s`. New weights take

    delay + bytes / bandwidth

to reach generation, one version after the other, while the trainer goes on if the schedule lets it; running requests go
on as well and are not read in again. What may start when is up to the schedule (`schedules.py`), and, if the rounds are
tail-batched, to `tail_batching.py`.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from scheduler.policy import DispatchPolicy
from scheduler.schedules import Schedule, State
from scheduler.simulator import SimulatedInstance, SimulatedRequest, Simulation
from scheduler.tail_batching import TailBatching


@dataclass(frozen=True)
class Link:
    """Between trainer and generation."""

    gbit_s: float = float("inf")
    """10^9 bits per second."""
    delay_s: float = 0.0

    def seconds(self, gigabytes: float) -> float:
        """Time to send so many 10^9 bytes."""
        return self.delay_s + 8 * gigabytes / self.gbit_s


@dataclass(frozen=True)
class Stages:
    """What follows generation."""

    train_tokens_s: float
    """Tokens, prompts included, that the trainer works through per second."""
    optimizer_s: float = 0.0
    """At the end of every step."""
    reward_s: float = 0.0
    """From a sample's end to its reward."""
    weights_gb: float = 0.0
    """10^9 bytes of a version."""
    link: Link = field(default_factory=Link)

    def __post_init__(self) -> None:
        if not self.train_tokens_s > 0:
            raise ValueError(f"the trainer needs a rate above 0 tokens/s, got {self.train_tokens_s}")
        if not self.link.gbit_s > 0:
            raise ValueError(f"a link needs a bandwidth above 0 Gbit/s, got {self.link.gbit_s}")
        if min(self.optimizer_s, self.reward_s, self.weights_gb, self.link.delay_s) < 0:
            raise ValueError("times and sizes of the stages must not be negative")


@dataclass(frozen=True)
class PipelineOutcome:
    """What came out; times in seconds from the start."""

    published: tuple[float, ...]
    """[iterations] when the weights of each step had reached generation."""
    trained: tuple[tuple[str, ...], ...]
    """[iterations] groups of each step, in the order in which they were trained."""
    samples: int
    """Trained in all."""
    tokens: float
    """Of the trained samples, prompts left out."""
    generation_busy: float
    """Mean over the instances of the time in which they had something to do."""
    training_busy: float
    transfers: float
    """Time in which weights were under way."""
    staleness: dict[int, int]
    """Groups by how many steps the weights that trained on them were newer than those that they were issued under."""
    put_off: int
    """Groups that were withdrawn from a round, counted each time."""
    left: int
    """Groups that were issued and not trained by the end."""

    @property
    def total(self) -> float:
        """The end: the last weights have arrived."""
        return self.published[-1] if self.published else 0.0

    def iteration_times(self) -> list[float]:
        """[iterations] seconds from one version's arrival to the next's."""
        return [later - earlier for earlier, later in itertools.pairwise((0.0, *self.published))]

    @property
    def generation_bubble(self) -> float:
        """Share of the instances' time in which they had nothing to do."""
        return 1.0 - self.generation_busy / self.total if self.total else 0.0

    @property
    def training_bubble(self) -> float:
        """Share of the trainer's time in which it had nothing to do."""
        return 1.0 - self.training_busy / self.total if self.total else 0.0

    @property
    def samples_per_second(self) -> float:
        """Trained samples by the whole time."""
        return self.samples / self.total if self.total else 0.0

    def cost_per_1k(self, usd_per_hour: float) -> float:
        """USD per 1,000 trained samples.

        Args:
            usd_per_hour: of all instances and the trainer together.
        """
        return usd_per_hour * self.total / 3600 / self.samples * 1000 if self.samples else 0.0


@dataclass
class _Group:
    """A group that was issued and not yet trained."""

    name: str
    requests: list[SimulatedRequest]
    version: int
    """Weights that it was issued under."""
    open: set[str]
    """Samples without a reward."""
    generating: set[str]


_REWARDED, _TRAINED, _STEPPED, _PUBLISHED = "rewarded", "trained", "stepped", "published"


class Pipeline:
    """One run under one schedule; see the module."""

    def __init__(
        self,
        policy: DispatchPolicy,
        instances: Sequence[SimulatedInstance],
        stages: Stages,
        schedule: Schedule,
        batch: int,
        rounds: TailBatching | None = None,
    ) -> None:
        """
        Args:
            policy: places requests.
            instances: that generate.
            stages: what follows.
            schedule: says what may start.
            batch: groups of an optimizer step.
            rounds: tail-batched rounds; then staleness is not bounded, for what is put off ages.

        Raises:
            ValueError: no instances, an empty batch, or rounds with another batch or a schedule that overlaps them.
        """
        if batch < 1:
            raise ValueError(f"a batch needs at least one group, got {batch}")
        if rounds is not None and (rounds.batch != batch or schedule.max_staleness):
            raise ValueError(
                f"tail batching goes with sync or stream and one batch size, got {schedule.name}, "
                f"{rounds.batch} and {batch} groups"
            )
        self.simulation = Simulation(policy, instances)
        self.stages, self.schedule, self.batch, self.rounds = stages, schedule, batch, rounds
        self._events: list[tuple[float, int, str, str]] = []
        self._numbers = itertools.count()
        self._groups: dict[str, _Group] = {}
        self._of: dict[str, str] = {}
        """Group of each open sample."""
        self._complete: list[tuple[int, int, str]] = []
        """Heap of (version, order, group): those that are due first come first."""
        self._source: Iterator[Sequence[SimulatedRequest]] = iter(())
        self._issued = self._generated = self._version = self._step = self._taken = 0
        self._rounds_begun = 0
        self._training = False
        self._link_free = self._training_busy = self._transfers = 0.0
        self._steps: list[list[str]] = [[]]
        self._published: list[float] = []
        self._staleness: Counter[int] = Counter()
        self._samples, self._tokens, self._put_offs = 0, 0.0, 0

    def run(self, groups: Iterable[Sequence[SimulatedRequest]], iterations: int) -> PipelineOutcome:
        """Simulates so many optimizer steps.

        Args:
            groups: in the order of issue, each of at least one request, all ids different; as many as a schedule may
                issue until the last step has been trained are taken from it, fewer if there are no more.
            iterations: optimizer steps.

        Raises:
            ValueError: an empty group, or two requests of one id.
            RuntimeError: the groups do not suffice for the steps, or the policy leaves requests waiting.
        """
        self._source = iter(groups)
        now = 0.0
        self._start_what_may(now, iterations)
        while len(self._published) < iterations:
            generated, event = self.simulation.next_end(), self._events[0][0] if self._events else float("inf")
            if min(generated, event) == float("inf"):
                raise RuntimeError(
                    f"step {self._step + 1} of {iterations} cannot be trained: {len(self._groups)} groups are under "
                    f"way, {self.simulation.policy.waiting} requests wait, and nothing runs"
                )
            if generated <= event:
                now, request_id = self.simulation.finish_next()
                self._sample_ended(request_id, now)
            else:
                now, _, kind, name = heapq.heappop(self._events)
                self._happened(kind, name, now)
            self._start_what_may(now, iterations)
        busy = [engine.busy for engine in self.simulation.engines.values()]
        return PipelineOutcome(
            tuple(self._published),
            tuple(map(tuple, self._steps[:iterations])),
            self._samples,
            self._tokens,
            sum(busy) / len(busy),
            self._training_busy,
            self._transfers,
            dict(sorted(self._staleness.items())),
            self._put_offs,
            len(self._groups),
        )

    def _after(self, now: float, seconds: float, kind: str, name: str = "") -> None:
        heapq.heappush(self._events, (now + seconds, next(self._numbers), kind, name))

    def _sample_ended(self, request_id: str, now: float) -> None:
        group = self._groups[self._of[request_id]]
        group.generating.discard(request_id)
        if not group.generating:
            self._generated += 1
        self._after(now, self.stages.reward_s, _REWARDED, request_id)

    def _happened(self, kind: str, name: str, now: float) -> None:
        if kind == _REWARDED:
            self._rewarded(name, now)
        elif kind == _TRAINED:
            self._training = False
            if self._taken == self.batch:
                self._training = True
                self._training_busy += self.stages.optimizer_s
                self._after(now, self.stages.optimizer_s, _STEPPED)
        elif kind == _STEPPED:
            self._training = False
            self._step += 1
            self._taken = 0
            self._steps.append([])
            # one version after the other
            seconds = self.stages.link.seconds(self.stages.weights_gb)
            begin = max(now, self._link_free)
            self._link_free = begin + seconds
            self._transfers += seconds
            self._after(begin, seconds, _PUBLISHED)
        else:
            self._version += 1
            self._published.append(now)

    def _rewarded(self, request_id: str, now: float) -> None:
        group = self._groups[self._of.pop(request_id)]
        group.open.discard(request_id)
        if group.open:
            return
        heapq.heappush(self._complete, (group.version, next(self._numbers), group.name))
        if self.rounds is not None:
            self.rounds.completed(group.name)
            self._end_round_if_over(now)

    def _end_round_if_over(self, now: float) -> None:
        assert self.rounds is not None
        if self.rounds.over:
            for name in self.rounds.end():
                self._withdraw(self._groups[name], now)

    def _withdraw(self, group: _Group, now: float) -> None:
        """Puts a group off; its samples that have ended keep their rewards."""
        self._put_offs += 1
        kept = self.simulation.withdraw(group.generating, now)
        group.requests = [replace(r, kept=kept.get(r.request_id, r.kept)) for r in group.requests]

    def _state(self) -> State:
        last = [group.version + self.schedule.max_staleness - self._step for group in self._groups.values()]
        bound = self.schedule.max_staleness
        return State(
            self.batch,
            self._issued,
            self._generated,
            self._version,
            self._step,
            self._taken,
            len(self._complete),
            tuple(sum(steps <= ahead for steps in last) for ahead in range(bound)),
        )

    def _start_what_may(self, now: float, iterations: int) -> None:
        if self._version >= iterations:
            return
        if self.rounds is None:
            self._issue(now)
        elif self._rounds_begun == self._step == self._version:
            self._begin_round(now)
        self._train(now)

    def _issue(self, now: float) -> None:
        fresh: list[SimulatedRequest] = []
        state = self._state()
        while self.schedule.may_issue(replace(state, issued=self._issued)):
            group = next(self._source, None)
            if group is None:
                break
            fresh.extend(self._admit(group).requests)
        if fresh:
            self.simulation.submit(fresh, now)

    def _admit(self, requests: Sequence[SimulatedRequest]) -> _Group:
        if not requests:
            raise ValueError("a group needs at least one request")
        names = {request.request_id for request in requests}
        group = _Group(f"{self._issued}", list(requests), self._version, set(names), set(names))
        self._issued += 1
        self._groups[group.name] = group
        self._of.update(dict.fromkeys(names, group.name))
        return group

    def _begin_round(self, now: float) -> None:
        assert self.rounds is not None
        self._rounds_begun += 1
        current = self.rounds.begin()
        admitted = [self._admit(group) for group in itertools.islice(self._source, current.new)]
        self.rounds.started(group.name for group in admitted)
        resumed = [self._groups[name] for name in current.resumed]
        fresh = [r for group in (*resumed, *admitted) for r in group.requests if r.request_id in group.generating]
        self.simulation.submit(fresh, now)
        self._end_round_if_over(now)

    def _train(self, now: float) -> None:
        if self._training or not self._complete:
            return
        version, _, name = self._complete[0]
        if not self.schedule.may_take(self._state(), version):
            return
        heapq.heappop(self._complete)
        group = self._groups.pop(name)
        tokens = sum(request.prompt_tokens + request.length for request in group.requests)
        seconds = tokens / self.stages.train_tokens_s
        self._training = True
        self._training_busy += seconds
        self._taken += 1
        self._steps[-1].append(name)
        self._staleness[self._step - group.version] += 1
        self._samples += len(group.requests)
        self._tokens += sum(request.length for request in group.requests)
        self._after(now, seconds, _TRAINED)
