"""A whole run whose weights are broadcast by gloo: an instance dies, comes back, and is in the group again."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from streamrl.run_dir.instance_files import read_started
from streamrl.run_dir.status import read_status
from streamrl.weights.version import lay_out
from tests.end_to_end.running import Running, assert_every_sample_once
from tests.waiting import finish

LOADED = re.compile(r"version (\d+) \((\w+)\) is loaded by (.*)")


@pytest.mark.timeout(300)
def test_an_instance_that_was_killed_gets_its_weights_from_the_trainer_and_every_version_is_the_same_everywhere(
    tmp_path: Path,
) -> None:
    names = ["here-regular-0", "here-tail-0"]
    run = Running(
        tmp_path,
        500,
        schedule={"name": "async"},
        recovery={"pause_s": 0.5},
        weights={"backend": "gloo"},
        checkpoint={"every": 1, "keep": 100},
    )
    run.wait(lambda: (run.role(names[1]).running or 0) > 0)
    killed = run.signal(names[1], signal.SIGKILL)
    run.wait(lambda: run.role(names[1]).state in ("dead", "starting"))
    run.wait(lambda: run.last_finished(names[1]) > killed)  # it is back, and generates
    run.goes_on(1)
    run.signal("controller", signal.SIGTERM)
    finish(run.process, 60, run.project.logs)
    processes = {one.name: one.process for one in read_started(run.run_dir) if one.role == "instance"}
    assert processes == {names[0]: 1, names[1]: 2}
    assert_every_sample_once(run.run_dir)
    loads = LOADED.findall((run.run_dir / "logs" / "trainer.log").read_text())
    who = [members for _, _, members in loads]
    assert who[0] == who[-1] == ", ".join(names)
    assert names[0] in who or names[1] in who  # while one was away, or when it was back between two publications
    # the workers refuse a version whose hash, of what they have received, is not that of what was sent
    for number, sent, _ in loads[1:]:
        checkpoint = run.run_dir / "checkpoints" / f"step_{number}" / "model.safetensors"
        if checkpoint.exists():
            assert lay_out(0, load_file(checkpoint).items())[0].version.content_hash == sent
    verified = read_status(run.run_dir).verified
    assert verified.mismatch == "" and verified.worst is not None and verified.bound is not None
    assert verified.versions >= len({number for number, _, _ in loads}) - 1
