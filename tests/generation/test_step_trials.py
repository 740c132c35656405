"""What is timed to know an instance's step times: in which order, within which time, and when it is doubtful."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from streamrl.generation.instance.calibration import QUICK_TOKENS
from streamrl.generation.instance.step_trials import MOST_REPEATS, StepTrials, TimingTrial

PROMPT = 128
FEW, MANY = QUICK_TOKENS


def quick(
    largest: int,
    budget_s: float = 20.0,
    context: int = 0,
    room: int = 10**6,
    repeat_s: float = 5.0,
    most_repeats: int = MOST_REPEATS,
) -> StepTrials:
    sizes = (largest, 1, max(1, largest // 4))
    return StepTrials(sizes, PROMPT, context, room, QUICK_TOKENS, budget_s, repeat_s, most_repeats)


def play(
    trials: StepTrials,
    base: float,
    row: float,
    overhead: float = 0.0,
    per_context: float = 0.0,
    disturbed: Callable[[TimingTrial, int], float] = lambda trial, number: 1.0,
) -> list[TimingTrial]:
    """Trials on an engine whose step of `n` tokens, a prompt's among them, takes base + row * n seconds, and
    `per_context` for each token of context; a filled prompt is not computed again."""
    made: list[TimingTrial] = []
    while (trial := trials.next()) is not None:
        filled = trial.kind == "steps" and trial.prompt > 1
        first = base + row * trial.batch * (1 if filled else trial.prompt)
        context = sum(trial.batch * (trial.prompt + n) for n in range(trial.tokens))
        seconds = overhead + first + (base + row * trial.batch) * (trial.tokens - 1) + per_context * context
        trials.took(seconds * disturbed(trial, len(made)))
        made.append(trial)
    return made


def test_all_sizes_are_timed_the_largest_first_and_then_again_until_three_repeats_agree() -> None:
    trials = quick(48, repeat_s=20.0)
    made = play(trials, 0.02, 0.001, overhead=0.3)
    pairs = {size: [TimingTrial(size, 1, FEW), TimingTrial(size, 1, MANY)] for size in (48, 1, 12)}
    assert made[:7] == [*pairs[48], *pairs[1], TimingTrial(1, PROMPT, 1, "prefill"), *pairs[12]]
    assert made[7:] == [*pairs[48], *pairs[1], *pairs[12]] * 2
    assert trials.left_out == trials.doubts == ""
    curve = trials.curve
    assert curve.batches == (1, 12, 48)
    assert curve.seconds == pytest.approx((0.021, 0.032, 0.068))
    # start-up is in the one trial of the prompt, and in no step
    assert curve.per_prefill_token == pytest.approx((0.3 + 0.02 + 0.128 - 0.021) / PROMPT)


def test_two_context_lengths_give_the_time_per_token_of_context() -> None:
    trials = quick(48, context=1000)
    made = play(trials, 0.02, 1e-5, per_context=2e-6)
    (fill,) = [trial for trial in made if trial.kind == "fill"]
    assert fill == TimingTrial(12, 1000, 1, "fill")
    assert made.count(TimingTrial(12, 1000, MANY)) == 3
    assert trials.curve.per_context_token == pytest.approx(2e-6)
    assert float(trials.curve.step(12, 12 * 1000)) == pytest.approx(0.02 + 12e-5 + 2e-6 * 12_000, rel=0.02)


@pytest.mark.parametrize(
    ("context", "room", "row", "length"),
    [
        (1000, 12 * 300, 1e-5, 300),  # the KV cache holds no more
        (1000, 12 * 60, 1e-5, None),  # too little for a difference
        (60, 10**6, 1e-5, None),
        (10**6, 10**6, 1e-5, 2048),
        (1000, 10**6, 2e-3, 0),  # prefilling may take a quarter of what is left
    ],
)
def test_the_long_context_fits_the_engine_and_the_budget(
    context: int, room: int, row: float, length: int | None
) -> None:
    trials = quick(48, context=context, room=room)
    made = play(trials, 0.02, row, per_context=1e-7)
    fills = [trial for trial in made if trial.kind == "fill"]
    if length is None:
        assert not fills and trials.curve.per_context_token == 0.0
        assert trials.left_out == "", "the engine has no room for more, whatever the time"
    elif length:
        assert fills[0].prompt == length
    else:
        assert 64 <= fills[0].prompt < 1000 and fills[0].batch * fills[0].prompt * row < 5.0


def test_a_slow_engine_is_measured_where_it_matters_and_the_rest_is_said() -> None:
    trials = quick(48, budget_s=16.5)
    made = play(trials, 0.5, 0.1)  # 5.3 s a step of the largest batch, 0.6 s one of a single request
    assert made[:1] == [TimingTrial(48, 1, 2)] and "prefill" not in {trial.kind for trial in made}
    assert trials.points[48] == pytest.approx(5.3) and trials.points[1] == pytest.approx(0.6)
    assert trials.spent_s < 16.5
    assert trials.left_out.startswith("step times of 2 of 3 batch sizes and of no prompt measured in ")
    assert quick_but_busy().left_out.startswith("step times of 3 of 3 batch sizes and of one context length only")
    # interpolated between both, and a prompt's token as dear as a request's
    assert float(trials.curve.base(12)) == pytest.approx(0.5 + 0.1 * 12)
    assert trials.curve.per_prefill_token == pytest.approx(0.1)


def quick_but_busy() -> StepTrials:
    """Trials of an engine that takes so long to prefill that no long context fits into the budget."""
    trials = quick(48, context=1000)
    play(trials, 0.02, 0.015)
    return trials


def test_a_hopeless_engine_is_measured_once() -> None:
    trials = quick(64)
    assert play(trials, 0.0, 10.0) == [TimingTrial(64, 1, 2)]
    assert trials.curve.batches == (64,) and trials.left_out.startswith("step times of 1 of 3")


@pytest.mark.parametrize("largest", [1, 2, 3])
def test_small_pools_have_fewer_sizes(largest: int) -> None:
    trials = StepTrials((largest, 1, max(1, largest // 4)), 2, 0, 0, QUICK_TOKENS, 20.0, 5.0)
    play(trials, 0.01, 0.001)
    assert trials.left_out == "" and trials.curve.batches == tuple(sorted({1, largest}))


def test_a_passing_disturbance_is_outvoted() -> None:
    trials = quick(48)
    # the first pair of batch 1 meets another process: its step seems 30 times as long as it is
    play(trials, 0.02, 0.001, disturbed=lambda trial, number: 30.0 if number == 3 else 1.0)
    assert len(trials.times[1, 1]) > 1
    assert trials.curve.seconds == pytest.approx((0.021, 0.032, 0.068)) and trials.doubts == ""


@pytest.mark.parametrize("most", [MOST_REPEATS, 5])
def test_times_that_do_not_agree_are_doubtful_and_bounded_in_number(most: int) -> None:
    noise = np.random.default_rng(0)
    trials = quick(48, budget_s=1e4, repeat_s=1e4, most_repeats=most)
    play(trials, 0.02, 0.0001, disturbed=lambda trial, number: float(noise.uniform(1, 8)))
    assert "repeats of " in trials.doubts and "batch 48" in trials.doubts
    assert max(map(len, trials.times.values())) == most


def test_a_larger_batch_that_stays_faster_is_doubtful() -> None:
    trials = quick(48, repeat_s=20.0)
    play(trials, 0.1, 0.0, disturbed=lambda trial, number: 0.2 if trial.batch == 48 else 1.0)
    assert trials.fall.startswith("a step of batch 48 took 20 ms and one of batch 1 100 ms, but a larger batch cannot")
    assert trials.fall in trials.doubts
    assert len(trials.times[48, 1]) > 3, "its repeats agree, but they are made again"


def test_repeats_end_with_the_time_for_them() -> None:
    steps = itertools.count(1)
    trials = quick(48, repeat_s=2.0)
    play(trials, 0.02, 0.001, disturbed=lambda trial, number: 1.0 + next(steps) % 5)
    assert 0 < trials.repeated_s <= 2.0 * 5


@given(st.floats(1e-4, 20), st.floats(0, 2), st.floats(0, 3), st.integers(1, 200), st.floats(1, 60))
@example(1.0, 1.0, 2.0, 2, 32.0)  # the bound on a step of one request is the step of two: tokens seem to cost nothing
def test_the_budget_is_kept_but_for_one_step_time_that_nobody_knew(
    base: float, row: float, overhead: float, largest: int, budget_s: float
) -> None:
    trials = quick(largest, budget_s, context=512)
    made = play(trials, base, row, overhead)
    first = overhead + 2 * (base + row * largest)
    # not known before it is tried: what start-up adds to a trial, and how much less a single request takes
    assert trials.spent_s <= max(first, budget_s + (base + row * largest)) + overhead * len(made) + 1e-6
    assert largest in trials.points and all(seconds > 0 for seconds in trials.curve.seconds)


def test_the_progress_of_a_measurement_is_reported() -> None:
    trials = quick(48)
    assert trials.summary == "measuring step times, 0 of 3 batch sizes done"
    for _ in range(2):
        trials.next()
        trials.took(1.0 + len(trials.times))
    assert trials.summary == "measuring step times, 1 of 3 batch sizes done"
