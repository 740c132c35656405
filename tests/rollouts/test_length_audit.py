"""The length audit: a schedule that drops the long ones is found out, one that waits is not accused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from streamrl.rollouts.length_audit import (
    FEWEST_GROUPS,
    LengthAudit,
    LengthComparison,
    StepAudit,
    bucket_edges,
    has_limit,
    ks_test,
)

LIMIT = 512
SIZE = 4
GROUPS = 8
Drop = Callable[[dict[str, list[int]]], set[str]]


def group_lengths(chance: np.random.Generator) -> list[int]:
    """Siblings have like lengths; all heavy-tailed."""
    centre = chance.lognormal(4.0, 0.7)
    return [int(np.clip(centre * chance.lognormal(0, 0.3), 1, LIMIT)) for _ in range(SIZE)]


def issue(audit: LengthAudit, step: int, chance: np.random.Generator) -> dict[str, list[int]]:
    groups = {f"{step}-{index}": group_lengths(chance) for index in range(GROUPS)}
    for name in groups:
        audit.issued(step, name, SIZE)
    return groups


def finish(audit: LengthAudit, name: str, lengths: list[int]) -> None:
    for number, length in enumerate(lengths):
        audit.finished(f"{name}.{number:03d}", name, length)


def run(steps: int, drop: Drop, seed: int = 0, aborted: bool = False) -> list[StepAudit]:
    """Each batch is finished and trained before the next; what `drop` names is dropped (aborted: while it runs)."""
    audit, chance, audits = LengthAudit(LIMIT), np.random.default_rng(seed), []
    for step in range(1, steps + 1):
        groups = issue(audit, step, chance)
        away = drop(groups)
        for name, lengths in groups.items():
            if name in away and aborted:
                audit.dropped(step, name, [length // 2 for length in lengths], "still running")
                continue
            finish(audit, name, lengths)
            if name in away:
                audit.dropped(step, name, lengths, "too stale")
            else:
                audit.trained(step, name, lengths)
        audits.append(audit.end_step(step))
    return audits


def longest(groups: dict[str, list[int]]) -> set[str]:
    """About one group in ten: those whose mean is above the 90th percentile of what `group_lengths` draws."""
    return {name for name, lengths in groups.items() if np.mean(lengths) > 140}


def test_dropping_the_longest_tenth_warns_and_says_by_how_much() -> None:
    audits = run(40, longest)
    last = audits[-1].comparison
    assert 0.05 < last.groups_left_out / (last.groups_left_out + last.groups_trained) < 0.15
    assert audits[-1].warning is not None and "shorter answers" in audits[-1].warning
    assert last.mean_ratio is not None and 0.7 < last.mean_ratio < 0.95
    assert last.p_value is not None and last.p_value < 1e-6
    assert last.cohorts == 20


def test_aborting_the_longest_warns_though_their_lengths_are_never_known() -> None:
    audits = run(40, longest, aborted=True)
    assert audits[-1].warning is not None
    assert audits[-1].open == 0 and audits[-1].unfinished_share == 0


def test_dropping_at_random_does_not_warn_though_it_is_looked_at_after_every_step() -> None:
    for seed in range(5):
        chance = np.random.default_rng(100 + seed)

        def at_random(groups: dict[str, list[int]], chance: np.random.Generator = chance) -> set[str]:
            return {name for name in groups if chance.random() < 0.1}

        assert [audit.warning for audit in run(60, at_random, seed)] == [None] * 60


def test_few_groups_are_no_evidence_however_they_look() -> None:
    audits = run(5, longest)
    assert audits[-1].comparison.groups_left_out < FEWEST_GROUPS
    assert audits[-1].comparison.p_value is None and audits[-1].warning is None
    assert audits[-1].comparison.mean_ratio is not None  # told all the same


def test_a_significant_but_small_difference_does_not_warn() -> None:
    """One long sample of each group dropped in a very long window: p is tiny, the means hardly differ."""
    audit, chance = LengthAudit(LIMIT, window_steps=200), np.random.default_rng(0)
    for step in range(1, 201):
        for name, lengths in issue(audit, step, chance).items():
            finish(audit, name, lengths)
            if step % 10 == 0 and np.mean(lengths) > 100:
                audit.dropped(step, name, lengths, "too stale")
            else:
                audit.trained(step, name, lengths)
        audited = audit.end_step(step)
    assert audited.comparison.p_value is not None and audited.comparison.p_value < 1e-6
    assert audited.comparison.mean_ratio is not None and 0.95 < audited.comparison.mean_ratio < 1
    assert audited.warning is None


@pytest.mark.parametrize("seed", range(5))
def test_a_schedule_that_trains_the_finished_first_but_waits_for_the_rest_never_warns(seed: int) -> None:
    """Two batches ahead, whatever is finished first is trained: step 1 trains short ones, none is ever dropped."""
    audit, chance = LengthAudit(LIMIT), np.random.default_rng(seed)
    running: dict[str, tuple[float, list[int]]] = {}
    first = None
    for step in range(1, 81):
        ahead = (step, step + 1, step + 2) if step == 1 else (step + 2,)
        for number in ahead:
            for name, lengths in issue(audit, number, chance).items():
                running[name] = (40.0 * number + max(lengths), lengths)
        for name in sorted(running, key=lambda name: running[name][0])[:GROUPS]:
            _, lengths = running.pop(name)
            finish(audit, name, lengths)
            audit.trained(step, name, lengths)
        audited = audit.end_step(step)
        first = first or audited
        assert audited.warning is None
        assert audited.comparison.mean_ratio in (None, pytest.approx(1.0))
    assert first is not None and first.unfinished_share > 0
    # step 1 trained the shortest of three batches, which a comparison with all that is known would call a bias
    assert audited.comparison.cohorts > 10


def test_putting_the_long_ones_off_for_ever_counts_as_leaving_them_out() -> None:
    audit, chance = LengthAudit(LIMIT, window_steps=20), np.random.default_rng(3)
    for step in range(1, 61):
        for name, lengths in issue(audit, step, chance).items():
            finish(audit, name, lengths)
            if np.mean(lengths) <= 110:
                audit.trained(step, name, lengths)
        audited = audit.end_step(step)
    assert audited.warning is not None
    assert audited.comparison.groups_left_out >= FEWEST_GROUPS


def test_every_sample_is_in_one_bucket_of_its_step() -> None:
    audit = LengthAudit(LIMIT)
    for name in ("a", "b", "c"):
        audit.issued(1, name, 2)
    finish(audit, "a", [1, LIMIT])
    audit.finished("a.000", "a", 1)  # told twice
    audit.finished("b.000", "b", 30)
    audit.trained(1, "a", [1, LIMIT])
    audit.trained(2, "b", [30, 31])  # already of the next step
    audit.dropped(1, "c", [100, 3], "too stale")
    first = audit.end_step(1)
    assert len(first.edges) == len(first.issued) + 1 and first.edges[0] == 0
    assert (sum(first.issued), sum(first.finished), sum(first.trained), sum(first.dropped)) == (6, 3, 2, 2)
    assert first.trained[-1] == 1 and first.edges[-2] == LIMIT  # cut at the limit: a bucket of its own
    assert first.drop_reasons == {"too stale": 2}
    assert first.open == 0
    second = audit.end_step(2)
    assert (sum(second.finished), sum(second.trained), sum(second.dropped)) == (0, 2, 0)


def test_what_still_runs_is_counted_as_open_and_its_cohort_is_not_compared() -> None:
    audit = LengthAudit(LIMIT)
    audit.issued(1, "a", 2)
    audit.issued(1, "b", 2)
    finish(audit, "a", [5, 6])
    audit.trained(1, "a", [5, 6])
    audit.finished("b.000", "b", 7)
    found = audit.end_step(1)
    assert found.open == 1 and found.unfinished_share == 0.25 and sum(found.issued) == 3
    assert found.comparison == LengthComparison(0, 0, 0, None, None, None, None, None)


def test_events_of_forgotten_or_unknown_groups_are_counted_and_nothing_more() -> None:
    audit = LengthAudit(LIMIT, window_steps=2)
    for step in range(1, 12):
        audit.issued(step, f"g{step}", 1)
        audit.end_step(step)
    audit.finished("g1.000", "g1", 9)
    audit.trained(12, "g1", [9])
    found = audit.end_step(12)
    assert sum(found.finished) == sum(found.trained) == 1


@pytest.mark.parametrize("limit", [1, 2, 7, 64, 128, 32768])
def test_buckets_rise_and_reach_the_limit(limit: int) -> None:
    edges = bucket_edges(limit)
    assert list(edges) == sorted(set(edges)) and edges[0] == 0 and edges[-2:] == (limit, limit + 1)


def test_equal_sets_have_a_p_value_of_one() -> None:
    statistic, p_value = ks_test([1, 2, 3, 4], [1, 2, 3, 4])
    assert statistic == 0 and p_value == 1


@pytest.mark.parametrize("longest", [16, 64, 1024, 32768])
def test_without_a_limit_the_last_bucket_holds_all_that_is_longer(longest: int) -> None:
    audit = LengthAudit(longest, limited=False)
    assert list(audit.edges) == sorted(set(audit.edges)) and (audit.edges[0], audit.edges[-1]) == (0, longest)
    assert not has_limit(audit.edges) and has_limit(bucket_edges(longest))
    audit.issued(1, "a", 3)
    finish(audit, "a", [longest - 1, longest, 5 * longest])
    assert audit.end_step(1).finished[-1] == 3
