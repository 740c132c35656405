"""When a fault counts as noticed, others as serving, and the run as recovered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamrl.chaos import study
from streamrl.chaos.faults import OF_AGENT_WORKERS, REPLACED_BY_OWNER, Fault, FaultKind
from streamrl.chaos.follow import Following, Observation, SeenProcess
from streamrl.chaos.inject import Injected
from streamrl.chaos.observation import TELLING
from streamrl.run_dir.remote_site import RemoteSite
from streamrl.run_dir.status import RoleStatus

PROCESSES = {
    "controller": SeenProcess(1, "controller", ""),
    "service-here": SeenProcess(2, "service", ""),
    "a-0": SeenProcess(3, "instance", ""),
    "b-0": SeenProcess(4, "instance", ""),
}
ROLES = {
    "controller": RoleStatus(role="controller", state="running", since=0.0),
    "service-here": RoleStatus(role="service", state="dispatching", since=0.0, running=8, waiting=2, silent_s=0.4),
    "a-0": RoleStatus(role="instance", state="generating", since=0.0, running=4, weight_version=3),
    "b-0": RoleStatus(role="instance", state="generating", since=0.0, running=4, weight_version=3),
}
POOLS = {"here/a": 1, "here/b": 1}
BEFORE = Observation(100.0, "running", 99.8, 5, 90.0, "", PROCESSES, ROLES, POOLS, POOLS)


def at(now: float, **changes: object) -> Observation:
    return replace(BEFORE, now=now, updated_at=now - 0.2, **changes)  # type: ignore[arg-type]


def role(name: str, **changes: object) -> dict[str, RoleStatus]:
    return ROLES | {name: ROLES[name].model_copy(update=changes)}


def west(silent_s: float, congested: bool = False) -> dict[str, RemoteSite]:
    return {"west": RemoteSite(silent_s=silent_s, congested=congested)}


def process(name: str, pid: int, exit_code: int | None = None) -> dict[str, SeenProcess]:
    return PROCESSES | {name: replace(PROCESSES[name], pid=pid, exit_code=exit_code)}


def following(kind: FaultKind, target: str, replaced: bool = True) -> Following:
    found = Following(Fault(1, kind, target, 1.0), BEFORE, frozenset({target} if replaced else ()), 100.0)
    found.over = True
    return found


def test_a_healthy_run_is_one_in_which_everything_is_there_and_says_so() -> None:
    assert BEFORE.healthy()
    assert not replace(BEFORE, now=110.0).healthy()  # the controller does not write
    assert not at(101, ready={"here/a": 1, "here/b": 0}).healthy()
    assert not at(101, roles=role("a-0", state="suspect")).healthy()
    assert not at(101, roles=role("service-here", silent_s=7.0)).healthy()
    assert not at(101, processes=process("a-0", 3, -9)).healthy()
    assert not at(101, sites=west(12.0)).healthy()
    assert not at(101, launched=False).healthy()


def test_a_killed_instance_is_noticed_served_for_replaced_and_followed_by_a_step() -> None:
    seen = following(FaultKind.INSTANCE_KILL, "a-0")
    seen.see(at(100.2))  # the status still tells how it was
    assert (seen.noticed, seen.serving, seen.recovered) == (None, None, None)
    seen.see(at(101.0, processes=process("a-0", 3, -9), roles=role("a-0", state="dead", running=0)))
    assert (seen.noticed, seen.serving) == (1.0, 1.0)
    starting = role("a-0", state="starting", running=0)
    seen.see(at(103.0, processes=process("a-0", 7), roles=starting, ready={"here/a": 0, "here/b": 1}))
    assert seen.recovered is None
    seen.see(at(120.0, processes=process("a-0", 7)))
    assert seen.recovered == 20.0
    seen.see(at(121.0, processes=process("a-0", 7), step_at=119.0))  # a step that ended before
    assert not seen.done
    seen.see(at(125.0, processes=process("a-0", 7), step_at=124.0))
    assert seen.stepped == 25.0


def test_an_instance_that_is_dead_serves_for_nobody_while_no_other_one_works() -> None:
    seen = following(FaultKind.INSTANCE_KILL, "a-0")
    alone = {name: one for name, one in role("a-0", state="dead", running=0).items() if name != "b-0"}
    seen.see(at(101.0, processes=process("a-0", 3, -9), roles=alone))
    assert (seen.noticed, seen.serving) == (1.0, None)


def test_the_state_from_before_a_death_is_no_recovery() -> None:
    seen = following(FaultKind.SERVICE_KILL, "service-here")
    replaced = process("service-here", 8)
    seen.see(at(101.5, processes=replaced, roles=role("service-here", silent_s=1.6)))  # heard last before it died
    seen.see(at(104.0, processes=replaced, roles=role("service-here", silent_s=4.2)))
    assert (seen.noticed, seen.serving, seen.recovered) == (1.5, None, None)
    seen.see(at(109.0, processes=replaced))
    assert (seen.serving, seen.recovered) == (9.0, 9.0)


def test_a_pause_is_over_when_the_instance_is_heard_again_and_nobody_is_replaced() -> None:
    seen = following(FaultKind.INSTANCE_PAUSE, "a-0", replaced=False)
    seen.over = False
    seen.see(at(103.0, roles=role("a-0", state="suspect")))
    seen.see(at(105.0))
    assert (seen.noticed, seen.recovered) == (3.0, None)
    seen.over = True
    seen.see(at(106.0))
    assert (seen.serving, seen.recovered) == (None, 6.0)


def test_a_silence_between_two_looks_is_noticed_by_what_the_service_has_logged() -> None:
    seen = following(FaultKind.INSTANCE_PAUSE, "a-0", replaced=False)
    seen.see(at(103.0, said=("WARNING streamrl.generation.site.fleet: a-00 is silent",)))
    assert seen.noticed is None
    seen.see(at(104.0, said=("WARNING streamrl.generation.site.fleet: a-0 is silent",)))
    assert seen.noticed == 4.0


def test_workers_of_agents_and_environments_are_replaced_by_their_owner_which_says_so() -> None:
    worker = "WARNING streamrl.agents.workers: an agent worker is replaced: SIGKILL"
    environment = "WARNING streamrl.environments.environment_pool: a process of environment 'lake' is replaced: SIGKILL"
    for kind in REPLACED_BY_OWNER:
        lines = (worker, environment) if kind in OF_AGENT_WORKERS else (environment, worker)
        assert all(TELLING.search(line.encode()) for line in lines)
        seen = following(kind, "agents-here", replaced=False)
        seen.see(at(101.0))
        seen.see(at(103.0, said=lines[1:]))
        assert (seen.noticed, seen.recovered) == (None, None)  # all is well but for what nobody has noticed
        seen.see(at(104.0, said=lines[:1]))
        assert (seen.noticed, seen.serving, seen.recovered) == (4.0, None, 4.0)


def test_an_endpoint_that_is_late_is_noticed_by_its_silence_and_nobody_is_replaced() -> None:
    def silent(seconds: float) -> dict[str, RoleStatus]:
        return ROLES | {"agents-here": RoleStatus(role="agents", state="idle", since=0.0, silent_s=seconds)}

    seen = following(FaultKind.ENDPOINT_PAUSE, "agents-here", replaced=False)
    seen.over = False
    seen.see(at(103.0, roles=silent(3.0)))
    assert seen.noticed is None
    seen.see(at(106.0, roles=silent(6.0)))
    seen.over = True
    assert (seen.noticed, seen.recovered) == (6.0, None)
    seen.see(at(108.0, roles=silent(0.5)))
    assert (seen.serving, seen.recovered) == (None, 8.0)


def test_a_cut_link_is_noticed_by_the_silence_of_its_site() -> None:
    seen = following(FaultKind.LINK_CUT, "west", replaced=False)
    seen.see(at(103.0, sites=west(3.0)))
    assert seen.noticed is None
    seen.see(at(106.0, sites=west(6.0)))
    assert (seen.noticed, seen.recovered) == (6.0, None)
    seen.see(at(116.0, sites=west(0.4)))
    assert seen.recovered == 16.0


def test_a_slow_link_is_noticed_by_a_congestion_that_was_not_there_before() -> None:
    congested = at(103.0, sites=west(0.4, congested=True))
    for before, noticed in ((BEFORE, 3.0), (replace(BEFORE, sites=west(0.4, congested=True)), None)):
        seen = Following(Fault(1, FaultKind.LINK_SLOW, "west", 1.0), before, frozenset(), 100.0)
        seen.see(congested)
        assert seen.noticed == noticed


def test_damaged_weights_that_are_loaded_without_a_word_are_told() -> None:
    starting = at(101.0, processes=process("a-0", 7), roles=role("a-0", state="starting", weight_version=None))
    loaded = at(120.0, processes=process("a-0", 7))
    # version 3 is what it serves: damaged in time, damaged when it may have been read already, or another one damaged
    for damaged, unnoticed in (({3: 105.0}, True), ({3: 119.0}, False), ({2: 105.0}, False), ({}, False)):
        seen = following(FaultKind.WEIGHTS_CORRUPT, "a-0")
        for one in (starting, loaded):
            seen.see(one)
            seen.weights_loaded(one, damaged)
        assert seen.unnoticed_weights == unnoticed


def test_damaged_weights_are_noticed_by_what_a_log_says() -> None:
    seen = following(FaultKind.WEIGHTS_CORRUPT, "a-0")
    seen.see(at(104.0, said=("CorruptTensors: version 3: tensor 'x' is corrupt",)))
    assert seen.noticed == 4.0


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_a_clock_that_is_set_ends_neither_a_fault_nor_the_time_for_recovery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    now, undone = 0.0, list[float]()

    def sleep(seconds: float) -> None:
        nonlocal now
        now += 1.0

    clock = SimpleNamespace(monotonic=lambda: now, time=lambda: 1e9 + now + (jump if now >= 3 else 0.0), sleep=sleep)
    monkeypatch.setattr(study, "time", clock)
    faults: Iterator[Fault] = iter(())
    injector: Any = None
    one = study.Study(tmp_path, injector, faults, None, 1.0, None, 60.0, print)
    followed = Following(Fault(1, FaultKind.INSTANCE_KILL, "a-0", 1.0), BEFORE, frozenset({"a-0"}), 1e9)
    injected = Injected(frozenset({"a-0"}), 20.0, lambda: undone.append(now))
    assert one._follow(followed, injected, 0.0) == ""
    assert (undone, now) == ([20.0], 60.0)
