"""Length model for requests of which nothing similar was trained on: a new task, or an unknown wording.

Boosted trees know nothing there: they put such a prompt into the leaf of whichever task it happens to resemble, and
measured on tasks left out of training they ranked worse than chance. What carries over from task to task is that, of
prompts with the same wording, the longer one and the one with more and greater numbers is the bigger problem. So a
request of a named task that was not trained on, and a prompt with too few common words, get

    log length = prior + slopes * (sizes - their training mean),      slopes >= 0,

with the slopes *within* the training tasks, whose effect is bounded. The prior is the distribution of what is left of
the training samples' log lengths, so its spread includes that between tasks. Where recent lengths of the task are
known, their mean takes the prior's place, with the spread within a task; earlier samples of the same prompt count as
in `ranker.shrinkage`. A prompt of unknown wording in a known task that has such samples is left to the trees.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ranker.distribution import LEVELS
from ranker.features import UNKNOWN
from ranker.history import earlier_lengths
from ranker.model_kinds import Columns
from ranker.segments import Array
from ranker.shrinkage import Shrunk, fit_shrunk
from scheduler.cost.survival import end_rate, survival_quantiles

SIZES = ("bytes", "number_log_sum")
"""Columns that measure how big a problem is, independently of its wording."""
COLUMNS = ("common_share", "task_recent_mean", *SIZES)
LEAST_SLOPE = 0.1
"""Slope of the log length over the log of the bytes, used where the training tasks show none: ranks by prompt
length."""
ORDINARY, MARGIN = 0.01, 0.5
"""A prompt is unfamiliar below `MARGIN` times the share of common words that all but `ORDINARY` of the training prompts
have. Free text has few common words and sets no bound that another text would miss.
"""
REACH = 1.5
"""Bound of the sizes' effect, in standard deviations of all log lengths: beyond, order is kept but hardly any distance.
"""


@dataclass(frozen=True)
class Unfamiliar:
    """A linear model of the lengths of unfamiliar requests."""

    bound: float
    """Least share of common words of a familiar prompt."""
    means: Array
    """Means of the columns `SIZES` [2]."""
    slopes: Array
    """Slopes of the log length over these columns [2], at least 0."""
    reach: float
    """Bound of the effect of sizes on the log length; greater than 0."""
    prior: Array
    """Quantiles [Q] of the log length without the effect of its size."""
    inside: Array
    """Quantiles [Q] of the same, less its task's mean."""
    table: Shrunk
    """Variances of log lengths between and within prompts."""

    def predict(self, features: Array, names: tuple[str, ...], columns: Columns) -> tuple[Array, Array]:
        """Return the unfamiliar requests [K] of features [N, F], and quantiles of their log lengths [K, Q]."""
        at = [names.index(name) for name in COLUMNS]
        mean, count = earlier_lengths(features[:, columns.history])
        unknown = features[:, columns.task] == UNKNOWN
        rows = np.flatnonzero(unknown | ((features[:, at[0]] < self.bound) & (count == 0)))
        recent = features[rows, at[1]].astype(float)
        effect = self._effect(features[rows][:, at[2:]])
        told = np.isfinite(recent)
        middle = float(np.interp(0.5, LEVELS, self.prior))
        base = np.where(told, recent, middle) + effect
        located = self.table.given(base, np.log(np.maximum(mean[rows], 1.0)), count[rows])
        narrow = told | (count[rows] > 0)
        logs = located[:, None] + np.where(narrow[:, None], self.inside, self.prior - middle)
        return rows, logs

    def _effect(self, sizes: Array) -> Array:
        linear = (sizes.astype(float) - self.means) @ self.slopes
        return np.asarray(self.reach * np.tanh(linear / self.reach))


def fit_unfamiliar(
    features: Array, names: tuple[str, ...], columns: Columns, prompt: Array, log: Array, ended: Array
) -> Unfamiliar:
    """Fit on training samples: features [N, F] without history, prompts [N], log lengths [N], whether ended [N]."""
    at = [names.index(name) for name in COLUMNS]
    share, sizes = features[:, at[0]], features[:, at[2:]].astype(float)
    known = share[np.isfinite(share)]
    bound = MARGIN * float(np.quantile(known, ORDINARY)) if len(known) else 0.0
    task = np.nan_to_num(features[:, columns.task], nan=-1.0)
    group = np.unique(task, return_inverse=True)[1].reshape(-1)
    count = np.bincount(group)

    def centred(values: Array) -> Array:
        return np.asarray(values - (np.bincount(group, values) / count)[group])

    slopes = _not_negative(np.stack([centred(column) for column in sizes.T], axis=1), centred(log))
    if not slopes.any():
        slopes[0] = LEAST_SLOPE
    empty = np.zeros(0)
    table = fit_shrunk(features[:, columns.task], int(task.max()) + 1, prompt, log)
    plain = Unfamiliar(bound, sizes.mean(axis=0), slopes, max(0.1, REACH * float(log.std())), empty, empty, table)
    rest = log - plain._effect(sizes)
    own = rest - (np.bincount(group, rest) / count)[group]
    rate = end_rate(log, ended, float(log.max()) - np.log(2))
    return Unfamiliar(
        bound,
        plain.means,
        slopes,
        plain.reach,
        survival_quantiles(rest, ended, LEVELS, rate),
        survival_quantiles(own, ended, LEVELS, rate),
        table,
    )


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
