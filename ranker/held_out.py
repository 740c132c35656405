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
from ranker.distribution import LEVELS, fit_distribution, fit_medians
from ranker.model_kinds import fit_spread, predict_spread
from ranker.segments import Array

MODEL, CHARACTERS, TASK, OTHERS = "model", "prompt_characters", "task", "other_samples"
"""Names of the forecasts: the kept model without history; lengths of prompts about as long; lengths of the task; the
other samples of the prompt.
"""


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


def hold_out(
    rollouts: Rollouts, features: Array, categorical: int, score: Array, fold: Array, seed: int, threads: int
) -> HeldOut:
    """Compute all forecasts for samples.

    Args:
        rollouts: the samples [N].
        features: [N, F], without history.
        categorical: index of the feature column that holds category numbers.
        score: score of each sample by a model that has not seen its fold [N].
        fold: [N]; all samples of a prompt are in one fold.
        seed: LightGBM's seed.
        threads: LightGBM's threads.
    """
    log = np.log(rollouts.output_length)
    limit = rollouts.cap or 2 * int(rollouts.output_length.max())
    characters = np.array([len(text) for text in rollouts.texts], dtype=float)[rollouts.prompt]
    model, by_size, by_task = (np.empty((len(log), len(LEVELS))) for _ in range(3))
    for part in np.unique(fold):
        rest, out = fold != part, fold == part
        _, centres, medians = fit_medians(score[rest], log[rest])
        residual = log[rest] - np.interp(score[rest], centres, medians)
        booster = fit_spread(features[rest], score[rest], residual, categorical, seed, threads)
        sizes = predict_spread(booster, features, score, threads)
        fitted = fit_distribution(score[rest], sizes[rest], log[rest], rollouts.cap)
        model[out] = fitted.quantiles(score[out], sizes[out], limit)
        one = np.ones(len(log))
        by_size[out] = fit_distribution(characters[rest], one[rest], log[rest], rollouts.cap).quantiles(
            characters[out], one[out], limit
        )
        by_task[out] = np.quantile(rollouts.output_length[rest], LEVELS)
        for task in np.unique(rollouts.task[out]):
            same = rest & (rollouts.task == task)
            if same.any():
                by_task[out & (rollouts.task == task)] = np.quantile(rollouts.output_length[same], LEVELS)
    unit = rollouts.unit
    forecasts = {MODEL: model, CHARACTERS: by_size, TASK: by_task, OTHERS: _others(unit, rollouts.output_length)}
    return HeldOut(LEVELS, forecasts, rollouts.output_length, unit, limit)


def _others(unit: Array, length: Array) -> Array:
    """Return quantiles [N, Q] of the other lengths of each sample's unit [N]; NaN where there are none."""
    out = np.full((len(length), len(LEVELS)), np.nan)
    order = np.argsort(unit, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(unit[order])) + 1):
        if len(rows) > 1:
            others = np.broadcast_to(length[rows], (len(rows), len(rows)))[~np.eye(len(rows), dtype=bool)]
            out[rows] = np.quantile(others.reshape(len(rows), -1), LEVELS, axis=1).T
    return out
