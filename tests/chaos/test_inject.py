"""Faults are done to a run's own processes and files, and to no others."""

from __future__ import annotations

import random
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from streamrl.chaos.faults import Fault, FaultKind
from streamrl.chaos.follow import Observation, SeenProcess
from streamrl.chaos.inject import DAMAGED_BYTES, ENVIRONMENT, Injector, NotPossible, _damage
from streamrl.config.load import load_cluster, load_run
from tests.marks import descendants
from tests.waiting import scaled, wait_for

CLUSTER = Path(__file__).parents[2] / "cluster_configs" / "local.yaml"


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process whose command line is that of a role."""
    command = [sys.executable, "-c", "import time; time.sleep(3600)", "streamrl.launcher.entry_point"]
    with subprocess.Popen(command, start_new_session=True) as process:
        wait_for(lambda: psutil.Process(process.pid).cmdline()[1:] == command[1:], 20)  # none at first
        yield process
        process.kill()


def injector(run_dir: Path) -> Injector:
    (run_dir / "logs").mkdir()
    (run_dir / "logs" / "controller.log").write_text("x" * 100)
    return Injector(run_dir, load_cluster(CLUSTER), load_run(None), 0, None)


def seen(pid: int, exit_code: int | None = None) -> Observation:
    processes = {name: SeenProcess(pid, name, "", exit_code) for name in ("controller", "instance")}
    return Observation(0.0, processes=processes)


def fault(kind: FaultKind, target: str = "instance") -> Fault:
    return Fault(1, kind, target, 0.0)


def test_a_process_is_killed_by_its_id(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    done = injector(tmp_path).inject(fault(FaultKind.INSTANCE_KILL), seen(sleeper.pid))
    assert done.replaced == {"instance"}
    assert sleeper.wait(scaled(5)) == -signal.SIGKILL


def test_a_pause_ends_with_its_undoing(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    done = injector(tmp_path).inject(fault(FaultKind.INSTANCE_PAUSE), seen(sleeper.pid))
    assert 0 < done.lasts_s < load_run(None).deadlines.heartbeat_s
    wait_for_status(sleeper.pid, stopped=True)
    done.undo()
    wait_for_status(sleeper.pid, stopped=False)
    sleeper.kill()
    sleeper.wait(scaled(5))
    done.undo()  # nothing is left to be undone


@pytest.fixture
def agents() -> Iterator[tuple[psutil.Process, ...]]:
    """An agents process, its worker and its environment, by their command lines."""
    sleeps = ["-c", "import time; time.sleep(3600)"]
    worker, environment = [*sleeps, "streamrl.agents.worker", "1"], [*sleeps, ENVIRONMENT, "1"]
    starts = "import subprocess, sys, time\n"
    starts += f"for one in {[worker, environment]!r}: subprocess.Popen([sys.executable, *one])\n"
    starts += "time.sleep(3600)"
    command = [sys.executable, "-c", starts, "streamrl.launcher.entry_point", "agents"]
    with subprocess.Popen(command, start_new_session=True) as process:
        owner = psutil.Process(process.pid)
        named = lambda: {words[-2]: one for one, words in descendants(owner.pid)}  # noqa: E731
        wait_for(lambda: named().keys() == {worker[-2], environment[-2]}, 20)
        yield owner, named()[worker[-2]], named()[environment[-2]]
        for one in (*owner.children(), owner):
            one.kill()


def test_a_worker_or_an_environment_of_agents_is_hit_and_not_its_owner(
    tmp_path: Path, agents: tuple[psutil.Process, ...]
) -> None:
    owner, worker, environment = agents
    faults, now = injector(tmp_path), seen(owner.pid)
    hang = faults.inject(fault(FaultKind.TOOL_HANG), now)
    wait_for_status(worker.pid, stopped=True)
    hang.undo()
    wait_for_status(worker.pid, stopped=False)
    late = faults.inject(fault(FaultKind.ENDPOINT_PAUSE), now)
    wait_for_status(owner.pid, stopped=True)
    assert worker.status() != psutil.STATUS_STOPPED and 0 < late.lasts_s < load_run(None).deadlines.heartbeat_s
    late.undo()
    assert hang.replaced == late.replaced == frozenset() and hang.note == f"worker with pid {worker.pid}"
    faults.inject(fault(FaultKind.AGENT_WORKER_KILL), now)
    wait_for(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, 20)
    with pytest.raises(NotPossible, match="has no worker process"):
        faults.inject(fault(FaultKind.TOOL_HANG), now)
    done = faults.inject(fault(FaultKind.ENVIRONMENT_KILL), now)
    assert done.note == f"environment with pid {environment.pid}" and not done.replaced
    wait_for(lambda: not environment.is_running() or environment.status() == psutil.STATUS_ZOMBIE, 20)


def wait_for_status(pid: int, stopped: bool) -> None:
    wait_for(lambda: (psutil.Process(pid).status() == psutil.STATUS_STOPPED) == stopped, 5)


def test_a_process_that_is_not_of_the_run_is_left_alone(tmp_path: Path) -> None:
    faults = injector(tmp_path)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]) as other:
        with pytest.raises(NotPossible, match="not instance any more"):
            faults.inject(fault(FaultKind.INSTANCE_KILL), seen(other.pid))
        assert other.poll() is None
        other.kill()
    with pytest.raises(NotPossible, match="not running"):
        faults.inject(fault(FaultKind.INSTANCE_KILL), seen(1, exit_code=-9))
    with pytest.raises(NotPossible, match="not started by this command"):
        faults.inject(fault(FaultKind.LAUNCHER_KILL, "launcher"), seen(1))


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="limits of another process are Linux's")
def test_a_full_disk_is_a_limit_on_files_that_leaves_room_for_last_words(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    before = resource.prlimit(sleeper.pid, resource.RLIMIT_FSIZE)
    done = injector(tmp_path).inject(fault(FaultKind.DISK_FULL, "controller"), seen(sleeper.pid))
    soft, hard = resource.prlimit(sleeper.pid, resource.RLIMIT_FSIZE)
    assert 100 < soft < 1 << 20 and hard == before[1]
    done.undo()
    assert resource.prlimit(sleeper.pid, resource.RLIMIT_FSIZE) == before


@pytest.mark.parametrize("size", [0, 10, DAMAGED_BYTES, 10_000])
def test_a_damaged_file_keeps_its_size_and_loses_its_content(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(size))
    _damage(path, random.Random(0))
    assert len(path.read_bytes()) == size
    assert not size or path.read_bytes() != bytes(size)
