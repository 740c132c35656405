"""Training and the ranker's file: recall near the ceiling, calibrated spread, one deterministic file."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from ranker.data import from_rows
from ranker.errors import RankerError
from ranker.evaluate import kendall_tau, recall_at
from ranker.history import HISTORY
from ranker.model import LengthModel
from ranker.train import refit, train, train_and_hold_out
from ranker.training_report import Captured, Dispatch, Report
from tests.ranker.synthetic import CAP, noisy, small_reasoner


def assert_sound(model: LengthModel, prompts: list[str]) -> None:
    prediction = model.predict(prompts)
    assert prediction.quantiles.shape == (len(prompts), len(prediction.levels))
    assert prediction.score.shape == (len(prompts),) and 0.5 in prediction.levels
    assert (np.diff(prediction.quantiles, axis=1) >= 0).all()
    assert (prediction.quantiles >= 1).all() and (prediction.quantiles <= model.limit + 1e-6).all()


@pytest.fixture(scope="module")
def small() -> LengthModel:
    """The model of the small reasoner."""
    model, _ = train(from_rows(small_reasoner(1500, 4, 1).rows), seed=0, threads=1)
    return model


def test_a_small_reasoner_is_ranked_nearly_as_well_as_can_be(small: LengthModel) -> None:
    report = small.report
    assert report.ceiling is not None and not report.messages
    recall = report.candidates[report.kind].recall
    assert recall["0.2"] >= 0.87
    assert recall["0.2"] >= 0.95 * report.ceiling["0.2"]
    assert recall["0.2"] > 2 * report.baselines["prompt_characters"].recall["0.2"]
    for level, share in report.coverage.items():
        assert share == pytest.approx(float(level), abs=0.04)


def test_prompts_of_another_day_are_ranked_as_the_report_says(small: LengthModel) -> None:
    made = small_reasoner(1000, 1, 99)
    length = np.array([row["output_length"] for row in made.rows])
    prediction = small.predict([row["prompt"] for row in made.rows])
    assert recall_at(prediction.score, length, 0.2) >= 0.85
    covered = (length[:, None] <= prediction.quantiles).mean(axis=0)
    np.testing.assert_allclose(covered, prediction.levels, atol=0.06)


def test_noisy_lengths_at_a_cap_are_ranked_near_their_ceiling() -> None:
    made = noisy(1500, 4, 2)
    model, report = train(from_rows(made.rows), seed=0, threads=1)
    length = np.array([row["output_length"] for row in made.rows])
    # The true ceiling on these very samples; the estimate in the report is that of endlessly many.
    true = recall_at(made.expected, length, 0.2)
    assert report.ceiling is not None and report.ceiling["0.2"] == pytest.approx(true, abs=0.02)
    assert report.candidates[report.kind].recall["0.2"] >= 0.95 * true
    assert report.cap == model.cap == CAP
    prediction = model.predict([row["prompt"] for row in made.rows[:100]])
    assert prediction.quantiles.max() <= CAP + 1e-6
    # Noise that no prompt tells is in the spread: a factor of e**(2 * 0.84 * 0.9) between the 0.2 and 0.8 quantiles.
    ratio = np.log(prediction.quantiles[:, 9] / prediction.quantiles[:, 3])
    assert 0.7 < np.median(ratio) < 1.8


def test_the_same_seed_gives_the_same_file(tmp_path: Path) -> None:
    rollouts = from_rows(small_reasoner(120, 2, 3).rows)
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        train(rollouts, seed=7, threads=1)[0].save(file)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_file_holds_the_whole_model(tmp_path: Path, small: LengthModel) -> None:
    small.report.extra["saving"] = 0.5
    small.report.dispatch = [Dispatch("somewhere", 0.5, {"model": Captured(0.6, 0.8), "task": Captured(1.0, None)})]
    small.save(tmp_path / "r.lgb")
    loaded = LengthModel.load(tmp_path / "r.lgb")
    prompts = [row["prompt"] for row in small_reasoner(50, 1, 4).rows] + ["", "something else entirely"]
    want, got = small.predict(prompts, ["chain_sum"] * 52), loaded.predict(prompts, ["chain_sum"] * 52)
    np.testing.assert_array_equal(got.score, want.score)
    np.testing.assert_array_equal(got.quantiles, want.quantiles)
    assert loaded.report == small.report
    older = {key: value for key, value in small.report.to_json().items() if key != "dispatch"}
    assert Report.from_json(older).dispatch == []
    assert_sound(loaded, prompts)
    assert loaded.predict([]).quantiles.shape[0] == 0


def damage(source: Path, target: Path, part: str, data: bytes | None) -> Path:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            if name != part:
                new.writestr(name, old.read(name))
            elif data is not None:
                new.writestr(name, data)
    return target


def test_other_versions_and_broken_files_are_named(tmp_path: Path, small: LengthModel) -> None:
    file = tmp_path / "r.lgb"
    small.save(file)
    with zipfile.ZipFile(file) as archive:
        manifest = json.loads(archive.read("manifest.json"))
    later = json.dumps(manifest | {"version": 99}).encode()
    with pytest.raises(RankerError, match=r"later: ranker file of version 99; expected 3"):
        LengthModel.load(damage(file, tmp_path / "later", "manifest.json", later))
    alien = json.dumps({"format": "x"}).encode()
    with pytest.raises(RankerError, match="alien: not a ranker file"):
        LengthModel.load(damage(file, tmp_path / "alien", "manifest.json", alien))
    features = json.dumps(manifest | {"features": ["x"]}).encode()
    for n, (part, data) in enumerate(
        [("manifest.json", features), ("manifest.json", b"{"), ("arrays.npz", b"x"), ("score.txt", None)]
    ):
        with pytest.raises(RankerError, match=f"damaged{n}: broken ranker file"):
            LengthModel.load(damage(file, tmp_path / f"damaged{n}", part, data))
    (tmp_path / "text").write_text("not a zip")
    with pytest.raises(RankerError, match="text: broken ranker file"):
        LengthModel.load(tmp_path / "text")
    with pytest.raises(RankerError, match="nowhere: no such ranker file"):
        LengthModel.load(tmp_path / "nowhere")


@pytest.mark.parametrize("count", [1, 2, 50])
def test_one_prompt_gives_the_distribution_of_all_lengths(tmp_path: Path, count: int) -> None:
    rows = [{"prompt": "p", "output_length": 10 + n} for n in range(count)]
    model, report = train(from_rows(rows))
    assert report.kind == "constant"
    assert any("split by prompt is possible" in m or "all lengths are equal" in m for m in report.messages)
    model.save(tmp_path / "r")
    assert_sound(LengthModel.load(tmp_path / "r"), ["p", "q"])
    middle = model.predict(["q"]).quantiles[0, 6]
    assert middle == pytest.approx(10 + (count - 1) / 2, rel=0.02)


@pytest.mark.parametrize(("prompts", "repeats"), [(9, 1), (9, 30), (25, 2)])
def test_few_prompts_are_learned_from_without_failing(prompts: int, repeats: int) -> None:
    model, report = train(from_rows(small_reasoner(prompts, repeats, 0).rows))
    assert report.kind != "constant"
    assert_sound(model, ["Sort these numbers: 1, 2, 3", ""])


def test_history_is_used_where_there_is_some() -> None:
    rng = np.random.default_rng(0)
    typical = np.exp(5 + rng.standard_normal(400))  # nothing in the text tells it
    rows = []
    for step in range(1, 5):
        for n in range(400):
            length = max(1, int(typical[n] * rng.uniform(0.9, 1.1)))
            rows.append({"prompt": f"riddle {n * 7919 % 400}", "step": step, "output_length": length})
    _, report = train(from_rows(rows))
    assert report.with_history is not None
    assert report.with_history.recall["0.2"] > 0.6
    assert report.baselines["last_length"].recall["0.2"] > 0.6
    assert report.candidates[report.kind].recall["0.2"] < 0.45


def test_a_task_that_came_later_is_ranked_by_the_size_of_its_problems() -> None:
    rows = small_reasoner(800, 2, 5).rows
    for task in ("chain_sum", "count_bits", "number_sorting", "spell_backward"):
        model = refit("log_length", from_rows([row for row in rows if row["task"] != task]))
        later = [row for row in rows if row["task"] == task]
        prompts = [row["prompt"] for row in later]
        prediction = model.predict(prompts, [task] * len(prompts))
        length = np.array([row["output_length"] for row in later])
        assert recall_at(prediction.score, length, 0.2) > 0.6, task
        assert_sound(model, prompts)
        lengths_of_all = np.quantile([row["output_length"] for row in rows], [0.05, 0.95])
        assert (prediction.quantiles[:, 1] < lengths_of_all[1]).all(), task  # no certainty about what was never seen
        # and what is known of the task says how long it is
        history = np.full((len(prompts), len(HISTORY)), np.nan)
        history[:, HISTORY.index("task_recent_mean")] = np.log(lengths_of_all[1])
        told = model.predict(prompts, [task] * len(prompts), history=history)
        assert (told.score > prediction.score).mean() > 0.9, task


def test_what_is_left_out_of_training_tells_nothing() -> None:
    rows = small_reasoner(400, 4, 8).rows
    trained = train_and_hold_out(from_rows(rows))
    held = trained.held_out
    assert held is not None and trained.report is trained.model.report
    assert set(held.forecasts) == {"model", "prompt_characters", "task", "other_samples"}
    for quantiles in held.forecasts.values():
        assert quantiles.shape == (len(rows), len(held.levels)) and (np.diff(quantiles, axis=1) >= 0).all()
        assert quantiles.min() >= 1 and quantiles.max() <= held.limit + 1e-6
    assert len(np.unique(held.unit)) == len({row["prompt"] for row in rows})
    # other_samples: exactly those of the same prompt but the one that is foretold
    others = held.length[(held.unit == held.unit[0])][1:]
    np.testing.assert_allclose(held.forecasts["other_samples"][0], np.quantile(others, held.levels))
    # lengths that have nothing to do with the prompt cannot be foretold by any rule that has not seen them
    shuffled = np.random.default_rng(0).permutation(400)[np.arange(1600) // 4]
    mixed = [row | {"output_length": rows[4 * n]["output_length"]} for row, n in zip(rows, shuffled, strict=True)]
    held = train_and_hold_out(from_rows(mixed)).held_out
    assert held is not None
    middle = int(np.searchsorted(held.levels, 0.5))
    for name in ("model", "prompt_characters", "task"):
        assert abs(kendall_tau(held.forecasts[name][:, middle], held.length)) < 0.15, name


def test_refit_keeps_the_kind() -> None:
    model = refit("mean_length", from_rows(small_reasoner(60, 2, 0).rows))
    assert model.kind == "mean_length"
    assert_sound(model, ["a", "b"])
