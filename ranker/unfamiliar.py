"""Length model for prompts whose wording is unlike all training prompts: a new task, for example.

Boosted trees know nothing there: they put such a prompt into the leaf of whichever task it happens to resemble, and
measured on tasks left out of training they ranked worse than chance. What carries over from task to task is that, of
prompts with the same wording, the longer one and the one with more and greater numbers is the bigger problem. So a
prompt with too few common words gets

    log length = typical + slopes * (sizes - their training mean),      slopes >= 0,

where `typical` is the task's recent mean if there is a history of it, and otherwise the training samples' median, and
the slopes are those *within* the training tasks. Its spread is that of all lengths. A prompt or a group with
finished samples is left to the trees, which make use of these.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ranker.segments import Array

SIZES = ("bytes", "number_log_sum")
"""Columns that measure how big a problem is, independently of its wording."""
COLUMNS = ("common_share", "prompt_before_mean", "sibling_mean", "task_recent_mean", *SIZES)
LEAST_SLOPE = 0.1
"""Slope of the log length over the log of the bytes, used where the training tasks show none: ranks by prompt
length."""
ORDINARY, MARGIN = 0.01, 0.5
"""A prompt is unfamiliar below `MARGIN` times the share of common words that all but `ORDINARY` of the training prompts
have. Free text has few common words and sets no bound that another text would miss.
"""


@dataclass(frozen=True)
class Unfamiliar:
    """A linear model of the lengths of unfamiliar prompts."""

    bound: float
    """Least share of common words of a familiar prompt."""
    means: Array
    """Means of the columns `SIZES` [2]."""
    slopes: Array
    """Slopes of the log length over these columns [2], at least 0."""
    typical: float
    """Median log length."""
    spread: float
    """Mean distance of a log length from the median."""

    def predict(self, columns: Array) -> tuple[Array, Array]:
        """Return the unfamiliar requests [K] of those with columns `COLUMNS` [N, 6], and their log lengths [K]."""
        rows = np.flatnonzero((columns[:, 0] < self.bound) & np.isnan(columns[:, 1:3]).all(axis=1))
        recent = columns[rows, 3].astype(float)
        typical = np.where(np.isnan(recent), self.typical, recent)
        log: Array = typical + (columns[rows, 4:] - self.means) @ self.slopes
        return rows, log


def fit_unfamiliar(columns: Array, task: Array, log: Array) -> Unfamiliar:
    """Fit on training samples: columns `COLUMNS` [N, 6], tasks [N] (NaN: none), log lengths [N]."""
    share = columns[:, 0]
    known = share[np.isfinite(share)]
    bound = MARGIN * float(np.quantile(known, ORDINARY)) if len(known) else 0.0
    sizes = columns[:, 4:].astype(float)
    group = np.unique(np.nan_to_num(task, nan=-1.0), return_inverse=True)[1].reshape(-1)
    count = np.bincount(group)

    def inside(values: Array) -> Array:
        centred: Array = values - (np.bincount(group, values) / count)[group]
        return centred

    slopes = _not_negative(np.stack([inside(column) for column in sizes.T], axis=1), inside(log))
    if not slopes.any():
        slopes[0] = LEAST_SLOPE
    typical = float(np.median(log))
    return Unfamiliar(bound, sizes.mean(axis=0), slopes, typical, max(0.01, float(np.abs(log - typical).mean())))


def _not_negative(sizes: Array, log: Array) -> Array:
    """Return the least-squares slopes [2] of centred logs [N] over two centred columns [N, 2], none below 0."""
    squares, products = (sizes**2).sum(axis=0), sizes.T @ log
    both = np.linalg.lstsq(sizes, log, rcond=None)[0]
    if (both >= 0).all():
        return both
    single = np.where(squares > 1e-9, np.maximum(products, 0) / np.maximum(squares, 1e-9), 0.0)
    best = int(np.argmax(single * products))  # by how much each alone lowers the squared error
    slopes = np.zeros(2)
    slopes[best] = single[best]
    return slopes
