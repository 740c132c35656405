"""The `streamrl verify` command."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import click

from streamrl.errors import RunFailed, UserError


@click.command()
@click.argument("model")
@click.option("--full", is_flag=True, help="Compare trainer and vLLM with the model's real weights.")
def command(model: str, full: bool) -> None:
    """Check that a model is trained right, before a run depends on it.

    MODEL is what `model.path` of a run file may be, or a folder with only a config.json: its architecture is built
    small and random. Shared prompts are compared with lone sequences, the trainer with vLLM, and new weights with a
    fresh engine. Exit code 1: it is refused.

    \b
    Example:
      streamrl verify smollm2-135m
    """
    missing = [name for name in ("torch", "transformers", "vllm") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"not installed: {', '.join(missing)}; install with: pip install 'streamrl[cpu,tasks]'")
    from rich.console import Console

    from streamrl.machine.model_files import resolve_model
    from streamrl.verify.findings import reasons_against, table_of
    from streamrl.verify.model_checks import verify

    folder = Path(model).expanduser()
    if full or not (folder / "config.json").is_file():
        folder = Path(resolve_model(model))
    findings = verify(folder, full, lambda text: click.echo(text, err=True))
    Console().print(table_of(model, findings))
    if reasons := reasons_against(findings):
        raise RunFailed(f"{model} is refused: " + "; ".join(reasons))
