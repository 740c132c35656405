"""`streamrl simulate`: a table and a plot from drawn lengths and from a recorded run; one message on bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ranker.data import read_rollouts
from ranker.train import train
from streamrl.rollouts.store import SCHEMA
from tests.cli.calling import streamrl
from tests.ranker.synthetic import small_reasoner


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with the rollouts of two steps."""
    folder = tmp_path / "run" / "rollouts"
    folder.mkdir(parents=True)
    for step in (1, 2):
        rows = [row | {"step": step, "prompt_tokens": [1, 2, 3]} for row in small_reasoner(30, 2, step).rows]
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), folder / f"step_{step:06d}.parquet")
    return tmp_path / "run"


def test_drawn_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "p.svg"
    some = ["--requests", "64", "--instances", "4", "--price", "2", "--noise", "0.3", "--out", str(plot)]
    assert streamrl(monkeypatch, "simulate", *some) == 0
    shown = capsys.readouterr().out
    assert "64 requests" in shown
    assert all(name in shown for name in ("least-loaded", "algorithm2-max", "skew-aware-static"))
    assert "<svg" in plot.read_text(encoding="utf-8")


def test_a_recorded_run_with_a_rankers_forecasts(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, _ = train(read_rollouts([str(run)]))
    model.save(tmp_path / "ranker.lgb")
    curve = tmp_path / "curve.json"
    curve.write_text(json.dumps({"step_seconds": {"1": 0.02, "8": 0.03, "32": 0.08}}))
    fleet = ["--instances", "2", "--slots", "32", "--curve", curve, "--policy", "skew-aware"]
    files = ["--trace", run, "--ranker", tmp_path / "ranker.lgb", "--out", tmp_path / "p.svg"]
    assert streamrl(monkeypatch, "simulate", *fleet, *files) == 0
    shown = capsys.readouterr().out
    assert "2 steps" in shown and "120 requests" in shown
    assert "skew-aware" in shown and "round-robin" not in shown


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--lengths", "zipf:2"], "--lengths zipf:2: expected lognormal:MU,SIGMA"),
        (["--lengths", "lognormal:7"], "expected lognormal:MU,SIGMA"),
        (["--policy", "best"], "--policy best: there is no such policy; expected one of random"),
        (["--device", "H21"], "--device H21: unknown device"),
        (["--curve", "no.json"], "--curve no.json"),
        (["--ranker", "r.lgb"], "--ranker needs --trace"),
        (["--trace", "nowhere"], "--trace nowhere: no rollouts"),
    ],
)
def test_bad_input_gets_one_message(
    arguments: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert streamrl(monkeypatch, "simulate", *arguments) == 2
    error = capsys.readouterr().err
    assert complaint in error and "Traceback" not in error
