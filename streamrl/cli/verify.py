"""The `streamrl verify` command."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from streamrl.errors import RunFailed, UserError
from streamrl.output_files import check_output

if TYPE_CHECKING:
    from rich.console import Console


@click.command()
@click.argument("model", required=False)
@click.option("--full", is_flag=True, help="Compare trainer and vLLM with the model's real weights.")
@click.option(
    "--chat-template-kwargs",
    "variables",
    metavar="YAML",
    default="{}",
    help="Variables of the chat template, as in the run file, e.g. '{enable_thinking: false}'.",
)
@click.option("--hardware", is_flag=True, help="Check this machine instead of a model.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="With --hardware: write the figures to this JSON file as well.",
)
def command(model: str | None, full: bool, variables: str, hardware: bool, out: Path | None) -> None:
    """Check that a model is trained right, or what this machine can do, before a run depends on it.

    MODEL is what `model.path` of a run file may be, or a folder with only a config.json: its architecture is built
    small and random. Shared prompts are compared with lone sequences, the trainer with vLLM, and new weights with a
    fresh engine. Exit code 1: it is refused.

    --hardware measures devices, matrix products, memory, links between GPUs, attention and output head (error and
    speed), the trainer and the coding of weights by the code that a run uses, and ends with a whole run of a tiny
    model. It takes two to ten minutes. Exit code 1: a stage failed.

    \b
    Examples:
      streamrl verify smollm2-135m
      streamrl verify --hardware --out hardware.json
    """
    if hardware == (model is not None) or (out is not None and not hardware):
        raise click.UsageError("expected a MODEL, or --hardware (with --out, if wanted)")
    if out is not None:
        check_output("--out", out)
    missing = [name for name in ("torch", "transformers", "vllm") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"not installed: {', '.join(missing)}; install with: pip install 'streamrl[cpu,tasks]'")
    from transformers.utils.logging import disable_progress_bar

    from streamrl.report.terminal import TextConsole

    disable_progress_bar()  # of the small models that are written: the stages say what they do
    if hardware:
        _hardware(TextConsole(), out)
        return
    assert model is not None
    from streamrl.config.load import load_run
    from streamrl.machine.model_files import resolve_model
    from streamrl.verify.findings import reasons_against, table_of
    from streamrl.verify.model_checks import verify

    run = load_run(None, [f"model.chat_template_kwargs={variables}"])
    folder = Path(model).expanduser()
    if full or not (folder / "config.json").is_file():
        folder = Path(resolve_model(model, "MODEL"))
    findings = verify(folder, full, lambda text: click.echo(text, err=True), run.model.chat_template_kwargs)
    TextConsole().print(table_of(model, findings))
    if reasons := reasons_against(findings):
        raise RunFailed(f"{model} is refused: " + "; ".join(reasons))


def _hardware(console: Console, out: Path | None) -> None:
    from streamrl.machine.gpus import BY_BUS, ORDER
    from streamrl.verify.hardware_checks import check_hardware, table_of, write_json

    os.environ.setdefault(ORDER, BY_BUS)
    results = check_hardware(lambda text: click.echo(text, err=True))
    if out is not None:  # before anything is printed: a reader that ends early (`| head`) ends the command
        try:
            write_json(out, results)
        except OSError as error:
            raise UserError(f"--out {out}: {error.strerror or error}") from error
    console.print(table_of(results))
    if out is not None:
        click.echo(f"written: {out}")
    if failed := [result.stage for result in results if result.error]:
        raise RunFailed(f"failed: {', '.join(failed)}")
