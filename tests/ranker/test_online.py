"""The ranker during a run: cold start, learning, trust with hysteresis."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ranker.data import from_rows
from ranker.errors import RankerError
from ranker.evaluate import kendall_tau
from ranker.model import Judged
from ranker.online import OnlineRanker
from ranker.train import refit, train_and_hold_out
from tests.ranker.synthetic import small_reasoner


def play(ranker: OnlineRanker, rows: list[dict[str, Any]], step: int, shuffle: bool = False) -> None:
    """One step: predicted, generated, observed, measured; with `shuffle` the lengths are those of other prompts."""
    lengths = [row["output_length"] for row in rows]
    if shuffle:
        lengths = list(np.random.default_rng(step).permutation(lengths))
    ids = [f"{step}.{n}" for n in range(len(rows))]
    prompts, tasks = [row["prompt"] for row in rows], [row["task"] for row in rows]
    prediction = ranker.predict(prompts, tasks, step)
    for sample, expected in zip(ids, prediction.mean if prediction else (), strict=bool(prediction)):
        ranker.expect([sample], float(expected))
    ranker.observe(
        [
            row | {"sample_id": sample, "output_length": int(length), "step": step}
            for row, sample, length in zip(rows, ids, lengths, strict=True)
        ]
    )
    ranker.end_step()


def test_it_learns_from_nothing_and_is_trusted_once_it_was_right() -> None:
    ranker = OnlineRanker(seed=1)
    steps = [small_reasoner(60, 2, seed).rows for seed in range(8)]
    assert ranker.predict(["p"]) is None and not ranker.trusted and ranker.refit() is False
    for step in (1, 2, 3):
        play(ranker, steps[step], step)
        assert ranker.trust is None and not ranker.trusted  # nothing was predicted, so nothing was measured
    assert ranker.refit()
    assert not ranker.trusted
    play(ranker, steps[4], 4)
    assert ranker.trusted and ranker.trust is not None and ranker.trust.recall_at_20 > 0.5
    for step in (5, 6, 7):
        play(ranker, steps[step], step, shuffle=True)
    assert not ranker.trusted and ranker.trust.recall_at_20 < 0.3


def test_between_the_bounds_nothing_changes() -> None:
    def after(trusted: bool, recall: float) -> bool:
        ranker = OnlineRanker()
        ranker.trusted = trusted
        found = round(recall * 20)
        length = np.arange(100.0)
        score = length.copy()
        missed = np.arange(80, 100 - found)
        score[missed], score[missed - 40] = score[missed - 40], score[missed].copy()
        ranker._finished = list(zip(score, length, strict=True))
        ranker.end_step()
        return ranker.trusted

    assert after(False, 0.35) is False and after(True, 0.35) is True
    assert after(False, 0.5) is True and after(True, 0.2) is False


def judged(expected: np.ndarray, length: np.ndarray, trusted: bool = False) -> OnlineRanker:
    """A ranker after a step with these expected and true lengths."""
    ranker = OnlineRanker()
    ranker.trusted = trusted
    ranker._finished = list(zip(expected.tolist(), length.tolist(), strict=True))
    ranker.end_step()
    return ranker


@pytest.mark.parametrize("at_limit", [0.1, 0.45, 0.55, 0.7, 0.95])
def test_where_many_reach_the_limit_a_ranking_is_compared_with_the_best_possible_one(at_limit: float) -> None:
    length = np.minimum(np.arange(1.0, 401.0), 400 * (1 - at_limit))
    right = judged(length, length)
    assert right.trusted and right.doubts == "" and right.trust is not None
    assert right.trust.recall_at_20 == right.trust.possible_recall == pytest.approx(min(1.0, 0.2 / at_limit), rel=0.01)
    shuffled = np.random.default_rng(0).permutation(np.arange(400.0))
    for wrong in (shuffled, -length, np.ones(400)):
        assert not judged(wrong, length).trusted and not judged(wrong, length, True).trusted


def test_the_doubts_name_what_is_missing() -> None:
    length = np.arange(1.0, 101.0)
    assert OnlineRanker().doubts == "none of this run has been measured yet"
    assert judged(length, np.full(100, 9.0), True).doubts == "nearly all lengths are equal"
    assert judged(length[:27], np.full(27, 9.0), True).doubts == "nearly all lengths are equal"
    capped = np.minimum(length, 50.0)
    assert judged(-length, capped).doubts == "recall@20 is 0.00, 0.25 is needed and 0.39 possible"
    only_tail = np.where(length > 80, 1000.0, -length)
    assert judged(only_tail, length).doubts == "Kendall's tau is -0.32, 0.15 is needed"


def test_predictions_made_before_the_start_are_the_ones_measured() -> None:
    ranker = OnlineRanker()
    rows = small_reasoner(60, 2, 0).rows
    play(ranker, rows, 1)
    ranker.refit()
    expected = np.arange(1.0, 31.0)
    for n, length in enumerate(expected):
        ranker.expect([f"a{n}"], float(length))
        ranker.expect([f"a{n}"], 1000.0 - length)  # once it runs, something else is expected
    finished = [
        {"prompt": "p", "sample_id": f"a{n}", "output_length": int(length)} for n, length in enumerate(expected)
    ]
    ranker.observe(finished[:20])
    assert ranker.end_step() is None  # too few to measure
    ranker.observe(finished[20:])
    measured = ranker.end_step()
    assert measured is not None and measured.recall_at_20 == measured.kendall_tau == 1.0 and measured.samples == 30


def test_what_was_cut_off_before_its_first_token_is_not_learned() -> None:
    ranker = OnlineRanker()
    ranker.expect(["a"], 100.0)
    ranker.observe([{"prompt": "p", "sample_id": "a", "output_length": 0, "finish_reason": "length"}])
    assert not ranker._finished and not ranker._waiting and ranker.refit() is False


@pytest.mark.parametrize(
    ("written_by", "held_out", "trusted"),
    [("m", 1, True), ("m", -1, False), ("other", 1, False), (None, 1, False)],
    ids=["held out right", "held out wrong", "another model", "unnamed model"],
)
def test_a_file_is_trusted_by_its_held_out_samples_and_by_the_same_model_only(
    written_by: str | None, held_out: int, trusted: bool
) -> None:
    model = refit("log_length", from_rows(small_reasoner(40, 2, 0).rows), written_by=("m",))
    length = np.arange(1.0, 101.0)
    assert not OnlineRanker(model, written_by="m").trusted  # a refit has no held-out samples
    model = replace(model, judged=Judged(held_out * length, length))
    assert OnlineRanker(model, written_by=written_by).trusted is trusted
    assert not OnlineRanker(replace(model, written_by=("m", "n")), written_by="m").trusted


def test_prompts_that_the_file_was_trained_on_are_known_to_a_run_of_the_same_model() -> None:
    rng = np.random.default_rng(0)
    typical = rng.lognormal(6, 1, 100)  # nothing in the text tells it
    rows = [
        {"prompt": f"riddle {n}", "step": step, "output_length": 1 + int(length * rng.lognormal(0, 0.1))}
        for step in range(3)
        for n, length in enumerate(typical)
    ]
    prompts = [f"riddle {n}" for n in range(100)]
    model = train_and_hold_out(from_rows(rows), written_by=("m",)).model

    def tau(ranker: OnlineRanker) -> float:
        prediction = ranker.predict(prompts, step=1)
        assert prediction is not None
        return float(np.nan_to_num(kendall_tau(prediction.mean, typical)))

    assert tau(OnlineRanker(model, written_by="other")) < 0.3
    ranker = OnlineRanker(model, written_by="m")
    assert tau(ranker) > 0.9
    ranker.observe([row | {"prompt": f"another {row['prompt']}"} for row in rows])
    ranker.refit()
    assert tau(ranker) > 0.7  # a refit forgets none of them


def test_the_same_calls_give_the_same_answers() -> None:
    def last() -> np.ndarray[Any, Any]:
        ranker = OnlineRanker(seed=3)
        for step in (1, 2):
            play(ranker, small_reasoner(20, 2, step).rows, step)
            ranker.refit()
        prediction = ranker.predict(["Spell this word backward: banana"], step=3)
        assert prediction is not None
        return prediction.quantiles

    np.testing.assert_array_equal(last(), last())


def test_only_the_window_is_kept() -> None:
    ranker = OnlineRanker(window=50)
    for step in (1, 2, 3):
        play(ranker, small_reasoner(40, 2, step).rows, step)
    ranker.refit()
    assert ranker.model is not None and ranker.model.report.samples == 50


def test_bad_rows_and_arguments_are_named() -> None:
    ranker = OnlineRanker()
    good = {"prompt": "p", "output_length": 3}
    with pytest.raises(RankerError, match="'output_length' is None"):
        ranker.observe([good, {"prompt": "p", "sample_id": "s"}])
    with pytest.raises(RankerError, match="sample s: 'prompt' is None"):
        ranker.observe([{"output_length": 3, "sample_id": "s"}])
    assert ranker.refit() is False  # the good row was not taken either
    with pytest.raises(RankerError, match="1 tasks for 2 prompts"):
        ranker.predict(["a", "b"], ["t"])
    with pytest.raises(RankerError, match="window is 0"):
        OnlineRanker(window=0)
