"""Whole runs in which processes are killed or stopped: real vLLM, real trainer, real processes, a tiny model."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrl.rollouts.ledger import Ledger
from streamrl.run_dir.instance_files import read_started
from streamrl.run_dir.metrics import read_metrics
from streamrl.run_dir.status import read_status
from tests.end_to_end.project import Project, trained_rows, wait_for
from tests.end_to_end.running import Running, assert_every_sample_once
from tests.waiting import finish, scaled


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files with a short path, as those of sockets must be."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.timeout(600)
def test_instance_rewards_and_service_come_back_and_what_they_had_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temporary: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(temporary))
    silent = {"heartbeat_s": scaled(60)}  # an instance that is stopped for the time of two steps is not taken for dead
    run = Running(
        Project(tmp_path, batch=24), 500, schedule={"name": "async"}, recovery={"pause_s": 0.5}, deadlines=silent
    )
    run.wait(lambda: (run.role("here-regular-0").running or 0) > 0)
    stopped = run.signal("here-regular-0", signal.SIGSTOP)
    run.wait(lambda: run.role("here-regular-0").state == "suspect" and not run.role("here-regular-0").running)
    assert time.time() - stopped < scaled(6)  # silent, and everything it had is elsewhere
    run.goes_on(2)  # weights are loaded without it
    missed = run.role("here-tail-0").weight_version or 0
    run.signal("here-regular-0", signal.SIGCONT)
    run.wait(lambda: (run.role("here-regular-0").weight_version or 0) >= missed > 0)
    run.wait(lambda: (run.role("here-tail-0").running or 0) > 0)
    killed = run.signal("here-tail-0", signal.SIGKILL)
    run.wait(lambda: run.role("here-tail-0").state in ("dead", "starting"))
    assert time.time() - killed < scaled(5)  # noticed, and everything it had is on its way elsewhere
    assert "was killed by SIGKILL" in run.role("here-tail-0").detail
    run.signal("rewards-here", signal.SIGKILL)
    run.goes_on(1)
    run.wait(lambda: read_status(run.run_dir).scaling.ready == {"here/regular": 1, "here/tail": 1})
    returned = run.signal("service-here", signal.SIGKILL)
    run.goes_on(2)
    for name, since in (("here-regular-0", stopped + 10), ("here-tail-0", returned)):  # they work again
        run.wait(lambda name=name, since=since: run.last_finished(name) > since)
    instances = {one.name: one.process for one in read_started(run.run_dir) if one.role == "instance"}
    assert instances == {"here-regular-0": 1, "here-tail-0": 2}  # they have outlived their service
    run.signal("controller", signal.SIGTERM)
    output = finish(run.process, 60, run.project.logs)
    assert run.process.returncode == 1 and "the controller was told to stop" in output  # somebody else did that
    for name in ("rewards-here", "service-here"):
        assert f"{name} was killed by SIGKILL" in output
    assert_every_sample_once(run.run_dir)
    assert "here-regular-0 is heard again" in (run.run_dir / "logs" / "service-here.log").read_text()
    assert list(temporary.iterdir()) == []  # also of what was killed


@pytest.mark.timeout(600)
def test_after_the_death_of_trainer_or_controller_the_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    run = Running(
        Project(tmp_path, tail=False, batch=24),
        8,
        schedule={"name": "async"},
        deadlines={"heartbeat_s": max(25, scaled(8))},
    )
    run.wait(lambda: run.steps >= 3)
    instances = {one.pid for one in read_started(run.run_dir) if one.role == "instance"}
    before = run.pid("controller")
    run.signal("trainer", signal.SIGKILL)
    run.wait(lambda: run.pid("controller") not in (None, before))
    again = time.time()
    run.wait(lambda: read_metrics(run.run_dir / "metrics.jsonl")[-1].time > again and run.steps >= 4)
    run.signal("controller", signal.SIGSTOP)  # it hangs, and is taken for dead
    output = finish(run.process, 280, run.project.logs)
    assert run.process.returncode == 0, output + run.project.logs()
    assert "trainer was killed by SIGKILL" in output
    assert "controller has given no sign of life" in output
    assert output.count("everything but the instances is started again") >= 2
    assert {one.pid for one in read_started(run.run_dir) if one.role == "instance"} == instances
    assert_every_sample_once(run.run_dir)
    assert Ledger(run.run_dir / "ledger.sqlite").counts() == {"trained": 18 * 8}
    assert {int(str(row["group_id"])) for row in trained_rows(run.run_dir)} == set(range(6 * 8))


def test_an_instance_that_dies_while_it_starts_ends_the_run_with_its_last_words(tmp_path: Path) -> None:
    project = Project(tmp_path, tail=False, warm=False)
    process = project.start(steps=5)
    started = project.run_dir() / "processes.json"
    wait_for(lambda: started.exists() and len(read_started(started.parent)) == 5, 120, process)
    victim = next(one for one in read_started(started.parent) if one.name == "here-regular-0")
    os.kill(victim.pid, signal.SIGKILL)
    output = finish(process, 60, project.logs)
    assert process.returncode == 1
    assert "here-regular-0 was killed by SIGKILL" in output
    assert "here-regular-0" in (read_status(project.run_dir()).error or "")
