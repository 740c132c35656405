"""Real processes that are looked at and asked for their stacks; they are small, and use what roles use."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from streamrl.cli.why_stuck import command
from streamrl.diagnose import snapshot
from streamrl.diagnose.facts import IDLE_CPU, Facts, ProcessFacts, innermost
from streamrl.diagnose.snapshot import collect
from streamrl.diagnose.stuck import judge
from streamrl.run_dir import layout
from streamrl.run_dir.instance_files import StartedProcess, write_started
from streamrl.run_dir.status import write_status
from streamrl.runtime.processes import this_host
from tests.report.synthetic import make_status
from tests.waiting import scaled, wait_for

READY_S = ANSWER_S = 20.0
LIMITS = {
    "cli.why_stuck.LOOK_S": 60.0,
    "cli.why_stuck.LONGEST_LOOK_S": 60.0,
    "diagnose.snapshot.TASKS_S": 0.5,
    "diagnose.snapshot.THREADS_S": 0.3,
    "diagnose.stuck.SILENT_AFTER_S": 10.0,
}
"""Seconds of a look at processes that have time to answer."""
CHILD = """
import asyncio, itertools, sys, threading, time
from pathlib import Path
from streamrl.diagnose.stacks import answer_requests

class Worker:
    async def wait_for_weights(self):
        await self.arrival()

    async def arrival(self):
        await asyncio.Event().wait()

def hold_the_loop():
    time.sleep(600)

def compute():
    sum(itertools.repeat(0, 10**12))  # in C, without looking at signals

async def main(what):
    beside = asyncio.create_task(Worker().wait_for_weights(), name="weights")
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    await asyncio.sleep(0.05)
    print("ready", flush=True)
    if what == "hold":
        hold_the_loop()
    if what == "compute":
        compute()
    await beside

folder, name, what = sys.argv[1:]
if what != "unprepared":
    answer_requests(Path(folder), name)
if what in ("unprepared", "loading"):
    print("ready", flush=True)
    for _ in range(6000):
        time.sleep(0.1)
asyncio.run(main(what))
"""
ELASTIC = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], env=os.environ | {"RANK": "0"})
child.wait()
"""
Start = Callable[..., int]


@pytest.fixture(autouse=True)
def time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a slow machine answer in time."""
    for name, seconds in LIMITS.items():
        monkeypatch.setattr(f"streamrl.{name}", scaled(seconds))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a process of a role as a launcher would, and returns its pid when it is at what it does."""
    children: list[subprocess.Popen[bytes]] = []
    listed: dict[Path, list[StartedProcess]] = {}

    def begin(name: str, what: str = "turn", role: str = "instance", folder: Path = tmp_path) -> int:
        command = [sys.executable, "-c", CHILD, str(folder), name, what]
        if role == "trainer":
            command = [sys.executable, "-c", ELASTIC, CHILD, str(folder), "trainer-0", what]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        children.append(child)
        assert child.stdout is not None
        assert select.select([child.stdout], [], [], scaled(READY_S))[0], f"{name} is not ready"
        assert child.stdout.readline() == b"ready\n"
        listed.setdefault(folder, []).append(StartedProcess(name, role, child.pid))
        write_started(folder, listed[folder])
        return child.pid

    yield begin
    for child in children:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait(timeout=scaled(10))
        assert child.stdout is not None
        child.stdout.close()


def looked(folder: Path, condition: Callable[[ProcessFacts], bool], threads: bool = False) -> Facts:
    """What is seen once something holds of all processes that there are (a status names more): at another moment they
    may be between two things, or not have had a core to answer with."""

    def look() -> Facts | None:
        facts = collect(folder, threads=threads)
        there = [one for one in facts.processes if one.pid is not None]
        return facts if there and all(map(condition, there)) else None

    found = wait_for(look, ANSWER_S, tell=lambda: collect(folder, threads=True))
    assert found is not None
    return found


def idles(one: ProcessFacts) -> bool:
    # as the judge takes it: a process that happens to be scheduled at this moment is none
    return one.cpu is not None and one.cpu < IDLE_CPU and one.alive != "running"


def write(folder: Path, wait: tuple[str, str, float, float], **changes: Any) -> None:
    """A status of now with one wait: (owner, for what, since how many seconds, limit)."""
    now = time.time()
    owner, what, since, limit = wait
    waits = [{"owner": owner, "waiting_for": what, "since": now - since, "limit_s": limit}]
    write_status(folder, make_status(3, 20, now, waits=waits, **changes))


def test_a_process_whose_loop_turns_tells_what_its_tasks_await(tmp_path: Path, start: Start) -> None:
    pid = start("here-tail-0")
    (one,) = looked(tmp_path, lambda one: one.loop == "answers").processes
    assert (one.name, one.pid) == ("here-tail-0", pid)
    assert one.alive in ("sleeping", "running")
    (line,) = [line for line in one.tasks if line.startswith("weights:")]
    chain = [part.split(" (")[0] for part in line.removeprefix("weights: ").split(" > ")]
    assert chain[:3] == ["Worker.wait_for_weights", "Worker.arrival", "Event.wait"]
    assert one.threads == ()  # nobody has asked for them


def test_all_threads_tell_where_they_are_when_asked(tmp_path: Path, start: Start) -> None:
    start("here-tail-0")
    for _ in range(2):  # each answer is told alone
        facts = looked(tmp_path, lambda one: any("in select" in line for line in one.threads), threads=True)
        assert sum("most recent call first" in line for line in facts.processes[0].threads) == 2


def test_a_stopped_process_is_found_and_answers_again_when_it_is_continued(tmp_path: Path, start: Start) -> None:
    pid = start("here-tail-0")
    write(tmp_path, ("controller", "here-tail-0 to answer apply_weights", 4.0, 300.0))
    os.kill(pid, signal.SIGSTOP)
    facts = looked(tmp_path, lambda one: one.alive == "stopped")
    verdict = judge(facts)
    assert verdict.state == "stuck" and verdict.sentence.endswith(f"continue it with kill -CONT {pid}")
    os.kill(pid, signal.SIGCONT)
    assert judge(looked(tmp_path, lambda one: one.loop == "answers")).state == "healthy"


def test_a_loop_that_is_held_is_blocked_and_its_stack_says_where(tmp_path: Path, start: Start) -> None:
    start("here-tail-0", "hold")
    write(tmp_path, ("controller", "here-tail-0 to answer apply_weights", 30.0, 300.0))
    facts = looked(tmp_path, lambda one: innermost(one.threads).startswith("hold_the_loop") and idles(one))
    assert facts.by_name["here-tail-0"].loop == "blocked"
    verdict = judge(facts)
    assert verdict.state == "stuck" and "hangs" in verdict.sentence and "hold_the_loop" in verdict.sentence


def test_one_long_call_into_c_is_blocked_and_computes(tmp_path: Path, start: Start) -> None:
    start("here-tail-0", "compute")
    write(tmp_path, ("controller", "here-tail-0 to answer apply_weights", 90.0, 300.0))
    facts = looked(tmp_path, lambda one: innermost(one.threads).startswith("compute") and not idles(one))
    assert facts.by_name["here-tail-0"].loop == "blocked"
    assert "is busy in one call: its event loop is blocked" in judge(facts).sentence


def test_who_only_looks_asks_no_process(tmp_path: Path, start: Start) -> None:
    pid = start("here-tail-0")
    (one,) = collect(tmp_path, ask=False).processes
    assert (one.pid, one.loop, one.tasks, one.threads) == (pid, "unknown", (), ()) and one.cpu is not None
    assert not (tmp_path / layout.STACKS / "here-tail-0.tasks.txt").exists()


def test_who_looks_at_a_run_of_which_nothing_lives_does_not_go_through_all_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_started(tmp_path, [StartedProcess("trainer", "trainer", 1, exit_code=3)])
    monkeypatch.setattr(snapshot.psutil, "process_iter", None)
    (one,) = collect(tmp_path).processes
    assert one.exit_code == 3


def test_a_process_that_still_loads_has_no_event_loop(tmp_path: Path, start: Start) -> None:
    start("here-tail-0", "loading")
    looked(tmp_path, lambda one: one.loop == "none")


def test_a_process_that_is_not_prepared_is_not_asked(tmp_path: Path, start: Start) -> None:
    """Either signal would end it."""
    start("here-regular-0", "unprepared")
    forged = start("here-tail-0", "unprepared")
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks" / "here-tail-0.txt").write_text(f"pid {forged} at {time.time() + 60}\n")
    for _ in range(2):
        processes = collect(tmp_path, threads=True).processes
        assert [one.loop for one in processes] == ["unknown"] * 2
        assert {one.alive for one in processes} <= {"sleeping", "running"}


def test_the_answers_of_an_earlier_process_are_not_taken_for_its_own(tmp_path: Path, start: Start) -> None:
    start("here-tail-0")
    collect(tmp_path)
    start("here-regular-0", "unprepared")
    for name in ("txt", "tasks.txt"):
        old = tmp_path / "stacks" / f"here-tail-0.{name}"
        (tmp_path / "stacks" / f"here-regular-0.{name}").write_bytes(old.read_bytes())
    one = collect(tmp_path).by_name["here-regular-0"]
    assert one.loop == "unknown" and one.tasks == ()


def test_a_pid_that_another_process_has_by_now_is_gone(tmp_path: Path, start: Start) -> None:
    start("here-tail-0")
    os.utime(tmp_path / layout.PROCESSES, (1_700_000_000, 1_700_000_000))  # written long before this process began
    (one,) = collect(tmp_path).processes
    assert one.alive == "gone" and one.loop == "unknown"


def test_the_ranks_behind_their_launcher_are_processes_of_their_own(tmp_path: Path, start: Start) -> None:
    pid = start("trainer", "compute", role="trainer")
    write(tmp_path, ("controller", "trainer-0 to answer 'train'", 3.0, 900.0))
    found = looked(
        tmp_path, lambda one: one.role == "rank launcher" or (one.loop == "blocked" and not idles(one))
    ).by_name
    assert found["trainer"].pid == pid and found["trainer"].role == "rank launcher"
    assert found["trainer-0"].pid not in (None, pid) and found["trainer-0"].loop == "blocked"
    assert found["trainer-0"].doing == "running"  # status.json calls the ranks 'trainer'
    assert (found["trainer"].cpu or 0.0) < (found["trainer-0"].cpu or 0.0)


def with_stopped_child(folder: Path, start: Start, role: str) -> int:
    """A process of a role with a child that is stopped, as vLLM's engine process under an instance; return its pid."""
    start("here-0", role="trainer")
    write_started(folder, [StartedProcess("here-0", role, collect(folder).processes[0].pid or 0)])
    child = next(int(p.read_text().split()[1]) for p in (folder / "stacks").glob("trainer-0.txt"))
    os.kill(child, signal.SIGSTOP)
    wait_for(lambda: psutil.Process(child).status() == psutil.STATUS_STOPPED, ANSWER_S)
    return child


def test_a_stopped_child_is_a_fact_of_its_parent(tmp_path: Path, start: Start) -> None:
    child = with_stopped_child(tmp_path, start, "instance")
    write(tmp_path, ("controller", "here-0 to answer apply_weights", 4.0, 300.0))
    assert f"kill -CONT {child}" in judge(collect(tmp_path)).sentence


@pytest.mark.parametrize("role", ["rewards", "agents"])
def test_programs_below_who_replaces_them_hold_nothing_up(tmp_path: Path, start: Start, role: str) -> None:
    with_stopped_child(tmp_path, start, role)
    write(tmp_path, ("controller", "here-0 to answer", 4.0, 300.0))
    facts = collect(tmp_path)
    assert facts.by_name["here-0"].children == () and judge(facts).state == "healthy"


def test_a_child_counts_only_if_its_state_lasts(tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    child = with_stopped_child(tmp_path, start, "instance")

    def sleep(seconds: float) -> None:
        os.kill(child, signal.SIGCONT)
        wait_for(lambda: psutil.Process(child).status() != psutil.STATUS_STOPPED, ANSWER_S)

    monkeypatch.setattr(snapshot, "time", SimpleNamespace(time=time.time, monotonic=time.monotonic, sleep=sleep))
    assert collect(tmp_path).by_name["here-0"].children == ()


def test_the_launcher_is_the_parent_that_has_the_lock_of_the_run(tmp_path: Path, start: Start) -> None:
    start("here-tail-0")
    lock = tmp_path / layout.LOCK
    with subprocess.Popen(["true"]) as ended:
        there = psutil.Process(ended.pid)
        wait_for(lambda: there.status() == psutil.STATUS_ZOMBIE, 10, what="a child that nobody has waited for")
        for text, found in (("", []), ("process 1 on here", []), (f"process {os.getpid()} on here", [os.getpid()])):
            lock.write_text(text)
            assert [one.pid for one in collect(tmp_path, ask=False).processes if one.role == "launcher"] == found


def test_a_launcher_is_known_to_be_gone_only_on_its_own_machine(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    host = socket.gethostname()
    for pid, where, gone in ((ended.pid, host, True), (ended.pid, "elsewhere", False), (os.getpid(), host, False)):
        (tmp_path / layout.LOCK).write_text(f"process {pid} on {where}")
        assert collect(tmp_path, ask=False).launcher_gone == gone


def test_a_launcher_in_a_container_is_there_as_long_as_it_has_its_lock(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    with (tmp_path / layout.LOCK).open("w") as lock:
        lock.write(f"process {ended.pid} on {socket.gethostname()}")  # as its pid is in there
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        there = collect(tmp_path, ask=False)
        assert there.launcher_lives and not there.launcher_gone
    gone = collect(tmp_path, ask=False)
    assert gone.launcher_gone and not gone.launcher_lives


def test_the_pids_of_another_host_or_container_say_nothing_here(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    pids = {"controller": ended.pid, "here-tail-0": os.getpid()}  # gone here, and another process here
    roles = {"controller": "controller", "here-tail-0": "instance"}

    def started_on(host: str) -> None:
        write_started(tmp_path, [StartedProcess(name, roles[name], pid, host=host) for name, pid in pids.items()])

    started_on("another boot pid:[1]")
    write(tmp_path, ("controller", "here-tail-0 to answer apply_weights", 4.0, 300.0))
    facts = collect(tmp_path, ask=False)
    found = [(one.pid, one.alive, one.cpu) for one in facts.processes if one.name in pids]
    assert found == [(None, "unknown", None)] * 2
    assert judge(facts).state == "healthy"
    write_status(tmp_path, make_status(20, 20, time.time(), state="done"))
    assert judge(collect(tmp_path, ask=False)).details == []

    (tmp_path / layout.LOCK).write_text(f"process {ended.pid} on {socket.gethostname()}")
    write(tmp_path, ("controller", "here-tail-0 to answer apply_weights", 4.0, 300.0))
    verdict = judge(collect(tmp_path, ask=False))
    assert verdict.state == "ended" and "none of its 2 processes is there" in verdict.sentence, "with the launcher"

    started_on(this_host())
    assert [one.alive for one in collect(tmp_path, ask=False).processes if one.name == "controller"] == ["gone"]

    for node, alive in (("", "gone"), ("10.0.0.2", "unknown")):  # at a node of Ray, it may outlive the launcher
        write_started(tmp_path, [StartedProcess("controller", "controller", ended.pid, node=node, host="another boot")])
        assert [one.alive for one in collect(tmp_path, ask=False).processes if one.name == "controller"] == [alive]


def test_sites_that_are_emulated_have_folders_of_their_own(tmp_path: Path, start: Start) -> None:
    site = tmp_path / "sites" / "b"
    site.mkdir(parents=True)
    start("service-b", role="service", folder=site)
    (site / "addresses.json").write_text('{"controller": "tcp://198.18.0.5:4", "services": {"b": "tcp://127.0.0.1:5"}}')
    facts = looked(tmp_path, lambda one: one.loop == "answers")
    assert [(one.name, one.site) for one in facts.processes] == [("service-b", "b")]
    assert facts.addresses == {"tcp://198.18.0.5:4": "controller", "tcp://127.0.0.1:5": "service-b"}


def test_the_command_says_it_and_shows_the_frames(tmp_path: Path, start: Start) -> None:
    pid = start("here-regular-0", "hold")
    start("here-regular-1")
    write(tmp_path, ("controller", "4 samples of 1 groups", 40.0, 300.0))
    result = CliRunner().invoke(command, [str(tmp_path), "--stacks"])
    assert result.exit_code == 3, result.output
    first, *rest = result.output.splitlines()
    assert re.match(
        r"stuck: controller has waited \d+ s \(limit 300 s\) for 4 samples of 1 groups; here-regular-0", first
    )
    assert "hold_the_loop" in first
    assert any(line.startswith("here-regular-0") and "BLOCKED" in line for line in rest)
    assert f"here-regular-0 (pid {pid})" in rest and "here-regular-1 (pid" not in result.output
    everything = CliRunner().invoke(command, [str(tmp_path), "--stacks", "all"]).output
    assert "here-regular-1 (pid" in everything and "Worker.arrival" in everything
