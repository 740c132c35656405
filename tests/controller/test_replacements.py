"""Which complete groups are replaced, and how many for each step."""

from __future__ import annotations

from typing import Any

import pytest

from streamrl.config.algorithm import GROUP_ADVANTAGES
from streamrl.config.run import RunConfig
from streamrl.controller.group_pool import GroupPool
from streamrl.controller.replacements import Replacements
from streamrl.controller.step_batch import StepBatch
from tests.controller.test_pool_and_batch import config, empty_group, finish, pool_of


def replaces(run: RunConfig, pool: GroupPool, name: str, rewards: list[float | None]) -> bool:
    """Whether a group of a run that has replaced none before is replaced in the first step."""
    return Replacements(run).replaces(finish(pool, name, rewards), StepBatch(run, 1), pool.issued)


def test_dynamic_sampling_judges_the_task_reward_before_the_overlong_penalty() -> None:
    run = config(2, name="dapo", overlong={"margin_tokens": 126, "penalty": 1.0})  # grows from 2 tokens on
    pool = pool_of("ab", batch=2)
    right = finish(pool, "a", [1.0, 1.0])
    batch = StepBatch(run, 1)
    assert len(set(batch.rewards(right))) == 2  # their lengths differ, and so do their shaped rewards
    assert Replacements(run).replaces(right, batch, pool.issued)
    assert not replaces(run, pool, "b", [1.0, 1.0 - 1e-9])


@pytest.mark.parametrize("advantage", [*GROUP_ADVANTAGES, "batch_group_baseline"])
def test_a_group_goes_on_with_two_survivors_and_is_replaced_with_fewer(advantage: str) -> None:
    pool, run = pool_of("abc", 3), config(3, 3, advantage=advantage)
    assert not replaces(run, pool, "a", [1.0, None, 0.0])
    assert replaces(run, pool, "b", [None, 1.0, None])
    assert replaces(run, pool, "c", [None, None, None])


@pytest.mark.parametrize("algorithm", [{"advantage": "batch"}, {"name": "ppo", "advantage": "gae", "critic": {}}])
def test_where_samples_are_not_compared_one_survivor_is_enough(algorithm: dict[str, object]) -> None:
    pool, run = pool_of("ab"), config(**algorithm)
    assert not replaces(run, pool, "a", [None, 1.0])
    assert replaces(run, pool, "b", [None, None])


def test_replacements_of_steps_that_have_ended_are_forgotten() -> None:
    run = config(2, name="dapo", max_replaced=0.5)
    replacements = Replacements(run)
    for step in range(1, 51):
        # one each for this step, unless the step before has charged it, and for the next
        charged = [replacements._charge(step, issued=2 * (step + 1)) for _ in range(3)]
        assert charged == [True, step == 1, False]
        assert set(replacements._charged) <= {step, step + 1}


def test_groups_of_equal_rewards_are_kept_without_dynamic_sampling() -> None:
    assert not replaces(config(2), pool_of("a"), "a", [1.0, 1.0])


def test_dynamic_sampling_replaces_flat_groups_up_to_its_limit() -> None:
    run = config(2, name="dapo", max_replaced=1.0)
    pool, replacements, batch = pool_of("abcde", batch=2), Replacements(run), StepBatch(run, 1)
    found = [replacements.replaces(finish(pool, "a", [1.0, 0.0]), batch, issued=2)]
    found += [replacements.replaces(finish(pool, name, [1.0, 1.0]), batch, issued=2) for name in "bcd"]
    assert found == [False, True, True, False]  # as many as the batch has: the next one is kept
    assert replacements.replaces(finish(pool, "e", [1.0, 1.0]), StepBatch(run, 2), issued=4)


@pytest.mark.parametrize(
    ("share", "prompts", "most"),
    [
        (0.3, 4, 1),
        (1e-9, 4, 0),
        (0.1, 10, 1),
        (0.29, 100, 29),
        (0.57, 100, 57),
        (0.1, 3, 0),
        (2.5, 3, 7),
        (1.1, 10, 11),
    ],
)
def test_no_more_groups_are_replaced_than_a_fraction_allows(share: float, prompts: int, most: int) -> None:
    run = config(prompts, name="dapo", max_replaced=share)
    pool, replacements, batch = pool_of("a", batch=2), Replacements(run), StepBatch(run, 1)
    flat = finish(pool, "a", [1.0, 1.0])
    found = [replacements.replaces(flat, batch, issued=prompts) for _ in range(most + 2)]
    assert found == [True] * most + [False] * 2


def test_a_replacement_may_be_charged_to_a_step_of_which_only_a_part_has_been_issued() -> None:
    run = config(2, name="dapo", max_replaced=1.0)
    pool, replacements, batch = pool_of("abcde", batch=2), Replacements(run), StepBatch(run, 1)
    found = [replacements.replaces(finish(pool, name, [1.0, 1.0]), batch, issued=3) for name in "abcde"]
    assert found == [True, True, True, True, False]


def test_groups_replaced_for_their_void_rewards_do_not_use_up_the_limit_of_dynamic_sampling() -> None:
    run = config(2, name="dapo", max_replaced=1.0)
    pool, replacements, batch = pool_of("abcde", batch=2), Replacements(run), StepBatch(run, 1)
    for name in "ab":
        assert replacements.replaces(finish(pool, name, [None, 1.0]), batch, issued=2)
    found = [replacements.replaces(finish(pool, name, [1.0, 1.0]), batch, issued=2) for name in "cde"]
    assert found == [True, True, False]


@pytest.mark.parametrize(
    "schedule",
    [
        {"name": "stream"},
        {"name": "sync", "sync_every": 2},
        {"name": "stream", "sync_every": 8},
        {"name": "async", "max_staleness": 3},
    ],
    ids=lambda schedule: f"{schedule['name']} {schedule.get('sync_every', '')}",
)
def test_the_groups_of_several_steps_share_the_limits_of_these_steps(schedule: dict[str, Any]) -> None:
    """Every group is flat, and all that are out at a time are complete before the first of their steps."""
    batch = {"prompts_per_step": 4, "samples_per_prompt": 2}
    algorithm = {"name": "dapo", "max_replaced": 1.5}
    run = RunConfig.model_validate({"schedule": schedule, "batch": batch, "algorithm": algorithm})
    together = run.schedule.max_staleness + 1
    pool, replacements, replaced = pool_of([], 2, 4, 8), Replacements(run), 0
    publications = [1 + n * together for n in range(2)] if schedule["name"] != "async" else [1, 2]
    counts = []
    for step in publications:
        while pool.complete < 4 * together:
            name = f"{pool.issued + replaced}"
            pool.issue([empty_group(name)], 0)
            if replacements.replaces(finish(pool, name, [1.0, 1.0]), StepBatch(run, step), pool.issued):
                pool.drop(name)
                replaced += 1
        counts.append(replaced)
        for _ in range(4 * (publications[1] - 1)):
            pool.take()
    assert counts[0] == 6 * together
    assert counts[1] == counts[0] + 6 * (publications[1] - 1)  # what the steps since have, and no more
