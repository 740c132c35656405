"""Kinds of scorers to compare, and how to fit one: tables by task, and LightGBM boosters.

A table (`ranker.shrinkage`) is a kind of its own, so that nothing that ranks worse than it on unseen prompts is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightgbm as lgb
import numpy as np

from ranker.censored_normal import likelihood_loss, pseudo_residual, scale_of
from ranker.features import FeatureSchema
from ranker.history import earlier_lengths
from ranker.segments import Array
from ranker.shrinkage import Shrunk, fit_shrunk

LONGEST = 0.2
"""Share of the samples that are the longest, for the table of their shares."""
TRACE = 1e-3
"""Weight of the length beside the share of the longest: orders tasks with equal shares."""
HIDE_TASK = 0.15
"""Share of prompts whose task a booster is not told in training, so that a request may come without one."""


@dataclass(frozen=True)
class ModelKind:
    """A kind of scorer."""

    name: str
    target: str
    """Target: 'log' of the length, 'length' in tokens, or 'longest' (1 for the longest fifth of all samples)."""
    parameters: dict[str, Any] | None
    """LightGBM parameters; None: the table alone."""


KINDS = (
    ModelKind("task_mean", "length", None),
    ModelKind("task_longest", "longest", None),
    # The likelihood of a normal log length that is cut off at the limit (Tobin 1958): the limit is no length.
    ModelKind("log_length", "log", {"objective": "censored_normal"}),
    ModelKind("mean_length", "length", {"objective": "l2"}),
    # A quantile below the limit is the same whatever happens beyond it (Powell 1986).
    ModelKind("quantile_60", "log", {"objective": "quantile", "alpha": 0.6}),
)
"""All kinds, tables first: of two tables, or two boosters, that rank equally well the first is kept."""
DEFAULT = "log_length"
"""Kind that a run begins with when it has no ranker file."""

ROUNDS, PATIENCE, SPREAD_ROUNDS = 300, 25, 60


@dataclass(frozen=True)
class Columns:
    """Numbers of the feature columns that tables use."""

    task: int
    history: slice

    @classmethod
    def of(cls, schema: FeatureSchema) -> Columns:
        """Find the columns."""
        return cls(schema.names.index("task"), schema.history)


@dataclass(frozen=True)
class LengthScorer:
    """A fitted table, or a booster of what is to be added to the mean of its tasks."""

    target: str
    """Target of its kind (see `ModelKind`)."""
    table: Shrunk
    columns: Columns
    booster: lgb.Booster | None

    def score(self, features: Array, threads: int = 1) -> Array:
        """Return the scores [N] of features [N, F]; a booster's sum in tokens may be negative."""
        if self.booster is None:
            return self.expected(features)
        return self.table.prior + np.asarray(self.booster.predict(features, num_threads=threads), dtype=np.float64)

    @property
    def in_tokens(self) -> bool:
        """Whether the scores are numbers of tokens."""
        return self.target == "length"

    def expected(self, features: Array) -> Array:
        """Return the table's values [N]: those of the task, moved to the earlier lengths of the same prompt."""
        of_task = self.table.of_task(features[:, self.columns.task])
        if self.target == "longest":
            return of_task
        mean, count = earlier_lengths(features[:, self.columns.history])
        return self.table.given(of_task, mean, count)


@dataclass(frozen=True)
class FitSamples:
    """Samples to fit on, N of them."""

    features: Array
    """[N, F], float32."""
    log: Array
    """Log lengths [N]."""
    ended: Array
    """Whether the sample ended by itself, rather than at a limit [N]."""
    prompt: Array
    """Number of the prompt [N]."""
    stop: Array
    """Samples for early stopping [N], bool; with a fixed number of trees they are trained on too."""


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
    kind: ModelKind, samples: FitSamples, columns: Columns, tasks: int, seed: int, threads: int, rounds: int = 0
) -> tuple[LengthScorer, int]:
    """Fit a kind and return it with the number of its trees.

    Args:
        kind: the kind to fit.
        samples: the samples.
        columns: the columns that tables use.
        tasks: number of tasks with a number.
        seed: LightGBM's seed.
        threads: LightGBM's threads.
        rounds: exact number of trees; 0: stop when the samples of `stop` no longer improve.
    """
    target = _target(kind, samples.log)
    table = fit_shrunk(samples.features[:, columns.task], tasks, samples.prompt, target)
    scorer = LengthScorer(kind.target, table, columns, None)
    if kind.parameters is None:
        return scorer, 0
    untold = np.random.default_rng(seed).random(samples.prompt.max() + 1)[samples.prompt] < HIDE_TASK
    features = samples.features.copy()
    features[untold, columns.task] = np.nan
    parameters = base_parameters(len(target), len(np.unique(samples.prompt)), seed, threads) | kind.parameters
    stop = samples.stop
    if not stop.any() or stop.all():
        stop = np.arange(len(stop)) % 6 == 0
    if (~stop).sum() < 2 * parameters["min_data_in_leaf"]:
        return scorer, 0  # too few to split: the table is all there is to know

    def dataset(rows: Array, reference: lgb.Dataset | None = None) -> lgb.Dataset:
        return lgb.Dataset(
            features[rows],
            target[rows],
            init_score=np.full(len(rows), table.prior),
            reference=reference,
            categorical_feature=[columns.task],
            params=parameters,
        )

    used = np.arange(len(target)) if rounds else np.flatnonzero(~stop)
    held = None
    measure: Callable[[Array, lgb.Dataset], tuple[str, float, bool]] | None = None
    train = dataset(used)
    if kind.parameters["objective"] == "censored_normal":
        parameters["objective"] = _CensoredNormal(target[used], samples.ended[used])
        checked = np.flatnonzero(stop)
        measure = _likelihood(target[checked], samples.ended[checked])
    if rounds:
        return LengthScorer(kind.target, table, columns, _train(parameters, train, rounds)), rounds
    held = dataset(np.flatnonzero(stop), train)
    early = lgb.early_stopping(PATIENCE, verbose=False)
    booster = _train(parameters, train, ROUNDS, valid_sets=[held], feval=measure, callbacks=[early])
    return LengthScorer(kind.target, table, columns, booster), max(1, booster.best_iteration) if booster else 0


def _train(parameters: dict[str, Any], data: lgb.Dataset, rounds: int, **more: Any) -> lgb.Booster | None:
    """Return a booster; None where no column can be split, which LightGBM refuses."""
    try:
        return lgb.train(parameters, data, rounds, **more)
    except lgb.basic.LightGBMError as error:
        if "num_features" in str(error):
            return None
        raise


class _CensoredNormal:
    """LightGBM objective of log lengths of which some are cut off; the scale follows the fit, round by round."""

    def __init__(self, target: Array, ended: Array) -> None:
        self._target, self._ended = target, ended
        self._scale = max(1e-3, float(target.std()))

    def __call__(self, predicted: Array, _: lgb.Dataset) -> tuple[Array, Array]:
        """Return gradient and second derivative [N], in units of the squared scale (as squared error has them)."""
        self._scale = scale_of(self._target - predicted, self._ended, self._scale)
        residual, slope = pseudo_residual(self._target - predicted, self._ended, self._scale)
        return -residual, slope


def _likelihood(target: Array, ended: Array) -> Callable[[Array, lgb.Dataset], tuple[str, float, bool]]:
    def measure(predicted: Array, _: lgb.Dataset) -> tuple[str, float, bool]:
        return "censored_normal", likelihood_loss(target - predicted, ended), False

    return measure


def _target(kind: ModelKind, log: Array) -> Array:
    """Return the training target for log lengths [N]."""
    if kind.target == "log":
        return log
    length = np.exp(log)
    if kind.target == "length":
        return length
    bound = np.sort(log)[-max(1, round(LONGEST * len(log)))]
    return np.asarray((log >= bound - 1e-9) + TRACE * length / length.max())


def fit_spread(
    features: Array, score: Array, residual: Array, ended: Array, categorical: int, seed: int, threads: int
) -> lgb.Booster | None:
    """Learn the size of the residual [N] of unseen prompts from features [N, F] and score [N].

    Where a length was cut off, the residual is only known to be greater; what is missing has the mean size of all
    (sizes with an exponential distribution have no memory).
    """
    parameters = base_parameters(len(score), len(score), seed, threads)
    # The size of the noise is a rough figure: large leaves keep it from following single prompts.
    parameters |= {"objective": "l2", "num_leaves": 8, "min_data_in_leaf": max(3, len(score) // 20)}
    data = np.column_stack((features, score)).astype(np.float32)
    mean = float(np.abs(residual[ended]).mean()) if ended.any() else float(np.abs(residual).mean())
    target = np.where(ended, np.abs(residual), np.maximum(residual, 0.0) + mean)
    train = lgb.Dataset(data, target, categorical_feature=[categorical], params=parameters)
    return _train(parameters, train, SPREAD_ROUNDS)


def predict_spread(booster: lgb.Booster | None, features: Array, score: Array, threads: int) -> Array:
    """Return the predicted mean size of the residual [N] (log), at least 0.01; 1 without a booster."""
    if booster is None:
        return np.ones(len(score))
    data = np.column_stack((features, score)).astype(np.float32)
    return np.maximum(np.asarray(booster.predict(data, num_threads=threads), dtype=np.float64), 0.01)
