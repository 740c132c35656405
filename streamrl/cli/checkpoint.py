"""`streamrl checkpoint DIR`: a checkpoint of a running job, beside those that the run file asks for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from streamrl.errors import UserError


@click.command(name="checkpoint")
@click.argument("directory", type=click.Path(path_type=Path), metavar="DIR")
def command(directory: Path) -> None:
    """Have the run in DIR write a checkpoint after its current optimizer step.

    Use it before you stop a job by hand: `streamrl launch --resume` then repeats nothing.

    \b
    Example:
      streamrl checkpoint runs/demo
    """
    from streamrl.protocol.operator import CheckpointNow, CheckpointPlanned
    from streamrl.run_dir.status import read_status
    from streamrl.runtime.operator_link import ask_controller

    status = read_status(directory)
    if status.final:
        raise UserError(f"{directory} is {status.state}: only a running job can write a checkpoint")
    answer = asyncio.run(ask_controller(directory, CheckpointNow()))
    assert isinstance(answer, CheckpointPlanned)
    click.echo(f"{directory} writes a checkpoint after step {answer.step}")
