"""Figures of rankings and distributions, and the rankings that need no model."""

from __future__ import annotations

import numpy as np

from ranker.data import Rollouts
from ranker.history import earlier_lengths
from ranker.measures import kendall_tau, recall_at
from ranker.segments import Array
from ranker.shrinkage import Shrunk, fit_shrunk

__all__ = ["FRACTIONS", "baselines", "coverage", "kendall_tau", "recall_at"]

FRACTIONS = (0.2, 0.1, 0.05)
"""Shares of the longest samples for which recall is reported."""
IN_WORDS = {
    "random": "random",
    "prompt_characters": "length of the prompt",
    "task_mean": "mean length of the task",
    "task_at_limit": "share of the task at the limit",
    "earlier_mean": "mean of the prompt's earlier lengths",
    "earlier_shrunk": "the same, shrunk to the task's mean",
    "siblings_hindsight": "hindsight: mean of the siblings",
    "siblings_shrunk_hindsight": "hindsight: the same, shrunk to the task's mean",
}
"""What each of the `baselines` ranks by."""
TRACE = 1e-6
"""Weight of the length beside the share at the limit: orders tasks with equal shares."""


def coverage(levels: Array, quantiles: Array, length: Array) -> dict[str, float]:
    """Return, by level, the share of samples with a length at most its quantile; if calibrated, it equals the level.

    Args:
        levels: [Q].
        quantiles: [N, Q], tokens.
        length: [N], tokens.
    """
    return {f"{level:g}": float((length <= quantiles[:, q]).mean()) for q, level in enumerate(levels)}


def baselines(rollouts: Rollouts, history: Array, fold: Array, seed: int = 0) -> dict[str, Array]:
    """Return the scores [N] of rankings that need no model.

    What they say of a task is learned from the other folds [N], as a model would learn it; `history` [N, 9] comes from
    `ranker.history`.

    * `task_mean`: mean length of the task; `task_at_limit`: share of the task's samples that reached the limit;
    * `earlier_mean`: mean length of the same prompt in earlier steps, or else `task_mean`; `earlier_shrunk`: the same,
      shrunk to the task's mean (`ranker.shrinkage`); where there are any;
    * `siblings_hindsight`, `siblings_shrunk_hindsight`: the same with all other samples of the group (or of the prompt,
      without groups). Siblings start together, so these are known too late; they show what a probe would reveal.
    """
    length = rollouts.output_length.astype(float)
    size = np.array([len(text) for text in rollouts.texts], dtype=float)
    unit = rollouts.group if (rollouts.group >= 0).all() else rollouts.prompt
    scores = {"random": np.random.default_rng(seed).random(len(rollouts)), "prompt_characters": size[rollouts.prompt]}
    scores |= {
        name: np.full(len(rollouts), np.nan) for name in ("task_mean", "earlier_shrunk", "siblings_shrunk_hindsight")
    }
    at_limit = np.full(len(rollouts), np.nan)
    earlier, others = earlier_lengths(history), _others(unit, length)
    for part in np.unique(fold):
        out, rest = fold == part, fold != part
        table = _table(rollouts, rest, length)
        task = table.of_task(_tasks(rollouts)[out])
        scores["task_mean"][out] = task
        scores["earlier_shrunk"][out] = table.given(task, earlier[0][out], earlier[1][out])
        scores["siblings_shrunk_hindsight"][out] = table.given(task, others[0][out], others[1][out])
        reached = rollouts.capped + TRACE * length
        at_limit[out] = _table(rollouts, rest, reached).of_task(_tasks(rollouts)[out])
    if rollouts.capped.any():
        scores["task_at_limit"] = at_limit
    if (earlier[1] > 0).any():
        scores["earlier_mean"] = np.where(earlier[1] > 0, earlier[0], scores["task_mean"])
    else:
        del scores["earlier_shrunk"]
    if (others[1] > 0).any():
        scores["siblings_hindsight"] = np.where(others[1] > 0, others[0], scores["task_mean"])
    else:
        del scores["siblings_shrunk_hindsight"]
    return scores


def _table(rollouts: Rollouts, rows: Array, value: Array) -> Shrunk:
    return fit_shrunk(_tasks(rollouts)[rows], len(rollouts.tasks), rollouts.prompt[rows], value[rows])


def _tasks(rollouts: Rollouts) -> Array:
    """Return each sample's task [N], NaN without one."""
    return np.where(rollouts.task < 0, np.nan, rollouts.task)


def _others(unit: Array, values: Array) -> tuple[Array, Array]:
    """Return mean [N] and number [N] of the other samples of each sample's unit; 0 where there are none."""
    count = np.bincount(unit).astype(float)[unit] - 1
    total = np.bincount(unit, weights=values)[unit]
    return np.where(count > 0, (total - values) / np.maximum(count, 1), 0.0), count
