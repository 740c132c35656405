"""Why a run does not go on: judged from facts alone; and the command, on folders made for it."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from streamrl.cli.why_stuck import busy_threads, command
from streamrl.diagnose.facts import (
    FINAL,
    SILENT_AFTER_S,
    Alive,
    ChildFacts,
    Facts,
    ProcessFacts,
    RunFacts,
    SiteFacts,
    WaitFacts,
    innermost,
)
from streamrl.diagnose.snapshot import collect
from streamrl.diagnose.stuck import judge, targets
from streamrl.run_dir import remote_site, status
from streamrl.run_dir.site_status import starting, write_site
from tests.report.synthetic import RunMaker, make_status

NOW = 10_000.0
STEPS = (20.0, 21.3, 30.0)
THREADS = (
    "Thread 0x01 (most recent call first):",
    '  File "/usr/lib/python3.11/threading.py", line 331 in wait',
    '  File "/usr/lib/python3.11/threading.py", line 629 in wait',
    "",
    "Current thread 0x02 (most recent call first):",
    '  File "/repo/streamrl/controller/length_predictor.py", line 71 in predict',
    '  File "/repo/streamrl/controller/controller.py", line 225 in _generate',
)


def process(name: str, role: str, pid: int, **changes: Any) -> ProcessFacts:
    values: dict[str, Any] = {"alive": "sleeping", "cpu": 0.01, "loop": "answers", "site": "here"}
    return ProcessFacts(name, role, pid, **(values | changes))


def family(**changes: dict[str, Any]) -> tuple[ProcessFacts, ...]:
    """A run's processes, in which the instances and the trainer compute; changes by name, with _ for -."""
    ordinary = [
        process("controller", "controller", 4701),
        process("trainer-0", "trainer", 4702, cpu=1.9),
        process("service-here", "service", 4703),
        process("here-regular-0", "instance", 4710, cpu=0.9, running=4),
        process("here-tail-0", "instance", 4711, cpu=0.9, running=12),
        process("rewards-here", "rewards", 4704),
        process("launcher", "launcher", 4700),
    ]
    return tuple(replace(one, **changes.get(one.name.replace("-", "_"), {})) for one in ordinary)


def waits(*found: tuple[str, str, float, float]) -> tuple[WaitFacts, ...]:
    """(owner, for what, since how many seconds, limit)"""
    return tuple(WaitFacts(owner, what, NOW - since, limit) for owner, what, since, limit in found)


def facts(
    *found: tuple[str, str, float, float],
    processes: tuple[ProcessFacts, ...] | None = None,
    into_step_s: float = 12.1,
    age_s: float = 0.4,
    step_times: tuple[float, ...] = STEPS,
    silent_s: dict[str, float] | None = None,
    **run: Any,
) -> Facts:
    values: dict[str, Any] = {"state": "running", "step": 6, "steps": 40, "started_at": NOW - 300}
    told = RunFacts(**(values | run), updated_at=NOW - age_s, waits=waits(*found), silent_s=silent_s or {})
    return Facts(
        now=NOW,
        run=told,
        processes=family() if processes is None else processes,
        step_times=step_times,
        step_began=NOW - into_step_s,
        addresses={"tcp://127.0.0.1:7001": "controller", "tcp://127.0.0.1:7002": "trainer-0"},
    )


SAMPLES = ("controller", "12 samples of 3 groups", 84.0, 600.0)
TRAINER = ("controller", "trainer-0 to answer 'train'", 6.0, 900.0)
WEIGHTS = ("controller", "weights 6 to reach service-here", 40.0, 300.0)


def test_an_ordinary_step_is_healthy_and_says_how_far_it_is() -> None:
    verdict = judge(facts(TRAINER, ("controller", "12 samples of 3 groups", 2.0, 600.0)))
    assert verdict.state == "healthy" and verdict.exit_code == 0
    assert verdict.sentence == (
        "healthy: step 7 of 40, 12.1 s into a step that takes 21.3 s (median); the longest wait is controller's, "
        "6 s of 900 s, for trainer-0 to answer 'train'"
    )


def test_a_trainer_in_a_long_step_is_slow_and_not_stuck() -> None:
    verdict = judge(facts(("controller", "trainer-0 to answer 'train'", 55.0, 900.0), into_step_s=61.0))
    assert verdict.state == "slow" and verdict.exit_code == 0
    assert "61.0 s into a step that takes 21.3 s (median)" in verdict.sentence
    assert "controller has waited 55 s (limit 900 s) for trainer-0 to answer 'train'" in verdict.sentence
    assert verdict.sentence.endswith("trainer-0 (pid 4702) computes (190 % CPU)")


def test_a_wait_near_its_limit_is_slow_even_in_the_first_step() -> None:
    wait = ("controller", "trainer-0 to answer 'train'", 750.0, 900.0)
    verdict = judge(facts(wait, into_step_s=750.0, step_times=()))
    assert verdict.state == "slow"
    assert "nears its limit: controller, 750 s of 900 s" in verdict.details[0]


def test_a_wait_past_its_limit_is_stuck_whatever_the_other_one_does() -> None:
    verdict = judge(facts(("controller", "trainer-0 to answer 'train'", 950.0, 900.0)))
    assert verdict.state == "stuck" and "(limit 900 s, which has passed)" in verdict.sentence


def test_a_stopped_instance_is_named_with_the_way_to_continue_it() -> None:
    processes = family(here_tail_0={"alive": "stopped", "cpu": 0.0, "loop": "unknown"})
    verdict = judge(facts(SAMPLES, TRAINER, processes=processes))
    assert verdict.state == "stuck" and verdict.exit_code == 3
    assert verdict.sentence == (
        "stuck: controller has waited 84 s (limit 600 s) for 12 samples of 3 groups; here-tail-0 (pid 4711), which "
        "has 12 of them, is stopped (SIGSTOP): continue it with kill -CONT 4711"
    )
    assert [(edge.waiter, edge.target) for edge in verdict.edges] == [("controller", "here-tail-0")]
    assert verdict.involved == ["controller", "here-tail-0"]


def test_the_chain_goes_on_through_who_waits_itself() -> None:
    processes = family(here_regular_0={"alive": "stopped"})
    apply = ("service-here", "here-regular-0 to answer apply_weights with applied", 38.0, 300.0)
    verdict = judge(facts(WEIGHTS, apply, processes=processes))
    assert [edge.waiter for edge in verdict.edges] == ["controller", "service-here"]
    assert verdict.edges[-1].target == "here-regular-0"
    assert "service-here waits 38 s for here-regular-0 to answer apply_weights" in verdict.sentence
    assert verdict.sentence.endswith("kill -CONT 4710")


def test_a_stopped_process_is_found_before_anybody_waits_for_it() -> None:
    verdict = judge(facts(TRAINER, processes=family(here_tail_0={"alive": "stopped"})))
    assert verdict.state == "stuck"
    assert verdict.sentence.startswith("stuck: here-tail-0 (pid 4711) is stopped")
    assert verdict.sentence.endswith("nobody has waited for it so far")


def test_an_instance_whose_engine_process_is_stopped_is_named_with_it() -> None:
    engine = ChildFacts("VLLM::EngineCore", 4799, "stopped")
    verdict = judge(facts(SAMPLES, processes=family(here_tail_0={"children": (engine,)})))
    assert "here-tail-0 (pid 4711), which has 12 of them, needs its process VLLM::EngineCore" in verdict.sentence
    assert verdict.sentence.endswith("kill -CONT 4799")


def test_an_engine_process_that_has_died_is_found_whatever_the_step_takes() -> None:
    engine = ChildFacts("VLLM::EngineCor", 4799, "zombie")
    verdict = judge(facts(TRAINER, processes=family(here_tail_0={"children": (engine,)})))
    assert verdict.state == "stuck" and "has lost its process VLLM::EngineCor (pid 4799)" in verdict.sentence


def test_another_child_that_has_ended_counts_only_for_an_idle_process_of_a_late_step() -> None:
    def state(late: bool, **controller: Any) -> str:
        processes = family(controller={"children": (ChildFacts("git", 99, "zombie"),)} | controller)
        return judge(facts(processes=processes, into_step_s=90.0 if late else 5.0)).state

    assert state(late=False) == "healthy"
    assert state(late=True, cpu=0.9) == "slow"
    assert state(late=True) == "stuck"


@pytest.mark.parametrize("alive", ["gone", "zombie"])
def test_a_dead_process_that_a_stopped_launcher_has_not_noticed(alive: Alive) -> None:
    processes = family(here_tail_0={"alive": alive, "cpu": None}, launcher={"alive": "stopped"})
    verdict = judge(facts(SAMPLES, processes=processes))
    assert verdict.state == "stuck"
    assert "the launcher has not noticed: it is stopped itself" in verdict.sentence
    assert any(detail.startswith("launcher (pid 4700) is stopped") for detail in verdict.details)


def test_a_process_that_has_ended_is_told_with_its_last_words() -> None:
    words = "here-tail-0 was killed by SIGKILL (out of memory, or somebody's kill -9): no room\n  more"
    processes = family(here_tail_0={"alive": "unknown", "exit_code": -9, "last_words": words})
    assert judge(facts(SAMPLES, processes=processes)).sentence.endswith(
        "here-tail-0 (pid 4711), which has 12 of them, was killed by SIGKILL (out of memory, or somebody's kill -9): "
        "no room"
    )


def test_a_dead_trainer_is_named_where_its_ranks_are_gone_with_it() -> None:
    launcher = process("trainer", "rank launcher", 4709, alive="zombie", cpu=0.0)
    processes = (launcher, *(one for one in family() if one.role != "trainer"))
    assert "trainer (pid 4709) has died" in judge(facts(TRAINER, processes=processes)).sentence
    assert "trainer (pid 4709) has died" in judge(facts(processes=processes)).sentence  # though nobody waits


def test_a_process_whose_end_is_known_is_named_before_those_that_it_takes_along() -> None:
    processes = family(service_here={"alive": "zombie"}, rewards_here={"exit_code": 1, "last_words": ""})
    assert judge(facts(processes=processes)).sentence.startswith(
        "stuck: rewards-here (pid 4704) ended with exit code 1"
    )


def test_an_instance_that_was_told_to_leave_is_no_fault() -> None:
    left = family(here_tail_0={"alive": "unknown", "exit_code": 0, "running": 0, "cpu": None})
    verdict = judge(facts(TRAINER, processes=left))
    assert verdict.state == "healthy" and not verdict.details


def test_an_instance_that_has_requests_and_computes_nothing_is_stuck_only_after_a_while() -> None:
    idle = family(here_tail_0={"cpu": 0.0}, here_regular_0={"running": 0})
    assert judge(facts(("controller", "12 samples of 3 groups", 20.0, 600.0), processes=idle)).state == "healthy"
    verdict = judge(facts(SAMPLES, processes=idle))
    assert verdict.state == "stuck" and "computes nothing (0 % CPU), but answers" in verdict.sentence


def test_an_idle_process_is_not_to_blame_while_another_one_works() -> None:
    idle = family(here_tail_0={"cpu": 0.0})
    assert judge(facts(SAMPLES, processes=idle)).state == "healthy"


def test_on_gpus_little_cpu_time_is_no_sign() -> None:
    idle = family(here_tail_0={"cpu": 0.0}, here_regular_0={"running": 0})
    assert judge(facts(SAMPLES, processes=idle, cuda=True)).state == "healthy"


def test_a_rank_whose_event_loop_is_blocked_without_computing_hangs_where_its_stack_says() -> None:
    hung = family(trainer_0={"cpu": 0.0, "loop": "blocked", "threads": THREADS})
    wait = ("controller", "trainer-0 to answer 'step'", 12.0, 900.0)
    verdict = judge(facts(wait, processes=hung))
    assert verdict.state == "stuck"
    assert verdict.sentence.endswith("computes nothing (0 % CPU), in predict (controller/length_predictor.py:71)")
    assert judge(facts(TRAINER, processes=hung)).state == "healthy"  # 6 s


def test_one_long_call_is_stuck_only_after_a_while() -> None:
    busy = family(trainer_0={"cpu": 1.0, "loop": "blocked", "threads": THREADS})
    long = ("controller", "trainer-0 to answer 'step'", 41.0, 900.0)
    assert judge(facts(long, processes=busy)).state == "healthy"
    verdict = judge(facts(("controller", "trainer-0 to answer 'step'", 45.0, 900.0), processes=busy))
    assert verdict.state == "stuck" and "is busy in one call" in verdict.sentence


def test_a_process_that_waits_for_a_disk_is_named() -> None:
    disk = family(trainer_0={"alive": "disk-sleep", "cpu": 0.0, "loop": "blocked"})
    verdict = judge(facts(("controller", "trainer-0 to answer 'checkpoint'", 12.0, 900.0), processes=disk))
    assert verdict.state == "stuck" and "waits for a disk or a network file system" in verdict.sentence


def test_two_processes_that_wait_for_each_other_are_both_named() -> None:
    back = ("service-here", "the hub at tcp://127.0.0.1:7001 to acknowledge messages", 50.0, 300.0)
    ours = ("controller", "service-here to acknowledge messages", 60.0, 300.0)
    verdict = judge(facts(ours, back))
    assert verdict.state == "stuck" and "waits for service-here in turn" in verdict.sentence
    assert [edge.target for edge in verdict.edges] == ["service-here", "controller"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"alive": "stopped"}, "it is stopped (SIGSTOP): continue it with kill -CONT 4701"),
        ({"loop": "blocked", "threads": THREADS, "cpu": 1.0}, "in predict (controller/length_predictor.py:71)"),
        ({"loop": "blocked", "cpu": 0.0}, "it hangs"),
        ({"loop": "answers"}, "it answers, so it cannot write status.json"),
    ],
)
def test_a_controller_that_does_not_write_is_the_first_to_be_named(change: dict[str, Any], text: str) -> None:
    stopped_too = family(controller=change, here_tail_0={"alive": "stopped"})
    verdict = judge(facts(SAMPLES, processes=stopped_too, age_s=31.0))
    assert verdict.state == "stuck"
    assert verdict.sentence.startswith("stuck: the controller (pid 4701) has not written for 31 s; it ")
    assert text in verdict.sentence


def test_a_controller_that_was_stopped_just_now_is_not_called_silent() -> None:
    verdict = judge(facts(SAMPLES, processes=family(controller={"alive": "stopped"})))
    assert verdict.sentence == (
        "stuck: the controller (pid 4701) is stopped (SIGSTOP): continue it with kill -CONT 4701"
    )


def test_an_instance_that_hangs_after_the_last_step_is_found_by_its_canary() -> None:
    canaries = ("controller", "1 canary measurements", 100.0, 300.0)
    hangs = family(here_tail_0={"loop": "blocked", "cpu": 0.0}, here_regular_0={"cpu": 0.0})
    verdict = judge(facts(canaries, processes=hangs, step=40))
    assert verdict.state == "stuck" and "here-tail-0 (pid 4711) hangs" in verdict.sentence


def test_a_pause_of_the_controller_is_no_standstill() -> None:
    assert judge(facts(TRAINER, processes=family(controller={"loop": "blocked"}), age_s=4.0)).state == "healthy"


def remote(**service: Any) -> tuple[ProcessFacts, ...]:
    """As `family`, with a site b on another machine."""
    away: dict[str, Any] = {"alive": "unknown", "cpu": None, "loop": "unknown", "site": "b"}
    return (
        *family(here_tail_0={"running": 0}, here_regular_0={"running": 0}),
        replace(process("service-b", "service", 1, **away), **({"pid": None} | service)),
        replace(process("b-regular-0", "instance", 1, **away, running=9, doing="generating"), pid=None),
    )


def test_waiting_for_a_site_that_is_away() -> None:
    verdict = judge(facts(SAMPLES, processes=remote(), silent_s={"b": 80.0}, into_step_s=90.0))
    assert verdict.state == "stuck"
    assert "b-regular-0, which has 9 of them, is out of reach: its site has been silent for 80 s" in verdict.sentence
    limited = judge(facts(SAMPLES, processes=remote(), silent_s={"b": 80.0}, into_step_s=90.0, absence_s=120.0))
    assert "silent for 80 s (the run ends at absence_s, 120 s), the link" in limited.sentence, "the wait's is 600 s"


def test_a_dead_link_for_weights_is_named_and_not_the_trainer() -> None:
    waits_ = (
        ("controller", "weights 6 to reach service-b", 70.0, 600.0),
        ("service-b", "the publisher to send weight version 6", 70.0, 600.0),
    )

    def told(trainer: dict[str, Any], **run: Any) -> str:
        processes = tuple(replace(one, **trainer) if one.name == "trainer-0" else one for one in remote())
        return judge(facts(*waits_, processes=processes, silent_s={"b": 0.4}, into_step_s=90.0, **run)).sentence

    idle: dict[str, Any] = {"cpu": 0.0, "alive": "sleeping", "loop": "answers"}
    silent = {"publisher_silent_s": {"b": 65.0}}
    link = "out of reach of service-b: the link for weights (port + 1) has been silent for 65 s"
    assert link in told(idle, **silent)
    assert link not in told(idle, publisher_silent_s={"b": 2.0}) and link not in told(idle)
    stopped = told(idle | {"alive": "stopped"}, **silent)
    assert link not in stopped and "is stopped (SIGSTOP)" in stopped, "the trainer's own state explains its silence"


def test_a_site_that_is_heard_and_does_not_hear_the_controller_is_named() -> None:
    told = {"silent_s": {"b": 0.4}, "controller_silent_s": {"b": 25.0}}
    verdict = judge(facts(SAMPLES, processes=remote(), into_step_s=90.0, **told))
    heard = "is out of reach: its site is heard, but has heard nothing of the controller for 25 s"
    assert verdict.state == "stuck" and verdict.sentence.endswith(heard)
    large = "4 connections in a row broke after the hello: an MTU or a firewall on the way drops large packets, or "
    verdict = judge(facts(SAMPLES, processes=remote(), into_step_s=90.0, **told, empty_connections={"b": 4}))
    assert f"{heard}; {large}" in verdict.sentence
    quick = judge(facts(SAMPLES, processes=remote(), **told, empty_connections={"b": 4}))
    assert quick.state == "healthy" and len(quick.details) == 2
    assert quick.details[0] == "site b is heard, but has heard nothing of the controller for 25 s"
    assert quick.details[1].startswith(f"site b: {large}")
    few = {"controller_silent_s": {"b": 2.0}, "empty_connections": {"b": 2}, "silent_s": {"b": 0.4}}
    assert judge(facts(SAMPLES, processes=remote(), **few)).details == []
    silent = judge(
        facts(SAMPLES, processes=remote(), into_step_s=90.0, silent_s={"b": 20.0}, empty_connections={"b": 4})
    )
    assert f"its site has been silent for 20 s; {large}" in silent.sentence


def test_waiting_for_a_site_that_has_said_goodbye() -> None:
    told = facts(SAMPLES, processes=remote(), silent_s={"b": 3.0}, left=frozenset({"b"}), into_step_s=90.0)
    verdict = judge(told)
    assert verdict.state == "stuck"
    assert "b-regular-0, which has 9 of them, is away: its site said goodbye 3 s ago" in verdict.sentence
    assert "site b said goodbye 3 s ago" in verdict.details


def test_the_status_tells_which_sites_have_said_goodbye(tmp_path: Path) -> None:
    half = {"publisher_silent_s": 9.0, "controller_silent_s": 8.0, "empty_connections": 3}
    sites = {"b": {"silent_s": 3.0, "left_s": 3.0}, "c": {"silent_s": 3.0, **half}}
    status.write_status(tmp_path, make_status(3, 20, time.time(), sites=sites))
    run = collect(tmp_path).run
    assert run is not None and (run.left, dict(run.silent_s)) == ({"b"}, {"b": 3.0, "c": 3.0})
    assert (dict(run.publisher_silent_s), dict(run.controller_silent_s)) == ({"c": 9.0}, {"c": 8.0})
    assert run.empty_connections["c"] == 3


def test_a_site_that_is_away_while_the_step_is_in_its_ordinary_time_is_only_told() -> None:
    verdict = judge(facts(SAMPLES, processes=remote(), silent_s={"b": 80.0}))
    assert verdict.state == "healthy" and verdict.details == ["site b has been silent for 80 s"]


def test_the_stopped_service_of_an_emulated_site_explains_its_silence() -> None:
    stopped = remote(alive="stopped", pid=4720)
    verdict = judge(facts(SAMPLES, processes=stopped, silent_s={"b": 80.0}, into_step_s=90.0))
    assert "service-b (pid 4720) is stopped" in verdict.sentence and "12 samples" in verdict.sentence


def test_the_stopped_proxy_of_an_emulated_network_explains_the_silence_of_a_site() -> None:
    proxy = process("proxy", "proxy", 4730, alive="stopped", loop="unknown")
    verdict = judge(facts(SAMPLES, processes=(*remote(), proxy), silent_s={"b": 80.0}))
    assert "the proxy that stands for the links is stopped (SIGSTOP)" in verdict.sentence
    assert "kill -CONT 4730" in verdict.sentence


def test_processes_of_another_machine_are_not_taken_for_dead() -> None:
    gone = tuple(replace(one, alive="gone", cpu=None) for one in family())
    assert judge(facts(TRAINER, processes=gone)).state == "healthy"


def test_a_starting_run_names_whom_it_waits_for() -> None:
    wait = ("controller", "service-here, trainer-0 to start", 40.0, 300.0)
    starting = facts(wait, state="starting", step=0, step_times=())
    verdict = judge(starting)
    assert verdict.state == "starting" and verdict.exit_code == 0
    assert "controller has waited 40 s (limit 300 s) for service-here, trainer-0 to start" in verdict.sentence


def test_a_start_that_cannot_end_is_stuck_on_the_instance_behind_the_service() -> None:
    wait = ("controller", "service-here to start", 40.0, 300.0)
    stopped = family(here_regular_0={"alive": "stopped"})
    verdict = judge(facts(wait, state="starting", processes=stopped))
    assert verdict.state == "stuck" and "here-regular-0 (pid 4710) is stopped" in verdict.sentence


def test_a_controller_that_loads_libraries_is_starting() -> None:
    loading = family(controller={"loop": "blocked", "cpu": 0.9})
    assert judge(facts(state="starting", processes=loading, age_s=25.0)).state == "starting"
    before = judge(Facts(NOW, None, family(controller={"loop": "none", "cpu": 0.9})))
    assert before.sentence == "starting: the controller has not reported yet; it computes (90 % CPU)"


def test_a_process_that_starts_is_told_with_its_stage() -> None:
    stages = {"stage": "importing vLLM", "stage_s": 12.0}
    early = judge(Facts(NOW, None, family(controller={"loop": "none", "cpu": 0.9}, here_regular_0=stages)))
    assert "here-regular-0: importing vLLM (12 s)" in early.details
    wait = ("controller", "service-here to start", 40.0, 300.0)
    known = judge(facts(wait, state="starting", processes=family(here_regular_0=stages | {"cpu": 0.9})))
    assert "here-regular-0 (pid 4710) computes (90 % CPU), in its start (importing vLLM, 12 s)" in known.sentence
    dead = family(here_regular_0=stages | {"exit_code": 1})
    assert "in its start (importing vLLM" in judge(facts(wait, state="starting", processes=dead)).sentence


@pytest.mark.parametrize(("state", "code"), [("done", 0), ("interrupted", 1), ("failed", 1)])
def test_a_run_that_has_ended_says_how(state: str, code: int) -> None:
    error = None if state == "done" else "a disk was full\nwith a traceback"
    processes = tuple(replace(one, alive="gone") for one in family())
    verdict = judge(facts(SAMPLES, processes=processes, state=state, error=error, age_s=900.0))
    assert (verdict.state, verdict.exit_code) == ("ended", code)
    assert verdict.sentence.startswith(f"ended: {state} at step 6 of 40")
    assert ("a disk was full" in verdict.sentence) == (state != "done")
    assert verdict.details == ([] if state == "done" else ["with a traceback"])


def test_a_run_that_was_continued_and_has_ended_took_all_its_time() -> None:
    verdict = judge(facts(state="done", step=40, started_at=NOW - 10, first_started_at=NOW - 500))
    assert verdict.sentence == "ended: done at step 40 of 40 after 500 s"
    verdict = judge(facts(state="done", step=40, started_at=NOW - 10, elapsed_s=60.0))  # the clock was set since
    assert verdict.sentence == "ended: done at step 40 of 40 after 60 s"


def test_a_run_that_was_killed_as_a_whole_has_ended() -> None:
    gone = tuple(replace(one, alive="gone", cpu=None) for one in family())
    verdict = judge(facts(SAMPLES, processes=gone, age_s=90.0))
    assert verdict.state == "ended" and verdict.exit_code == 1
    assert verdict.sentence.startswith("ended: at step 6 of 40, 90 s ago, without saying so")


@pytest.mark.parametrize("processes", [(), tuple(replace(one, pid=None, alive="unknown") for one in family())])
def test_a_run_of_another_container_that_is_silent_for_some_seconds_has_not_ended(
    processes: tuple[ProcessFacts, ...],
) -> None:
    """Its controller may load a checkpoint, or wait for its disk, and no process of it can be seen."""
    assert judge(facts(SAMPLES, processes=processes, age_s=5.0)).state not in ("slow", "ended")
    for age_s in (11.0, 119.0):
        verdict = judge(facts(SAMPLES, processes=processes, age_s=age_s))
        assert verdict.state == "slow" and f"no sign of the run for {age_s:.0f} s" in verdict.sentence
    verdict = judge(facts(SAMPLES, processes=processes, age_s=121.0))
    assert verdict.state == "ended" and "none of its processes is known here" in verdict.sentence
    assert judge(replace(facts(processes=processes, age_s=11.0), launcher_gone=True)).state == "ended"


def test_a_run_without_a_process_has_ended_as_soon_as_its_launcher_is_known_to_be_gone() -> None:
    gone = tuple(replace(one, alive="gone", cpu=None) for one in family() if one.role != "launcher")
    seen = facts(SAMPLES, processes=gone, age_s=1.0)
    assert judge(seen).state != "ended", "it may be on another machine"
    verdict = judge(replace(seen, launcher_gone=True))
    assert verdict.sentence.startswith("ended: at step 6 of 40, 1 s ago, without saying so")
    left = (replace(gone[0], alive="sleeping"), *gone[1:])
    assert judge(replace(seen, launcher_gone=True, processes=left)).state != "ended"


@pytest.mark.parametrize(
    ("owner", "text", "found"),
    [
        ("controller", "trainer-0 to answer 'train'", ["trainer-0"]),
        ("controller", "here-regular-0, here-tail-0 to leave", ["here-regular-0", "here-tail-0"]),
        ("controller", "3 samples of 3 groups", ["here-regular-0", "here-tail-0"]),
        ("controller", "3 rewards of 3 groups", ["rewards-here"]),
        ("controller", "the ranker to learn from step 3", ["controller"]),
        ("service-here", "the hub at tcp://127.0.0.1:7002 to acknowledge all messages", ["trainer-0"]),
        ("service-here", "the publisher to send weight version 3", ["trainer-0"]),
        ("service-here", "weights 3 from here", ["service-here"]),
        ("service-here", "the transfer before weight version 3", ["service-here"]),
        ("trainer-0", "its turn on GPU node-1-0, which here-tail-0 (pid 71) has", ["here-tail-0"]),
        ("trainer-0", "all instances to answer finish_weight_update", ["here-regular-0", "here-tail-0"]),
        ("controller", "2 canary measurements", ["here-regular-0", "here-tail-0"]),
        ("agents-here", "agent workers to start", ["agents-here"]),
        ("controller", "the answer to everything", []),
    ],
)
def test_the_text_of_a_wait_names_who_is_waited_for(owner: str, text: str, found: list[str]) -> None:
    assert targets(WaitFacts(owner, text, NOW, 1.0), facts()) == found


def test_names_are_whole_words_and_may_have_dots_and_come_in_the_order_of_the_processes() -> None:
    names = ("a.b", "west-tail-1", "west-tail-10", "b", "x", "tail")
    seen = facts(processes=tuple(process(name, "instance", pid) for pid, name in enumerate(names, 1)))
    for text, found in {
        "west-tail-10 to answer, then x": ["west-tail-10", "x"],
        "x, west-tail-1 to leave": ["west-tail-1", "x"],
        "a.b to leave": ["a.b", "b"],
        "xa.b, a.bc, (a.b-0) to leave": ["b"],
    }.items():
        assert targets(WaitFacts("controller", text, NOW, 1.0), seen) == found


def test_the_waits_of_a_large_run_are_searched_once_for_each_text(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 600  # more names than Python remembers patterns
    searches: list[str] = []
    for name in ("search", "findall", "fullmatch"):
        do = getattr(re, name)
        monkeypatch.setattr(re, name, lambda *given, do=do: searches.append(given[0]) or do(*given))
    instances = tuple(process(f"here-regular-{n}", "instance", 5000 + n, cpu=0.9) for n in range(size))
    found = [(one.name, "service-here to answer", 2.0, 300.0) for one in instances]
    assert judge(facts(*found, processes=(*family(), *instances))).state == "healthy"
    assert len(searches) < 3 * size, "each name is looked at once, not once for each wait"
    assert len(set(searches)) < 10, "no pattern of each name"


def test_a_wait_that_names_nobody_is_reported_with_the_processes_that_compute() -> None:
    verdict = judge(facts(("controller", "something else", 55.0, 900.0), into_step_s=90.0))
    assert "computing now: trainer-0 (190 % CPU), here-regular-0 (90 % CPU)" in verdict.sentence


def test_a_site_with_a_launcher_of_its_own_is_judged_by_what_it_hears() -> None:
    site = SiteFacts("b", "serving", NOW - 0.5, 0.2, 3)
    service = (process("service-b", "service", 51),)
    assert judge(Facts(NOW, None, service, site=site)).state == "healthy"
    deaf = judge(Facts(NOW, None, service, site=replace(site, trainer_silent_s=80.0)))
    assert deaf.state == "stuck" and "has heard nothing of the trainer's site for 80 s" in deaf.sentence
    name = "the name home.test cannot be resolved: no answer within 10 s"
    lost = judge(Facts(NOW, None, service, site=replace(site, trainer_silent_s=80.0, unresolved=name)))
    assert lost.sentence.endswith(f"3 finished samples wait to be sent; {name}")
    for silent_s, state in ((5.0, "healthy"), (20.0, "slow"), (41.0, "stuck")):
        without = judge(Facts(NOW, None, service, site=replace(site, publisher_silent_s=silent_s, unresolved=name)))
        assert without.state == state
    heard = "has heard nothing of the trainer's publisher of weights (port + 1) for 42 s, and hears the controller; "
    assert without.sentence.endswith(heard + name), "half a second since it was written"
    large = judge(Facts(NOW, None, service, site=replace(site, empty_connections=3)))
    assert large.state == "stuck" and "site b: 3 connections in a row broke after the hello" in large.sentence
    stopped = (replace(service[0], alive="stopped"),)
    assert "kill -CONT 51" in judge(Facts(NOW, None, stopped, site=site)).sentence


def test_a_site_that_cannot_be_seen_is_ended_only_after_long_silence() -> None:
    hidden = (replace(process("service-b", "service", 51, alive="unknown"), pid=None),)
    site = SiteFacts("b", "serving", NOW - 0.5, 0.2, 3)
    assert judge(Facts(NOW, None, hidden, site=site)).state == "healthy"
    for silent_s, state in ((15.0, "slow"), (115.0, "slow"), (125.0, "ended")):
        verdict = judge(Facts(NOW, None, hidden, site=replace(site, updated_at=NOW - silent_s)))
        assert (verdict.state, verdict.failed) == (state, state == "ended")
        assert state == "ended" or "no sign of site b for" in verdict.sentence
    zombie = (process("service-b", "service", 51, alive="zombie"),)
    assert judge(Facts(NOW, None, zombie, site=replace(site, updated_at=NOW - 15.0))).state == "ended"


def test_a_site_that_does_not_serve_yet_is_not_judged_by_what_it_hears(tmp_path: Path) -> None:
    write_site(tmp_path, starting("b"))
    assert collect(tmp_path).site is None
    assert judge(collect(tmp_path)).state != "healthy"
    write_site(tmp_path, starting("b") | {"state": "serving"})
    assert (found := collect(tmp_path).site) is not None and found.state == "serving"


def test_a_full_disk_is_told() -> None:
    assert judge(replace(facts(TRAINER), disk_free_gb=0.01)).details == ["the run's disk is full: 0.01 GB free"]


FULL_SITE = SiteFacts("b", "serving", NOW - 145.0, 0.2, 3)


def test_a_full_disk_is_told_before_what_its_old_files_say() -> None:
    gone = (process("service-b", "service", 51, alive="gone"), process("b-one-0", "instance", 52, alive="gone"))
    verdict = judge(Facts(NOW, None, gone, site=FULL_SITE, launcher_lives=True, disk_free_gb=0.0))
    assert (verdict.state, verdict.failed) == ("stuck", False)
    assert verdict.sentence.startswith(
        "stuck: the run's disk is full: 0.00 GB free; site b: service-b (pid 51) is gone,"
    )
    assert "has not noticed" not in verdict.sentence and not any("disk" in text for text in verdict.details)
    assert judge(Facts(NOW, None, gone, site=FULL_SITE)).state == "ended"


def test_a_process_that_cannot_write_its_answer_does_not_hang() -> None:
    deaf = (process("service-b", "service", 51, loop="blocked"),)
    known = Facts(NOW, None, deaf, site=FULL_SITE, launcher_lives=True)
    assert "hangs" in judge(known).sentence
    assert "hangs" not in "".join([(full := judge(replace(known, disk_free_gb=0.0))).sentence, *full.details])


def test_a_run_whose_launcher_lives_has_not_ended() -> None:
    gone = tuple(
        process(name, role, 9, alive="gone") for name, role in (("controller", "controller"), ("a", "trainer"))
    )
    seen = facts(processes=gone, age_s=90.0)
    assert judge(seen).state == "ended"
    assert judge(replace(seen, launcher_lives=True)).sentence.startswith(
        "stuck: the controller (pid 9) has not written"
    )


def test_the_stack_of_the_main_thread_is_the_last_one() -> None:
    assert innermost(THREADS) == "predict (controller/length_predictor.py:71)"
    assert innermost(()) == ""


def test_threads_that_wait_for_work_are_left_out() -> None:
    assert busy_threads(THREADS) == list(THREADS[4:])


def test_the_bounds_are_those_of_the_status_file() -> None:
    assert SILENT_AFTER_S == status.STALE_AFTER_S == remote_site.ABSENT_AFTER_S
    assert FINAL == status.FINAL_STATES


# -- the command


def test_the_command_on_a_run_that_is_done(make_run: RunMaker) -> None:
    result = CliRunner().invoke(command, [str(make_run(20, rollouts=False, trace=False, state="done"))])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[0].startswith("ended: done at step 20 of 20")


def test_the_command_begins_with_one_sentence_and_shows_the_waits(tmp_path: Path) -> None:
    now = time.time()
    wait = {"owner": "controller", "waiting_for": "trainer-0 to answer 'x'", "since": now - 8, "limit_s": 60}
    status.write_status(tmp_path, make_status(3, 20, now, waits=[wait]))
    result = CliRunner().invoke(command, [str(tmp_path)])
    assert result.exit_code == 0, result.output
    first, *rest = result.output.splitlines()
    assert first.startswith("healthy: step 4 of 20")
    assert any("trainer-0 to answer 'x'" in line and "60 s" in line for line in rest)
    assert any(line.startswith("here-regular-1") and "13 requests" in line for line in rest)


def test_a_wait_past_its_limit_ends_the_command_with_3(tmp_path: Path) -> None:
    now = time.time()
    wait = {"owner": "controller", "waiting_for": "3 rewards of 1 groups", "since": now - 90, "limit_s": 60}
    status.write_status(tmp_path, make_status(3, 20, now, waits=[wait]))
    result = CliRunner().invoke(command, [str(tmp_path), "--stacks"])
    assert result.exit_code == 3, result.output
    assert result.output.startswith("stuck: controller has waited ")
    assert "(limit 60 s, which has passed) for 3 rewards" in result.output.splitlines()[0]


def test_a_full_disk_refers_to_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = {"owner": "controller", "waiting_for": "3 rewards of 1 groups", "since": time.time() - 90, "limit_s": 60}
    status.write_status(tmp_path, make_status(3, 20, time.time(), waits=[wait]))
    monkeypatch.setattr(psutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    first, *_ = CliRunner().invoke(command, [str(tmp_path)]).output.splitlines()
    assert first.startswith("stuck: the run's disk is full: 0.00 GB free; ") and first.endswith("(see docs: E1007)")


def test_a_folder_without_a_run_is_bad_input(tmp_path: Path) -> None:
    result = CliRunner().invoke(command, [str(tmp_path / "nothing")])
    assert getattr(result.exception, "exit_code", None) == 2
    assert "no such run folder" in str(result.exception)
    (tmp_path / "status.json").write_text("{")
    assert "cannot be read" in str(CliRunner().invoke(command, [str(tmp_path)]).exception)


def test_help_has_an_example_and_the_exit_codes() -> None:
    output = CliRunner().invoke(command, ["--help"]).output
    assert "streamrl why-stuck runs/demo --stacks" in output and "3 the run is stuck" in output
