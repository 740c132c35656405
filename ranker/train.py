"""Training of the ranker: compares kinds of models on unseen prompts, keeps the best, and measures its spread.

All splits are by prompt: all samples of a prompt are in one fold. The figures of each kind are measured *without any
history* (a new prompt of a new run), the hardest use; those of the kept kind also with it. Training hides the history
of some prompts, so that one model serves both uses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ranker.ceiling import ceiling_of_many
from ranker.data import Rollouts
from ranker.distribution import LEVELS, Distribution, fit_distribution, fit_medians
from ranker.evaluate import FRACTIONS, baselines, coverage, kendall_tau, noise_ceiling, recall_at, recall_limit
from ranker.features import FeatureSchema, assemble, fit_schema, text_features
from ranker.held_out import MODEL, HeldOut, hold_out
from ranker.history import PROMPT, SIBLINGS, simulate
from ranker.model import LengthModel
from ranker.model_kinds import KINDS, LengthScorer, ModelKind, fit, fit_spread, predict_spread
from ranker.segments import Array
from ranker.training_report import Figures, Many, Report
from ranker.unfamiliar import COLUMNS, fit_unfamiliar

FOLDS = 3
MIN_PROMPTS = 9
"""Fewest distinct prompts: three in each fold."""
COMPARE_ROWS, FIT_ROWS = 16_000, 60_000
"""Largest number of samples for the comparison of kinds, and for the kept model: some tens of seconds in all on two
cores."""
REPEATS = 4
"""Largest number of samples of a prompt that count for the figures of a ranking."""
HIDE_ALL, HIDE_PROMPT = 0.3, 0.2
"""Shares of prompts whose rows are trained on without any history, and without that of the prompt and its siblings."""
MARGIN = 0.005
"""Difference in mean recall by which a kind that stands later in `KINDS` must be better: less is noise."""
CRITERION = "greatest mean recall of the longest 20, 10 and 5 % on held-out prompts without history (ties: the first)"


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
    prompt: Array
    """Number of each sample's prompt [N]."""
    fold: Array
    """Fold of each sample's prompt [N]."""
    stop: Array
    """Whether the sample's prompt is used for early stopping, in the folds that train on it [N]."""

    @property
    def categorical(self) -> int:
        """Index of the column with the task's number."""
        return self.schema.names.index("task")


@dataclass(frozen=True)
class Trained:
    """Result of a training."""

    model: LengthModel
    report: Report
    """The model's report (the same object)."""
    held_out: HeldOut | None
    """Forecasts for unseen prompts, for further figures; None where no split by prompt was possible."""


def train(rollouts: Rollouts, seed: int = 0, threads: int = 1) -> tuple[LengthModel, Report]:
    """Return the model and the report of `train_and_hold_out`."""
    trained = train_and_hold_out(rollouts, seed, threads)
    return trained.model, trained.report


def train_and_hold_out(rollouts: Rollouts, seed: int = 0, threads: int = 1) -> Trained:
    """Train and measure; deterministic for a seed and a number of threads.

    With fewer than `MIN_PROMPTS` distinct prompts no split by prompt is possible: the model then gives all requests
    the distribution of all lengths, and the report says so.
    """
    rollouts = _subsample(rollouts, FIT_ROWS, seed, "trained on")
    if len(rollouts.texts) < MIN_PROMPTS or len(np.unique(rollouts.output_length)) < 2:
        return Trained(*_constant(rollouts, seed), None)
    few = _subsample(rollouts, COMPARE_ROWS, seed, "kinds of models compared on")
    table = tabulate(few, seed)
    scores, rounds = {}, {}
    for kind in KINDS:
        scores[kind.name], rounds[kind.name] = _held_out(kind, table, seed, threads)
    length, counted = few.output_length, _counted(few, seed)
    candidates = {name: _figures(score, length, counted) for name, (score, _) in scores.items()}
    kept = KINDS[0]
    for kind in KINDS[1:]:
        if _mean(candidates[kind.name]) > _mean(candidates[kept.name]) + MARGIN:
            kept = kind
    cold, warm = scores[kept.name]
    history = simulate(few)
    known = bool(np.isfinite(history).any())
    held_out = hold_out(few, table.cold, table.categorical, cold, table.fold, seed, threads)
    report = Report(
        samples=len(rollouts),
        prompts=len(rollouts.texts),
        tasks=len(np.unique(rollouts.task[rollouts.task >= 0])),
        cap=rollouts.cap,
        kind=kept.name,
        criterion=CRITERION,
        candidates=candidates,
        with_history=_figures(warm, length, counted) if known else None,
        baselines={n: _figures(s, length, counted) for n, s in baselines(few, history, table.fold, seed).items()},
        ceiling=_named(noise_ceiling(rollouts, FRACTIONS, seed)),
        limit={f"{share:g}": recall_limit(length[counted], share) for share in FRACTIONS},
        many=_many(held_out.unit, length, cold),
        coverage=_coverage(held_out, table.fold),
        messages=list(dict.fromkeys([*rollouts.notes, *few.notes])),
    )
    whole = table if few is rollouts else tabulate(rollouts, seed)
    return Trained(_final(kept, rollouts, whole, rounds[kept.name], report, seed, threads), report, held_out)


def refit(name: str, rollouts: Rollouts, seed: int = 0, threads: int = 1) -> LengthModel:
    """Fit a model of the named kind, without comparison or figures; a constant one if the samples are too few."""
    if len(rollouts.texts) < MIN_PROMPTS or len(np.unique(rollouts.output_length)) < 2:
        return _constant(rollouts, seed)[0]
    kind = next((kind for kind in KINDS if kind.name == name), KINDS[0])
    report = Report(
        samples=len(rollouts),
        prompts=len(rollouts.texts),
        tasks=len(np.unique(rollouts.task[rollouts.task >= 0])),
        cap=rollouts.cap,
        kind=kind.name,
        criterion="refitted: the kind was given",
    )
    return _final(kind, rollouts, tabulate(rollouts, seed), 0, report, seed, threads)


def tabulate(rollouts: Rollouts, seed: int) -> Table:
    """Compute features, targets and folds of samples."""
    rng = np.random.default_rng(seed)
    names, counts = np.unique(rollouts.task[rollouts.task >= 0], return_counts=True)
    frequent = names[np.argsort(-counts, kind="stable")]
    schema = fit_schema(rollouts.texts, [rollouts.tasks[i] for i in frequent], seed)
    number = np.full(len(rollouts.tasks) + 1, -1)
    number[frequent[: len(schema.tasks)]] = np.arange(len(schema.tasks))
    text = text_features(schema, rollouts.texts)[rollouts.prompt]
    history = simulate(rollouts)
    cold = assemble(schema, text, number[rollouts.task], rollouts.difficulty, None)
    warm = assemble(schema, text, number[rollouts.task], rollouts.difficulty, history)
    chance = rng.random(len(rollouts.texts))[rollouts.prompt]
    trained = warm.copy()
    trained[chance < HIDE_ALL, schema.history] = np.nan
    own = slice(schema.history.start, schema.history.start + len(PROMPT) + len(SIBLINGS))
    trained[chance < HIDE_ALL + HIDE_PROMPT, own] = np.nan
    fold = (rng.permutation(len(rollouts.texts)) % FOLDS)[rollouts.prompt]
    stop = (rng.permutation(len(rollouts.texts)) % 6 == 0)[rollouts.prompt]
    return Table(schema, cold, warm, trained, np.log(rollouts.output_length), rollouts.prompt, fold, stop)


def _held_out(kind: ModelKind, table: Table, seed: int, threads: int) -> tuple[tuple[Array, Array], int]:
    """Return scores by models that have not seen the prompts (without [N], with history [N]), and the median of their
    trees."""
    cold, warm, trees = np.zeros(len(table.log)), np.zeros(len(table.log)), []
    for fold in range(FOLDS):
        scorer, rounds = _fit_rows(kind, table, np.flatnonzero(table.fold != fold), seed, threads)
        out = table.fold == fold
        cold[out] = scorer.score(table.cold[out], threads)
        warm[out] = scorer.score(table.warm[out], threads)
        trees.append(rounds)
    return (cold, warm), int(np.median(trees))


def _fit_rows(
    kind: ModelKind, table: Table, rows: Array, seed: int, threads: int, rounds: int = 0
) -> tuple[LengthScorer, int]:
    stop = table.stop[rows]
    if not stop.any() or stop.all():
        stop = np.arange(len(rows)) % 6 == 0
    prompts = len(np.unique(table.prompt[rows]))
    return fit(kind, table.trained[rows], table.log[rows], stop, table.categorical, prompts, seed, threads, rounds)


def _final(
    kind: ModelKind, rollouts: Rollouts, table: Table, rounds: int, report: Report, seed: int, threads: int
) -> LengthModel:
    """Fit the model on all samples; its spread is learned from scores by models that have not seen the prompts."""
    score = np.zeros(len(table.log))
    trees = []
    for fold in range(FOLDS):
        scorer, used = _fit_rows(kind, table, np.flatnonzero(table.fold != fold), seed, threads, rounds)
        out = table.fold == fold
        # As in training: with and without history, so that the spread is right for both.
        score[out] = scorer.score(table.trained[out], threads)
        trees.append(used)
    scorer, _ = _fit_rows(kind, table, np.arange(len(table.log)), seed, threads, rounds or int(np.median(trees)))
    features = table.trained
    _, centres, medians = fit_medians(score, table.log)
    residual = table.log - np.interp(score, centres, medians)
    spread = fit_spread(features, score, residual, table.categorical, seed, threads)
    sizes = predict_spread(spread, features, score, threads)
    distribution = fit_distribution(score, sizes, table.log, rollouts.cap)
    names = table.schema.names
    columns = table.cold[:, [names.index(name) for name in COLUMNS]]
    unfamiliar = fit_unfamiliar(columns, table.cold[:, table.categorical], table.log)
    longest = int(rollouts.output_length.max())
    return LengthModel(kind.name, table.schema, scorer, spread, unfamiliar, distribution, rollouts.cap, longest, report)


def _coverage(held: HeldOut, fold: Array) -> dict[str, float]:
    """Return the coverage of the model's quantiles; means over folds [N]."""
    # 1e-6: a quantile that is exactly a length may be a rounding error below it
    quantiles = held.forecasts[MODEL] * (1 + 1e-6)
    parts = [coverage(held.levels, quantiles[fold == f], held.length[fold == f]) for f in np.unique(fold)]
    return {level: float(np.mean([part[level] for part in parts])) for level in parts[0]}


def _many(unit: Array, length: Array, score: Array) -> Many | None:
    found = ceiling_of_many(unit, length, score, FRACTIONS)
    if found is None:
        return None
    prompts, ceiling, recall = found
    return Many(prompts, {f"{x:g}": ceiling[x] for x in FRACTIONS}, {f"{x:g}": recall[x] for x in FRACTIONS})


def _counted(rollouts: Rollouts, seed: int) -> Array:
    """Return whether a sample counts for recall and tau [N]: at most `REPEATS` of each prompt in each step of a run.

    The ceiling counts all prompts equally, too; and a prompt with many samples would make figures a matter of luck:
    either all of its samples are among the longest, or none.
    """
    unit = rollouts.unit
    order = np.lexsort((np.random.default_rng(seed).random(len(unit)), unit))
    sizes = np.bincount(unit)
    rank = np.empty(len(unit), dtype=np.int64)
    rank[order] = np.arange(len(unit)) - (np.cumsum(sizes) - sizes)[unit[order]]
    few: Array = rank < REPEATS
    return few


def _figures(score: Array, length: Array, counted: Array) -> Figures:
    """Return the figures of all folds together [N]: the models of all folds predict the same thing."""
    score, length = score[counted], length[counted]
    tau = kendall_tau(np.where(np.isnan(score), -np.inf, score), length)
    return Figures({f"{x:g}": recall_at(score, length, x) for x in FRACTIONS}, float(tau) if np.isfinite(tau) else None)


def _mean(figures: Figures) -> float:
    return sum(figures.recall.values()) / len(figures.recall)


def _named(recall: dict[float, float] | None) -> dict[str, float] | None:
    return None if recall is None else {f"{fraction:g}": value for fraction, value in recall.items()}


def _subsample(rollouts: Rollouts, most: int, seed: int, what: str) -> Rollouts:
    """Return at most about `most` samples, whole prompts."""
    if len(rollouts) <= most:
        return rollouts
    order = np.random.default_rng(seed).permutation(len(rollouts.texts))
    sizes = np.bincount(rollouts.prompt, minlength=len(order))[order]
    chosen = np.zeros(len(order), dtype=bool)
    chosen[order[: max(1, int(np.searchsorted(np.cumsum(sizes), most, side="right")))]] = True
    rows = np.flatnonzero(chosen[rollouts.prompt])
    if len(rows) > 2 * most:  # few prompts with very many samples each
        rows = np.sort(np.random.default_rng(seed).choice(rows, most, replace=False))
    return rollouts.take(rows, f"{what} {len(rows)} of {len(rollouts)} samples, chosen by prompt")


def _constant(rollouts: Rollouts, seed: int) -> tuple[LengthModel, Report]:
    """Return a model that gives every request the distribution of all lengths, and its report."""
    prompts = len(rollouts.texts)
    if len(np.unique(rollouts.output_length)) < 2:
        why = "all lengths are equal"
    else:
        plural = "prompt" if prompts == 1 else "prompts"
        why = f"{prompts} distinct {plural}: no split by prompt is possible (at least {MIN_PROMPTS} are needed)"
    note = f"{why}; every request gets the distribution of all lengths"
    log = np.log(rollouts.output_length)
    distribution = Distribution(
        np.zeros(1), np.array([np.median(log)]), (np.quantile(log, LEVELS) - np.median(log))[None, :], np.zeros(1)
    )
    report = Report(
        samples=len(rollouts),
        prompts=prompts,
        tasks=len(np.unique(rollouts.task[rollouts.task >= 0])),
        cap=rollouts.cap,
        kind="constant",
        criterion=CRITERION,
        messages=[*rollouts.notes, note],
    )
    longest = int(rollouts.output_length.max())
    schema = fit_schema(rollouts.texts, [], seed)
    return LengthModel("constant", schema, None, None, None, distribution, rollouts.cap, longest, report), report
