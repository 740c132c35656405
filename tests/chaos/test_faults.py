"""The schedule of faults."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest

from streamrl.chaos.faults import (
    LEAST_PAUSE_S,
    MOST_PAUSE_S,
    OF_AGENT_WORKERS,
    OF_LINKS,
    FaultKind,
    Inventory,
    schedule,
    targets,
)

ONE_SITE = Inventory(instances=("here-regular-0", "here-tail-0"), services=("service-here",), rewards=("rewards-here",))
OF_AGENTS = {FaultKind.AGENTS_KILL, FaultKind.ENDPOINT_PAUSE, FaultKind.ENVIRONMENT_KILL, *OF_AGENT_WORKERS}


def test_the_same_seed_gives_the_same_faults_and_another_one_does_not() -> None:
    possible, _ = targets(ONE_SITE)
    first, again, other = (list(islice(schedule(seed, possible), 60)) for seed in (3, 3, 4))
    assert first == again
    assert first != other
    assert [fault.number for fault in first] == list(range(1, 61))
    assert all(LEAST_PAUSE_S <= fault.pause_s <= MOST_PAUSE_S for fault in first)


def test_no_kind_is_ever_more_than_one_ahead_of_another() -> None:
    possible, _ = targets(ONE_SITE)
    counts = Counter(dict.fromkeys(possible, 0))
    for fault in islice(schedule(0, possible), 100):
        counts[fault.kind] += 1
        assert max(counts.values()) - min(counts.values()) <= 1


def test_targets_of_a_kind_take_turns() -> None:
    possible, _ = targets(ONE_SITE)
    kills = [fault.target for fault in islice(schedule(0, possible, [FaultKind.INSTANCE_KILL]), 8)]
    assert all(
        {first, second} == set(ONE_SITE.instances) for first, second in zip(kills[::2], kills[1::2], strict=True)
    )


def test_kinds_without_their_precondition_are_left_out_with_the_reason() -> None:
    possible, left_out = targets(ONE_SITE)
    assert set(left_out) == {FaultKind.SITE_KILL, *OF_LINKS, *OF_AGENTS}
    assert left_out[FaultKind.LINK_CUT] == "the run has no emulated link"
    assert set(possible) | set(left_out) == set(FaultKind)
    possible, left_out = targets(Inventory(("west-a-0",), ("service-west",), (), ("west",), ("west",), True, False))
    assert possible[FaultKind.LINK_SLOW] == possible[FaultKind.SITE_KILL] == ("west",)
    assert set(left_out) == {FaultKind.REWARDS_KILL, FaultKind.DISK_FULL, FaultKind.LAUNCHER_KILL, *OF_AGENTS}
    assert "nothing would restart the run" in left_out[FaultKind.LAUNCHER_KILL]


def test_a_run_of_agents_can_lose_their_process_and_those_that_are_no_programs_their_workers() -> None:
    possible, left_out = targets(replace(ONE_SITE, agents=("agents-here",)))
    assert possible[FaultKind.AGENTS_KILL] == possible[FaultKind.ENDPOINT_PAUSE] == ("agents-here",)
    assert left_out[FaultKind.TOOL_HANG] == "the run has no worker process of agents"
    assert left_out[FaultKind.ENVIRONMENT_KILL] == "the run has no environment"
    here = ("agents-here",)
    possible, _ = targets(replace(ONE_SITE, agents=here, agent_workers=here, environments=here))
    assert possible.keys() >= OF_AGENTS


def test_a_run_of_another_machine_keeps_its_controller() -> None:
    possible, left_out = targets(Inventory(("west-a-0",), ("service-west",), (), trains_here=False))
    assert {FaultKind.CONTROLLER_KILL, FaultKind.TRAINER_KILL} <= set(left_out)
    assert FaultKind.SERVICE_KILL in possible


def test_a_selection_of_which_nothing_is_possible_is_refused() -> None:
    possible, _ = targets(ONE_SITE)
    with pytest.raises(ValueError, match="no kind"):
        schedule(0, possible, [FaultKind.SITE_KILL])
