"""Features: sizes of the problem in a prompt, the same however prompts are batched; history without a look ahead."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import numpy as np
import pytest

from ranker import text
from ranker.data import from_rows
from ranker.features import UNKNOWN, featurise, fit_schema
from ranker.history import HISTORY, NOTHING, LiveHistory, Seen, remember, simulate
from ranker.rare import RARE, fit_rare_words
from ranker.segments import runs
from ranker.text import STRUCTURE, hash_runs, ngrams, pack, structure
from tests.ranker.synthetic import small_reasoner

ODD = ["", " ", "\0\0", "7", "héllo wörld ü", "x" * 20_000, "9" * 400, ":", "a:", '"', "``", "日本語 12", "\n\n", "((("]


def column(prompt: str, name: str) -> float:
    return float(structure(pack([prompt]))[0, STRUCTURE.index(name)])


def test_sizes_of_problems_are_seen() -> None:
    assert column("Sort: 4, 2, 19", "tail_numbers") == 3
    assert column("Sort: 4, 2, 19", "number_max") == pytest.approx(math.log(20))
    assert column("Sort: 4, 2, 19", "number_last") == pytest.approx(math.log(20))
    assert column("Spell this word backward (example: sun -> nus): banana", "tail_word_max") == 6
    assert column("Spell this word backward (example: sun -> nus): banana", "tail_words") == 1
    assert column("How many times does `strawberry` have an r?", "quoted_max") == 10
    assert column("f((x)(y(z)))", "depth_max") == 3
    assert column("1 + 2 - 3 * 4", "count_operator") == 3
    assert column("no number", "number_max") != column("no number", "number_max")  # NaN
    assert column("a\nbcd\n", "line_max") == 3


def test_the_problem_is_told_from_the_wording_around_it() -> None:
    words = ["sun", "banana", "strawberries", "of", "pineapple", "fig", "cherry", "plum", "lime", "kiwi"]
    prompts = [
        f"Please spell '{word}' (reversing instructions: example 4096), number {31 + n} !"
        for n, word in enumerate(words)
    ]
    rare = fit_rare_words(prompts).apply(pack(prompts))
    np.testing.assert_array_equal(rare[:, RARE.index("rare_word_max")], [len(word) for word in words])
    np.testing.assert_array_equal(rare[:, RARE.index("rare_words")], 1)
    expected = np.log1p(31 + np.arange(len(words)))
    np.testing.assert_allclose(rare[:, RARE.index("rare_number_max")], expected, rtol=1e-6)


def test_features_count_lines_and_brackets_and_read_the_end_of_a_prompt() -> None:
    assert column("Sort this: 12, 5", "tail_bytes") == len(" 12, 5") + 1  # the zero byte that ends a prompt counts
    assert column("Sort this: 12, 5", "tail_digit") == 3 and column("Sort this: 12, 5", "count_digit") == 3
    assert column("no colon", "tail_bytes") == column("ends: ", "tail_bytes") + 2 == len("no colon") + 1
    assert column("))((", "depth_max") == 0 and column("](", "depth_max") == 0
    assert column("a\n\nlongest\nb", "line_max") == len("longest")


def test_equal_words_hash_alike_wherever_they_are() -> None:
    data = np.frombuffer(b"banana  anana banan banana x" * 3, dtype=np.uint8)
    start, length = runs(data != 32)
    hashed = hash_runs(data, start, length)
    words = [bytes(data[s : s + n]) for s, n in zip(start, length, strict=True)]
    assert len(set(words)) == 5
    for i, one in enumerate(words):
        for j, other in enumerate(words):
            assert (hashed[i] == hashed[j]) == (one == other)


def test_ngrams_of_a_long_prompt_are_those_of_its_ends() -> None:
    ends = "What is it about? " * 30, " How many are there in all? " * 20
    long = [ends[0] + filling * 500 + ends[1] for filling in ("some text ", "1 2 3 4 5 ")]
    for begin, bucket in ngrams(pack(long)).values():
        np.testing.assert_array_equal(bucket[: begin[1]], bucket[begin[1] :])
    short = ngrams(pack(["some text and more", "1 + 2"]))
    assert list(np.diff(short["word"][0])) == [7, 3] and list(np.diff(short["char"][0])) == [16, 3]
    assert not np.array_equal(structure(pack(long[:1])), structure(pack(long[1:])))  # their sizes are those of all


def test_common_words_tell_the_known_wordings() -> None:
    known = [row["prompt"] for row in small_reasoner(200, 1, 0).rows]
    place = RARE.index("common_share")
    rare = fit_rare_words(known)
    assert rare.apply(pack(known))[:, place].min() > 0.5
    assert rare.apply(pack(["Welche Farbe hat Omas Katze", ""]))[0, place] == 0


def test_common_words_are_the_same_counted_a_batch_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [*ODD, *(row["prompt"] for row in small_reasoner(300, 1, 0).rows)]
    found = []
    for size in (1, 1000, 10**9):
        monkeypatch.setattr(text, "BATCH", size)
        found.append(fit_rare_words(texts).common)
    np.testing.assert_array_equal(found[0], found[2])
    np.testing.assert_array_equal(found[1], found[2])
    assert found[2].any()


def test_counting_words_takes_no_more_memory_for_more_prompts() -> None:
    texts = [f"{n} " + "some words of a prompt 12 34 " * 100 for n in range(1000)]  # 3 MB
    tracemalloc.start()
    try:
        fit_rare_words(texts)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20 * 2**20


def test_a_batch_gives_what_single_prompts_give() -> None:
    prompts = [*ODD, *(row["prompt"] for row in small_reasoner(60, 1, 0).rows), *ODD]
    schema = fit_schema(prompts, ["t"], 0)
    together = featurise(schema, prompts)
    assert together.shape == (len(prompts), len(schema.names))
    for i, prompt in enumerate(prompts):
        np.testing.assert_allclose(together[i], featurise(schema, [prompt])[0], rtol=1e-4, atol=1e-5)


def test_missing_columns_are_nan_and_unknown_tasks_are_marked() -> None:
    schema = fit_schema(["a", "b"], ["t", "u"], 0)
    columns = featurise(schema, ["a"] * 3, ["u", "other", None])
    task = columns[:, schema.names.index("task")]
    assert task[0] == 1 and task[1] == UNKNOWN and np.isnan(task[2])
    without = fit_schema(["a", "b"], [], 0)  # trained without names of tasks: a name says nothing
    assert np.isnan(featurise(without, ["a"], ["other"])[0, without.names.index("task")])
    assert np.isnan(columns[:, schema.history]).all()


def test_history_never_sees_its_own_or_later_lengths() -> None:
    made = small_reasoner(40, 4, 0, steps=1).rows
    rng = np.random.default_rng(0)
    rows = [row | {"step": int(rng.integers(1, 6))} for row in made]
    before = simulate(from_rows(rows))
    for step in range(1, 6):  # what happens from a step on changes nothing of what was known until then
        changed = [row | {"output_length": 5000} if row["step"] >= step else row for row in rows]
        early = np.array([row["step"] <= step for row in rows])
        np.testing.assert_array_equal(simulate(from_rows(changed))[early], before[early])
    first = np.array([row["step"] == 1 for row in rows])
    assert np.isnan(before[first]).all() and np.isfinite(before[~first][:, HISTORY.index("all_recent_mean")]).all()


def test_siblings_that_ended_before_a_sample_started_are_not_seen_as_a_run_predicts_groups_whole() -> None:
    def row(length: int, start: float, end: float) -> dict[str, object]:
        times = {"t_dispatched": start, "t_finished": end}
        return {"prompt": "p", "output_length": length, "group_id": "g", "step": 1} | times

    rows = [row(10, 0, 5), row(30, 0, 9), row(90, 6, 20), row(50, 10, 30)]
    live = LiveHistory(100).columns(["p"] * 4, [None] * 4, 1)
    np.testing.assert_array_equal(simulate(from_rows(rows)), live)
    assert np.isnan(live).all()


def test_live_history_gives_what_training_simulates() -> None:
    rng = np.random.default_rng(1)
    rows = []
    for step in range(1, 8):
        for n in rng.choice(30, 12, replace=False):
            for _ in range(4):
                length = int(rng.integers(5, 500))
                rows.append({"prompt": f"p{n}", "task": f"t{n % 3}", "step": step, "output_length": length})
    simulated = simulate(from_rows(rows))
    live = LiveHistory(10_000)
    for step in range(1, 8):
        now = [i for i, row in enumerate(rows) if row["step"] == step]
        prompts, tasks = [str(rows[i]["prompt"]) for i in now], [str(rows[i]["task"]) for i in now]
        columns = live.columns(prompts, list(tasks), step)
        np.testing.assert_allclose(columns, simulated[now], rtol=1e-5)
        for i in now:
            length = float(rows[i]["output_length"])  # type: ignore[arg-type]
            live.add(Seen(str(rows[i]["prompt"]), str(rows[i]["task"]), step, math.log(length)))


def test_what_is_remembered_of_training_prompts_is_what_a_run_would_know() -> None:
    rng = np.random.default_rng(2)
    rows: list[dict[str, Any]] = [
        {"prompt": f"p{rng.integers(20)}", "task": "t", "step": step, "output_length": int(rng.integers(5, 500))}
        for step in range(4)
        for _ in range(30)
    ]
    live = LiveHistory(1000)
    for row in rows:
        live.add(Seen(row["prompt"], "t", row["step"], math.log(row["output_length"])))
    prompts = ["new", *(f"p{n}" for n in range(20))]
    known = live.columns(prompts, ["t"] * 21, 4)
    remembered = remember(from_rows(list(rng.permutation(np.array(rows, dtype=object)))))
    nothing = np.full_like(known, np.nan)
    filled = remembered.fill(nothing, prompts)
    np.testing.assert_allclose(filled[:, :4], known[:, :4], rtol=1e-5)
    assert np.isnan(filled[0]).all() and np.isnan(filled[:, 4:]).all() and np.isnan(nothing).all()
    own = live.columns(prompts, ["t"] * 21, 2)
    np.testing.assert_array_equal(
        remembered.fill(own, prompts)[1:][np.isfinite(own[1:, 3])], own[1:][np.isfinite(own[1:, 3])]
    )
    np.testing.assert_array_equal(NOTHING.fill(own, prompts), own)
    assert remembered.fill(nothing[:0], []).shape == (0, 9) and remembered.fill(nothing[:1], ["\ud83d"]).shape == (1, 9)


def test_live_history_forgets_what_left_its_window() -> None:
    live = LiveHistory(2)
    for step, prompt in enumerate(["a", "b", "c"], 1):
        live.add(Seen(prompt, "t", step, 1.0))
    columns = live.columns(["a", "b"], ["t", "t"], 9)
    assert np.isnan(columns[0, :4]).all() and np.isfinite(columns[1, :4]).all()
