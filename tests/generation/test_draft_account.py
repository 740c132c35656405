"""When drafting goes on, by what it has saved and cost."""

from __future__ import annotations

import pytest

from streamrl.generation.drafts.draft_account import CREDIT, FEWEST, LOOK, MOST, SHARE, DraftAccounts


def opened(batch: int = 1, beside_s: float = 0.0) -> DraftAccounts:
    accounts = DraftAccounts()
    for _ in range(FEWEST):
        accounts.plain(batch, 0.01 + beside_s, 0.01)
    return accounts


def spent(accounts: DraftAccounts, batch: int = 1, rows_s: float = 0.01) -> int:
    """Lose plain steps, one each time, until nothing may be drafted; return how many."""
    count = 0
    while accounts.may_draft(batch):
        accounts.drafted(batch, 0.02, rows_s, 0.0, 0.0)
        count += 1
    return count


def test_plain_steps_are_measured_before_anything_is_drafted() -> None:
    accounts = DraftAccounts()
    for _ in range(FEWEST):
        assert not accounts.may_draft(1)
        accounts.plain(1, 0.01, 0.01)
    assert accounts.may_draft(1)


def test_a_new_account_may_lose_its_credit() -> None:
    assert spent(opened()) == CREDIT + 1  # the share of the plain steps is left after the fourth


def test_savings_are_kept_up_to_a_limit() -> None:
    accounts = opened()
    for _ in range(10):
        accounts.drafted(1, 0.01, 0.01, 0.0, 1.0)
    assert spent(accounts) == MOST


def test_an_empty_account_is_filled_by_a_share_of_plain_steps() -> None:
    accounts = opened()
    spent(accounts)
    waited = 0
    while not accounts.may_draft(1):
        accounts.plain(1, 0.01, 0.01)
        waited += 1
    assert waited == pytest.approx(1 / SHARE, abs=FEWEST + 2)


def test_what_every_step_takes_beside_its_rows_is_no_loss() -> None:
    accounts = opened(beside_s=0.01)
    for _ in range(LOOK - 1):
        accounts.drafted(1, 0.02, 0.01, 0.0, 0.0)
    assert accounts.may_draft(1)


def test_a_single_stall_of_a_plain_step_does_not_count() -> None:
    accounts = opened()
    accounts.plain(1, 5.0, 0.01)
    assert spent(accounts) == CREDIT + 1


def test_a_stall_of_a_step_with_drafts_costs_what_its_rows_do() -> None:
    accounts = opened()
    accounts.drafted(1, 5.0, 0.01, 0.005, 0.0)
    assert spent(accounts) == CREDIT


def test_what_takes_too_long_in_every_step_is_no_stall() -> None:
    accounts = opened()
    accounts.drafted(1, 0.04, 0.01, 0.0, 0.0)  # four plain steps, as one alone no loss
    assert accounts.may_draft(1)
    accounts.drafted(1, 0.04, 0.01, 0.0, 0.0)  # loses three
    accounts.drafted(1, 5.0, 0.01, 0.0, 0.0)  # no more than three
    assert not accounts.may_draft(1)
    waited = 0
    while not accounts.may_draft(1):
        accounts.plain(1, 0.01, 0.01)
        waited += 1
    assert waited == pytest.approx(2 / SHARE, abs=FEWEST + 2)


def test_what_tokens_save_is_as_far_off_as_the_curve_is() -> None:
    accounts = DraftAccounts()
    for _ in range(FEWEST):
        accounts.plain(1, 0.01, 0.02)  # the curve says twice as much
    for _ in range(10):
        accounts.drafted(1, 0.016, 0.02, 0.0, 0.01)  # costs 0.006, and saves 0.005
    for _ in range(31):
        assert accounts.may_draft(1)
        accounts.drafted(1, 0.016, 0.02, 0.0, 0.01)
    assert not accounts.may_draft(1)


def test_a_curve_is_taken_to_be_off_by_a_factor_of_four_at_most() -> None:
    accounts = DraftAccounts()
    for _ in range(FEWEST):
        accounts.plain(1, 0.01, 1.0)
    for _ in range(10):
        accounts.drafted(1, 0.02, 1.0, 0.0, 0.06)  # saves 0.015, costs 0.01
    assert spent(accounts, rows_s=1.0) == CREDIT + 10 * (0.015 - 0.01) / 0.01 + 1


def test_a_stall_is_told_by_measured_steps_where_the_curve_is_far_too_high() -> None:
    accounts = DraftAccounts()
    for _ in range(FEWEST):
        accounts.plain(1, 0.01, 1.0)
    accounts.drafted(1, 0.5, 1.0, 0.0, 0.0)
    assert accounts.may_draft(1)


def test_a_plain_step_is_due_after_many_with_drafts() -> None:
    accounts = opened()
    for _ in range(LOOK):
        assert accounts.may_draft(1)
        accounts.drafted(1, 0.01, 0.01, 0.0, 0.01)
    assert not accounts.may_draft(1)
    accounts.plain(1, 0.01, 0.01)
    assert accounts.may_draft(1)


@pytest.mark.parametrize(("batch", "same"), [(4, 7), (8, 15), (1, 1)])
def test_batches_share_an_account_up_to_the_next_power_of_two(batch: int, same: int) -> None:
    accounts = opened(batch)
    assert accounts.may_draft(same)
    assert not accounts.may_draft(same + 1)
    spent(accounts, batch)
    assert not accounts.may_draft(same)
