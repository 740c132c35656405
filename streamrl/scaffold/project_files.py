"""The files of a new project: cluster file, run file, reward function and, without prompts of one's own, questions.

Templates are in `files/`, beside this module, and come with the wheel; those that are also examples of the repository
are links to them there, so that each text exists once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import yaml

from streamrl.errors import UserError

FILES = Path(__file__).parent / "files"
QUESTIONS = "questions.jsonl"
PROMPT_COLUMNS = ("prompt", "question", "problem", "query", "instruction", "input", "messages")
ANSWER_COLUMNS = ("answer", "solution", "ground_truth", "target", "label", "output")


def shipped(name: str) -> Path:
    """Return the path of a file that comes with the package, such as `demo.yaml`."""
    return FILES / name


@dataclass(frozen=True)
class Prompts:
    """A file of prompts, and the columns of it that are used."""

    path: str
    """As the run file names it: relative to the project's folder, or absolute."""
    prompt_column: str
    answer_column: str | None


@dataclass(frozen=True)
class ProjectChoices:
    """What `streamrl init` asks for."""

    name: str
    """Name of the run, safe as that of a folder."""
    model: str
    prompts: Prompts | None
    """None: the questions that come with the package."""
    gpus: int
    """GPUs of this machine that the run uses; 0: CPUs."""
    gpu: str | None = None
    """Their type; None: unknown, and left to whoever edits the cluster file."""


def read_columns(path: Path, prompt_column: str | None = None, answer_column: str | None = None) -> Prompts:
    """Find the columns of a JSONL file of prompts by the names that data sets use.

    Args:
        path: file with one JSON object per line.
        prompt_column: column with the prompt; None: the first of `PROMPT_COLUMNS` that the file has.
        answer_column: column with the answer; None: the first of `ANSWER_COLUMNS` that it has, or none.

    Raises:
        UserError: the file cannot be read, its first row is no JSON object, or a column is missing.
    """
    row = _first_row(path)
    there = ", ".join(map(str, row))
    for option, column in (("--prompt-column", prompt_column), ("--answer-column", answer_column)):
        if column is not None and column not in row:
            raise UserError(f"{option} {column}: {path} has no such column; it has: {there}")
    prompt = prompt_column or next((name for name in PROMPT_COLUMNS if name in row), None)
    if prompt is None:
        raise UserError(f"{path}: which column has the prompt? Name it with --prompt-column; the file has: {there}")
    answer = answer_column or next((name for name in ANSWER_COLUMNS if name in row), None)
    return Prompts(str(path), prompt, answer)


def _first_row(path: Path) -> dict[str, Any]:
    """Return the first row of a JSONL file as a run reads it: empty lines and a byte order mark are skipped."""
    expected = "expected a file with one JSON object per line"
    try:
        with path.open("rb") as file:
            number, line = next(((number, line) for number, line in enumerate(file, 1) if line.strip()), (0, b""))
        if not number:
            raise UserError(f"{path}: {expected}, found no line")
        row = json.loads(line.decode("utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"{path}: cannot be read: {reason}; {expected}") from error
    except ValueError as error:
        raise UserError(f"{path}:{number}: expected a JSON object, found: not valid JSON ({error})") from error
    if not isinstance(row, dict):
        raise UserError(f"{path}:{number}: expected a JSON object, found: {json.dumps(row)[:40]}")
    return row


def project_files(choices: ProjectChoices) -> dict[str, str]:
    """Return the text of each file of a new project, by its name."""
    prompts = choices.prompts or Prompts(QUESTIONS, "question", "answer")
    schedule = "colocated" if choices.gpus == 1 else "stream"  # one GPU has to take turns
    values = {
        "name": choices.name,
        "model": choices.model,
        "prompts": prompts.path,
        "prompt_column": prompts.prompt_column,
        "answer_column": prompts.answer_column,
        "schedule": schedule,
    }
    files = {
        "cluster.yaml": _cluster(choices.gpus, choices.gpu),
        "run.yaml": _fill("run.yaml", values),
        "rewards.py": shipped("rewards.txt" if prompts.answer_column else "rewards_without_answers.txt").read_text(
            encoding="utf-8"
        ),
    }
    if choices.prompts is None:
        files[QUESTIONS] = shipped(QUESTIONS).read_text(encoding="utf-8")
    return files


def _cluster(gpus: int, gpu: str | None) -> str:
    """Return the cluster file of this machine; half of the GPUs train, and one generates and trains in turns."""
    if not gpus:
        return shipped("local.yaml").read_text(encoding="utf-8")
    ranks = max(1, gpus // 2)
    text = _fill("gpus.yaml", {"ranks": ranks, "replicas": max(1, gpus - ranks), "gpu": gpu or "H100"})
    return text if gpu else text.replace(" gpu: ", " # gpu: ")  # an example


def _fill(name: str, values: dict[str, Any]) -> str:
    text = Template(shipped(name).read_text(encoding="utf-8"))
    return text.substitute({key: _scalar(value) for key, value in values.items()})


def _scalar(value: str | int | None) -> str:
    """Write a value as YAML; text is quoted only where it would be read as something else."""
    if not isinstance(value, str):
        return json.dumps(value)
    try:
        plain = yaml.safe_load(f"key: {value}\n") == {"key": value}
    except yaml.YAMLError:
        plain = False
    return value if plain else json.dumps(value)
