"""What an instance measures as it starts: in which order, and within which time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.generation.instance.calibration import QUICK_TOKENS, QuickPlan, TimingTrial

PROMPT = 128


def play(plan: QuickPlan, base: float, row: float, overhead: float = 0.0) -> list[TimingTrial]:
    """Trials on an engine whose step of `n` tokens, a prompt's among them, takes base + row * n seconds."""
    trials = []
    while (trial := plan.next()) is not None:
        trials.append(trial)
        first = base + row * trial.batch * trial.prompt
        plan.took(overhead + first + (base + row * trial.batch) * (trial.tokens - 1))
    return trials


def test_a_quick_engine_is_measured_at_all_sizes_the_largest_first() -> None:
    plan = QuickPlan(48, PROMPT)
    trials = play(plan, 0.02, 0.001, overhead=0.3)
    few, many = QUICK_TOKENS
    assert trials == [
        *(TimingTrial(48, 1, few), TimingTrial(48, 1, many)),
        *(TimingTrial(1, 1, few), TimingTrial(1, 1, many)),
        TimingTrial(1, PROMPT, 1),
        *(TimingTrial(12, 1, few), TimingTrial(12, 1, many)),
    ]
    curve = plan.curve
    assert plan.left_out == ""
    assert curve.batches == (1, 12, 48)
    assert curve.seconds == pytest.approx((0.021, 0.032, 0.068))
    # start-up is in the one trial of the prompt, and in no step
    assert curve.per_prefill_token == pytest.approx((0.3 + 0.02 + 0.128 - 0.021) / PROMPT)


def test_a_slow_engine_is_measured_where_it_matters_and_the_rest_is_said() -> None:
    plan = QuickPlan(48, PROMPT, budget_s=16.5)
    trials = play(plan, 0.5, 0.1)  # 5.3 s a step of the largest batch, 0.6 s one of a single request
    assert trials[:1] == [TimingTrial(48, 1, 2)] and TimingTrial(1, PROMPT, 1) not in trials
    assert plan.points[48] == pytest.approx(5.3) and plan.points[1] == pytest.approx(0.6)
    assert plan.spent_s < 16.5
    assert plan.left_out.startswith("step times of 2 of 3 batch sizes and of no prompt measured in 14 s; the rest ")
    # interpolated between both, and a prompt's token as dear as a request's
    assert float(plan.curve.base(12)) == pytest.approx(0.5 + 0.1 * 12)
    assert plan.curve.per_prefill_token == pytest.approx(0.1)


def test_a_hopeless_engine_is_measured_once() -> None:
    plan = QuickPlan(64, PROMPT, budget_s=20.0)
    assert play(plan, 0.0, 10.0) == [TimingTrial(64, 1, 2)]
    assert plan.curve.batches == (64,) and plan.left_out.startswith("step times of 1 of 3")


@pytest.mark.parametrize("largest", [1, 2, 3])
def test_small_pools_have_fewer_sizes(largest: int) -> None:
    plan = QuickPlan(largest, 2)
    play(plan, 0.01, 0.001)
    assert plan.left_out == "" and plan.curve.batches == tuple(sorted({1, largest}))


@given(st.floats(1e-4, 20), st.floats(0, 2), st.floats(0, 3), st.integers(1, 200), st.floats(1, 60))
def test_the_budget_is_kept_but_for_one_step_time_that_nobody_knew(
    base: float, row: float, overhead: float, largest: int, budget_s: float
) -> None:
    plan = QuickPlan(largest, PROMPT, budget_s)
    trials = play(plan, base, row, overhead)
    first = overhead + 2 * (base + row * largest)
    # not known before it is tried: what start-up adds to a trial, and how much less a single request takes
    assert plan.spent_s <= max(first, budget_s + (base + row * largest)) + overhead * len(trials) + 1e-6
    assert largest in plan.points and all(seconds > 0 for seconds in plan.curve.seconds)


def test_how_far_it_is_is_told() -> None:
    plan = QuickPlan(48, PROMPT)
    assert plan.summary == "measuring step times, 0 of 3 batch sizes done"
    plan.next()
    plan.took(1.0)
    plan.next()
    plan.took(2.0)
    assert plan.summary == "measuring step times, 1 of 3 batch sizes done"
