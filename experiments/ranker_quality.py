"""Measure how well the ranker ranks and predicts lengths, against tables without a model, on the recorded data sets.

    .venv/bin/python experiments/ranker_quality.py              # some minutes
    .venv/bin/python experiments/ranker_quality.py smollm2      # one data set of experiments/data/

Writes experiments/results/ranker_NAME.json and .md for each data set.

*New prompts*: the training's own held-out samples, at most four of a prompt. Neither the choice of the kind nor any fit
saw their prompts. All rankings are measured fold by fold and averaged. Tables learn from the other folds, as the ranker
does. The ranker's score is its expected length, by which dispatch goes.

*Tasks left out*: all samples of a quarter of the tasks are foretold by a fit on the other tasks, for each quarter.

*Another limit*: training sees three of four prompts, with lengths cut off at half of the limit. The others are foretold
at the whole limit. "Clipped" are the same forecasts with the limit that training saw.

Intervals (95 %) are percentiles of a bootstrap: prompts are drawn with replacement within their folds (tasks left out:
within their quarter), so they hold for these tasks, and the fits stay as they are. Those of differences draw the same
prompts for both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import click
import numpy as np
from running import HERE, RESULTS, Sheet, machine, shown, terminal, write_results

from ranker.data import Rollouts, read_rollouts
from ranker.evaluate import IN_WORDS, baselines
from ranker.held_out import MODEL
from ranker.history import simulate
from ranker.measures import recall_at
from ranker.segments import Array
from ranker.selection import Ranking, by_fold
from ranker.train import LIMIT, NEW_TASKS, refit, train_and_hold_out

DATA = ("smollm2", "small_reasoner")
DRAWS = 400
TABLES = ("task_mean", "task_at_limit")
"""Baselines that are known when a request starts."""
NAMES = {MODEL: "ranker"} | IN_WORDS | {NEW_TASKS: "ranker, tasks left out", LIMIT: "bound by ties at the limit"}


@click.command(help=__doc__)
@click.argument("names", nargs=-1, type=click.Choice(DATA), metavar="[NAME]...")
def main(names: tuple[str, ...]) -> None:
    console = terminal()
    for name in names or DATA:
        values, sheets = measure(name, read_rollouts([HERE / "data" / f"{name}.parquet"]))
        for sheet in sheets:
            sheet.show(console)
        out = RESULTS / f"ranker_{name}.json"
        write_results(out, {"machine": machine()} | values, f"Ranking and foretelling lengths: {name}", sheets)
        console.print(f"written to {out} and .md beside", highlight=False)


def measure(name: str, rollouts: Rollouts) -> tuple[dict[str, Any], list[Sheet]]:
    """Measure one data set; return what is kept, and its tables."""
    trained = train_and_hold_out(rollouts)
    report, found = trained.report, trained.rankings
    rows: list[tuple[str, ...]] = []
    kept: dict[str, Any] = {}
    for key in (key for key in NAMES if key in found):
        figures, (low, high) = by_fold(found[key]), interval(partial(recall, found[key]), found[key])
        kept[key] = asdict(figures) | {"interval": [low, high]}
        cells = [shown(figures.recall[share], ".3f") for share in ("0.2", "0.1", "0.05")]
        rows.append((NAMES[key], cells[0], f"{low:.3f} to {high:.3f}", *cells[1:], shown(figures.kendall_tau, ".3f")))
    best = max((key for key in TABLES if key in found), key=lambda key: kept[key]["recall"]["0.2"])
    ahead = interval(lambda draw: recall(found[MODEL], draw) - recall(found[best], draw), found[MODEL])
    notes = [
        f"kept: {report.kind}; chosen for the folds: {', '.join(report.kinds)}",
        f"the ranker less '{NAMES[best]}', recall@20: {ahead[0]:+.3f} to {ahead[1]:+.3f}",
    ]
    if report.many is not None:
        most, mine = report.many.ceiling["0.2"], report.many.recall["0.2"]
        notes.append(
            f"noise ceiling on the {report.many.prompts} prompts with many samples: {most:.3f}; ranker {mine:.3f}"
        )
    cap = f"limit {report.cap}" if report.cap else "no limit"
    title = f"{name}: {report.samples} samples of {report.prompts} prompts, {report.tasks} tasks, {cap}"
    sheet = Sheet(title, ("ranked by", "recall@20", "95 %", "recall@10", "recall@5", "Kendall tau"), rows, notes)
    moved = other_limit(rollouts, report.kind)
    labels = {"ranker": "ranker, moved", "clipped": "ranker, clipped at the limit of training"} | NAMES
    parts = [(labels[key], *(shown(one.get(c), ".3f") for c in ("recall", "covered"))) for key, one in moved.items()]
    columns = ("trained at half of the limit", "recall@20", "lengths up to the 90 % quantile")
    values: dict[str, Any] = {
        "kind": report.kind,
        "kinds": report.kinds,
        "rankings": kept,
        "ahead_of": best,
        "ahead": ahead,
    }
    many = asdict(report.many) if report.many else None
    values |= {"many": many, "coverage": report.coverage, "moved": moved}
    return values, [sheet, Sheet(f"{name}: another limit", columns, parts)]


def other_limit(rollouts: Rollouts, kind: str) -> dict[str, dict[str, float]]:
    """Train with lengths cut off at half of the limit; return recall@20 and coverage at the whole limit."""
    most = int(rollouts.output_length.max())
    half = most // 2
    fold = (np.random.default_rng(0).permutation(len(rollouts.texts)) % 4)[rollouts.prompt]
    cut = rollouts.take(fold != 0)
    cut.capped[:] |= cut.output_length >= half
    np.minimum(cut.output_length, half, out=cut.output_length)
    rest = rollouts.take(fold == 0)
    model = refit(kind, cut)
    prompts, length = [rest.texts[i] for i in rest.prompt], rest.output_length
    tasks = [rest.tasks[i] if i >= 0 else None for i in rest.task]
    found: dict[str, dict[str, float]] = {}
    for key, limit in (("ranker", most), ("clipped", half)):
        told = model.predict(prompts, tasks, limit=float(limit))
        nine = told.quantiles[:, int(np.searchsorted(told.levels, 0.9))]
        found[key] = {"recall": recall_at(told.mean, length, 0.2), "covered": float((length <= nine + 1e-6).mean())}
    shortened = rollouts.take(np.ones(len(rollouts), dtype=bool))
    shortened.capped[:] |= shortened.output_length >= half
    np.minimum(shortened.output_length, half, out=shortened.output_length)
    simple = baselines(shortened, simulate(shortened), (fold == 0).astype(int))
    return found | {key: {"recall": recall_at(simple[key][fold == 0], length, 0.2)} for key in TABLES if key in simple}


def recall(ranking: Ranking, weight: Array) -> float:
    """Return recall@20, the mean over folds, with each sample [N] as often as its weight says."""
    rows = np.repeat(np.arange(len(weight)), weight)
    score, length, fold = ranking.score[rows], ranking.length[rows], ranking.fold[rows]
    return float(np.mean([recall_at(score[fold == f], length[fold == f], 0.2) for f in np.unique(fold)]))


def interval(figure: Callable[[Array], float], ranking: Ranking) -> tuple[float, float]:
    """Return the 95 % interval of a figure over draws of prompts, given as weights of samples [N]."""
    rng = np.random.default_rng(0)
    _, prompt = np.unique(np.stack((ranking.fold, ranking.prompt)), axis=1, return_inverse=True)
    prompt = prompt.reshape(-1)
    fold = np.zeros(prompt.max() + 1, dtype=int)
    fold[prompt] = ranking.fold
    drawn = []
    for _ in range(DRAWS):
        weight = np.zeros(len(fold), dtype=int)
        for f in np.unique(fold):
            own = np.flatnonzero(fold == f)
            weight[own] = np.bincount(rng.integers(len(own), size=len(own)), minlength=len(own))
        drawn.append(figure(weight[prompt]))
    low, high = np.quantile(drawn, (0.025, 0.975))
    return float(low), float(high)


if __name__ == "__main__":
    main()
