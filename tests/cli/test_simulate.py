"""`streamrl simulate`: a table and a plot from drawn lengths and from a recorded run; one message on bad input."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ranker.data import read_rollouts
from ranker.train import refit
from scheduler.cost.generation_cost import Batch, slots_of
from scheduler.cost.hardware import device
from scheduler.cost.model_shapes import MODELS
from streamrl.cli import simulate
from streamrl.rollouts.rollout_store import SCHEMA
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


@pytest.fixture
def some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options: 16 requests of 100 tokens, on one instance whose steps take 0.1 s each; tables have wide columns."""
    monkeypatch.setenv("COLUMNS", "200")
    curve = tmp_path / "curve.json"
    curve.write_text(json.dumps({"step_seconds": {"1": 0.1, "256": 0.1}}))
    fleet = ["--instances", "1", "--slots", "64", "--curve", str(curve)]
    return ["--lengths", "constant:100", "--requests", "16", *fleet]


@pytest.fixture
def unplotted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is drawn, for tests of tables: a plot takes longer than what it is of."""
    monkeypatch.setattr("streamrl.cli.simulate._plot", lambda *given: None)


def test_the_command_simulates_drawn_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "p.svg"
    some = ["--requests", "64", "--instances", "4", "--price", "2", "--noise", "0.3", "--out", str(plot)]
    assert streamrl(monkeypatch, "simulate", *some) == 0
    shown = capsys.readouterr().out
    assert "64 requests" in shown
    assert all(name in shown for name in ("least-loaded", "algorithm2-max", "skew-aware-static"))
    assert "<svg" in plot.read_text(encoding="utf-8")


@pytest.mark.usefixtures("unplotted")
@pytest.mark.parametrize("whole", [[], ["--iterations", "2", "--train-rate", "1000", "--schedule", "sync"]])
def test_instances_decode_as_many_requests_as_their_memory_holds(
    whole: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    some = ["--lengths", "constant:20000", "--requests", "64", "--instances", "2", "--out", tmp_path / "p.svg", *whole]
    held = slots_of(MODELS["7b"], device("RTX4090"), 1, Batch.of(np.full(64, 20_000.0), 64, 0.0))
    assert 1 <= held < 32
    shown = []
    for slots in (256, held):
        options = ["--device", "RTX4090", "--slots", str(slots), "--policy", "least-loaded"]
        assert streamrl(monkeypatch, "simulate", *some, *options) == 0
        shown.append(capsys.readouterr().out)
    told, table = shown[0].split("\n", 1)
    assert told == f"an instance decodes at most {held} of these requests at once, not 256: memory of RTX4090"
    assert table == shown[1], "a batch that memory holds is simulated as it is"


@pytest.mark.usefixtures("unplotted")
def test_a_recorded_run_with_a_rankers_forecasts(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refit("", read_rollouts([str(run)])).save(tmp_path / "ranker.lgb")
    curve = tmp_path / "curve.json"
    steps = {"1": 0.02, "8": 0.03, "32": 0.08}
    curve.write_text(json.dumps({"step_seconds": steps, "doubts": "repeats differ"}))
    fleet = ["--instances", "2", "--slots", "32", "--curve", curve, "--policy", "skew-aware"]
    files = ["--trace", run, "--ranker", tmp_path / "ranker.lgb", "--out", tmp_path / "p.svg"]
    assert streamrl(monkeypatch, "simulate", *fleet, *files) == 0
    shown, said = capsys.readouterr()
    assert "curve.json is doubtful: repeats differ" in said and "has no per_context_token" in said
    assert "2 steps" in shown and "120 requests" in shown
    assert "skew-aware" in shown and "round-robin" not in shown


def rows(shown: str) -> dict[str, list[str]]:
    """A table's cells by those of its first two columns."""
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if line.startswith("│")]
    return {f"{row[0]}, {row[1]}": row[2:] for row in cells}


@pytest.mark.usefixtures("unplotted")
def test_instances_that_speculate_take_the_time_of_their_steps_over_the_tokens_of_one(
    some: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ["--policy", "least-loaded", "--out", tmp_path / "p.svg", "--acceptance", "0.5", "--most-drafts", "2"]
    assert streamrl(monkeypatch, "simulate", *some, *chosen) == 0
    assert f"{100 * 0.1 / 1.75:.1f}" in capsys.readouterr().out  # E(2) = 1.75 tokens in a step of 0.1 s


def test_whole_iterations_by_schedule(
    some: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = ["--train-rate", "160", "--reward-s", "1", "--weights-gb", "1", "--link-gbit", "8", "--link-ms", "500"]
    prices = ["--price", "2", "--trainer-price", "1.6"]
    chosen = ["--iterations", "3", "--policy", "least-loaded", "--over-issue", "1.5", "--out", tmp_path / "p.svg"]
    assert streamrl(monkeypatch, "simulate", *some, *stages, *prices, *chosen) == 0
    shown = capsys.readouterr().out
    assert "3 iterations of 16 requests" in shown and (tmp_path / "p.svg").exists()
    table = rows(shown)
    # generation 10, reward 1, training 10, transfer 1.5
    assert table["sync, least-loaded"][:3] == ["22.5 s", "55.6%", "55.6%"]
    assert table["sync, least-loaded"][3:] == [f"{16 / 22.5:.2f}", "0: 6", "1.4063"]
    stepping = ["--environment-s", "1", "--environment-processes", "4", "--schedule", "sync", "--iterations", "3"]
    more = ["--policy", "least-loaded", "--out", tmp_path / "p.svg"]
    assert streamrl(monkeypatch, "simulate", *some, *stages, *stepping, *more) == 0
    # all 16 samples end at once, and 4 processes then step for a second each
    assert rows(capsys.readouterr().out)["sync, least-loaded"][0] == "26.5 s"
    # the first two batches are issued under the weights of the start
    assert table["async, least-loaded"][4] == "0: 2, 1: 4"
    assert set(table) == {
        f"{name}, least-loaded" for name in ("sync", "sync+tail", "stream", "stream+tail", "one_step_off", "async")
    }


@pytest.mark.usefixtures("unplotted")
def test_colocated_rare_publications_and_rounds(
    some: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = ["--train-rate", "160", "--reward-s", "1", "--weights-gb", "1", "--link-gbit", "8", "--link-ms", "500"]
    common = [*some, *stages, "--policy", "least-loaded", "--out", tmp_path / "p.svg"]
    shared = ["--colocated-train-rate", "320", "--switch-s", "0.5", "--colocated-instances", "2"]
    rounds = ["--round-tokens", "40", "--over-issue", "1.5", "--max-age", "2"]
    assert streamrl(monkeypatch, "simulate", *common, "--iterations", "3", *shared, *rounds) == 0
    table = rows(capsys.readouterr().out)
    # generation 10, reward 1, training 5, two changes of turn
    assert table["colocated, least-loaded"][0] == "17.0 s"
    names = {f"{name}{suffix}" for name in ("sync", "stream") for suffix in ("", "+tail", "+partial")}
    assert set(table) == {f"{name}, least-loaded" for name in (*names, "colocated", "one_step_off", "async")}

    assert streamrl(monkeypatch, "simulate", *common, "--iterations", "4", "--sync-every", "2") == 0
    table = rows(capsys.readouterr().out)
    # two batches are generated together in 10, rewarded in 1, trained in 20 and sent in 1.5
    assert table["sync, least-loaded"][0] == "16.2 s" and table["sync, least-loaded"][4] == "0: 4, 1: 4"
    assert set(table) == {f"{name}, least-loaded" for name in ("sync", "stream", "async")}


def test_a_recorded_run_is_repeated_for_more_iterations_than_it_has(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    some = ["--trace", run, "--iterations", "5", "--train-rate", "1000", "--schedule", "one_step_off"]
    assert streamrl(monkeypatch, "simulate", *some, "--out", tmp_path / "p.svg") == 0
    shown = capsys.readouterr().out
    assert "5 iterations of 60 requests" in shown
    assert set(rows(shown)) == {"one_step_off, least-loaded", "one_step_off, skew-aware"}


ITERATIONS = ["--iterations", "3", "--train-rate", "9"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--iterations", "3"], "--iterations needs --train-rate"),
        (["--schedule", "sync"], "--schedule needs --iterations"),
        (["--round-tokens", "9"], "--round-tokens needs --iterations"),
        ([*ITERATIONS, "--schedule", "colocated"], "--schedule colocated needs --colocated-train-rate"),
        (
            [*ITERATIONS, "--schedule", "sync", "--colocated-train-rate", "9"],
            "is for --schedule colocated; chosen: sync",
        ),
        ([*ITERATIONS, "--colocated-instances", "9"], "--colocated-instances needs --colocated-train-rate"),
        ([*ITERATIONS, "--schedule", "one_step_off", "--sync-every", "2"], "one_step_off publishes after every step"),
        ([*ITERATIONS, "--sync-every", "3"], "weights every 3 steps need a staleness of 2, got 1"),
        ([*ITERATIONS, "--max-age", "3"], "--max-age needs --over-issue or --round-tokens"),
        (
            [*ITERATIONS, "--schedule", "async", "--round-tokens", "9"],
            "--round-tokens goes with sync or stream",
        ),
        ([*ITERATIONS, "--sync-every", "2", "--over-issue", "2"], "--over-issue goes with sync or stream"),
        (
            [*ITERATIONS, "--schedule", "colocated", "--colocated-train-rate", "9", "--over-issue", "2"],
            "--over-issue goes with sync or stream",
        ),
        *(
            ([option, value], f"{option} needs --iterations: without it only generation is simulated")
            for option, value in (
                *(("--environment-s", "2"), ("--environment-processes", "2"), ("--trainer-price", "2")),
                *(("--reward-s", "1"), ("--switch-s", "1"), ("--weights-gb", "1"), ("--link-gbit", "1")),
                *(("--link-ms", "1"), ("--max-staleness", "1"), ("--sync-every", "1")),
            )
        ),
        (["--most-drafts", "2"], "--most-drafts needs --acceptance"),
        (["--trace", "x", "--ranker", "r.lgb", "--noise", "0.1"], "--noise does not go with --ranker"),
        ([*ITERATIONS, "--environment-s", "2", "--over-issue", "2"], "--over-issue does not go with --environment-s"),
        (["--lengths", "zipf:2"], "--lengths zipf:2: expected lognormal:MU,SIGMA"),
        (["--lengths", "lognormal:7"], "expected lognormal:MU,SIGMA"),
        (["--lengths", "lognormal:7.6,nan"], "of 1 token or more), e.g. lognormal:7.6,0.8"),
        (["--lengths", "uniform:1,inf"], "expected lognormal:MU,SIGMA"),
        (["--lengths", "uniform:-1e308,1e308"], "expected lognormal:MU,SIGMA"),
        (["--policy", "best"], "--policy best: there is no such policy; expected one of random"),
        (["--device", "H21"], "--device H21: unknown device"),
        (["--device", "RTX4090", "--lengths", "constant:200000", "--limit", "200000"], "do not hold a 7B model and a"),
        (["--curve", "falls.json"], '--curve falls.json: "step_seconds": a step of batch 8 took 10 ms'),
        (["--curve", "no.json"], "--curve no.json: no such file; streamrl calibrate writes such a file"),
        (["--curve", "."], "--curve .: this is a folder, expected a file;"),
        (["--curve", "empty.json"], "--curve empty.json: not valid JSON: "),
        (["--curve", "rubbish.bin"], "--curve rubbish.bin: not UTF-8 text (byte 128);"),
        (["--trace", "rubbish.bin"], "--trace rubbish.bin: cannot be read as Parquet: "),
        (["--trace", "broken"], f"--trace {Path('broken', 'step_1.parquet')}: cannot be read as Parquet: "),
        (["--trace", "none.parquet", "--ranker", "no.lgb"], "error: --ranker no.lgb: no such ranker file"),
        (
            ["--requests", "8", "--out", "no/plot.svg"],
            "--out no/plot.svg: its folder does not exist",
        ),
        (["--ranker", "r.lgb"], "--ranker needs --trace"),
        (["--trace", "nowhere"], "--trace nowhere: no rollouts"),
        *(
            (["--trace", "none.parquet", option, value], f"{option} does not go with --trace")
            for option, value in (("--lengths", "constant:5"), ("--requests", "1024"), ("--limit", "20000"))
        ),
        (["--curve", "falls.json", "--device", "H800"], "--device does not go with --curve"),
        *(
            (["--lengths", text], f"--lengths {text}: expected lognormal:MU,SIGMA")
            for text in (
                *("constant:5,6", "constant:-4", "constant:0.5", "constant:nan", "constant:", "uniform:5"),
                *("uniform:9,2", "uniform:-1,2", "uniform:1,inf", "lognormal:7,-1", "lognormal:inf,1"),
            )
        ),
        *(
            ([option, value], f"'{option}': {value} is not ")
            for option in (
                *("--noise", "--acceptance", "--price", "--over-issue", "--train-rate", "--colocated-train-rate"),
                *("--switch-s", "--weights-gb", "--link-gbit", "--link-ms", "--reward-s", "--environment-s"),
                "--trainer-price",
            )
            for value in ("nan", "inf")
        ),
        ([*ITERATIONS, "--requests", "1000000"], "7,000,000 requests or more would be simulated"),
        (["--trace", "none.parquet"], "--trace none.parquet: its rollouts have no rows"),
        ([*ITERATIONS, "--trace", "none.parquet"], "--trace none.parquet: its rollouts have no rows"),
    ],
)
def test_bad_input_gets_one_message(
    arguments: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.Table.from_pylist([], schema=SCHEMA), "none.parquet")
    for name in ("rubbish.bin", "broken/step_1.parquet"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(bytes(range(256)))
    Path("empty.json").touch()
    Path("falls.json").write_text(json.dumps({"step_seconds": {"1": 0.05, "8": 0.01}}))
    assert streamrl(monkeypatch, "simulate", *arguments) == 2
    error = capsys.readouterr().err
    assert complaint in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("name", "written"), [("plot", "plot.svg"), ("plot.pdf", "plot.pdf"), ("plot.PNG", "plot.PNG")]
)
def test_the_plot_has_the_name_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, written: str
) -> None:
    monkeypatch.chdir(tmp_path)
    some = ["--requests", "4", "--instances", "2", "--policy", "least-loaded"]
    assert streamrl(monkeypatch, "simulate", *some, "--out", name) == 0
    assert capsys.readouterr().out.endswith(f"plot written to {written}\n")
    assert [path.name for path in tmp_path.iterdir()] == [written]


def test_an_ending_that_is_no_format_of_pictures_is_refused_before_the_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(simulate, "_compare_policies", lambda *_: pytest.fail("it simulates"))
    assert streamrl(monkeypatch, "simulate", "--requests", "4", "--out", "fig.v2") == 2
    error = capsys.readouterr().err
    assert "--out fig.v2: .v2 is no format of pictures; expected one of " in error and ".png" in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["d", "e"])
def test_a_folder_is_no_name_of_a_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("d", "e.svg"):
        Path(folder).mkdir()
    assert streamrl(monkeypatch, "simulate", "--requests", "4", "--out", name) == 2
    assert "is a folder; expected a file's name" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "e.svg"]
