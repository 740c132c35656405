"""Forecasts for held-out samples: by the kept model and by simple rules, for prompts that no model has seen.

Every forecast is a distribution, given by its quantiles. The forecast of a sample depends on samples of the *other
folds* only (folds are split by prompt). The exception is `other_samples`, which uses all other samples of the same
prompt. No predictor knows these beforehand. They show what noise leaves to be known, but are no strict ceiling: three
samples that happen to agree look like certainty.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ranker.data import Rollouts
from ranker.distribution import LEVELS, fit_distribution
from ranker.segments import Array

MODEL, CHARACTERS, TASK, OTHERS = "model", "prompt_characters", "task", "other_samples"
"""Names of the forecasts: the kept model without history; lengths of prompts about as long; lengths of the task; the
other samples of the prompt.
"""
AT_ONCE = 2**22
"""Most lengths that are copied at once, where they are those of several units."""


@dataclass(frozen=True)
class HeldOut:
    """Forecasts for samples [N] by models that have not seen their prompts."""

    levels: Array
    """Levels of the quantiles [Q], ascending."""
    forecasts: dict[str, Array]
    """Quantiles by name of the forecast: tokens [N, Q], monotone in Q and within 1..limit; rows of NaN where there is
    no forecast.
    """
    length: Array
    """True lengths [N], tokens."""
    unit: Array
    """Number, from 0, of each sample's unit [N]: a prompt in one step of one run."""
    limit: int
    """Length that no request exceeds, tokens."""


def simple_forecasts(rollouts: Rollouts, fold: Array) -> dict[str, Array]:
    """Compute the forecasts of the simple rules for samples [N] with their folds [N]."""
    log, ended = np.log(rollouts.output_length), ~rollouts.capped
    limit = rollouts.cap or 2 * int(rollouts.output_length.max())
    characters = np.array([len(text) for text in rollouts.texts], dtype=float)[rollouts.prompt]
    by_size, by_task = (np.empty((len(log), len(LEVELS))) for _ in range(2))
    one = np.ones(len(log))
    for part in np.unique(fold):
        rest, out = fold != part, fold == part
        prompts = len(np.unique(rollouts.prompt[rest]))
        fitted = fit_distribution(characters[rest], one[rest], log[rest], ended[rest], prompts)
        by_size[out] = fitted.quantiles(characters[out], one[out], limit)
        by_task[out] = np.quantile(rollouts.output_length[rest], LEVELS)
        for task in np.unique(rollouts.task[out]):
            same = rest & (rollouts.task == task)
            if same.any():
                by_task[out & (rollouts.task == task)] = np.quantile(rollouts.output_length[same], LEVELS)
    return {CHARACTERS: by_size, TASK: by_task, OTHERS: _others(rollouts.unit, rollouts.output_length)}


def _others(unit: Array, length: Array) -> Array:
    """Return quantiles [N, Q] of the other lengths of each sample's unit [N]; NaN where there are none."""
    out = np.full((len(length), len(LEVELS)), np.nan)
    order = np.argsort(unit, kind="stable")
    samples = np.bincount(unit)[unit[order]]
    for count in np.unique(samples[samples > 1]):  # units of one size together, as a call for each takes long
        units = order[samples == count].reshape(-1, count)
        for rows in np.array_split(units, -(-units.size * count // AT_ONCE)):
            others = np.broadcast_to(length[rows][:, None], (len(rows), count, count))[:, ~np.eye(count, dtype=bool)]
            out[rows.ravel()] = np.quantile(others.reshape(-1, count - 1), LEVELS, axis=1).T
    return out
