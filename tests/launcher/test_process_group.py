"""Processes of a launcher: instances follow their service's wishes, what dies is started again within its budget."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamrl.config.run import RunConfig
from streamrl.launcher import process_group
from streamrl.launcher.entry_point import AGAIN
from streamrl.launcher.local_backend import LocalProcess, start
from streamrl.launcher.process_group import ProcessGroup
from streamrl.launcher.started_process import RunProcess
from streamrl.run_dir import layout
from streamrl.run_dir.instance_files import (
    StartedProcess,
    WantedInstance,
    forget,
    read_started,
    read_wanted,
    write_started,
    write_wanted,
)
from streamrl.run_dir.site_status import starting, write_site
from streamrl.run_dir.status import write_status
from streamrl.runtime.process_plan import ProcessSpec, Role
from streamrl.runtime.processes import is_alive, this_host
from tests.stepped_clock import SteppedClock
from tests.waiting import scaled, wait_for

QUICKLY = {"pause_s": 0.0, "restarts": 2}
SLEEPS = "import time; time.sleep(600)"


def spec(name: str, role: Role, code: str = SLEEPS, index: int = 0) -> ProcessSpec:
    return ProcessSpec(name, role, "here", "regular", [sys.executable, "-S", "-c", code], index=index)


@dataclass
class Share:
    """What a family needs of one."""

    run_dir: Path
    specs: list[ProcessSpec]
    run: RunConfig = field(default_factory=lambda: RunConfig.model_validate({"recovery": QUICKLY}))
    env: dict[str, str] = field(default_factory=dict)
    hosts: dict[str, Any] = field(default_factory=dict)
    trains: bool = True

    def place(self, check_stop: Callable[[], None]) -> None:
        """All of it is here."""

    @property
    def folders(self) -> dict[str, Path]:
        return {"here": self.run_dir}

    def processes(self) -> list[ProcessSpec]:
        return self.specs

    def possible_instances(self, site: str) -> dict[str, ProcessSpec]:
        return {f"i-{n}": spec(f"i-{n}", "instance", index=n) for n in range(3)}

    def namespace(self, site: str) -> None:
        return None


@pytest.fixture
def families() -> Iterator[Callable[..., ProcessGroup]]:
    made: list[ProcessGroup] = []

    def make(folder: Path, *specs: ProcessSpec, trains: bool = True) -> ProcessGroup:
        (folder / "logs").mkdir(exist_ok=True)
        family = ProcessGroup(Share(folder, list(specs), trains=trains), resume=False)  # type: ignore[arg-type]
        made.append(family)
        family.start()
        return family

    yield make
    for family in made:
        family.stop()


def until(condition: Callable[[], object], family: ProcessGroup) -> list[str]:
    """Lets the family work until something holds; what it has told."""
    told: list[str] = []

    def work() -> None:
        family.reconcile()
        told.extend(family.revive())

    wait_for(condition, 20, meanwhile=work, tell=lambda: told)
    return told


def alive(folder: Path) -> dict[str, tuple[int, int]]:
    return {one.name: (one.pid, one.process) for one in read_started(folder) if one.exit_code is None}


def end_run(folder: Path, state: str) -> None:
    write_status(folder, {"run": "r", "state": state, "step": 1, "steps": 1, "started_at": 1.0, "updated_at": 1.0})


def end_site(folder: Path, state: str) -> None:
    write_site(folder, {**starting("here"), "state": state})


CORE = [spec("controller", "controller"), spec("trainer", "trainer"), spec("service-here", "service")]


def test_instances_come_leave_and_are_replaced_as_the_service_wants(
    tmp_path: Path, families: Callable[..., ProcessGroup]
) -> None:
    family = families(tmp_path, *CORE, spec("i-0", "instance"))
    first = alive(tmp_path)["i-0"]
    assert {one.host for one in read_started(tmp_path)} == {this_host()}, "where its pid counts"
    write_wanted(tmp_path, [WantedInstance("i-0"), WantedInstance("i-1")])
    until(lambda: "i-1" in alive(tmp_path), family)
    assert alive(tmp_path)["i-0"] == first
    write_wanted(tmp_path, [WantedInstance("i-0", process=2), WantedInstance("i-1", leaving=True)])
    until(lambda: alive(tmp_path)["i-0"][1] == 2, family)
    assert alive(tmp_path)["i-0"][0] != first[0] and "i-1" in alive(tmp_path)
    write_wanted(tmp_path, [WantedInstance("i-0", process=2)])  # the other one has left, or is to
    until(lambda: "i-1" not in alive(tmp_path), family)
    os.kill(alive(tmp_path)["i-0"][0], signal.SIGKILL)
    until(lambda: "i-0" not in alive(tmp_path), family)
    [dead] = [one for one in read_started(tmp_path) if one.name == "i-0"]
    assert dead.exit_code == -signal.SIGKILL and "was killed by SIGKILL" in dead.last_words
    assert family.dead == []  # its service decides
    write_wanted(tmp_path, [WantedInstance("i-0", process=2, paused=True)])
    until(lambda: not any(one.name == "i-0" for one in read_started(tmp_path)), family)
    family.reconcile()
    assert "i-0" not in alive(tmp_path)
    write_wanted(tmp_path, [WantedInstance("i-0", process=3)])
    until(lambda: alive(tmp_path).get("i-0", (0, 0))[1] == 3, family)


def test_a_service_comes_back_alone_until_its_budget_is_used_up(
    tmp_path: Path, families: Callable[..., ProcessGroup]
) -> None:
    family = families(tmp_path, *CORE)
    others = {name: pid for name, pid in alive(tmp_path).items() if name != "service-here"}
    told: list[str] = []
    for _ in range(2):
        before = alive(tmp_path)["service-here"]
        os.kill(before[0], signal.SIGKILL)
        told += until(lambda before=before: alive(tmp_path).get("service-here", before) != before, family)
    killed = "service-here was killed by SIGKILL (out of memory, or somebody's kill -9; see docs: E1006)"
    assert told == [f"{killed}; it is started again"] * 2
    assert {name: alive(tmp_path)[name] for name in others} == others
    os.kill(alive(tmp_path)["service-here"][0], signal.SIGKILL)
    told = until(lambda: family.dead, family)
    assert told == ["service-here has died 3 times; it is not started again (see docs: E1006)"]


def test_what_the_launcher_kills_for_its_silence_says_so(tmp_path: Path, families: Callable[..., ProcessGroup]) -> None:
    family = families(tmp_path, *CORE)
    why = "it gave no sign of life for 301 s, more than deadlines.startup_s of the run file"
    killed = f"service-here was killed by SIGKILL (by its launcher, as {why}; see docs: E1011)"
    for _ in range(2):
        before = alive(tmp_path)["service-here"]
        family.kill("service-here", why)
        told = until(lambda before=before: alive(tmp_path).get("service-here", before) != before, family)
        assert told == [f"{killed}; it is started again"]
    family.kill("service-here", why)
    told = until(lambda: family.dead, family)
    assert told == ["service-here has died 3 times; it is not started again (see docs: E1011)"]
    assert family.dead[0].last_words().startswith(killed)


@pytest.mark.parametrize(("state", "again"), [("running", True), ("done", False), ("failed", False)])
def test_a_service_that_ends_well_is_started_again_unless_the_run_is_over(
    tmp_path: Path, families: Callable[..., ProcessGroup], state: str, again: bool
) -> None:
    """Services of other sites hear of the end from the controller, and may be gone before it is."""
    end_run(tmp_path, state)
    family = families(tmp_path, CORE[0], CORE[1], spec("service-here", "service", "pass"))
    service = family._processes[2]
    wait_for(lambda: service.exit_code == 0, 20)
    assert bool(family.revive()) == again and family.dead == []


GIVES_UP = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)\nsys.exit(75)"


@pytest.mark.parametrize("together", [False, True])
def test_a_controller_that_gives_up_for_a_dead_trainer_is_neither_charged_nor_told(
    tmp_path: Path, families: Callable[..., ProcessGroup], monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    controller = spec("controller", "controller", GIVES_UP)
    controller.command.append(str(gives_up := tmp_path / "gives_up"))
    family = families(tmp_path, controller, *CORE[1:])
    clock = SteppedClock()
    monkeypatch.setattr(process_group, "time", clock)
    monkeypatch.setattr(family.share, "run", RunConfig.model_validate({"recovery": QUICKLY | {"pause_s": 1.0}}))
    told: list[str] = []
    for _ in range(2):  # all restarts that one process has
        first, trainer = family.first, family._processes[1]
        os.kill(trainer.pid, signal.SIGKILL)
        wait_for(lambda trainer=trainer: trainer.exit_code is not None, 20)
        if not together:
            told += family.revive()
        gives_up.touch()
        wait_for(lambda first=first: first.exit_code == AGAIN, 20)
        told += family.revive()
        assert family.first is first, "it waits for the trainer's restart"
        gives_up.unlink()
        clock.sleep(60)
        told += family.revive()
        assert family.first is not first and family._processes[1] is not trainer
    killed = "trainer was killed by SIGKILL (out of memory, or somebody's kill -9; see docs: E1006)"
    assert told == [f"{killed}; everything but the instances is started again"] * 2
    os.kill(family.first.pid, signal.SIGKILL)  # by itself, for the first time
    wait_for(lambda: family.first.exit_code is not None, 20)
    told = family.revive()
    assert family.dead == [] and told == [
        f"{killed.replace('trainer', 'controller')}; everything but the instances is started again"
    ]


@pytest.mark.parametrize("state", ["running", "done", "failed", "interrupted"])
@pytest.mark.parametrize("victim", ["controller", "trainer", "service-here"])
def test_nothing_is_started_again_once_the_controller_has_ended_the_run(
    tmp_path: Path, families: Callable[..., ProcessGroup], victim: str, state: str
) -> None:
    family = families(tmp_path, *CORE)
    process = next(one for one in family._processes if one.spec.name == victim)
    end_run(tmp_path, state)
    os.kill(process.pid, signal.SIGKILL)
    wait_for(lambda: process.exit_code is not None, 20)
    assert bool(family.revive()) == (state == "running") and family.dead == []
    assert family.has_ended() == (victim == "controller" and state != "running")


@pytest.mark.parametrize("state", ["serving", "done", "failed"])
@pytest.mark.parametrize("code", [SLEEPS, "pass"])
def test_a_site_that_generates_ends_with_what_its_service_has_recorded(
    tmp_path: Path, families: Callable[..., ProcessGroup], code: str, state: str
) -> None:
    """A service that a signal stops ends as well as one that is done."""
    family = families(tmp_path, spec("service-here", "service", code), trains=False)
    end_site(tmp_path, state)
    if code == SLEEPS:
        os.kill(family.first.pid, signal.SIGKILL)
    wait_for(lambda: family.first.exit_code is not None, 20)
    killed = "was killed by SIGKILL (out of memory, or somebody's kill -9; see docs: E1006)"
    how = killed if code == SLEEPS else "ended with exit code 0"
    assert family.has_ended() == (state != "serving")
    told = family.revive()
    assert told == ([f"service-here {how}; it is started again"] if state == "serving" else [])
    assert family.dead == []


def test_a_site_whose_service_is_stopped_again_and_again_has_not_ended_well(
    tmp_path: Path, families: Callable[..., ProcessGroup]
) -> None:
    end_site(tmp_path, "serving")
    family = families(tmp_path, spec("service-here", "service", "pass"), trains=False)
    until(lambda: family.dead, family)
    assert not family.has_ended()


@pytest.mark.parametrize("state", ["done", "failed"])
def test_a_process_that_ends_with_an_error_is_the_cause_unless_the_run_is_done(
    tmp_path: Path, families: Callable[..., ProcessGroup], state: str
) -> None:
    fails = "import sys; print('LAST WORDS: no room', file=sys.stderr); sys.exit(1)"
    family = families(tmp_path, spec("controller", "controller", "exit(1)"), spec("trainer", "trainer", fails))
    end_run(tmp_path, state)
    wait_for(lambda: all(one.exit_code == 1 for one in family._processes), 20)
    assert [one.spec.name for one in family.dead] == ([] if state == "done" else ["trainer"])
    assert family.has_ended() == (state == "done")


def test_a_controller_that_ends_the_run_just_before_it_is_killed_is_not_started_again(
    tmp_path: Path, families: Callable[..., ProcessGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    family = families(tmp_path, *CORE)
    kill = family._kill

    def ends_before(processes: Sequence[RunProcess]) -> None:
        end_run(tmp_path, "done")
        kill(processes)

    monkeypatch.setattr(family, "_kill", ends_before)
    os.kill(alive(tmp_path)["trainer"][0], signal.SIGKILL)
    until(family.has_ended, family)
    assert "controller" not in alive(tmp_path) and family.dead == []


@pytest.mark.parametrize("victim", ["controller", "trainer"])
def test_everything_but_the_instances_goes_back_with_controller_and_trainer(
    tmp_path: Path, families: Callable[..., ProcessGroup], victim: str
) -> None:
    family = families(tmp_path, *CORE, spec("i-0", "instance"))
    before = alive(tmp_path)
    os.kill(before[victim][0], signal.SIGKILL)
    [line] = until(lambda: len(alive(tmp_path)) == 4 and alive(tmp_path)[victim] != before[victim], family)
    assert line.endswith("everything but the instances is started again")
    after = alive(tmp_path)
    assert after["i-0"] == before["i-0"]
    assert all(after[name] != before[name] for name in ("controller", "trainer", "service-here"))
    environment = Path(f"/proc/{after['controller'][0]}/environ").read_text()
    assert "STREAMRL_RESUME=1" in environment
    assert family.first.pid == after["controller"][0]


@pytest.mark.parametrize(
    ("code", "again"),
    [
        ("import sys; print('LAST WORDS: no such model', file=sys.stderr); sys.exit(1)", False),
        ("import sys; print('LAST WORDS, unexpected: KeyError', file=sys.stderr); sys.exit(1)", True),
        ("import sys; print('LAST WORDS: another controller', file=sys.stderr); sys.exit(75)", True),
        ("", True),
    ],
)
def test_only_failures_that_may_pass_are_restarted(
    tmp_path: Path, families: Callable[..., ProcessGroup], code: str, again: bool
) -> None:
    family = families(tmp_path, *CORE, spec("rewards-here", "rewards", code))
    told: list[str] = []
    wait_for(lambda: told or family.dead, 20, meanwhile=lambda: told.extend(family.revive()))
    assert bool(told) == again
    assert bool(family.dead) != again
    if not again:
        assert family.dead[0].last_words() == "rewards-here ended with exit code 1: no such model"


@pytest.mark.parametrize(
    ("words", "is_cause"),
    [
        ("a-0 died 6 times, and no instance is left at here", True),
        ("x has been silent for 9 s", False),
    ],
)
def test_a_lost_peer_is_never_reported_as_the_cause(tmp_path: Path, words: str, is_cause: bool) -> None:
    (tmp_path / "service.log").write_text(f"LAST WORDS: {words}\n")
    with subprocess.Popen([sys.executable, "-S", "-c", "exit(1)"]) as ended:
        ended.wait()
    process = LocalProcess(spec("service", "service"), tmp_path / "service.log", process=ended)
    assert process.is_root_cause == is_cause


def test_the_files_between_service_and_launcher_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert read_wanted(tmp_path) is None and read_started(tmp_path) == []
    wanted = [WantedInstance("a", 3), WantedInstance("b", leaving=True)]
    started = [StartedProcess("a", "instance", 77, 3, -9, "was killed")]
    write_wanted(tmp_path, wanted)
    write_started(tmp_path, started)
    assert read_wanted(tmp_path) == wanted and read_started(tmp_path) == started
    forget(tmp_path)
    assert read_wanted(tmp_path) is None and read_started(tmp_path) == []


def test_what_a_full_disk_has_kept_from_being_written_is_written_later(
    tmp_path: Path, families: Callable[..., ProcessGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    family = families(tmp_path, *CORE, spec("i-0", "instance"))
    with monkeypatch.context() as full:

        def write(folder: Path, started: Sequence[StartedProcess]) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        full.setattr(process_group, "write_started", write)
        pid = alive(tmp_path)["i-0"][0]
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not is_alive(pid), 10)
        family.reconcile()
        assert alive(tmp_path)["i-0"][0] == pid  # as it was written last
        [line] = family.troubles()
        assert line.startswith(f"cannot write {tmp_path / layout.PROCESSES}: No space left on device; until it can be,")
        assert line.endswith("(see docs: E1007)")
        family.reconcile()
        assert family.troubles() == []
    until(lambda: "i-0" not in alive(tmp_path), family)


def test_a_disk_that_is_full_is_no_reason_to_try_again(tmp_path: Path) -> None:
    from streamrl.errors import DISK

    code = "import errno; raise OSError(errno.ENOSPC, 'No space left on device')"
    assert errno.ENOSPC in DISK
    done = subprocess.run(
        [sys.executable, "-c", ROLE_THAT_FAILS.format(code=code)], capture_output=True, text=True, timeout=scaled(60)
    )
    assert done.returncode == 1
    assert "LAST WORDS: [Errno 28] No space left on device" in done.stderr


ROLE_THAT_FAILS = """
import sys
from streamrl.launcher import entry_point
async def fails():
    {code}
entry_point._role = lambda args: fails()
entry_point.answer_requests = entry_point.say = lambda *args: None
sys.argv = ["role", "controller", "--run-dir", "."]
sys.exit(entry_point.main())
"""


def test_a_role_that_is_done_ends_although_one_of_its_threads_never_does(tmp_path: Path) -> None:
    code = "import asyncio, threading; asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)"
    role = [sys.executable, "-c", ROLE_THAT_FAILS.format(code=code)]
    assert subprocess.run(role, cwd=tmp_path, timeout=scaled(60)).returncode == 0


def test_all_are_asked_to_end_before_one_is_waited_for_and_share_one_deadline(
    tmp_path: Path, families: Callable[..., ProcessGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["controller", "trainer", "rewards-here"]
    family = families(tmp_path, spec(names[0], "controller"), spec(names[1], "trainer"), spec(names[2], "rewards"))
    asked: list[str] = []
    limits: list[float] = []
    request, finish = LocalProcess.request_kill, LocalProcess.finish_kill

    def note(self: LocalProcess) -> None:
        asked.append(self.spec.name)
        request(self)

    def slow(self: LocalProcess, limit_s: float) -> None:
        assert asked == names
        finish(self, limit_s)
        limits.append(limit_s)
        threading.Event().wait(0.05)

    monkeypatch.setattr(LocalProcess, "request_kill", note)
    monkeypatch.setattr(LocalProcess, "finish_kill", slow)
    monkeypatch.setattr(process_group, "KILL_S", scaled(60))
    family.stop()
    assert len(limits) == 3 and limits[0] > limits[1] > limits[2]


WITH_MEMORY = """
import multiprocessing.resource_tracker, os, signal, sys, time
from multiprocessing.shared_memory import SharedMemory
print(SharedMemory(create=True, size=1).name, multiprocessing.resource_tracker._resource_tracker._pid, flush=True)
os.fork()
if sys.argv[1:] == ["stopped"]:
    os.killpg(0, signal.SIGSTOP)
time.sleep(600)
"""


@pytest.mark.parametrize("how", ["alive", "stopped", "dead"])
def test_shared_memory_of_what_is_killed_is_freed(tmp_path: Path, how: str) -> None:
    begun = spec("here-regular-0", "instance", WITH_MEMORY)
    begun.command.append(how)
    process = start(begun, tmp_path, resume=False)

    def told() -> str:
        return process.log.read_text().partition("\n")[2]

    wait_for(lambda: told().endswith("\n"), 60)
    name, tracker = told().split()
    try:
        if how == "dead":  # its child goes on
            os.kill(process.pid, signal.SIGKILL)
            wait_for(lambda: process.exit_code is not None, 20)
        elif how == "stopped":
            wait_for(lambda: psutil.Process(int(tracker)).status() == psutil.STATUS_STOPPED, 20)
        process.kill()
        wait_for(lambda: not is_alive(int(tracker)), 20)
        wait_for(lambda: process.pid not in map(group_of, psutil.pids()), 20)
        assert not Path("/dev/shm", name).exists()
    finally:
        Path("/dev/shm", name).unlink(missing_ok=True)


def group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


class HangingProcess(RunProcess):
    """A process that answers nothing: neither a signal nor a kill; it counts what it is asked."""

    clock: SteppedClock
    asked: list[str]
    exit_code = None
    pid = 1

    def signal(self, number: int) -> None:
        self.asked.append(signal.Signals(number).name)

    def request_kill(self) -> None:
        self.asked.append("kill")

    def finish_kill(self, limit_s: float) -> None:
        self.clock.sleep(limit_s)


@pytest.mark.parametrize("count", [1, 2, 1000])
def test_a_stop_takes_one_grace_period_however_many_processes_hang(
    count: int, tmp_path: Path, families: Callable[..., ProcessGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    family, clock = families(tmp_path), SteppedClock()
    hanging = [HangingProcess(spec(f"i-{n}", "instance"), tmp_path / "log") for n in range(count)]
    for one in hanging:
        one.clock, one.asked = clock, []
    monkeypatch.setattr(process_group, "time", clock)
    monkeypatch.setattr(family, "_processes", hanging)
    family.stop()
    assert clock.now == pytest.approx(process_group.STOP_S + process_group.KILL_S, abs=0.2)
    assert all(one.asked == ["SIGTERM", "kill"] for one in hanging)
