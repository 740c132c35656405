"""The choice of a kind: nested, fold by fold, tables first; and what is fitted: censored lengths, hidden tasks."""

from __future__ import annotations

import numpy as np
import pytest

from ranker.censored_normal import hazard, likelihood_loss, pseudo_residual, scale_of
from ranker.model_kinds import KINDS, Columns, FitSamples, fit
from ranker.selection import FOLDS, CrossScores, KindChoice, Ranking, by_fold

COLUMNS = Columns(task=0, history=slice(1, 13))
BY_NAME = {kind.name: kind for kind in KINDS}


def test_figures_rank_no_scores_of_two_fits_together() -> None:
    length = np.tile(np.arange(100.0), 2)
    fold = np.repeat([0, 1], 100)
    score = length + 1000 * fold  # the second fit calls everything longer
    assert by_fold(Ranking(score, length, fold, fold)).recall == {"0.2": 1.0, "0.1": 1.0, "0.05": 1.0}
    assert by_fold(Ranking(score, length, 0 * fold, fold)).recall["0.2"] == pytest.approx(0.5)


def choice_of(right: dict[str, np.ndarray]) -> KindChoice:
    """Each kind ranks the folds perfectly where `right` [FOLDS] says so, and elsewhere the wrong way round."""
    count = 400
    fold = np.arange(count) % FOLDS
    length = np.repeat(np.arange(count / FOLDS), FOLDS) + 1
    scores = {}
    for kind in KINDS:
        sign = np.where(right.get(kind.name, np.zeros(FOLDS, bool))[fold], 1.0, -1.0)
        values = np.tile(sign * length, (FOLDS, 1))
        values[fold, np.arange(count)] = np.nan
        scores[kind.name] = CrossScores(values, values, values, 1)
    return KindChoice(scores, fold, length, np.ones(count, dtype=bool), np.arange(count), False)


def test_a_fold_has_no_part_in_the_choice_of_the_kind_that_it_measures() -> None:
    # on fold 0 the table is right, on fold 1 a booster: which chooses where the other one is measured
    choice = choice_of(
        {"task_mean": np.array([True, False, False, False]), "mean_length": np.array([0, 1, 0, 0], bool)}
    )
    assert [kind.name for kind in choice.nested()] == ["mean_length", "task_mean", "task_mean", "task_mean"]


def test_of_equal_kinds_the_table_is_kept() -> None:
    every = np.ones(FOLDS, dtype=bool)
    assert choice_of({kind.name: every for kind in KINDS}).best().name == KINDS[0].name == "task_mean"
    assert choice_of({"quantile_60": every}).best().name == "quantile_60"


def missing(by_tables: list[int], by_boosters: list[int]) -> KindChoice:
    """Tables do not find the longest sample in some folds, boosters not the second longest; all else is perfect."""
    count = 400
    fold, place = np.arange(count) % FOLDS, np.arange(count) // FOLDS
    length = 1000.0 - place
    scores = {}
    for kind in KINDS:
        lost, folds = (0, by_tables) if kind.parameters is None else (1, by_boosters)
        values = np.tile(np.where((place == lost) & np.isin(fold, folds), 0.0, length), (FOLDS, 1))
        values[fold, np.arange(count)] = np.nan
        scores[kind.name] = CrossScores(values, values, values, 1)
    return KindChoice(scores, fold, length, np.ones(count, dtype=bool), np.arange(count), False)


def test_a_booster_is_kept_only_where_it_is_ahead_of_the_table_by_more_than_a_standard_error() -> None:
    # sums of differences of one size on n of 400 prompts have a standard error of sqrt(n): 3 > sqrt(3), 1 < sqrt(5)
    assert missing([0, 1, 2], []).best().name == "log_length"
    assert missing([0, 1, 2], [0, 1]).best().name == "task_mean"
    assert missing([], []).best().name == "task_mean"
    # the folds left out: without fold 3, 3 > sqrt(3); without fold 0 and on the others 2 of 3, 2 - 2 = 0
    assert missing([0, 1, 2], [3]).best(3).name == "log_length"
    assert missing([0, 1, 2], [3, 0]).best(0).name == "task_mean"


def test_what_prompts_add_to_recall_is_the_figure_that_is_told() -> None:
    choice = missing([0, 1, 2], [3])
    for name in ("task_mean", "log_length"):
        rows = choice.fold != 1
        part = (choice.scores[name].cold[1, rows], choice.length[rows], choice.fold[rows], choice.prompt[rows])
        for without, figures in ((None, choice.figures(name)), (1, by_fold(Ranking(*part)))):
            told = np.mean(list(figures.recall.values()))
            assert choice._recall_by_prompt(name, without).sum() == pytest.approx(told, abs=1e-12)


def samples(ended: np.ndarray, log: np.ndarray, task: np.ndarray) -> FitSamples:
    features = np.full((len(log), 14), np.nan, dtype=np.float32)
    features[:, 0] = task
    features[:, 13] = np.arange(len(log)) % 10
    return FitSamples(features, log, ended, np.arange(len(log)), np.arange(len(log)) % 6 == 0)


def test_a_length_at_the_limit_counts_as_longer_in_the_fit_and_as_a_length_otherwise() -> None:
    rng = np.random.default_rng(0)
    log = 5 + 0.8 * rng.standard_normal(3000)
    at = np.log(200.0)
    cut = samples(log < at, np.minimum(log, at), np.zeros(3000))
    scorer, _ = fit(BY_NAME["log_length"], cut, COLUMNS, 1, 0, 1)
    assert scorer.score(cut.features).mean() == pytest.approx(5.0, abs=0.06)
    told_all_ended = samples(np.ones(3000, dtype=bool), np.minimum(log, at), np.zeros(3000))
    scorer, _ = fit(BY_NAME["log_length"], told_all_ended, COLUMNS, 1, 0, 1)
    assert scorer.score(cut.features).mean() == pytest.approx(np.minimum(log, at).mean(), abs=0.06)
    assert np.minimum(log, at).mean() < 4.9


def test_a_request_without_a_task_has_the_mean_of_the_tasks_to_begin_with() -> None:
    rng = np.random.default_rng(1)
    task = rng.integers(0, 4, 2000).astype(float)
    log = 3 + task + 0.1 * rng.standard_normal(2000)
    given = samples(np.ones(2000, dtype=bool), log, task)
    for name in ("task_mean", "mean_length"):
        scorer, _ = fit(BY_NAME[name], given, COLUMNS, 4, 0, 1)
        score = scorer.score(samples(np.ones(5, bool), np.ones(5), np.array([0, 1, 2, 3, np.nan])).features)
        assert score[0] < score[1] < score[2] < score[3] and scorer.table.all_named
        assert score[4] == pytest.approx(np.exp(log).mean(), rel=0.35), name
    task[:500] = np.nan
    scorer, _ = fit(
        BY_NAME["task_mean"], samples(np.ones(2000, bool), 0 * log + np.isnan(task), task), COLUMNS, 4, 0, 1
    )
    assert not scorer.table.all_named
    assert scorer.score(given.features[:1] * np.nan)[0] == pytest.approx(np.e, rel=0.05)


def test_the_slope_of_the_likelihood_is_what_boosting_gets() -> None:
    residual, ended = np.array([-1.0, 0.4, -0.5, 1.5]), np.array([True, True, False, False])
    slope, second = pseudo_residual(residual, ended, 0.7)
    # of what ended: the residual; of what was cut off: the hazard, by the definition of both
    assert slope[:2].tolist() == [-1.0, 0.4] and second[:2].tolist() == [1.0, 1.0]
    np.testing.assert_allclose(slope[2:], 0.7 * hazard(residual[2:] / 0.7))
    assert hazard(np.array([0.0]))[0] == pytest.approx(np.sqrt(2 / np.pi), rel=1e-4)
    step = 1e-4
    higher = 0.7 * hazard((residual[2:] - step) / 0.7)
    np.testing.assert_allclose(second[2:], (slope[2:] - higher) / step, rtol=0.02)


def test_the_scale_of_values_cut_off_at_random_points_is_recovered() -> None:
    rng = np.random.default_rng(2)
    true, cut = 0.6 * rng.standard_normal(20_000), rng.uniform(-1, 1, 20_000)
    ended = true < cut
    seen = np.where(ended, true, cut)
    assert scale_of(seen, ended, 1.0, rounds=50) == pytest.approx(0.6, abs=0.02)
    assert likelihood_loss(seen, ended) < likelihood_loss(seen, np.ones(20_000, dtype=bool))
