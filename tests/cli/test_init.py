"""`streamrl init`: what it writes is a run that can be launched, and what it cannot use is refused beforehand."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import click.termui
import pytest
from click.testing import CliRunner, Result

from examples.rewards import right_and_short
from streamrl.cli.init import command
from streamrl.cli.launch import command as launch
from streamrl.config.load import load_cluster, load_run
from streamrl.config.tasks import FileTask
from streamrl.errors import UserError
from streamrl.machine import gpus
from streamrl.machine.gpus import Gpu
from streamrl.scaffold.project_files import shipped
from streamrl.tasks.files import TaskRow, load_rows
from tests.cli.calling import streamrl
from tests.tiny_model import save_tiny_model


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def init(*arguments: str, typed: str | None = None) -> Result:
    return CliRunner().invoke(command, list(arguments), input=typed)


def test_three_answers_make_a_run_that_passes_a_dry_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model(folder / "model")
    done = init("mine", typed="model\nexample\n0\n")
    assert done.exit_code == 0, done.output
    assert done.output.count("]: ") == 3
    monkeypatch.chdir("mine")
    monkeypatch.syspath_prepend(str(folder / "mine"))
    files = ["--cluster", "cluster.yaml", "--run", "run.yaml"]
    planned = CliRunner().invoke(launch, [*files, "--dry-run"], catch_exceptions=False)
    assert planned.exit_code == 0, planned.output


def test_the_written_reward_scores_the_shipped_questions(folder: Path) -> None:
    assert init("--model", "smollm2-135m", "--prompts", "example", "--gpus", "0").exit_code == 0
    names: dict[str, object] = {}
    exec((folder / "rewards.py").read_text(), names)
    score = names["score"]
    assert callable(score)
    for line in (folder / "questions.jsonl").read_text().splitlines():
        answer = json.loads(line)["answer"]
        assert score(f"That is 3 and {answer}.", prompt="", answer=answer) == 1.0
        assert score(f"{answer}1", prompt="", answer=answer) == 0.0


def test_prompts_without_answers_ask_for_a_reward_of_ones_own(folder: Path) -> None:
    (folder / "mine.jsonl").write_text('{"prompt": "Tell a story."}\n')
    done = init("p", "--model", "smollm2-135m", "--prompts", "mine.jsonl", "--gpus", "0")
    assert done.exit_code == 0 and "warning: no answers found in mine.jsonl: write your own score" in done.output
    names: dict[str, Any] = {}
    exec((folder / "p" / "rewards.py").read_text(), names)
    with pytest.raises(NotImplementedError, match="write your own score in rewards"):
        names["score"]("It was.", prompt="Tell a story.", answer="")


def test_columns_of_a_file_are_found_and_paths_are_seen_from_the_projects_folder(folder: Path) -> None:
    (folder / "own.jsonl").write_text(json.dumps({"id": 1, "problem": "1+1", "solution": "2"}) + "\n")
    assert init("a/b", "--model", "org/name: #1", "--prompts", "own.jsonl", "--gpus", "0").exit_code == 0
    run = load_run(folder / "a" / "b" / "run.yaml")
    (task,) = run.tasks
    assert isinstance(task, FileTask)
    assert (task.path, task.prompt_column, task.answer_column) == ("../../own.jsonl", "problem", "solution")
    assert run.model.path == "org/name: #1"
    assert not (folder / "a" / "b" / "questions.jsonl").exists()


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        ("so 48 + 24 = 72.", "48/2 = <<48/2=24>>24\nShe sold 24+48 = 72.\n#### 72", True),
        ("so 48 + 24 = 72.", "#### 7", False),
        ("It costs $1,234.", "1,234", True),
        ("It costs $1,234.", 1234, True),
        ("It costs 1234.50", "#### 1,234.5", True),
        ("It costs 1,234", "234", False),
        ("1,2,72", "72", True),
        ("3,1415", "1415", True),
        ("It is 72", 72.0, True),
        ("It is 72.0", "72", True),
        ("It is -72", "72", False),
        ("It is -72", -72, True),
        ("It is 0.00001", 1e-05, True),
        ("It is 5", 1e-05, False),
        ("9007199254740993", 9007199254740992, False),
        ("none", "none", False),
        ("It is 3", "none", False),
        ("", "3", False),
    ],
)
def test_a_reward_compares_numbers_not_texts(completion: str, answer: object, right: bool) -> None:
    names: dict[str, Any] = {}
    exec(shipped("rewards.txt").read_text(), names)
    assert names["score"](completion, prompt="", answer=answer) == float(right)
    short = right_and_short(completion, prompt="", answer=answer)
    assert short == pytest.approx(float(right) - 0.001 * len(completion), abs=1e-9)


@pytest.mark.parametrize("start", [b"\xef\xbb\xbf", b"\n  \r\n"])
def test_a_file_may_begin_with_what_a_run_skips(start: bytes, folder: Path) -> None:
    (folder / "own.jsonl").write_bytes(start + '{"question": "½ + ½", "answer": "1"}\n'.encode())
    assert init("--model", "m", "--prompts", "own.jsonl", "--gpus", "0").exit_code == 0
    (task,) = load_run("run.yaml").tasks
    assert isinstance(task, FileTask)
    assert (task.prompt_column, task.answer_column) == ("question", "answer")
    assert load_rows(task) == [TaskRow("½ + ½", "1")]


def test_paths_lead_to_their_files_from_a_project_behind_a_link(folder: Path) -> None:
    (folder / "far/away").mkdir(parents=True)
    (folder / "link").symlink_to("far/away")
    (folder / "blob").write_text('{"prompt": "1+1", "answer": "2"}\n')
    (folder / "data").mkdir()
    (folder / "data/own.jsonl").symlink_to("../blob")
    save_tiny_model(folder / "model")
    done = init("link/mine", "--model", "model", "--prompts", "data/own.jsonl", "--gpus", "0")
    assert done.exit_code == 0, done.output
    run = load_run(folder / "link/mine/run.yaml")
    (task,) = run.tasks
    assert isinstance(task, FileTask)
    assert (task.path, run.model.path) == ("../../../data/own.jsonl", "../../../model")


def test_commands_that_are_printed_can_be_pasted(folder: Path) -> None:
    done = init("my project", "--model", "smollm2-135m", "--prompts", "example", "--gpus", "0")
    assert [line.strip() for line in done.output.splitlines()[1:4]] == [
        "next:",
        "cd 'my project'",
        "streamrl fetch-model smollm2-135m",
    ]


@pytest.mark.parametrize(
    ("gpus", "ranks", "replicas", "schedule"), [(1, 1, 1, "colocated"), (2, 1, 1, "stream"), (5, 2, 3, "stream")]
)
def test_gpus_are_shared_out_between_training_and_generation(
    gpus: int, ranks: int, replicas: int, schedule: str, folder: Path
) -> None:
    assert init("--model", "smollm2-135m", "--prompts", "example", "--gpus", str(gpus)).exit_code == 0
    here = load_cluster("cluster.yaml").sites["here"]
    assert here.trainer is not None
    assert (here.trainer.ranks, here.generation[0].replicas) == (ranks, replicas)
    assert load_run("run.yaml").schedule.name == schedule


@pytest.mark.parametrize(
    ("names", "gpu"),
    [
        (["NVIDIA H100 80GB HBM3"] * 2, "H100"),
        (["NVIDIA A100-SXM4-80GB"] * 2, "A100-80"),
        (["NVIDIA GeForce RTX 4090"] * 2, "RTX4090"),
        (["NVIDIA A100-SXM4-40GB"] * 2, "A100-SXM4-40GB"),
        (["NVIDIA L40S", "NVIDIA H200"], None),
        ([], None),
    ],
)
def test_a_plan_knows_the_type_of_the_gpus_that_are_here_or_asks_for_it(
    names: list[str], gpu: str | None, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [Gpu(number, f"GPU-{number}", name, 0.0, 0.0, "") for number, name in enumerate(names)]
    monkeypatch.setattr(gpus, "gpus_here", lambda: found)
    assert init("--model", "smollm2-135m", "--prompts", "example", "--gpus", "8").exit_code == 0
    here = load_cluster("cluster.yaml").sites["here"]
    assert here.trainer is not None
    assert here.trainer.gpu == here.generation[0].gpu == (gpu or "cpu")
    planned = streamrl(monkeypatch, "plan", "--cluster", "cluster.yaml", "--lengths", "1k")
    told = capsys.readouterr()
    if gpu is None:
        assert planned == 2 and "trainer: gpu is 'cpu' with hardware: cuda; expected the GPU type" in told.err
    elif gpu == "A100-SXM4-40GB":
        assert planned == 2 and f"unknown device '{gpu}'" in told.err
    else:
        assert planned == 0 and gpu in told.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompts", "none.jsonl"], "none.jsonl: cannot be read: No such file"),
        (["--prompts", "list.jsonl"], "list.jsonl:1: expected a JSON object, found: [1]"),
        (["--prompts", "text.jsonl"], "text.jsonl:1: expected a JSON object, found: not valid JSON"),
        (["--prompts", "late.jsonl"], "late.jsonl:3: expected a JSON object, found: 5"),
        (["--prompts", "blank.jsonl"], "blank.jsonl: expected a file with one JSON object per line, found no line"),
        (["--prompts", "bytes.jsonl"], "bytes.jsonl: cannot be read: not UTF-8 text; expected a file with one JSON"),
        (["--prompts", "odd.jsonl"], "Name it with --prompt-column; the file has: a, b"),
        (["--prompts", "odd.jsonl", "--prompt-column", "c"], "--prompt-column c: odd.jsonl has no such column"),
        (["--prompts", "example", "--answer-column", "c"], "name it with --prompts"),
        (["odd.jsonl", "--prompts", "example"], "odd.jsonl is a file, expected a folder"),
    ],
)
def test_bad_input_is_refused_and_nothing_is_written(arguments: list[str], words: str, folder: Path) -> None:
    (folder / "list.jsonl").write_text("[1]\n")
    (folder / "text.jsonl").write_text("1+1\n")
    (folder / "late.jsonl").write_text("\n \n5\n")
    (folder / "blank.jsonl").write_text("\n\n")
    (folder / "bytes.jsonl").write_bytes(b"PAR1\xff\xfe\n")
    (folder / "odd.jsonl").write_text('{"a": 1, "b": 2}\n')
    done = init(*arguments, "--model", "m", "--gpus", "0")
    assert isinstance(done.exception, UserError) and words in str(done.exception)
    assert not list(folder.glob("**/*.yaml"))


ANSWERS = {"--model": "smollm2-135m", "--prompts": "example", "--gpus": "0"}


@pytest.mark.parametrize("missing", list(ANSWERS))
@pytest.mark.parametrize("stdin", ["ended", "closed", "unreadable"])
def test_a_question_that_nobody_can_answer_names_its_option(
    missing: str, stdin: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [word for option, answer in ANSWERS.items() if option != missing for word in (option, answer)]
    with (folder / "written").open("w") as unreadable:
        monkeypatch.setattr(sys, "stdin", {"ended": io.StringIO(), "closed": None, "unreadable": unreadable}[stdin])
        assert streamrl(monkeypatch, "init", "mine", *given) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: no answer to ") and error.endswith(f": give {missing}\n")
    assert not (folder / "mine").exists()


def test_a_question_can_be_interrupted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(click.termui, "visible_prompt_func", interrupted)
    assert streamrl(monkeypatch, "init", "mine") == 130
    assert "give --model" not in capsys.readouterr().err


def test_no_file_is_overwritten(folder: Path) -> None:
    (folder / "rewards.py").write_text("mine = 1\n")
    done = init("--model", "m", "--prompts", "example", "--gpus", "0")
    assert isinstance(done.exception, UserError) and "has rewards.py already" in str(done.exception)
    assert (folder / "rewards.py").read_text() == "mine = 1\n" and not (folder / "run.yaml").exists()


@pytest.mark.parametrize(
    ("folder_name", "name"),
    [("m2", "m2"), ("My run: é!", "My-run"), ("...", "run"), (".hidden", "hidden"), ("a" * 80, "a" * 60), ("7", "7")],
)
def test_a_run_is_named_after_its_folder(folder: Path, folder_name: str, name: str) -> None:
    assert init(folder_name, "--model", "smollm2-135m", "--prompts", "example", "--gpus", "0").exit_code == 0
    assert load_run(folder / folder_name / "run.yaml").name == name


def test_a_model_that_is_not_here_is_told_as_a_launch_would(folder: Path) -> None:
    done = init("new", "--model", "nosuch", "--prompts", "example", "--gpus", "0")
    assert done.exit_code == 0
    assert "warning: --model: nosuch is neither a folder, nor a hub id (owner/name), nor one of: smollm2" in done.stderr
    for good in ("org/model", "smollm2-135m"):  # a hub is not asked, and what is to be fetched is among the next steps
        done = init(f"with-{good.partition('/')[0]}", "--model", good, "--prompts", "example", "--gpus", "0")
        assert done.exit_code == 0 and not done.stderr
