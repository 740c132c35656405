"""Timing of a step: when the trainer and the instances worked between the ends of two optimizer steps. Pure.

Times are unix seconds, if nothing else is said; a span is (start, end). In overlapping schedules, samples and weight
updates cross the ends of steps; each step counts the part that lies in it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Span = tuple[float, float]
CLOCK_SET_S = 1.0
"""Seconds by which the clock may differ from monotonic seconds over a step; if by more, it was set."""


def covered(spans: Iterable[Span], start: float, end: float) -> float:
    """Return the seconds of [start, end] that at least one span covers."""
    total, reached = 0.0, start
    for left, right in sorted(spans):
        left, right = max(left, reached), min(right, end)
        if right > left:
            total += right - left
            reached = right
    return total


@dataclass(frozen=True)
class Traffic:
    """Traffic with sites over a period."""

    nbytes: int = 0
    """Bytes of weights that all sites together received."""
    seconds: float | None = None
    """Longest time from the announcement of a version until a site had verified all of it; None: no transfer."""
    usd: Mapping[str, float] = field(default_factory=dict)
    """Price of everything that the link to each site carried: weights, prompts and samples."""


@dataclass(frozen=True)
class Interval:
    """Times of one step; one in which a clock was set has taken no time, which is no measurement."""

    started: float
    """End of the previous step."""
    ended: float
    """End of this step."""
    training: tuple[Span, ...]
    """Spans in which the trainer computed or made weights."""
    publishing: tuple[Span, ...]
    """Part of `training` in which the trainer made weights."""
    generating: dict[str, tuple[Span, ...]]
    """Spans in which each instance had requests."""
    loading: dict[str, tuple[Span, ...]]
    """Spans in which each instance stood still to load weights."""
    syncs: tuple[Span, ...]
    """Spans from an optimizer step until every instance served its weights, of those that ended in this step."""
    present: dict[str, Span]
    """Span of the step in which each instance could have worked."""
    learning: tuple[Span, ...] = ()
    """Part of `training` in which the trainer worked on micro-batches and the optimizer step."""
    unfinished_sync: Span | None = None
    """Span from an optimizer step to the end of this one, if not every instance served its weights by then."""
    rewarding: tuple[Span, ...] = ()
    """Spans from the end of each sample to its reward, of the rewards that came in this step."""

    @property
    def seconds(self) -> float:
        """Duration of the step."""
        return self.ended - self.started

    def _covered(self, *spans: Iterable[Span]) -> float:
        return covered((span for some in spans for span in some), self.started, self.ended)

    @property
    def train_s(self) -> float:
        """Seconds in which the trainer was busy."""
        return self._covered(self.training)

    @property
    def learn_s(self) -> float:
        """Seconds in which the trainer worked on micro-batches and the optimizer step."""
        return self._covered(self.learning)

    @property
    def generate_s(self) -> float:
        """Seconds in which at least one instance generated."""
        return self._covered(*self.generating.values())

    @property
    def reward_s(self) -> float | None:
        """Seconds from a sample's end to its reward, median of those that came in the step; None: none came."""
        if not self.rewarding:
            return None
        return statistics.median(max(0.0, end - start) for start, end in self.rewarding)

    @property
    def instances(self) -> float:
        """Number of instances, mean over the step; 0 if it took no time."""
        return sum(end - start for start, end in self.present.values()) / self.seconds if self.seconds else 0.0

    @property
    def generation_bubble(self) -> float:
        """Share of the instances' time in which they did not generate; loading weights does not count as generating.

        0 if no instance was there.
        """
        if not self.instances:
            return 0.0
        busy = [
            self._covered(self.generating[name], self.loading[name]) - self._covered(self.loading[name])
            for name in self.generating
        ]
        return 1.0 - sum(busy) / (self.instances * self.seconds)

    @property
    def training_bubble(self) -> float:
        """Share of the step in which the trainer was idle; 0 if it took no time."""
        return 1.0 - self.train_s / self.seconds if self.seconds else 0.0

    @property
    def exposed_sync_s(self) -> float:
        """Seconds lost to weight updates, mean over the instances.

        With an update in flight, time is lost while the trainer makes weights, while the instance loads them, and while
        neither of the two does anything. 0 if no instance was there.
        """
        if not self.instances:
            return 0.0
        lost = 0.0
        syncs = self.syncs if self.unfinished_sync is None else (*self.syncs, self.unfinished_sync)
        for name, spans in self.generating.items():
            first, last = self.present[name]
            for start, end in ((max(start, first), min(end, last)) for start, end in syncs):
                stood = covered((*self.publishing, *self.loading[name]), start, end)
                anything = covered((*self.training, *spans, *self.publishing, *self.loading[name]), start, end)
                lost += stood + max(0.0, end - start) - anything
        return lost / self.instances


@dataclass
class StepTimes:
    """Events since the last step; `end_step` makes an `Interval` of them and keeps those that reach into the next."""

    instances: dict[str, float] = field(default_factory=dict)
    """All instances, including idle ones, each with the time since which it can work."""
    started: float | None = None
    """End of the previous step; None until the first weights are served."""
    clock: float | None = None
    """`started` in monotonic seconds, which nobody sets and a suspended machine does not count."""
    trainer: list[tuple[str, float, float]] = field(default_factory=list)
    """(command, start, end) of the trainer's commands."""
    generating: list[tuple[str, float, float]] = field(default_factory=list)
    """(instance, start, end) of finished samples."""
    running: dict[str, float] = field(default_factory=dict)
    """Instances that generate now, each with the time since which it does."""
    loading: list[tuple[str, float, float]] = field(default_factory=list)
    """(instance, start, end) of weight loads."""
    rewarding: list[Span] = field(default_factory=list)
    """Spans from the end of each sample to its reward."""
    gone: dict[str, Span] = field(default_factory=dict)
    """Instances that left during the step, each with the span in which it could work."""
    ended_trainer: list[tuple[str, float, float]] = field(default_factory=list)
    """Commands of the trainer in the step that ended last."""
    _syncs: list[Span] = field(default_factory=list)
    _sync_began: float | None = None

    def weights_served(self, now: float, clock: float) -> None:
        """Record that every instance serves the newest weights; `clock` is `now` in monotonic seconds."""
        if self.started is None:
            self.started, self.clock, self.trainer, self.loading = now, clock, [], []
        if self._sync_began is not None:
            self._syncs.append((self._sync_began, now))
            self._sync_began = None

    def set_instances(self, instances: Iterable[str], now: float) -> None:
        """Record that from now on exactly these instances can work."""
        names = set(instances)
        for name in self.instances.keys() - names:
            self.gone[name] = (self.instances.pop(name), now)
        for name in names - self.instances.keys():
            self.instances[name] = now

    def end_step(self, now: float, clock: float, weights_due: float | None) -> Interval:
        """Close the step and return its times; it has taken none if the clock was set, or the machine suspended, in it.

        Args:
            now: its end; its start counts if that is later. The next step begins now.
            clock: its end in monotonic seconds.
            weights_due: time from which its weights could be published; None: they will not be published.
        """
        started = now if self.started is None else self.started
        took_s = 0.0 if self.clock is None else clock - self.clock
        begins, now = now, max(now, started)
        if begins < started or abs(begins - started - took_s) > CLOCK_SET_S:
            self._forget(begins)
            started = now

        def of(entries: Iterable[tuple[str, float, float]], name: str) -> tuple[Span, ...]:
            return tuple((start, end) for key, start, end in entries if key == name)

        spans = self.gone | {name: (since, now) for name, since in self.instances.items()}
        present = {name: (max(since, started), until) for name, (since, until) in spans.items()}
        present = {name: span for name, span in present.items() if span[1] > span[0]}
        still = {name: ((since, now),) for name, since in self.running.items() if since < now}
        interval = Interval(
            started,
            now,
            tuple((start, end) for _, start, end in self.trainer),
            of(self.trainer, "publish"),
            {name: of(self.generating, name) + still.get(name, ()) for name in present},
            {name: of(self.loading, name) for name in present},
            tuple(self._syncs),
            present,
            of(self.trainer, "train") + of(self.trainer, "step"),
            None if self._sync_began is None else (self._sync_began, now),
            tuple(self.rewarding),
        )
        self.started, self.clock = begins, clock
        self.ended_trainer, self.trainer = self.trainer, []
        self.generating = [entry for entry in self.generating if entry[2] > now]
        self.loading = [entry for entry in self.loading if entry[2] > now]
        self._syncs, self.rewarding, self.gone = [], [], {}
        if weights_due is not None and self._sync_began is None:
            self._sync_began = weights_due
        return interval

    def _forget(self, now: float) -> None:
        """Forget the times that a clock which has been set back would reach once more."""
        self.instances = {name: min(since, now) for name, since in self.instances.items()}
        self.generating = [entry for entry in self.generating if entry[2] <= now]
        self.loading = [entry for entry in self.loading if entry[2] <= now]
        if self._sync_began is not None:
            self._sync_began = min(self._sync_began, now)
