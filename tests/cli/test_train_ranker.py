"""`streamrl train-ranker`: reads what a run wrote, shows and keeps its figures, one message on bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ranker.model import LengthModel
from streamrl.rollouts.rollout_store import SCHEMA
from tests.cli.calling import streamrl
from tests.ranker.synthetic import small_reasoner


def two_runs(tmp_path: Path, prompts: int) -> list[Path]:
    """The rollouts folders of two runs of two steps, with two answers to each of so many prompts a step."""
    folders = []
    for n in range(2):
        folder = tmp_path / f"run{n}" / "rollouts"
        folder.mkdir(parents=True)
        for step in (1, 2):
            rows = [row | {"step": step, "epoch": 1} for row in small_reasoner(prompts, 2, 10 * n + step).rows]
            pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), folder / f"step_{step:06d}.parquet")
        folders.append(folder)
    return folders


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return two_runs(tmp_path, 6)


def test_several_runs_make_one_ranker(
    tmp_path: Path, runs: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = ["--rollouts", runs[0], "--rollouts", runs[1]]
    out = tmp_path / "ranker.lgb"
    assert streamrl(monkeypatch, "train-ranker", *paths, "--out", out, "--report", tmp_path / "r.html") == 0
    shown = capsys.readouterr().out
    assert "48 samples of" in shown and "4 tasks" in shown
    for words in (
        "(kept)",
        "random",
        "mean",
        "this ranker",
        "left",
        "limit",
        str(out),
    ):
        assert words in shown
    assert LengthModel.load(out).report.samples == 48
    assert "of the oracle's saving" in " ".join(shown.split()) and "least-loaded 1.00, ours with these" in shown
    assert "ties of equal lengths" in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_the_file_says_which_model_wrote_the_rollouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # too few to be learned from, as it is asked eight times; only the last rollouts are not
    runs, out = two_runs(tmp_path, 1), tmp_path / "r.lgb"

    def told(*arguments: object) -> tuple[tuple[str, ...], str]:
        assert streamrl(monkeypatch, "train-ranker", "--rollouts", *arguments, "--out", out) == 0
        return LengthModel.load(out).written_by, " ".join(capsys.readouterr().out.split())

    written_by, shown = told(runs[0])
    assert written_by == () and "not known which language model wrote these rollouts" in shown
    (runs[0].parent / "config.yaml").write_text("run: {model: {path: tiny}}")
    written_by, shown = told(runs[0])
    assert written_by == ("tiny",) and "language model wrote" not in shown
    monkeypatch.chdir(runs[0])
    assert told(".")[0] == told("step_000001.parquet")[0] == ("tiny",)
    elsewhere = runs[0].rename(tmp_path / "other_disk")
    runs[0].symlink_to(elsewhere)
    assert told(runs[0])[0] == ("tiny",)
    assert told(*runs)[0] == ()  # the second run does not say
    (runs[1].parent / "config.yaml").write_text("run: {model: {path: other}}")
    written_by, shown = told(*runs)
    assert written_by == ("other", "tiny") and "rollouts of several models (other, tiny)" in shown
    assert told(*runs, "--model", "mine")[0] == ("mine",)
    assert told(*two_runs(tmp_path / "more", 3), "--model", "mine")[0] == ("mine",)


def test_the_report_of_several_runs_behind_one_option_is_json_on_request(
    tmp_path: Path, runs: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, copy = tmp_path / "ranker.lgb", tmp_path / "r.json"
    assert streamrl(monkeypatch, "train-ranker", "--rollouts", *runs, "--out", out, "--json", "--report", copy) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == json.loads(copy.read_text()) == LengthModel.load(out).report.to_json()
    assert shown["samples"] == 48


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "r"], "no rollouts"),
        (["--rollouts", "nowhere", "--out", "r"], "nowhere: no such file or folder"),
        (["--rollouts", "bad.jsonl", "--out", "r"], "bad.jsonl: no column 'output_length'"),
        (["--rollouts", "good.jsonl", "--out", "no/r"], "--out no/r: its folder does not exist"),
        (["--rollouts", "good.jsonl", "--out", "."], "--out .: is a folder"),
        (["--rollouts", "good.jsonl", "--out", "r", "--report", "r.pdf"], "ends in .html or .json"),
    ],
)
def test_bad_input_is_one_message_and_no_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"prompt": "p"}\n')
    (tmp_path / "good.jsonl").write_text('{"prompt": "p", "output_length": 4}\n')
    assert streamrl(monkeypatch, "train-ranker", *arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err and "Traceback" not in captured.err and not captured.out
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mine.jsonl", "--out", "mine.jsonl"], "--out mine.jsonl: .jsonl is an ending of rollouts"),
        (["--out", "mine.jsonl", "also.jsonl"], "--out mine.jsonl: .jsonl is an ending of rollouts"),  # a glob
        (["mine.jsonl", "--out", "new.parquet"], "--out new.parquet: .parquet is an ending of rollouts"),
        (["mine.jsonl", "--out", "link.lgb"], "--out link.lgb: is one of the rollouts"),
        ([".", "--out", "r", "--report", "link.html"], "--report link.html: is one of the rollouts"),
        (["mine.jsonl", "--out", "r.json", "--report", "./r.json"], "--report r.json: is the file of --out, too"),
    ],
)
def test_rollouts_are_not_written_over(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = "".join(json.dumps({"prompt": "p", "output_length": n}) + "\n" for n in range(10, 20))
    for name in ("mine.jsonl", "also.jsonl"):
        (tmp_path / name).write_text(rows)
    for name in ("link.lgb", "link.html"):
        (tmp_path / name).symlink_to("mine.jsonl")
    there = sorted(tmp_path.iterdir())
    assert streamrl(monkeypatch, "train-ranker", *arguments) == 2
    assert message in capsys.readouterr().err
    assert (tmp_path / "mine.jsonl").read_text() == (tmp_path / "also.jsonl").read_text() == rows
    assert sorted(tmp_path.iterdir()) == there


def test_a_single_distinct_prompt_is_reported_and_still_gives_a_ranker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "".join(json.dumps({"prompt": "p", "output_length": n}) + "\n" for n in range(10, 20))
    (tmp_path / "x.jsonl").write_text(rows)
    assert streamrl(monkeypatch, "train-ranker", "--rollouts", tmp_path / "x.jsonl", "--out", tmp_path / "r") == 0
    assert "1 distinct prompt: no split by prompt is possible" in " ".join(capsys.readouterr().out.split())
    assert LengthModel.load(tmp_path / "r").predict(["q"]).quantiles[0, 6] == pytest.approx(14.5, rel=0.05)


@pytest.mark.parametrize("limited", [False, True])
def test_groups_are_not_called_prompts_and_a_limit_is_named_only_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], limited: bool
) -> None:
    """Twelve prompts, in each of two steps again."""
    monkeypatch.setenv("COLUMNS", "200")
    rollouts = tmp_path / "rollouts.jsonl"
    rows = [
        {
            "prompt": f"question {number} {'long ' * number}",
            "output_length": 10 + 20 * number + step + 3 * sample,
            "step": step,
            "finish_reason": "length" if limited and number == 11 else "stop",
        }
        for step in range(2)
        for number in range(12)
        for sample in range(4)
    ]
    rollouts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--rollouts", rollouts, "--out", tmp_path / "r.lgb", "--threads", "1")
    assert streamrl(monkeypatch, "train-ranker", *options) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "96 samples of 12 prompts" in shown and "on average of 1 batch of 24 groups (96 requests in all)" in shown
    assert "limit for any ranking: ties of equal lengths" in shown
    assert ("at the length limit" in shown) == limited
