"""What the trainer and the instances did when, from the end of one optimizer step to the end of the next. Pure.

All times are unix seconds; a span is (start, end). In the overlapping schedules samples and weight updates cross the
ends of steps: whatever lies partly in a step counts there with that part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Span = tuple[float, float]


def covered(spans: Iterable[Span], start: float, end: float) -> float:
    """Seconds of [start, end] in at least one span."""
    total, reached = 0.0, start
    for left, right in sorted(spans):
        left, right = max(left, reached), min(right, end)
        if right > left:
            total += right - left
            reached = right
    return total


@dataclass(frozen=True)
class Traffic:
    """What went to sites, and came from them, in some time."""

    nbytes: int = 0
    """Of weights, received by all sites."""
    seconds: float | None = None
    """From the announcement of a version until a site had all of it, verified, the longest; None: none came."""
    usd: float = 0.0
    """Price of all that links carried: weights, prompts, samples."""


@dataclass(frozen=True)
class Interval:
    """One step's times."""

    started: float
    """The step before ended."""
    ended: float
    training: tuple[Span, ...]
    """The trainer computed, or made weights."""
    publishing: tuple[Span, ...]
    """The part of it in which it made weights."""
    generating: dict[str, tuple[Span, ...]]
    """By instance: it had requests."""
    loading: dict[str, tuple[Span, ...]]
    """By instance: it stood still for new weights."""
    syncs: tuple[Span, ...]
    """From an optimizer step to the moment at which every instance served its weights."""
    present: dict[str, Span]
    """By instance: from when to when, in the step, it could have worked."""
    learning: tuple[Span, ...] = ()
    """The part of `training` in which it worked on micro-batches and did the optimizer step."""

    @property
    def seconds(self) -> float:
        """Length of the step."""
        return self.ended - self.started

    def _covered(self, *spans: Iterable[Span]) -> float:
        return covered((span for some in spans for span in some), self.started, self.ended)

    @property
    def train_s(self) -> float:
        """Time in which the trainer was busy."""
        return self._covered(self.training)

    @property
    def learn_s(self) -> float:
        """Time in which the trainer learned."""
        return self._covered(self.learning)

    @property
    def generate_s(self) -> float:
        """Time in which at least one instance generated."""
        return self._covered(*self.generating.values())

    @property
    def instances(self) -> float:
        """How many there were, mean over the step."""
        return sum(end - start for start, end in self.present.values()) / self.seconds

    @property
    def generation_bubble(self) -> float:
        """Share of the instances' time in which they did not generate; standing still for weights is no generating."""
        busy = [
            self._covered(self.generating[name], self.loading[name]) - self._covered(self.loading[name])
            for name in self.generating
        ]
        return 1.0 - sum(busy) / (self.instances * self.seconds)

    @property
    def training_bubble(self) -> float:
        """Share of the step in which the trainer did nothing."""
        return 1.0 - self.train_s / self.seconds

    @property
    def exposed_sync_s(self) -> float:
        """Time lost to weights, mean over the instances: the trainer makes them, the instance loads them, or, while
        they are under way, neither does anything else."""
        lost = 0.0
        for name, spans in self.generating.items():
            for start, end in self._clipped(self.syncs, self.present[name]):
                stood = covered((*self.publishing, *self.loading[name]), start, end)
                anything = covered((*self.training, *spans, *self.publishing, *self.loading[name]), start, end)
                lost += stood + (end - start) - anything
        return lost / self.instances

    @staticmethod
    def _clipped(spans: Sequence[Span], to: Span) -> list[Span]:
        clipped = [(max(start, to[0]), min(end, to[1])) for start, end in spans]
        return [(start, end) for start, end in clipped if end > start]


@dataclass
class StepTimes:
    """Collects what happens; `end_step` makes an `Interval` of it and keeps what reaches into the next."""

    instances: dict[str, float] = field(default_factory=dict)
    """All instances (one that never works is idle), each with the time since when it can work."""
    started: float | None = None
    """End of the step before; None until the first weights are served."""
    trainer: list[tuple[str, float, float]] = field(default_factory=list)
    """(what, start, end)."""
    generating: list[tuple[str, float, float]] = field(default_factory=list)
    """(instance, start, end) of finished samples."""
    running: dict[str, float] = field(default_factory=dict)
    """Instances that generate right now, with the time since when they do."""
    loading: list[tuple[str, float, float]] = field(default_factory=list)
    """(instance, start, end) of weights being loaded."""
    gone: dict[str, Span] = field(default_factory=dict)
    """Instances that have left during the step: from when to when they could work."""
    ended_trainer: list[tuple[str, float, float]] = field(default_factory=list)
    """`trainer` of the step that ended last."""
    _syncs: list[Span] = field(default_factory=list)
    _sync_began: float | None = None

    def weights_served(self, now: float) -> None:
        """Every instance serves the newest weights."""
        if self.started is None:
            self.started, self.trainer, self.loading = now, [], []
        if self._sync_began is not None:
            self._syncs.append((self._sync_began, now))
            self._sync_began = None

    def there_are(self, instances: Iterable[str], now: float) -> None:
        """From now on these instances can work, and no others."""
        names = set(instances)
        for name in self.instances.keys() - names:
            self.gone[name] = (self.instances.pop(name), now)
        for name in names - self.instances.keys():
            self.instances[name] = now

    def end_step(self, now: float, weights_due: float | None) -> Interval:
        """Closes the step.

        Args:
            now: its end.
            weights_due: when its weights were there to be published; None: they are not.
        """
        started = now if self.started is None else self.started

        def of(entries: Iterable[tuple[str, float, float]], name: str) -> tuple[Span, ...]:
            return tuple((start, end) for key, start, end in entries if key == name)

        spans = self.gone | {name: (since, now) for name, since in self.instances.items()}
        present = {name: (max(since, started), until) for name, (since, until) in spans.items() if until > started}
        still = {name: ((since, now),) for name, since in self.running.items() if since < now}
        under_way = ((self._sync_began, now),) if self._sync_began is not None else ()
        interval = Interval(
            started,
            now,
            tuple((start, end) for _, start, end in self.trainer),
            of(self.trainer, "publish"),
            {name: of(self.generating, name) + still.get(name, ()) for name in present},
            {name: of(self.loading, name) for name in present},
            (*self._syncs, *under_way),
            present,
            of(self.trainer, "train") + of(self.trainer, "step"),
        )
        self.started = now
        self.ended_trainer, self.trainer = self.trainer, []
        self.generating = [entry for entry in self.generating if entry[2] > now]
        self.loading = [entry for entry in self.loading if entry[2] > now]
        self._syncs, self.gone = [], {}
        if weights_due is not None and self._sync_began is None:
            self._sync_began = weights_due
        return interval
