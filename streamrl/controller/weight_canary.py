"""Weights verified end to end: each instance's canary after each version that it loads, beside the trainer's.

    trainer:   publishes version n, then measures the canary with the same weights    -> trainer_measured(n)
    instance:  has loaded version n, measures the canary beside its other requests    -> instance_measured(n)

Either may come first. A version is verified once every instance that has measured it agrees with the trainer. Pure: no
I/O and no clock.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from streamrl.config.run import RunConfig
from streamrl.rollouts.canary import FAR, mean_mismatch, mismatch_bound
from streamrl.rollouts.types import FloatArray

HISTORY = 20
"""Number of newest versions whose measurements are remembered; instances load no older ones."""


@dataclass(frozen=True)
class Measured:
    """The canary's log-probabilities as one process computes them."""

    dtype: str
    """Compute type of the process."""
    logprobs: FloatArray
    """Shape [C]."""


@dataclass(frozen=True)
class Mismatch:
    """An instance that does not compute what the trainer computes."""

    instance: str
    text: str
    far: bool = False
    """Whether this is the run's first version, and no rounding explains the difference."""


class WeightCanary:
    """The comparison of all instances with the trainer, version by version."""

    def __init__(self, run: RunConfig, sent: str = "float32") -> None:
        """
        Args:
            run: configuration of the run.
            sent: type in which weights are sent, where that is not the trainer's compute type.
        """
        self._sent = sent
        self._bound, self._generation_dtype = run.mismatch.bound, run.weights.generation_dtype
        self._may_multiply_in_8_bits = run.generation.compute != "same"  # an instance's word alone widens no bound
        self._of_trainer: dict[int, Measured] = {}
        self._uncompared: dict[int, dict[str, Measured]] = {}
        """Measurements of instances, by version and instance, that wait for the trainer's."""
        self._measured: dict[int, set[str]] = {}
        """Instances that have measured a version."""
        self._expected: dict[int, set[str]] = {}
        self._reported: dict[int, set[str]] = {}
        """Instances whose mismatch on a version was returned: one that repeats itself is not news."""
        self._first: int | None = None
        """Number of the first version that the trainer has measured."""
        self._agreed: set[int] = set()
        self._differed: set[int] = set()
        self._verified_before = 0
        """Number of versions verified of those that are no longer remembered."""
        self.comparisons = 0
        self.worst: float | None = None
        """Largest mean |difference| so far, nats."""
        self.bound: float | None = None
        """Bound of the widest pair of compute types seen so far, nats; None: nothing has been compared."""
        self._far = 0.0
        """The largest of `FAR` of the pairs of compute types seen so far, nats; 0: nothing has been compared."""
        self.mismatch = ""
        """Newest mismatch; '': there was none."""

    @property
    def verified(self) -> int:
        """Number of versions on which every instance heard of agrees with the trainer."""
        return self._verified_before + len(self._agreed - self._differed)

    def trainer_measured(self, number: int, measured: Measured) -> list[Mismatch]:
        """Record the trainer's canary of a version; return the mismatches that this shows."""
        self._of_trainer[number] = measured
        self._first = number if self._first is None else self._first
        by_version: tuple[dict[int, Any], ...] = (self._of_trainer, self._measured, self._uncompared)
        for kept in (*by_version, self._expected, self._reported):
            for old in [n for n in kept if n <= number - HISTORY]:
                del kept[old]
        for old in [n for n in self._agreed | self._differed if n <= number - HISTORY]:
            self._verified_before += old in self._agreed and old not in self._differed
            self._agreed.discard(old)
            self._differed.discard(old)
        waiting = self._uncompared.pop(number, {})
        return [found for name, one in waiting.items() if (found := self._compare(number, name, one))]

    def instance_measured(self, number: int, instance: str, measured: Measured) -> list[Mismatch]:
        """Record an instance's canary of a version; return the mismatches that this shows."""
        self._measured.setdefault(number, set()).add(instance)
        if number not in self._of_trainer:
            self._uncompared.setdefault(number, {})[instance] = measured
            return []
        return [found] if (found := self._compare(number, instance, measured)) else []

    def loaded(self, number: int, instances: Collection[str]) -> None:
        """Record which instances have loaded a version, so that their measurements are awaited."""
        self._expected.setdefault(number, set()).update(instances)

    def missing(self, number: int, present: Collection[str]) -> list[str]:
        """Return the instances, of those present, whose measurement of a version that they have loaded is to come."""
        return sorted((self._expected.get(number, set()) & set(present)) - self._measured.get(number, set()))

    def _compare(self, number: int, instance: str, measured: Measured) -> Mismatch | None:
        trainer = self._of_trainer[number]
        eight_bits = measured.dtype if self._may_multiply_in_8_bits and measured.dtype in ("int8", "fp8") else None
        linear = eight_bits or self._generation_dtype
        rounding = mismatch_bound(trainer.dtype, measured.dtype, linear, self._sent)
        bound = self._bound or rounding
        mismatch = mean_mismatch(trainer.logprobs, measured.logprobs)
        self.comparisons += 1
        self.bound = max(bound, self.bound or 0.0)
        self.worst = max(mismatch, self.worst or 0.0)
        self._far = max(self._far, FAR[rounding])
        if mismatch <= bound:
            self._agreed.add(number)
            return None
        self._differed.add(number)
        self.mismatch = (
            f"version {number} on {instance} does not compute what the trainer computes: log-probabilities of a fixed "
            f"text differ by {mismatch:.3g} nats in the mean, more than {bound:.3g} "
            f"(trainer {trainer.dtype}, instance {measured.dtype})"
        )
        reported = self._reported.setdefault(number, set())
        if instance in reported:
            return None
        reported.add(instance)
        return Mismatch(instance, self.mismatch, far=number == self._first and mismatch > FAR[rounding])

    def is_far(self, mismatch: float, temperature: float) -> bool:
        """Return whether no rounding explains a difference of samples from the trainer.

        Args:
            mismatch: mean |difference| of log-probabilities, nats.
            temperature: the samples'; below 1 it widens differences of logits.
        """
        return 0 < self._far < mismatch * min(1.0, temperature)

    def state(self) -> dict[str, object]:
        """Return the contents of `VerifiedStatus`."""
        return {
            "versions": self.verified,
            "comparisons": self.comparisons,
            "worst": self.worst,
            "bound": self.bound,
            "mismatch": self.mismatch,
        }
