"""Training of the ranker: compares kinds of scorers on unseen prompts, keeps the best, and measures what was kept.

All splits are by prompt: all samples of a prompt are in one fold. `ranker.selection` says which samples choose and
which report. The figures of each kind are measured *without any history* (a new prompt of a new run), the hardest
use, and with it. Training hides the history of some prompts, so that one model serves both uses.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from ranker.ceiling import MANY, ceiling_of_many
from ranker.data import Rollouts
from ranker.distribution import LEVELS, expected_length, fit_distribution, fit_location
from ranker.evaluate import FRACTIONS, baselines, coverage
from ranker.features import UNKNOWN, assemble, fit_schema, text_features
from ranker.held_out import MODEL, HeldOut, simple_forecasts
from ranker.history import PROMPT, remember, simulate
from ranker.model import NOT_JUDGED, Judged, LengthModel
from ranker.model_kinds import DEFAULT, KINDS, LengthScorer, ModelKind, fit_spread, predict_spread
from ranker.segments import Array
from ranker.selection import CRITERION, FOLDS, KindChoice, Ranking, Table, by_fold, cross_score
from ranker.shrinkage import fit_shrunk
from ranker.training_report import Many, Report
from ranker.unfamiliar import fit_unfamiliar

WITH_HISTORY, NEW_TASKS, LIMIT = "with_history", "new_tasks", "limit"
"""Names of rankings: with the lengths that had finished earlier, of tasks that were left out, and by the true length.
"""
MIN_PROMPTS = 9
"""Fewest distinct prompts: two or three in each fold."""
COMPARE_ROWS, FIT_ROWS = 16_000, 60_000
"""Largest number of samples for the comparison of kinds, and for the kept model: some tens of seconds in all on two
cores."""
REPEATS = 4
"""Largest number of samples of a prompt that count for the figures of a ranking."""
HIDE_ALL, HIDE_PROMPT = 0.3, 0.2
"""Shares of prompts whose rows are trained on without any history, and without that of the prompt."""
JUDGED = 2000
"""Most held-out samples that the model's file keeps."""


@dataclass(frozen=True)
class Trained:
    """Result of a training."""

    model: LengthModel
    report: Report
    """The model's report (the same object)."""
    held_out: HeldOut | None
    """Forecasts for unseen prompts, for further figures; None where no split by prompt was possible."""
    rankings: dict[str, Ranking] = field(default_factory=dict)
    """What the report's figures are of, by their names there: samples that chose nothing."""


def train_and_hold_out(
    rollouts: Rollouts, seed: int = 0, threads: int = 1, written_by: tuple[str, ...] = ()
) -> Trained:
    """Train and measure; deterministic for a seed and numbers of threads (LightGBM's and BLAS's) on one kind of CPU.

    Elsewhere sums are rounded otherwise, and of two kinds of model that are as good another one may be kept.

    With fewer than `MIN_PROMPTS` distinct prompts no split by prompt is possible: the model then gives all requests
    the distribution of all lengths, and the report says so.

    Args:
        rollouts: the samples.
        seed: seed of splits and of LightGBM.
        threads: LightGBM's threads.
        written_by: names of the language models that wrote the samples, where known.
    """
    rollouts = _subsample(rollouts, FIT_ROWS, seed, "trained on")
    if len(rollouts.texts) < MIN_PROMPTS or len(np.unique(rollouts.output_length)) < 2:
        return Trained(*_constant(rollouts, seed, written_by), None)
    few = _subsample(rollouts, COMPARE_ROWS, seed, "kinds of models compared on")
    table = tabulate(few, seed)
    length, counted, history = few.output_length, _counted(few, seed), simulate(few)

    def ranking(score: Array, fold: Array) -> Ranking:
        rows = counted & (fold >= 0)
        return Ranking(score[rows], length[rows], fold[rows], few.prompt[rows])

    scores = cross_score(table, seed, threads)
    choice = KindChoice(scores, table.fold, length, counted, few.prompt, bool(np.isfinite(history).any()))
    kept = choice.best()
    cold, warm, unseen, chosen = _nested(choice, few, table, seed, threads)
    expected = expected_length(cold)
    simple = baselines(few, history, table.fold, seed)
    rankings = {name: ranking(score, table.fold) for name, score in (simple | {MODEL: expected, LIMIT: length}).items()}
    if choice.history:
        rankings[WITH_HISTORY] = ranking(expected_length(warm), table.fold)
    if (new := _rank_new_tasks(few, table, seed)) is not None:
        rankings[NEW_TASKS] = ranking(*new)
    measured = {name: by_fold(found) for name, found in rankings.items()}
    held_out = HeldOut(
        LEVELS, {MODEL: cold} | simple_forecasts(few, table.fold), length, few.unit, few.cap or 2 * int(length.max())
    )
    report = Report(
        samples=len(rollouts),
        prompts=len(rollouts.texts),
        tasks=len(np.unique(rollouts.task[rollouts.task >= 0])),
        cap=rollouts.cap,
        kind=kept.name,
        criterion=CRITERION,
        candidates={kind.name: choice.figures(kind.name) for kind in KINDS},
        held_out=measured[MODEL],
        kinds=chosen,
        with_history=measured.get(WITH_HISTORY),
        new_tasks=measured.get(NEW_TASKS),
        baselines={name: measured[name] for name in simple},
        limit=measured[LIMIT].recall,
        many=_many(few.unit, length, expected),
        coverage=_coverage(cold, length, table.fold),
        coverage_with_history=_coverage(warm, length, table.fold) if choice.history else {},
        messages=list(dict.fromkeys([*rollouts.notes, *few.notes, *_warnings(few)])),
    )
    whole = table if few is rollouts else tabulate(rollouts, seed)
    rows = np.flatnonzero(counted)
    rows = np.random.default_rng(seed).permutation(rows)[:JUDGED]
    judged = Judged(expected[rows], length[rows].astype(float))
    rounds = scores[kept.name].trees
    reused = unseen if whole is table and set(chosen) == {kept.name} else None
    model = _final(kept, rollouts, whole, rounds, report, seed, threads, reused)
    model = replace(model, judged=judged, written_by=written_by, remembered=remember(rollouts))
    return Trained(model, report, held_out, rankings)


def refit(
    name: str, rollouts: Rollouts, seed: int = 0, threads: int = 1, written_by: tuple[str, ...] = ()
) -> LengthModel:
    """Fit a model of the named kind, without comparison or figures; a constant one if the samples are too few."""
    if len(rollouts.texts) < MIN_PROMPTS or len(np.unique(rollouts.output_length)) < 2:
        return _constant(rollouts, seed, written_by)[0]
    named = {kind.name: kind for kind in KINDS}
    kind = named.get(name, named[DEFAULT])
    report = Report(
        samples=len(rollouts),
        prompts=len(rollouts.texts),
        tasks=len(np.unique(rollouts.task[rollouts.task >= 0])),
        cap=rollouts.cap,
        kind=kind.name,
        criterion="refitted: the kind was given",
    )
    return replace(_final(kind, rollouts, tabulate(rollouts, seed), 0, report, seed, threads), written_by=written_by)


def tabulate(rollouts: Rollouts, seed: int) -> Table:
    """Compute features, targets and folds of samples."""
    rng = np.random.default_rng(seed)
    names, counts = np.unique(rollouts.task[rollouts.task >= 0], return_counts=True)
    frequent = names[np.argsort(-counts, kind="stable")]
    schema = fit_schema(rollouts.texts, [rollouts.tasks[i] for i in frequent], seed)
    number = np.full(len(rollouts.tasks) + 1, np.nan)
    number[frequent[: schema.numbered]] = np.arange(schema.numbered)
    text = text_features(schema, rollouts.texts)[rollouts.prompt]
    history = simulate(rollouts)
    cold = assemble(schema, text, number[rollouts.task], None)
    warm = assemble(schema, text, number[rollouts.task], history)
    chance = rng.random(len(rollouts.texts))[rollouts.prompt]
    trained = warm.copy()
    trained[chance < HIDE_ALL, schema.history] = np.nan
    own = slice(schema.history.start, schema.history.start + len(PROMPT))
    trained[chance < HIDE_ALL + HIDE_PROMPT, own] = np.nan
    fold = (rng.permutation(len(rollouts.texts)) % FOLDS)[rollouts.prompt]
    stop = (rng.permutation(len(rollouts.texts)) % 6 == 0)[rollouts.prompt]
    log, ended = np.log(rollouts.output_length), ~rollouts.capped
    return Table(schema, cold, warm, trained, log, ended, rollouts.prompt, fold, stop)


def _nested(
    choice: KindChoice, rollouts: Rollouts, table: Table, seed: int, threads: int
) -> tuple[Array, Array, Array, list[str]]:
    """Return quantiles [N, Q] without and with history by models whose choice and fit a sample's fold had no part in,
    their scores [N] of what is trained on, and the kinds that were chosen for the folds."""
    without, given = (np.empty((len(table.log), len(LEVELS))) for _ in range(2))
    unseen, kinds = np.empty(len(table.log)), choice.nested()
    for fold, kind in enumerate(kinds):
        rest, out = np.flatnonzero(table.fold != fold), table.fold == fold
        scorer, _ = table.fit(kind, rest, seed, threads)
        score = choice.scores[kind.name].trained[fold, rest]
        model = _model(kind, scorer, table, rest, score, rollouts.cap, seed, threads)
        without[out] = model.predict_features(table.cold[out], threads).quantiles
        given[out] = model.predict_features(table.warm[out], threads).quantiles if choice.history else without[out]
        unseen[out] = scorer.score(table.trained[out], threads)
    return without, given, unseen, [kind.name for kind in kinds]


def _final(
    kind: ModelKind,
    rollouts: Rollouts,
    table: Table,
    rounds: int,
    report: Report,
    seed: int,
    threads: int,
    unseen: Array | None = None,
) -> LengthModel:
    """Fit the model on all samples.

    Its spread is learned from scores [N] by models that have not seen the prompts, with and without history, as in
    training; `unseen`, if they are there already.
    """
    trees = [rounds]
    if unseen is None:
        unseen, trees = np.zeros(len(table.log)), []
        for fold in range(FOLDS):
            scorer, used = table.fit(kind, np.flatnonzero(table.fold != fold), seed, threads, rounds)
            out = table.fold == fold
            unseen[out] = scorer.score(table.trained[out], threads)
            trees.append(used)
    every = np.arange(len(table.log))
    scorer, _ = table.fit(kind, every, seed, threads, int(np.median(trees)))
    model = _model(kind, scorer, table, every, unseen, rollouts.cap, seed, threads)
    return replace(model, report=report)


def _model(
    kind: ModelKind,
    scorer: LengthScorer,
    table: Table,
    rows: Array,
    score: Array,
    cap: int | None,
    seed: int,
    threads: int,
) -> LengthModel:
    """Complete a scorer with distributions, from scores of samples [K] (`rows`) whose prompts it had not seen."""
    log, ended, features = table.log[rows], table.ended[rows], table.trained[rows]
    prompts = len(np.unique(table.prompt[rows]))
    spread = None
    if scorer.booster is not None:
        residual = log - fit_location(score, log, ended, prompts, scorer.in_tokens)
        spread = fit_spread(features, score, residual, ended, table.columns.task, seed, threads)
    sizes = predict_spread(spread, features, score, threads)
    distribution = fit_distribution(score, sizes, log, ended, prompts, scorer.in_tokens)
    names = table.schema.names
    unfamiliar = fit_unfamiliar(table.cold[rows], names, table.columns, table.prompt[rows], log, ended)
    longest = int(np.rint(np.exp(log.max())))
    report = Report(len(rows), prompts, 0, cap, kind.name, "")
    returning = None
    again = np.isfinite(features[:, table.columns.history][:, : len(PROMPT)]).any()
    if scorer.booster is not None and not again and len(rows) > prompts:  # else noise cannot be told from the prompts'
        missed = np.exp(log) - distribution.expected(score)
        returning = fit_shrunk(np.full(len(rows), np.nan), 0, table.prompt[rows], missed)
    return LengthModel(
        kind.name,
        table.schema,
        scorer,
        spread,
        unfamiliar,
        distribution,
        cap,
        longest,
        report,
        NOT_JUDGED,
        returning=returning,
    )


def _rank_new_tasks(rollouts: Rollouts, table: Table, seed: int) -> tuple[Array, Array] | None:
    """Return expected lengths [N] by fits that took no part of a sample's group of tasks, and the groups [N] (-1: no
    task); None with fewer than two tasks."""
    tasks = np.unique(rollouts.task[rollouts.task >= 0])
    if len(tasks) < 2:
        return None
    groups = np.array_split(np.random.default_rng(seed).permutation(tasks), min(FOLDS, len(tasks)))
    names, columns = table.schema.names, table.columns
    expected, number = np.zeros(len(table.log)), np.full(len(table.log), -1)
    for group, members in enumerate(groups):
        out = np.isin(rollouts.task, members)
        rest = ~out
        fitted = fit_unfamiliar(
            table.cold[rest], names, columns, table.prompt[rest], table.log[rest], table.ended[rest]
        )
        features = table.cold[out].copy()
        features[:, columns.task] = UNKNOWN
        most = np.log(rollouts.cap or 2 * rollouts.output_length.max())
        expected[out] = expected_length(np.exp(np.clip(fitted.predict(features, names, columns)[1], 0.0, most)))
        number[out] = group
    return expected, number


def _warnings(rollouts: Rollouts) -> list[str]:
    """Return what the samples cannot teach."""
    found = []
    tasks = np.unique(rollouts.task)
    if len(tasks) == 1:
        what = f"all samples are of one task ({rollouts.tasks[tasks[0]]})" if tasks[0] >= 0 else "no sample has a task"
        found.append(f"{what}: nothing is known of how other tasks differ")
    share = float(rollouts.capped.mean())
    if share > 0.5:
        found.append(
            f"{100 * share:.0f} % of the samples reached the length limit: how long they would be is not known"
        )
    return found


def _coverage(quantiles: Array, length: Array, fold: Array) -> dict[str, float]:
    """Return the coverage of quantiles [N, Q] of lengths [N]; means over folds [N]."""
    # 1e-6: a quantile that is exactly a length may be a rounding error below it
    quantiles = quantiles * (1 + 1e-6)
    parts = [coverage(LEVELS, quantiles[fold == f], length[fold == f]) for f in np.unique(fold)]
    return {level: float(np.mean([part[level] for part in parts])) for level in parts[0]}


def _many(unit: Array, length: Array, score: Array) -> Many | None:
    found = ceiling_of_many(unit, length, score, FRACTIONS)
    if found is None:
        return None
    prompts, ceiling, recall = found
    return Many(prompts, {f"{x:g}": ceiling[x] for x in FRACTIONS}, {f"{x:g}": recall[x] for x in FRACTIONS})


def _counted(rollouts: Rollouts, seed: int) -> Array:
    """Return whether a sample counts for recall and tau [N]: at most `REPEATS` of each prompt in each step of a run.

    A prompt with many samples would make figures a matter of luck:
    either all of its samples are among the longest, or none.
    """
    few: Array = _places(rollouts.unit, np.random.default_rng(seed)) < REPEATS
    return few


def _subsample(rollouts: Rollouts, most: int, seed: int, what: str) -> Rollouts:
    """Return at most `most` samples: first fewer of the prompts that have many, but `MANY`, and then fewer prompts."""
    if len(rollouts) <= most:
        return rollouts
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(rollouts.texts))
    sizes = np.bincount(rollouts.prompt)
    each = max(_most_each(sizes, most), MANY if most >= MIN_PROMPTS * MANY else 1)
    left, chosen = most, np.zeros(len(order), dtype=bool)
    for prompt, size in zip(order.tolist(), np.minimum(sizes, each)[order].tolist(), strict=True):
        chosen[prompt] = size <= left
        left -= size if size <= left else 0
    rows = np.flatnonzero(chosen[rollouts.prompt] & (_places(rollouts.prompt, rng) < each))
    return rollouts.take(rows, f"{what} {len(rows)} of {len(rollouts)} samples, chosen by prompt")


def _most_each(sizes: Array, most: int) -> int:
    """Return the most samples of each prompt, of which there are `sizes` [P], that are at most `most` together."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if np.minimum(sizes, middle).sum() <= most else (low, middle - 1)
    return low


def _places(unit: Array, rng: np.random.Generator) -> Array:
    """Return the place of each sample among those of its unit, in random order [N]."""
    order = np.lexsort((rng.random(len(unit)), unit))
    sizes = np.bincount(unit)
    places = np.empty(len(unit), dtype=np.int64)
    places[order] = np.arange(len(unit)) - (np.cumsum(sizes) - sizes)[unit[order]]
    return places


def _constant(rollouts: Rollouts, seed: int, written_by: tuple[str, ...]) -> tuple[LengthModel, Report]:
    """Return a model that gives every request the distribution of all lengths, and its report."""
    prompts = len(rollouts.texts)
    if len(np.unique(rollouts.output_length)) < 2:
        why = "all lengths are equal"
    else:
        plural = "prompt" if prompts == 1 else "prompts"
        why = f"{prompts} distinct {plural}: no split by prompt is possible (at least {MIN_PROMPTS} are needed)"
    note = f"{why}; every request gets the distribution of all lengths"
    log = np.log(rollouts.output_length)
    one = np.ones(len(log))
    distribution = fit_distribution(0 * one, one, log, ~rollouts.capped, prompts)
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
    model = LengthModel(
        "constant", schema, None, None, None, distribution, rollouts.cap, longest, report, NOT_JUDGED, written_by
    )
    return model, report
