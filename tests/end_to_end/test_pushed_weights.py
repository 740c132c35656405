"""A whole run whose weights are broadcast by gloo, with two trainer ranks and a mixture of experts: instances die, come
and leave, and service and trainer are killed in the middle of a publish."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from streamrl.run_dir.instance_files import read_started
from streamrl.run_dir.metrics import read_metrics
from streamrl.run_dir.status import read_status
from streamrl.weights.version import lay_out
from tests import warm
from tests.end_to_end.project import Project
from tests.end_to_end.running import Running, assert_every_sample_once
from tests.waiting import finish, scaled

LOADED = re.compile(r"version (\d+) \((\w+)\) is loaded by (.*)")
REGULAR, ADDED, TAIL = "here-regular-0", "here-regular-1", "here-tail-0"


class PushedRun(Running):
    """The run, and what is done to it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            Project(folder, mixture=True, batch=24),
            500,
            ranks=2,
            schedule={"name": "async", "max_staleness": 4},
            # an instance that stands still holds a publish up until it goes on, and nobody gives it up
            recovery={"pause_s": 0.5, "suspect_s": 600},
            deadlines={"heartbeat_s": 600},
            weights={"backend": "gloo"},
            checkpoint={"every": 1, "keep": 100},
        )

    def loads(self) -> list[tuple[str, str, str]]:
        """Returns (number, hash, instances) of each publish that was loaded."""
        return LOADED.findall((self.run_dir / "logs" / "trainer.log").read_text())

    def scale(self, replicas: int) -> None:
        command = [sys.executable, "-m", "streamrl.cli.main", "scale", str(self.run_dir)]
        done = warm.run([*command, "--pool", "regular", "--replicas", str(replicas)], scaled(200))
        assert done.returncode == 0, done.stdout + done.stderr + self.project.logs()

    def asked_since(self) -> float:
        """When the tail's instance was asked to do its part of a publish (unix seconds); 0: it is not."""
        asked = f"{TAIL} to answer take_weights"
        waits = read_status(self.run_dir).waits
        return max((one.since for one in waits if one.waiting_for.startswith(asked)), default=0.0)

    def is_starved(self) -> bool:
        """Whether nothing is left to do for those that have not been stopped."""
        roles = read_status(self.run_dir).roles
        return all(roles[name].state == "idle" for name in (REGULAR, "rewards-here", "trainer"))

    def kill_in_a_publish(self, name: str) -> None:
        """Kills a process in a publish, which waits for an instance that has stood still since before it began."""
        while True:
            stopped = self.signal(TAIL, signal.SIGSTOP)
            self.wait(lambda: self.asked_since() > 0 or self.is_starved())
            if self.asked_since() > stopped:
                break
            # it was asked before, and may have answered, too; or the step waits for its samples
            self.signal(TAIL, signal.SIGCONT)
            self.goes_on(1)
        self.signal(name, signal.SIGKILL)
        self.signal(TAIL, signal.SIGCONT)


@pytest.mark.timeout(600)
def test_every_version_is_the_same_everywhere_whoever_dies_comes_or_leaves(tmp_path: Path) -> None:
    run = PushedRun(tmp_path)
    run.wait(lambda: (run.role(TAIL).running or 0) > 0)
    killed = run.signal(TAIL, signal.SIGKILL)
    run.scale(2)  # until the new one generates
    run.wait(lambda: run.last_finished(TAIL) > killed)  # it is back, and generates, too
    run.wait(lambda: any(members == f"{REGULAR}, {ADDED}, {TAIL}" for _, _, members in run.loads()))
    run.scale(1)
    service = run.pid("service-here")
    run.kill_in_a_publish("service-here")
    run.wait(lambda: run.pid("service-here") not in (None, service))
    run.goes_on(1)
    controller = run.pid("controller")
    run.kill_in_a_publish("trainer")
    run.wait(lambda: run.pid("controller") not in (None, controller))
    published = len(run.loads())
    run.wait(lambda: len(run.loads()) >= published + 2)  # what the checkpoint has, and one step more
    run.signal("controller", signal.SIGTERM)
    finish(run.process, 60, run.project.logs)
    processes = {one.name: one.process for one in read_started(run.run_dir) if one.role == "instance"}
    assert (processes[REGULAR], processes[TAIL]) == (1, 2)
    assert_every_sample_once(run.run_dir)
    loads = run.loads()
    who = [members for _, _, members in loads]
    assert who[0] == who[-1] == f"{REGULAR}, {TAIL}"
    # the workers refuse a version whose hash, of what they have received, is not that of what was sent
    for number, sent, _ in loads[1:]:
        checkpoint = run.run_dir / "checkpoints" / f"step_{number}" / "model.safetensors"
        if checkpoint.exists():
            assert lay_out(0, load_file(checkpoint).items())[0].version.content_hash == sent
    verified = read_status(run.run_dir).verified
    assert verified.mismatch == "" and verified.worst is not None and verified.bound is not None
    assert verified.worst < verified.bound / 2
    log = (run.run_dir / "logs" / "trainer.log").read_text()
    assert log.count(f"{TAIL}: the site's service was restarted") == 1  # it was in the middle of a publish
    metrics = read_metrics(run.run_dir / "metrics.jsonl")
    assert (metrics[0].logprob_gap_mean or 0) < 1e-4 and metrics[0].staleness_max == 0
    assert [row.mismatch_warning for row in metrics] == [None] * len(metrics)
