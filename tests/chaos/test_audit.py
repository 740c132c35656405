"""Every sample trained once: what an audit finds, and what it must not take for a loss."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from streamrl.chaos.audit import Account, LedgerRow, RolloutRow, audit, reward_curve

SIBLINGS = 2


def ledger(prompt: int, state: str = "trained") -> list[LedgerRow]:
    return [LedgerRow(f"{prompt:08d}.{n:03d}", f"{prompt:08d}", state) for n in range(SIBLINGS)]


def rollouts(prompt: int, step: int, versions: list[int] | None = None, trained: bool = True) -> list[RolloutRow]:
    found = np.asarray(versions or [step - 1] * 3, np.int32)
    tokens, logprobs = np.arange(3, dtype=np.int32), np.full(3, -0.5, np.float32)
    return [
        RolloutRow(f"{prompt:08d}.{n:03d}", True, step, trained, 3, tokens, logprobs, found) for n in range(SIBLINGS)
    ]


def account() -> Account:
    """Two steps of two prompts; prompt 5 is open, 4 was trained before 2 was."""
    trained = {0: 1, 1: 1, 3: 2, 4: 2}
    rows = [row for prompt in trained for row in ledger(prompt)]
    rows += [*ledger(2, "scored"), *ledger(5, "issued")]
    made = [row for prompt, step in trained.items() for row in rollouts(prompt, step)]
    return Account(rows, {1: 4, 2: 4}, made, [1, 2])


def test_void_samples_are_counted_by_cause_and_are_not_lost() -> None:
    given = account()
    first, second, *others = given.ledger
    voids = [replace(row, state="dropped", void_cause="environment") for row in (first, second)]
    dropped = {first.sample_id, second.sample_id}
    made = [replace(row, trained=row.sample_id not in dropped) for row in given.rollouts]
    one = replace(given, ledger=[*voids, *others], rollouts=made, step_sizes={1: 2, 2: 4})
    found = audit(one)
    assert (found.faults, found.lost, found.twice, found.samples) == ((), 0, 0, 6)
    assert found.voids == {"environment": 2}


def test_a_whole_account_is_clean() -> None:
    found = audit(account())
    assert not found.faults
    assert (found.steps, found.prompts, found.samples, found.open) == (2, 5, 8, 1)


def test_a_prompt_that_is_neither_trained_nor_open_is_lost() -> None:
    whole = account()
    rows = [row for row in whole.ledger if row.group_id != "00000002"]
    found = audit(replace(whole, ledger=rows))
    assert found.lost == SIBLINGS
    assert "neither trained nor open: 2" in found.faults[0]
    assert not audit(replace(whole, ledger=rows, too_long=1)).faults


def test_prompts_that_a_resumed_run_is_still_to_issue_again_are_open_until_it_issues_new_ones() -> None:
    whole = account()
    rows = [row for row in whole.ledger if row.group_id not in ("00000002", "00000005")]
    resumed = replace(whole, ledger=rows, next_index=5, again=frozenset({2}))
    assert not audit(resumed).faults
    assert audit(replace(resumed, ledger=[*rows, *ledger(5, "issued")])).lost == SIBLINGS


def test_a_sample_in_two_steps_is_trained_twice() -> None:
    whole = account()
    found = audit(replace(whole, rollouts=[*whole.rollouts, replace(whole.rollouts[0], step=2)]))
    assert found.twice == 1
    assert any("00000000.000" in fault for fault in found.faults)


def test_a_missing_sibling_is_lost() -> None:
    whole = account()
    assert audit(replace(whole, rollouts=whole.rollouts[1:])).lost == 1
    assert audit(replace(whole, ledger=whole.ledger[1:])).lost > 0


def test_dropped_groups_are_accounted_for() -> None:
    whole = account()
    rows = [replace(row, state="dropped") if row.group_id == "00000003" else row for row in whole.ledger]
    made = [replace(row, trained=not row.sample_id.startswith("00000003")) for row in whole.rollouts]
    assert not audit(replace(whole, ledger=rows, rollouts=made, step_sizes={1: 4, 2: 2})).faults


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"versions": np.asarray([1, 0, 1], np.int32)}, "older than the one before"),
        ({"versions": np.asarray([0, 1, 2], np.int32)}, "trained tokens of weight versions 0 to 2"),
        ({"logprobs": np.zeros(2, np.float32)}, "have lengths [2, 3]"),
        ({"logprobs": np.full(3, np.nan, np.float32)}, "log-probability"),
        ({"logprobs": np.full(3, 0.5, np.float32)}, "log-probability"),
        ({"tokens": np.asarray([1, -7, 2], np.int32)}, "negative"),
        ({"output_length": 4}, "have lengths [3, 4]"),
    ],
)
def test_a_sample_whose_parts_do_not_fit_is_malformed(changes: dict[str, object], text: str) -> None:
    whole = account()
    found = audit(replace(whole, rollouts=[*whole.rollouts[:-1], replace(whole.rollouts[-1], **changes)]))  # type: ignore[arg-type]
    assert found.malformed == 1
    assert text in found.faults[-1]


@pytest.mark.parametrize("trained", [True, False])
def test_only_a_void_episode_that_never_called_the_model_may_have_no_token(trained: bool) -> None:
    whole = account()
    nothing = np.zeros(0, np.int32)
    empty = {"tokens": nothing, "logprobs": nothing.astype(np.float32), "versions": nothing, "output_length": 0}
    rows = [*whole.rollouts[:-1], replace(whole.rollouts[-1], trained=trained, **empty)]  # type: ignore[arg-type]
    found = audit(replace(whole, rollouts=rows))
    assert found.malformed == trained
    assert any("it has no token" in one for one in found.faults) == trained


@pytest.mark.parametrize("steps", [[2, 3], [1, 1, 2], [1], [1, 3]])
def test_metrics_have_every_step_once(steps: list[int]) -> None:
    assert audit(replace(account(), metric_steps=steps)).faults


def test_ledger_and_rollouts_must_agree_on_the_size_of_a_step() -> None:
    assert "steps 2" in audit(replace(account(), step_sizes={1: 4, 2: 6})).faults[0]


def test_the_reward_curve_compares_its_ends() -> None:
    curve = reward_curve([0.0, 0.2, 0.4, 0.6], most=2)
    assert curve is not None
    assert (curve.steps, curve.first, curve.last) == (2, pytest.approx(0.1), pytest.approx(0.5))
    assert curve.deviation == pytest.approx(np.std([0.0, 0.2, 0.4, 0.6]))
    assert reward_curve([0.5]) is None


def test_void_samples_are_dropped_and_no_loss_while_their_siblings_are_trained() -> None:
    whole = account()
    gone = "00000003.001"
    rows = [replace(row, state="dropped") if row.sample_id == gone else row for row in whole.ledger]
    made = [replace(row, trained=False) if row.sample_id == gone else row for row in whole.rollouts]
    void = replace(whole, ledger=rows, rollouts=made, step_sizes={1: 4, 2: 3})
    assert audit(void).faults == () and audit(void).samples == 7
    assert audit(replace(void, ledger=[row for row in rows if row.sample_id != gone])).lost == 1
