"""What drafted tokens save, and how many of them pay, against values computed by hand."""

from __future__ import annotations

import pytest

from scheduler.cost.decode import StepCurve, replica_time
from scheduler.cost.speculative_decoding import (
    Speculation,
    best_drafts,
    draft_counts,
    expected_tokens,
    speculated,
    token_values,
)

FLAT = StepCurve((1, 100), (1.0, 1.0))
"""Rows cost nothing."""
SLOPED = StepCurve((1, 11), (1.0, 2.0))
"""0.1 s for each further row."""
PROPORTIONAL = StepCurve((1, 10), (1.0, 10.0))
"""A row costs a step: nothing is saved by taking several together."""


def test_a_step_with_two_drafts_yields_one_and_three_quarters_of_a_token_at_half_acceptance() -> None:
    assert expected_tokens(0.5, 2) == pytest.approx(1 + 0.5 + 0.25)
    assert expected_tokens(0.0, 5) == 1
    assert expected_tokens(1.0, 5) == 6


def test_as_many_drafts_as_allowed_are_best_where_rows_cost_nothing() -> None:
    drafts, seconds = best_drafts(FLAT, 4, Speculation(0.5, 3))
    assert drafts == 3
    assert seconds == pytest.approx(1 / 1.875)


def test_no_drafts_are_best_where_a_row_costs_a_step() -> None:
    assert best_drafts(PROPORTIONAL, 2, Speculation(0.9, 8)) == (0, 2.0)


def test_the_best_number_of_drafts_balances_rows_against_tokens() -> None:
    # one request: (1 + 0.1 k) / E(k) = 1.1 / 1.5, 1.2 / 1.75, 1.3 / 1.875, 1.4 / 1.9375
    drafts, seconds = best_drafts(SLOPED, 1, Speculation(0.5, 4))
    assert (drafts, seconds) == (2, pytest.approx(1.2 / 1.75))


def test_overhead_makes_drafts_not_worth_it() -> None:
    # at best 1.2 + 0.6 for 1.75 tokens
    assert best_drafts(SLOPED, 1, Speculation(0.5, 4, overhead_s=0.6))[0] == 0


def test_a_speculated_curve_has_the_best_seconds_at_every_batch_and_reads_the_context_as_before() -> None:
    curve = StepCurve((1, 11), (1.0, 2.0), per_context_token=1e-3, per_prefill_token=1e-4)
    faster = speculated(curve, Speculation(0.5, 4), 6)
    assert faster.batches == (1, 2, 3, 4, 5, 6)
    for batch, seconds in zip(faster.batches, faster.seconds, strict=True):
        assert seconds == pytest.approx(best_drafts(curve, batch, Speculation(0.5, 4))[1])
    assert (faster.per_context_token, faster.per_prefill_token) == (1e-3, 1e-4)


@pytest.mark.parametrize(
    ("acceptance", "most", "overhead"), [(1.1, 1, 0.0), (-0.1, 1, 0.0), (0.5, -1, 0.0), (0.5, 1, -1.0)]
)
def test_impossible_values_are_refused(acceptance: float, most: int, overhead: float) -> None:
    with pytest.raises(ValueError, match=r"must not be negative|probability"):
        Speculation(acceptance, most, overhead)


def test_a_token_less_of_the_longest_request_saves_a_whole_step_of_one() -> None:
    lengths = [3.0, 30.0, 20.0]
    values = token_values(SLOPED, lengths)
    assert values == pytest.approx([0.1, 1.0, 0.1])
    for index, value in enumerate(values):  # the exact time of the instance says the same
        shorter = [length - (n == index) for n, length in enumerate(lengths)]
        assert replica_time(lengths, SLOPED) - replica_time(shorter, SLOPED) == pytest.approx(value)


def test_without_forecasts_or_with_requests_waiting_every_token_saves_the_mean() -> None:
    assert token_values(SLOPED, [3.0, None, 20.0]) == pytest.approx([0.4] * 3)
    assert token_values(SLOPED, [3.0, 30.0, 20.0], refilled=True) == pytest.approx([0.4] * 3)


def test_drafts_are_verified_as_long_as_they_save_more_than_their_rows_cost() -> None:
    # savings 0.5, 0.25, 0.125, 0.0625 of a second, 0.1 for each row
    assert draft_counts(SLOPED, [[0.5] * 4], [1.0], 0.0) == [3]


def test_the_request_whose_tokens_are_worth_most_gets_the_drafts() -> None:
    chances = [[0.5, 0.5], [0.5, 0.5]]
    assert draft_counts(SLOPED, chances, [1.0, 0.1], 0.0) == [2, 0]


def test_drafts_that_do_not_pay_their_overhead_are_left_out() -> None:
    # saved 0.5 + 0.25 - 0.2
    assert draft_counts(SLOPED, [[0.5, 0.5]], [1.0], 0.54) == [2]
    assert draft_counts(SLOPED, [[0.5, 0.5]], [1.0], 0.56) == [0]


def test_a_later_draft_counts_only_after_all_before_it() -> None:
    # the second token alone would be accepted surely, but the first hardly ever is
    assert draft_counts(SLOPED, [[0.05, 1.0]], [1.0], 0.0) == [0]


def test_rows_that_are_free_together_are_taken_although_the_first_ones_cost() -> None:
    # the second row costs 1 s, all further ones nothing
    step = StepCurve((1, 2, 9), (1.0, 2.0, 2.0))
    assert draft_counts(step, [[0.9] * 4], [1.0], 0.0) == [4]


def test_requests_without_a_draft_get_none() -> None:
    assert draft_counts(SLOPED, [[], []], [1.0, 1.0], 0.0) == [0, 0]
    assert draft_counts(FLAT, [[], [0.5]], [1.0, 1.0], 0.0) == [0, 1]
