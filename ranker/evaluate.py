"""Evaluation of a ranking: recall of the longest samples, Kendall's tau, plain baselines."""

from __future__ import annotations

import numpy as np

from ranker.ceiling import noise_ceiling
from ranker.data import Rollouts
from ranker.measures import kendall_tau, recall_at, recall_limit
from ranker.segments import Array

__all__ = ["FRACTIONS", "baselines", "coverage", "kendall_tau", "noise_ceiling", "recall_at", "recall_limit"]

FRACTIONS = (0.2, 0.1, 0.05)
"""Shares of the longest samples for which recall is reported."""


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

    `last_length` needs earlier steps with the same prompt. `task_mean` is over the task's samples in the other folds
    [N], as a model would learn it. `sibling_mean_hindsight` is over the other samples of the group (or of the prompt,
    without groups): siblings start together, so it is known too late, and shows what a probe sample would reveal.
    """
    log = np.log(rollouts.output_length)
    size = np.array([len(text) for text in rollouts.texts], dtype=float)
    unit = rollouts.group if (rollouts.group >= 0).all() else rollouts.prompt
    scores = {
        "random": np.random.default_rng(seed).random(len(rollouts)),
        "prompt_characters": size[rollouts.prompt],
        "task_mean": _task_mean(rollouts.task + 1, fold, log),
        "last_length": history[:, 1].astype(float),
        "sibling_mean_hindsight": _others_mean(unit, log),
    }
    return {name: score for name, score in scores.items() if np.isfinite(score).any()}


def _others_mean(unit: Array, values: Array) -> Array:
    """Return the mean of the other samples of each sample's unit [N]; NaN where there are none."""
    count = np.bincount(unit).astype(float)[unit]
    total = np.bincount(unit, weights=values)[unit]
    return np.where(count > 1, (total - values) / np.maximum(count - 1, 1), np.nan)


def _task_mean(task: Array, fold: Array, log: Array) -> Array:
    """Return the mean over the same task in all other folds [N]; NaN where there is none."""
    out = np.full(len(log), np.nan)
    for part in np.unique(fold):
        rest = fold != part
        count = np.bincount(task[rest], minlength=int(task.max()) + 1)
        total = np.bincount(task[rest], weights=log[rest], minlength=len(count))
        out[~rest] = np.where(count > 0, total / np.maximum(count, 1), np.nan)[task[~rest]]
    return out
