"""Which complete groups are replaced by new ones, and how many of them for each step. Pure: no I/O."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from streamrl.config.run import RunConfig
from streamrl.controller.step_batch import StepBatch
from streamrl.rollouts.advantage import is_flat
from streamrl.rollouts.types import Group


@dataclass
class Replacements:
    """The groups of equal rewards that others have replaced in a run, each charged to a step.

    Where groups of several steps are generated together (`sync_every` above 1, `async`), they may all be complete
    before the first of these steps ends. So a replacement is charged to the first step with room, from the current one
    up to the last one that groups have been issued for.
    """

    run: RunConfig
    _charged: Counter[int] = field(default_factory=Counter)
    """Number of replacements by step, from the current one on."""

    def replaces(self, group: Group, batch: StepBatch, issued: int) -> bool:
        """Return whether another group takes the place of a complete one, which is then never trained.

        That is so if it has too few survivors; and, with dynamic sampling, if the task's own rewards are all equal
        (before the overlong penalty: DAPO filters by correctness, arXiv 2503.14476, eq. 11), up to the limit of a step.

        Args:
            group: the complete group.
            batch: batch of the current step.
            issued: number of groups issued since the run's start, with this one and without those replaced before.
        """
        if batch.too_few_survivors(group):
            return True
        flat = self.run.algorithm.dynamic_sampling and is_flat(group.rewards())
        return flat and self._charge(batch.step, issued)

    def _charge(self, step: int, issued: int) -> bool:
        """Charge one replacement to the first step with room; return False if there is none."""
        size = self.run.batch.prompts_per_step
        limit = self.run.algorithm.most_replaced(size)
        last = max(step, -(-issued // size))
        for ended in [number for number in self._charged if number < step]:
            del self._charged[ended]
        for number in range(step, last + 1):
            if self._charged[number] < limit:
                self._charged[number] += 1
                return True
        return False
