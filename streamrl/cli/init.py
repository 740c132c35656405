"""`streamrl init`: writes the files of a new project."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from streamrl.errors import UserError, as_typed

if TYPE_CHECKING:
    from streamrl.scaffold.project_files import Prompts

EXAMPLE = "example"
"""The answer to the question for prompts that asks for the questions that come with the package."""


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), default=Path())
@click.option("--model", help="folder in HF format, hub id (owner/name), or a name of `streamrl fetch-model`")
@click.option("--prompts", help="file with one JSON object per line; 'example': 40 questions that come with streamrl")
@click.option("--gpus", type=click.IntRange(0), help="GPUs of this machine to use; 0: CPUs")
@click.option("--prompt-column", metavar="NAME", help="column with the prompt (default: found by its name)")
@click.option("--answer-column", metavar="NAME", help="column with the answer (default: found by its name)")
def command(
    folder: Path,
    model: str | None,
    prompts: str | None,
    gpus: int | None,
    prompt_column: str | None,
    answer_column: str | None,
) -> None:
    """Write a cluster file, a run file and a reward function into FOLDER, with comments.

    Asks three questions: which model, which prompts, how many GPUs. An option answers its question beforehand. No
    file is overwritten.

    \b
    Examples:
      streamrl init mine
      streamrl init mine --model smollm2-135m --prompts example --gpus 0
      streamrl init mine --model Qwen/Qwen2.5-0.5B-Instruct --prompts gsm8k.jsonl --gpus 2
    """
    from streamrl.machine.gpus import gpu_names
    from streamrl.machine.known_models import KNOWN_MODELS
    from streamrl.machine.model_files import on_hub, resolve_model
    from streamrl.scaffold.project_files import ProjectChoices, project_files

    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file, expected a folder")
    if model is None:
        model = _asked("--model", "Model (a folder, a hub id, or a known name)", default=next(iter(KNOWN_MODELS)))
    if prompts is None:
        prompts = _asked("--prompts", "Prompts (a JSONL file)", default=EXAMPLE)
    if gpus is None:
        most = len(gpu_names())
        gpus = _asked("--gpus", "GPUs of this machine (0: CPUs)", default=most, type=click.IntRange(0))
    chosen = _chosen_prompts(folder, prompts, prompt_column, answer_column)
    missing = ""
    if model not in KNOWN_MODELS and not on_hub(model):
        try:
            resolve_model(model, "--model")
        except UserError as error:
            missing = str(error)
    if os.path.isdir(model):
        model = _seen_from(folder, Path(model))
    texts = project_files(ProjectChoices(_name_for(folder), model, chosen, gpus, _type_here() if gpus else None))
    if there := [name for name in texts if os.path.lexists(folder / name)]:
        raise UserError(f"{folder} has {', '.join(there)} already, and nothing is overwritten; name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            with (folder / name).open("x", encoding="utf-8") as file:  # never through a link
                file.write(text)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from error
    if chosen is not None and chosen.answer_column is None:
        click.echo(f"warning: no answers found in {prompts}: write your own score in rewards.py", err=True)
    if missing:
        click.echo(f"warning: {missing}", err=True)
    click.echo(f"wrote {', '.join(str(folder / name) for name in texts)}")
    steps = [] if folder.resolve() == Path.cwd() else [as_typed("cd", folder)]
    steps += [as_typed("streamrl", "fetch-model", model)] if model in KNOWN_MODELS else []
    launch = "streamrl launch --cluster cluster.yaml --run run.yaml"
    for line in ("next:", *steps, f"{launch} --dry-run", launch):
        click.echo(line if line == "next:" else f"  {line}")


def _name_for(folder: Path) -> str:
    """Return the name of the project's runs: the folder's, with what no run's name may have replaced."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", folder.resolve().name)[:60].strip("-.") or "run"


def _type_here() -> str | None:
    """Return the type of this machine's GPUs; None: it has none, or they are unknown."""
    from streamrl.machine.gpus import gpu_type, gpus_here

    try:
        return gpu_type(gpus_here())
    except UserError:
        return None  # the files may be for another machine


def _asked(option: str, question: str, **how: Any) -> Any:
    """Ask a question that an option would have answered; return the answer.

    Raises:
        UserError: there is nobody to answer: the input has ended, or cannot be read.
        click.Abort: the user stopped the command.
    """
    try:
        if sys.stdin is not None:
            return click.prompt(question, **how)
    except (click.Abort, OSError) as error:
        if isinstance(error, click.Abort) and not isinstance(error.__context__, EOFError):
            raise
        click.echo()  # the question's line has no end
    raise UserError(f"no answer to {question!r}: give {option}")


def _chosen_prompts(folder: Path, answer: str, prompt_column: str | None, answer_column: str | None) -> Prompts | None:
    """Return the prompts that were chosen, as the run file names them; None: those that come with the package."""
    from dataclasses import replace

    from streamrl.scaffold.project_files import read_columns

    if answer == EXAMPLE:
        if prompt_column or answer_column:
            raise UserError("--prompt-column and --answer-column are columns of a file: name it with --prompts")
        return None
    found = read_columns(Path(answer), prompt_column, answer_column)
    return replace(found, path=_seen_from(folder, Path(answer)))


def _seen_from(folder: Path, path: Path) -> str:
    """Return a path that the user has given as it is seen from the project's folder."""
    if path.is_absolute():
        return str(path)
    real = path.parent.resolve() / path.name  # its own name stays, of which a run reads the kind of file
    return os.path.relpath(real, folder.resolve())  # `..` of a link leads elsewhere than its name says
