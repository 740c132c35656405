"""Choice of the kind of scorer, on prompts that take part in no reported figure.

Prompts are dealt into `FOLDS` folds. For each pair of folds, each kind is fitted on all others, and scores the two.
So the choice for a fold f is made on the scores that samples outside f got from models that saw neither f nor the
samples' own fold; f then measures what was chosen (nested cross-validation: Stone 1974; Varma and Simon 2006). The
kind that is kept in the end is chosen by all these scores.

A booster and a table that are equally good differ by noise, and even by rounding. So the best table is kept unless the
best booster is ahead of it by more than one standard error (after Breiman, Friedman, Olshen and Stone 1984, section
3.4.3). The error is that of the difference between the two on the same prompts.

Scores of two fits are never ranked together: a table that was fitted on other prompts has other values for the same
task. So figures are those of one fit on one fold, and their means over folds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np

from ranker.evaluate import FRACTIONS, kendall_tau, recall_at
from ranker.features import FeatureSchema
from ranker.measures import recall_parts
from ranker.model_kinds import KINDS, Columns, FitSamples, LengthScorer, ModelKind, fit
from ranker.segments import Array
from ranker.training_report import Figures

FOLDS = 4
CRITERION = (
    "greatest mean recall of the longest 20, 10 and 5 % on held-out prompts, without history and, if any, with it; a "
    "booster must be ahead of the best table by more than a standard error"
)


@dataclass(frozen=True)
class Table:
    """Arrays for fitting, by sample."""

    schema: FeatureSchema
    cold: Array
    """Features without history [N, F]."""
    warm: Array
    """Features with the simulated history [N, F]."""
    trained: Array
    """Features with the history partly hidden [N, F]."""
    log: Array
    """Log lengths [N]."""
    ended: Array
    """Whether the sample ended by itself, rather than at a limit [N]."""
    prompt: Array
    """Number of each sample's prompt [N]."""
    fold: Array
    """Fold of each sample's prompt [N]."""
    stop: Array
    """Whether the sample's prompt is used for early stopping, in the folds that train on it [N]."""

    @property
    def columns(self) -> Columns:
        """The columns that tables use."""
        return Columns.of(self.schema)

    def fit(self, kind: ModelKind, rows: Array, seed: int, threads: int, rounds: int = 0) -> tuple[LengthScorer, int]:
        """Fit a kind on some samples, by number; return it with the number of its trees."""
        samples = FitSamples(self.trained[rows], self.log[rows], self.ended[rows], self.prompt[rows], self.stop[rows])
        return fit(kind, samples, self.columns, self.schema.numbered, seed, threads, rounds)


@dataclass(frozen=True)
class CrossScores:
    """Scores of a kind by models that saw neither a sample's fold nor fold f [FOLDS, N]; NaN where these are one."""

    cold: Array
    """Scores without history."""
    warm: Array
    """Scores with history."""
    trained: Array
    """Scores with the history partly hidden."""
    trees: int
    """Median of the models' trees."""


def cross_score(table: Table, seed: int, threads: int) -> dict[str, CrossScores]:
    """Return the scores of each kind, by its name."""
    found = {}
    same = np.array_equal(table.cold, table.warm, equal_nan=True)  # without any history one score serves all
    for kind in KINDS:
        cold = np.full((FOLDS, len(table.log)), np.nan)
        scores = {"cold": cold} if same else {"cold": cold, "warm": cold.copy(), "trained": cold.copy()}
        trees = []
        for a, b in combinations(range(FOLDS), 2):
            rest = np.flatnonzero((table.fold != a) & (table.fold != b))
            scorer, rounds = table.fit(kind, rest, seed, threads)
            trees.append(rounds)
            for without, own in ((a, b), (b, a)):
                rows = table.fold == own
                for name, values in scores.items():
                    values[without, rows] = scorer.score(getattr(table, name)[rows], threads)
        warm, trained = scores.get("warm", cold), scores.get("trained", cold)
        found[kind.name] = CrossScores(cold, warm, trained, int(np.median(trees)))
    return found


@dataclass(frozen=True)
class KindChoice:
    """Chooses among kinds by their scores."""

    scores: dict[str, CrossScores]
    fold: Array
    """[N]."""
    length: Array
    """[N], tokens."""
    counted: Array
    """Whether a sample counts for figures [N]."""
    prompt: Array
    """Number of the prompt [N]."""
    history: bool
    """Whether there is any history."""

    def figures(self, name: str) -> Figures:
        """Return a kind's figures without history on the samples outside a fold, the mean over the folds."""
        values, parts = self.scores[name].cold, []
        for out in range(FOLDS):
            rows = self.counted & (self.fold != out)
            parts.append(by_fold(Ranking(values[out, rows], self.length[rows], self.fold[rows], self.prompt[rows])))
        return mean_figures(parts)

    def nested(self) -> list[ModelKind]:
        """Return the kind for each fold [FOLDS], in whose choice the fold had no part."""
        return [self.best(fold) for fold in range(FOLDS)]

    def best(self, without: int | None = None) -> ModelKind:
        """Return the kind to keep: by the samples outside a fold, or by all."""
        found = {kind.name: self._recall_by_prompt(kind.name, without) for kind in KINDS}
        table, booster = (
            max((kind for kind in KINDS if (kind.parameters is None) == tables), key=lambda k: found[k.name].sum())
            for tables in (True, False)
        )
        return booster if _is_ahead(found[booster.name] - found[table.name]) else table

    def _recall_by_prompt(self, name: str, without: int | None) -> Array:
        """Return what each prompt [P] adds to a kind's mean recall."""
        added = np.zeros(len(self.prompt))
        outs = range(FOLDS) if without is None else (without,)
        uses = [self.scores[name].cold, self.scores[name].warm][: 2 if self.history else 1]
        for values, out, own, share in product(uses, outs, range(FOLDS), FRACTIONS):
            rows = self.counted & (self.fold == own)
            if own != out and rows.any():
                added[rows] += recall_parts(values[out, rows], self.length[rows], share)
        folds = len(np.unique(self.fold[self.counted]))
        added /= len(uses) * len(outs) * (folds - 1) * len(FRACTIONS)
        return np.bincount(self.prompt, added)[np.unique(self.prompt)]


def _is_ahead(difference: Array) -> bool:
    """Return whether a sum over prompts [P] is greater than its standard error."""
    error = np.sqrt(len(difference)) * difference.std(ddof=1)
    return bool(difference.sum() > error + 1e-9)


@dataclass(frozen=True)
class Ranking:
    """Scores of held-out samples."""

    score: Array
    """[N]."""
    length: Array
    """[N], tokens."""
    fold: Array
    """Number of the fold [N]: all of its samples have scores of one fit."""
    prompt: Array
    """Number of the prompt [N]."""


def by_fold(ranking: Ranking) -> Figures:
    """Return the mean over folds of the figures of a ranking."""
    folds = [ranking.fold == f for f in np.unique(ranking.fold)]
    return mean_figures([figures(ranking.score[rows], ranking.length[rows]) for rows in folds])


def mean_figures(parts: Sequence[Figures]) -> Figures:
    """Return the mean of at least one figures; a tau that is undefined is left out."""
    taus = [part.kendall_tau for part in parts if part.kendall_tau is not None]
    recall = {share: float(np.mean([part.recall[share] for part in parts])) for share in parts[0].recall}
    return Figures(recall, float(np.mean(taus)) if taus else None)


def figures(score: Array, length: Array) -> Figures:
    """Return the figures of a ranking of samples [N]."""
    tau = kendall_tau(np.where(np.isnan(score), -np.inf, score), length)
    recall = {f"{share:g}": recall_at(score, length, share) for share in FRACTIONS}
    return Figures(recall, float(tau) if np.isfinite(tau) else None)
