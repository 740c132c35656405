"""Training and the ranker's file: few prompts, history, one deterministic file."""

from __future__ import annotations

import json
import math
import zipfile
from pathlib import Path

import numpy as np
import pytest

from ranker import train
from ranker.data import from_rows
from ranker.errors import RankerError
from ranker.features import featurise
from ranker.history import HISTORY, LiveHistory, Seen, remember
from ranker.model import LengthModel
from ranker.train import refit, train_and_hold_out
from ranker.training_report import Captured, Dispatch, Report
from tests.ranker.synthetic import small_reasoner


def assert_sound(model: LengthModel, prompts: list[str]) -> None:
    prediction = model.predict(prompts)
    assert prediction.quantiles.shape == (len(prompts), len(prediction.levels))
    assert prediction.mean.shape == (len(prompts),) and 0.5 in prediction.levels
    assert (np.diff(prediction.quantiles, axis=1) >= 0).all()
    assert (prediction.quantiles >= 1).all() and (prediction.quantiles <= model.limit + 1e-6).all()


@pytest.fixture(scope="module")
def small() -> LengthModel:
    """The model of the small reasoner, whose file keeps fewer judged samples than there are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "JUDGED", 200)
        return train_and_hold_out(from_rows(small_reasoner(90, 3, 1).rows), written_by=("m",)).model


def test_the_same_seed_gives_the_same_file(tmp_path: Path) -> None:
    rollouts = from_rows(small_reasoner(30, 2, 3).rows)
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        train_and_hold_out(rollouts, seed=7, threads=1).model.save(file)
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_file_holds_the_whole_model(tmp_path: Path, small: LengthModel) -> None:
    small.report.extra["saving"] = 0.5
    small.report.dispatch = [Dispatch("somewhere", 0.5, {"model": Captured(0.6, 0.8), "task": Captured(1.0, None)})]
    small.save(tmp_path / "r.lgb")
    loaded = LengthModel.load(tmp_path / "r.lgb")
    prompts = [row["prompt"] for row in small_reasoner(50, 1, 4).rows] + ["", "something else entirely"]
    want, got = small.predict(prompts, ["chain_sum"] * 52), loaded.predict(prompts, ["chain_sum"] * 52)
    np.testing.assert_array_equal(got.mean, want.mean)
    np.testing.assert_array_equal(got.quantiles, want.quantiles)
    assert loaded.report == small.report and loaded.written_by == ("m",)
    np.testing.assert_array_equal(loaded.judged.expected, small.judged.expected)
    assert len(loaded.judged.length) == 200 < small.report.samples
    assert len(loaded.remembered.keys) == loaded.report.prompts
    np.testing.assert_array_equal(loaded.remembered.keys, small.remembered.keys)
    np.testing.assert_array_equal(loaded.remembered.columns, small.remembered.columns)
    older = {key: value for key, value in small.report.to_json().items() if key != "dispatch"}
    assert Report.from_json(older).dispatch == []
    assert_sound(loaded, prompts)
    assert loaded.predict([]).quantiles.shape[0] == 0


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("kind", ["log_length", "mean_length"])
def test_a_booster_that_saw_no_prompt_again_goes_by_earlier_lengths(tmp_path: Path, kind: str, steps: int) -> None:
    rng = np.random.default_rng(3)
    own = np.exp(rng.normal(4.5, 0.6, 240))  # nothing in the texts says it
    prompts = [f"Tell me about {''.join(rng.choice(list('abcdefgh'), 6))} and {number}." for number in range(len(own))]
    rows = [
        {"prompt": prompt, "output_length": int(1 + length * rng.lognormal(0.0, 0.1)), "step": number % steps}
        for number, (prompt, length) in enumerate(zip(prompts, own, strict=True))
        for _ in range(4)
    ]
    model = refit(kind, from_rows(rows))
    assert model.scorer is not None and model.scorer.booster is not None and model.returning is not None
    remembered = remember(from_rows(rows))
    unknown = np.full((len(prompts), len(HISTORY)), np.nan, dtype=np.float32)
    without, given = (model.predict(prompts, None, one) for one in (None, remembered.fill(unknown, prompts)))
    missed, left = (float(np.abs(one.mean - own).mean()) for one in (without, given))
    assert left < 0.4 * missed
    np.testing.assert_array_equal(model.predict(prompts, None, unknown).quantiles, without.quantiles)
    assert (np.diff(given.quantiles, axis=1) >= 0).all() and (given.quantiles <= model.limit + 1e-6).all()
    model.save(tmp_path / "r.lgb")
    loaded = LengthModel.load(tmp_path / "r.lgb").predict(prompts, None, remembered.fill(unknown, prompts))
    np.testing.assert_array_equal(loaded.quantiles, given.quantiles)


def test_a_booster_that_saw_prompts_again_has_learned_of_them_itself() -> None:
    rows = small_reasoner(60, 2, 0).rows
    assert refit("log_length", from_rows([row | {"step": step} for step in range(2) for row in rows])).returning is None


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
    with pytest.raises(RankerError, match=r"later: ranker file of version 99; expected 6"):
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


def test_a_file_of_version_5_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Its features have a column that no run filled."""
    rows = small_reasoner(60, 2, 0).rows
    model = refit("mean_length", from_rows(rows))
    features = featurise(model.schema, [row["prompt"] for row in rows], [row["task"] for row in rows])
    file = tmp_path / "r.lgb"
    model.save(file)
    with zipfile.ZipFile(file) as archive:
        manifest = json.loads(archive.read("manifest.json"))
    names = list(model.schema.names)
    names.insert(names.index("task") + 1, "difficulty")
    older = json.dumps(manifest | {"version": 5, "features": names}).encode()
    loaded = LengthModel.load(damage(file, tmp_path / "older", "manifest.json", older))
    assert (
        not len(loaded.remembered.keys)
        and list(loaded.schema.names) == names
        and loaded.scorer is not None
        and model.scorer is not None
    )
    wider = featurise(loaded.schema, [row["prompt"] for row in rows], [row["task"] for row in rows])
    assert np.isnan(wider[:, names.index("difficulty")]).all()
    np.testing.assert_array_equal(np.delete(wider, names.index("difficulty"), axis=1), features)
    quantiles = model.predict_features(features).quantiles
    np.testing.assert_array_equal(loaded.predict_features(features).quantiles, quantiles)
    loaded.save(tmp_path / "again")
    again = LengthModel.load(tmp_path / "again")
    np.testing.assert_array_equal(again.predict_features(features).quantiles, quantiles)


@pytest.mark.parametrize("count", [1, 2, 50])
def test_one_prompt_gives_the_distribution_of_all_lengths(tmp_path: Path, count: int) -> None:
    rows = [{"prompt": "p", "output_length": 10 + n} for n in range(count)]
    model = train_and_hold_out(from_rows(rows)).model
    report = model.report
    assert report.kind == "constant"
    assert any("split by prompt is possible" in m or "all lengths are equal" in m for m in report.messages)
    model.save(tmp_path / "r")
    assert_sound(LengthModel.load(tmp_path / "r"), ["p", "q"])
    middle = model.predict(["q"]).quantiles[0, 6]
    assert middle == pytest.approx(10 + (count - 1) / 2, rel=0.02)


@pytest.mark.parametrize(("prompts", "repeats"), [(9, 1), (9, 30), (25, 2)])
def test_few_prompts_are_learned_from_without_failing(prompts: int, repeats: int) -> None:
    model = train_and_hold_out(from_rows(small_reasoner(prompts, repeats, 0).rows)).model
    report = model.report
    assert report.kind != "constant"
    assert_sound(model, ["Sort these numbers: 1, 2, 3", ""])


def test_history_is_used_where_there_is_some() -> None:
    rng = np.random.default_rng(0)
    typical = np.exp(5 + rng.standard_normal(200))  # nothing in the text tells it
    rows = []
    for step in range(1, 5):
        for n in range(200):
            length = max(1, int(typical[n] * rng.uniform(0.9, 1.1)))
            rows.append({"prompt": f"riddle {n * 7919 % 200}", "step": step, "output_length": length})
    report = train_and_hold_out(from_rows(rows)).report
    assert report.with_history is not None
    assert report.with_history.recall["0.2"] > 0.6
    assert report.baselines["earlier_shrunk"].recall["0.2"] > 0.6
    assert report.held_out is not None and report.held_out.recall["0.2"] < 0.45
    assert report.coverage_with_history["0.9"] == pytest.approx(0.9, abs=0.05)


def test_the_longest_prompts_are_expected_to_be_as_long_as_they_were() -> None:
    """Lengths by prompt are log-normal, and only earlier lengths tell them: the longest are far above the last bin."""
    rng = np.random.default_rng(0)
    typical = rng.lognormal(6, 1, 300)
    rows = [
        {
            "prompt": f"riddle {n}",
            "step": step,
            "output_length": int(typical[n] * rng.lognormal(0, 0.4)) + 1,
        }
        for step in range(3)
        for n in range(300)
        for _ in range(4)
    ]
    model = refit("task_mean", from_rows(rows))
    live = LiveHistory(10**6)
    for row in rows:
        live.add(Seen(str(row["prompt"]), None, int(row["step"]), math.log(int(row["output_length"]))))
    prompts = [f"riddle {n}" for n in range(300)]
    told = model.predict(prompts, history=live.columns(prompts, [None] * 300, 3))
    order = np.argsort(typical)
    for part in np.array_split(order, 10):
        assert told.mean[part].mean() == pytest.approx(typical[part].mean() * np.exp(0.08), rel=0.25)


def bimodal(seed: int, prompts: int) -> list[dict[str, object]]:
    """Short answers of 1 to 29 tokens and long ones around 100k, told by the prompts' words."""
    rng = np.random.default_rng(seed)
    words = ["apple", "river", "stone", "integral", "sum", "of", "matrix", "graph", "tree", "say", "hello", "code"]
    rows: list[dict[str, object]] = []
    for n in range(prompts):
        long = rng.random() < 0.3
        text = " ".join(rng.choice(words, 8))
        prompt = f"{text} {'prove theorem carefully' if long else 'answer briefly'} {seed} {n}"
        for _ in range(2):
            length = 300_000 * rng.lognormal(-1, 0.8) if long else rng.integers(1, 30)
            rows.append({"prompt": prompt, "output_length": max(1, int(length)), "task": "t"})
    return rows


def test_a_mix_of_very_short_and_very_long_answers_is_covered() -> None:
    """Sums of a booster in tokens are far below 0 for some of the short ones."""
    model = refit("mean_length", from_rows(bimodal(2, 1500)))
    later = bimodal(3, 500)
    prompts, tasks = [str(row["prompt"]) for row in later], ["t"] * len(later)
    length = np.array([row["output_length"] for row in later])
    assert model.scorer is not None
    assert model.scorer.score(featurise(model.schema, prompts, tasks)).min() < -1000
    assert_sound(model, prompts)
    told = model.predict(prompts, tasks)
    levels = told.levels.tolist()
    for some in (length < 30, length >= 30):
        for level in (0.5, 0.9):
            covered = (length <= told.quantiles[:, levels.index(level)] * (1 + 1e-6))[some].mean()
            assert covered == pytest.approx(level, abs=0.1), (level, covered)


def test_refit_keeps_the_kind() -> None:
    model = refit("mean_length", from_rows(small_reasoner(60, 2, 0).rows))
    assert model.kind == "mean_length"
    assert_sound(model, ["a", "b"])


def test_an_unknown_task_is_told_by_its_name_although_its_words_are_known() -> None:
    rows = small_reasoner(400, 2, 6).rows
    model = refit("log_length", from_rows([row for row in rows if row["task"] != "chain_sum"]))
    prompts = [row["prompt"] for row in rows if row["task"] == "count_bits"][:40]
    known, unknown = model.predict(prompts, ["count_bits"] * 40), model.predict(prompts, ["new"] * 40)

    def width(quantiles: np.ndarray) -> float:
        return float(np.median(np.log(quantiles[:, 10] / quantiles[:, 2])))

    assert width(unknown.quantiles) > 3 * width(known.quantiles)  # all that lengths may be


def test_quantiles_hold_beyond_the_limit_of_the_training_samples() -> None:
    """Lengths are log-normal; training sees them cut off at 200, what is predicted ends at 800 or nowhere near."""
    rng = np.random.default_rng(3)
    size = rng.uniform(20, 60, 1500)
    true = np.exp(np.log(3 * size) + 0.8 * rng.standard_normal(1500))
    rows = [
        {
            "prompt": "count up " + "x" * int(s),
            "output_length": max(1, int(min(200, length))),
            "finish_reason": "length" if length >= 200 else "stop",
        }
        for s, length in zip(size, true, strict=True)
    ]
    model = refit("log_length", from_rows(rows[:1000]))
    prompts, later = [row["prompt"] for row in rows[1000:]], true[1000:]
    moved = model.predict(prompts, limit=800.0)
    covered = dict(zip(moved.levels.tolist(), (later[:, None] <= moved.quantiles).mean(axis=0), strict=True))
    for level in (0.3, 0.5, 0.7, 0.8, 0.9):
        assert covered[level] == pytest.approx(level, abs=0.06), level
    assert 200 < moved.quantiles[:, 10].mean() < moved.quantiles.max() <= 800
    at_home = model.predict(prompts)
    assert at_home.quantiles.max() <= 200 + 1e-6
    each = model.predict(prompts[:2], limit=np.array([50.0, 300.0]))
    assert each.quantiles[0].max() <= 50 + 1e-6 < 100 < each.quantiles[1].max() <= 300 + 1e-6


@pytest.mark.parametrize("kind", ["log_length", "mean_length", "task_mean"])
def test_samples_of_a_run_with_a_low_limit_shorten_no_forecast(kind: str) -> None:
    """They count as longer than their limit, and no request as one that runs away to the others' limit."""
    rng = np.random.default_rng(0)
    size = rng.integers(1, 4, 660)
    length = np.minimum(8000, np.exp(5.3 + 0.8 * size + 0.3 * rng.standard_normal(660))).astype(int)
    rows = [
        {"prompt": "word " * 10 * n + str(rng.integers(10**5)), "output_length": int(tokens), "finish_reason": "stop"}
        for n, tokens in zip(size, length, strict=True)
    ]
    cut = [row | {"output_length": 64, "finish_reason": "length"} for row in rows[600:]]
    prompts = [row["prompt"] for row in rows[:200]]
    alone, both = (refit(kind, from_rows(some)).predict(prompts) for some in (rows[:600], rows[:600] + cut))
    for n in (1, 2, 3):
        of_size = size[:200] == n
        assert both.mean[of_size].mean() == pytest.approx(alone.mean[of_size].mean(), rel=0.1)
    top = [prediction.quantiles[:, list(prediction.levels).index(0.98)].mean() for prediction in (alone, both)]
    assert top[1] == pytest.approx(top[0], rel=0.25)


def test_one_task_is_said_and_no_variance_is_said() -> None:
    rows = [row for row in small_reasoner(200, 2, 0).rows if row["task"] == "chain_sum"]
    assert (
        "all samples are of one task (chain_sum): nothing is known of how other tasks differ"
        in train_and_hold_out(from_rows(rows)).report.messages
    )
    level = [row | {"output_length": 7} for row in rows]
    model = train_and_hold_out(from_rows(level)).model
    report = model.report
    assert report.kind == "constant" and any("all lengths are equal" in message for message in report.messages)
    assert model.predict(["x"]).quantiles.tolist() == [
        [pytest.approx(7.0, rel=1e-4)] * len(model.predict(["x"]).levels)
    ]
