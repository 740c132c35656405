"""Files of commands are written although nobody reads all that they print (`streamrl plan --json F | head -1`)."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from streamrl.cli.chaos import _write_results
from streamrl.cli.verify import _hardware
from streamrl.report.terminal import TextConsole
from streamrl.run_dir.status import write_status
from streamrl.verify.hardware_checks import StageResult
from tests.cli.calling import streamrl
from tests.report.synthetic import make_status

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def ended_reader() -> Iterator[None]:
    """The standard output is a pipe whose reader has ended. No fixture: pytest sets its own for each phase."""
    reader, writer = os.pipe()
    os.close(reader)
    out = io.TextIOWrapper(io.FileIO(writer, "w"), write_through=True)
    with contextlib.redirect_stdout(out):
        yield
    out.detach().close()


def test_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, out = ROOT / "cluster_configs/heterogeneous.yaml", tmp_path / "plan.json"
    with ended_reader():
        assert streamrl(monkeypatch, "plan", "--cluster", cluster, "--schedule", "sync", "--json", out) == 1
    assert out.stat().st_size


@pytest.mark.parametrize("options", [[], ["--iterations", "2", "--train-rate", "1000"]])
def test_the_plot_of_a_simulation(options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "plot.svg"
    with ended_reader():
        assert streamrl(monkeypatch, "simulate", "--requests", "32", "--instances", "2", *options, "--out", out) == 1
    assert out.stat().st_size


@pytest.mark.parametrize("ending", ["json", "html"])
def test_the_report_of_a_ranker(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, rollouts = tmp_path / f"report.{ending}", tmp_path / "rollouts.jsonl"
    rollouts.write_text("".join(json.dumps({"prompt": "p", "output_length": n}) + "\n" for n in range(10, 20)))
    with ended_reader():
        assert streamrl(monkeypatch, "train-ranker", rollouts, "--out", tmp_path / "r.lgb", "--report", report) == 1
    assert report.stat().st_size


def test_what_was_measured_of_the_hardware(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = [StageResult("products", 1.0, (), "")]
    monkeypatch.setattr("streamrl.verify.hardware_checks.check_hardware", lambda say: results)
    with ended_reader(), pytest.raises((SystemExit, BrokenPipeError)):
        _hardware(TextConsole(), tmp_path / "hardware.json")
    assert (tmp_path / "hardware.json").stat().st_size


def test_results_of_faults(tmp_path: Path) -> None:
    study = SimpleNamespace(results=[], ended="")
    with ended_reader(), pytest.raises((SystemExit, BrokenPipeError)):
        _write_results(tmp_path, study, {}, 0, 1.0)  # type: ignore[arg-type]
    assert len([path for path in tmp_path.iterdir() if path.stat().st_size]) == 2


@pytest.mark.parametrize(("waited_s", "code"), [(8.0, 0), (90.0, 3)])
def test_the_exit_code_of_a_verdict(
    waited_s: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    wait = {"owner": "controller", "waiting_for": "3 rewards of 1 groups", "since": now - waited_s, "limit_s": 60}
    write_status(tmp_path, make_status(3, 20, now, waits=[wait]))
    with ended_reader():
        assert streamrl(monkeypatch, "why-stuck", tmp_path) == code


def test_the_exit_code_of_a_verdict_as_its_process_ends(tmp_path: Path) -> None:
    """What a pipe without a reader has not taken is written again as Python ends, whose exit code is 120 then."""
    write_status(tmp_path, make_status(3, 3, time.time(), state="done"))
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "streamrl.cli.main", "why-stuck", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
