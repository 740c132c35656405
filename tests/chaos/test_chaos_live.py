"""Faults in a real run, through the command line: real vLLM, real trainer, real processes, a tiny model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.end_to_end.project import Project
from tests.end_to_end.running import EASY, assert_every_sample_once
from tests.waiting import scaled

LIMIT_S = 540.0
"""For the whole command, on a machine that is busy."""


@pytest.mark.timeout(600)
def test_a_run_survives_faults_of_different_kinds_and_every_sample_is_trained_once(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.command(
        tasks=EASY,
        model={"path": str(tmp_path / "model"), "max_context": 512, "dtype": "float32"},
        sampling={"max_tokens": 300},
        recovery={"suspect_s": 2, "pause_s": 0.5},
        deadlines={"heartbeat_s": max(20, scaled(8))},
        schedule={"name": "async"},
    )
    options = ["--minutes", f"{scaled(4)}", "--limit-s", f"{scaled(300)}", "--faults", "2", "--seed", "2"]
    options += ["--kinds", "instance-pause,service-kill"]
    done = warm.run(
        [
            sys.executable,
            "-m",
            "streamrl.cli.main",
            "chaos",
            "--cluster",
            "cluster.yaml",
            "--run",
            "run.yaml",
            *options,
        ],
        cwd=tmp_path,
        env=project.env,
        timeout=scaled(LIMIT_S),
    )
    assert done.returncode == 0, done.stdout + done.stderr + project.logs()
    run_dir = project.run_dir()
    told = json.loads((run_dir / "chaos.json").read_text())
    faults = {fault["kind"]: fault for fault in told["faults"]}
    assert set(faults) == {"instance-pause", "service-kill"}
    for kind, fault in faults.items():
        assert kind in done.stdout
        assert fault["noticed_s"] is not None and fault["harmless"]
        assert fault["noticed_s"] <= fault["recovered_s"] < fault["stepped_s"]
    assert told["passed"] and told["audit"]["lost"] == told["audit"]["twice"] == 0
    assert told["audit"]["steps"] == told["reward"]["steps"][-1][0]
    assert "Passed." in (run_dir / "chaos.md").read_text()
    assert_every_sample_once(run_dir)
