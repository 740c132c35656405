"""Tables of a value by task and by prompt, shrunk to what is known otherwise (empirical Bayes).

One-way random effects on two floors: tasks differ around the mean of all tasks, prompts around their task, samples
around their prompt. The variance of each floor is estimated from the samples (analysis of variance; Searle, Casella and
McCulloch 1992, chapter 3), and each mean of n values is weighted by V / (V + v / n) against the mean of the floor
above it, where V is the variance between such means and v that of one value within (James and Stein 1961; Efron and
Morris 1975). So a task with few samples, and a prompt with one earlier sample, are moved to the mean above as far as
they are noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ranker.segments import Array


@dataclass(frozen=True)
class Shrunk:
    """A fitted table of one value."""

    tasks: Array
    """Shrunk mean of each task, and of samples without a task [T + 1]; the prior where there are no samples."""
    prior: float
    """Mean of the tasks' means: what is expected of an unknown task."""
    between: float
    """Variance between the prompts of a task."""
    within: float
    """Variance between the samples of a prompt."""

    @property
    def all_named(self) -> bool:
        """Whether all samples had a task, so that nothing is known of others."""
        return bool(self.tasks[-1] == self.prior)

    def of_task(self, task: Array) -> Array:
        """Return the means [N] of tasks given by number [N]; NaN: without a task; -1: unknown, which has the prior."""
        none = len(self.tasks) - 1
        number = np.nan_to_num(np.asarray(task, dtype=float), nan=none).astype(int)
        return np.append(self.tasks, self.prior)[np.where(number <= none, number, -1)]

    def given(self, expected: Array, mean: Array, count: Array) -> Array:
        """Return expectations [N] after `count` samples of the same prompt with that mean [N] (NaN or 0: none)."""
        known = np.nan_to_num(count)
        weight = known * self.between / np.maximum(known * self.between + self.within, 1e-12)
        return np.asarray(np.where(known > 0, expected + weight * (np.nan_to_num(mean) - expected), expected))


def fit_shrunk(task: Array, tasks: int, prompt: Array, value: Array) -> Shrunk:
    """Fit the table; every prompt counts once.

    Args:
        task: task's number of each sample [N]; NaN: none, and all these are a task of their own.
        tasks: number of tasks T.
        prompt: prompt's number of each sample [N].
        value: [N].
    """
    code = np.nan_to_num(np.asarray(task, dtype=float), nan=tasks).astype(int)
    cells, cell = np.unique(np.stack((code, prompt), axis=1), axis=0, return_inverse=True)
    cell = cell.reshape(-1)
    repeats = np.bincount(cell)
    mean = np.bincount(cell, weights=value) / repeats
    of = cells[:, 0]
    count = np.bincount(of, minlength=tasks + 1).astype(float)
    plain = np.bincount(of, weights=mean, minlength=tasks + 1) / np.maximum(count, 1)
    there = count > 0
    prompts = float(((mean - plain[of]) ** 2).sum()) / max(1.0, len(cells) - there.sum())
    if len(value) > len(cells):
        within = float(((value - mean[cell]) ** 2).sum()) / (len(value) - len(cells))
        between = max(0.0, prompts - within * float((1 / repeats).mean()))
    else:  # no prompt has two samples: half of the variance is taken for the prompt's own
        within = between = prompts / 2
    spread = float(plain[there].var(ddof=1)) if there.sum() > 1 else 0.0
    apart = max(0.0, spread - prompts * float((1 / count[there]).mean()))
    prior = float(plain[there].mean())

    weight = apart * count / np.maximum(apart * count + prompts, 1e-12)
    return Shrunk(np.where(there, prior + weight * (plain - prior), prior), prior, between, within)
