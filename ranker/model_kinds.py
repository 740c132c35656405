"""Kinds of LightGBM models to compare, and how to fit one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import lightgbm as lgb
import numpy as np

from ranker.segments import Array

QUERY = 256
"""Number of samples that LambdaRank compares with each other: about a batch, which is what the dispatcher ranks."""
GRADES = 31
"""Number of LambdaRank's relevance grades: equal steps of the log of the share of samples that are at least as long, so
that those among the longest are distinguished; the gain grows linearly.
"""
LONGEST = 0.01
"""Share of the samples that has the greatest grade."""


@dataclass(frozen=True)
class ModelKind:
    """A kind of model: LightGBM parameters and the target."""

    name: str
    parameters: dict[str, Any]
    target: str
    """Target: 'log' of the length, 'length' in tokens, or 'grade' within all training samples."""


KINDS = (
    ModelKind("log_length", {"objective": "l2"}, "log"),
    ModelKind("mean_length", {"objective": "l2"}, "length"),
    ModelKind("quantile_60", {"objective": "quantile", "alpha": 0.6}, "log"),
    ModelKind("quantile_80", {"objective": "quantile", "alpha": 0.8}, "log"),
    ModelKind(
        "lambdarank",
        # Only pairs with one of the first ranks are learned from: more ranks than the longest 20 % (51) have.
        {
            "objective": "lambdarank",
            "label_gain": list(range(GRADES)),
            "lambdarank_truncation_level": 64,
            "eval_at": [51],
        },
        "grade",
    ),
)
"""Kinds in order of preference: of two that rank equally well the first is taken, as its score carries more
information."""

ROUNDS, PATIENCE, SPREAD_ROUNDS = 300, 25, 60


@dataclass(frozen=True)
class LengthScorer:
    """A fitted booster and the map of its raw output to a score."""

    booster: lgb.Booster
    shift: float
    scale: float

    def score(self, features: Array, threads: int = 1) -> Array:
        """Return the scores [N] of features [N, F]."""
        raw = np.asarray(self.booster.predict(features, num_threads=threads), dtype=np.float64)
        scaled: Array = (raw - self.shift) / self.scale
        return scaled


def base_parameters(samples: int, prompts: int, seed: int, threads: int) -> dict[str, Any]:
    """Return the LightGBM parameters that all kinds share; deterministic for a seed and a number of threads."""
    return {
        "learning_rate": 0.08,
        "num_leaves": 16,
        # At least two prompts: the samples of one prompt alone say nothing about other prompts.
        "min_data_in_leaf": int(max(np.clip(samples // 100, 3, 30), 2 * samples // prompts)),
        "feature_fraction": 0.7,
        "bagging_fraction": 0.8,
        "bagging_freq": 1,
        "lambda_l2": 3.0,
        "max_bin": 127,
        "seed": seed,
        "num_threads": threads,
        "deterministic": True,
        "force_row_wise": True,
        "verbosity": -1,
    }


def fit(
    kind: ModelKind,
    features: Array,
    log: Array,
    valid: Array,
    categorical: int,
    prompts: int,
    seed: int,
    threads: int,
    rounds: int = 0,
) -> tuple[LengthScorer, int]:
    """Fit a kind and return it with the number of its trees.

    Args:
        kind: the kind to fit.
        features: [N, F], float32.
        log: log lengths [N].
        valid: samples for early stopping [N], bool; with `rounds`, they are trained on too.
        categorical: index of the column that holds category numbers.
        prompts: number of distinct prompts of the samples.
        seed: seed of LightGBM, and of LambdaRank's queries.
        threads: LightGBM's threads.
        rounds: exact number of trees; 0: stop when `valid` no longer improves.
    """
    parameters = base_parameters(len(log), prompts, seed, threads) | kind.parameters
    rng = np.random.default_rng(seed)

    def dataset(rows: Array, reference: lgb.Dataset | None = None) -> lgb.Dataset:
        sizes = None
        if kind.target == "grade":
            rows = rng.permutation(rows)
            sizes = [QUERY] * (len(rows) // QUERY) + ([len(rows) % QUERY] if len(rows) % QUERY else [])
        target = _target(kind, log)[rows]
        names = [categorical]
        return lgb.Dataset(
            features[rows], target, group=sizes, reference=reference, categorical_feature=names, params=parameters
        )

    if rounds:
        train = dataset(np.arange(len(log)))
        booster = lgb.train(parameters, train, num_boost_round=rounds)
    else:
        train = dataset(np.flatnonzero(~valid))
        held = dataset(np.flatnonzero(valid), train)
        stop = lgb.early_stopping(PATIENCE, verbose=False)
        booster = lgb.train(parameters, train, ROUNDS, valid_sets=[held], callbacks=[stop])
        rounds = max(1, booster.best_iteration)
    # A pairwise model's output has no unit: each fit is brought to the same scale by its training samples.
    raw = np.asarray(booster.predict(features, num_threads=threads)) if kind.target == "grade" else np.array([0.0])
    shift, scale = (float(raw.mean()), float(raw.std()) or 1.0) if kind.target == "grade" else (0.0, 1.0)
    return LengthScorer(booster, shift, scale), rounds


def _target(kind: ModelKind, log: Array) -> Array:
    """Return the training target for log lengths [N]."""
    if kind.target == "log":
        return log
    if kind.target == "length":
        return np.exp(log)
    as_long = 1 - np.searchsorted(np.sort(log), log, side="left") / len(log)
    return np.minimum(np.floor(np.log(as_long) / np.log(LONGEST) * GRADES), GRADES - 1).astype(int)


def fit_spread(
    features: Array, score: Array, residual: Array, categorical: int, seed: int, threads: int
) -> lgb.Booster:
    """Learn the size of the residual [N] of unseen prompts from features [N, F] and score [N]."""
    parameters = base_parameters(len(score), len(score), seed, threads)
    # The size of the noise is a rough figure: large leaves keep it from following single prompts.
    parameters |= {"objective": "l2", "num_leaves": 8, "min_data_in_leaf": max(3, len(score) // 20)}
    data = np.column_stack((features, score)).astype(np.float32)
    target = np.abs(residual)
    train = lgb.Dataset(data, target, categorical_feature=[categorical], params=parameters)
    return lgb.train(parameters, train, SPREAD_ROUNDS)


def predict_spread(booster: lgb.Booster, features: Array, score: Array, threads: int = 1) -> Array:
    """Return the predicted mean size of the residual [N] (log), at least 0.01."""
    data = np.column_stack((features, score)).astype(np.float32)
    return np.maximum(np.asarray(booster.predict(data, num_threads=threads), dtype=np.float64), 0.01)
