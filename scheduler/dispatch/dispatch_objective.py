"""Objectives of dispatch: what a schedule waits for, as a number of seconds that a plan makes small. Pure.

* `MAKESPAN`: the end of the last request. `colocated` and `sync` train when the whole batch is there; `one_step_off`
  generates a batch while the one before is trained, so its step is the longer of the makespan and the training.
* `Streamed`: the end of training's last group, under `stream`. Training takes each group as it becomes complete, one
  after the other. With groups in the order of completion, c_k the end of the k-th (its *last* sample) and t_k the
  seconds that training it takes, the last one is trained at

      max over k of (c_k + t_k + t_{k+1} + ... + t_K)

  (Lindley's recursion, written out). A fast trainer makes it the makespan; a slow one makes it the time until the first
  groups are there, which longest-first delays.

Under `async` there is no batch: groups are issued continuously, and what counts is the rate of complete groups at the
staleness bound. No plan here improves it (`experiments/async_policies.py`), so least-loaded dispatch is the default
there (`registry.policy_for`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.cost.decode import Floats


@dataclass(frozen=True)
class Streamed:
    """The end of training's last group, where training takes groups as they become complete."""

    train_tokens_s: float
    """Tokens, prompts included, that the trainer processes per second."""

    def __post_init__(self) -> None:
        if not self.train_tokens_s > 0:
            raise ValueError(f"a streamed objective needs a trainer's rate above 0 tokens/s, got {self.train_tokens_s}")

    def seconds(self, ends: Floats, groups: Sequence[str], tokens: Floats) -> Floats:
        """Return the end of training's last group, by scenario.

        Args:
            ends: [scenarios, n] seconds at which each request ends.
            groups: [n] group of each request.
            tokens: [scenarios, n] tokens of each request to train, prompt included.

        Returns:
            [scenarios] seconds; 0 without requests.
        """
        if not len(groups):
            return np.zeros(len(ends))
        numbers = np.unique(np.asarray(groups), return_inverse=True)[1]
        order = np.argsort(numbers, kind="stable")
        starts = np.flatnonzero(np.diff(numbers[order], prepend=-1))
        complete = np.maximum.reduceat(ends[:, order], starts, axis=1)
        training = np.add.reduceat(tokens[:, order], starts, axis=1) / self.train_tokens_s
        turn = np.argsort(complete, axis=1)
        complete, training = np.take_along_axis(complete, turn, 1), np.take_along_axis(training, turn, 1)
        return np.asarray((complete + training[:, ::-1].cumsum(axis=1)[:, ::-1]).max(axis=1))


MAKESPAN = None
"""The end of the last request."""
DispatchObjective = Streamed | None
"""What a plan makes small: `MAKESPAN`, or a streamed training."""
