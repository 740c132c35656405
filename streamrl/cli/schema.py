"""`streamrl schema`: prints the JSON Schema of the cluster file or the run file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from pydantic import BaseModel


@click.command()
@click.argument("which", type=click.Choice(["cluster", "run"]))
def command(which: str) -> None:
    """Print the JSON Schema of the cluster file or the run file, for completion and checks in editors.

    \b
    Example:
      streamrl schema run > run.schema.json
    """
    click.echo(json.dumps(_model(which).model_json_schema(), indent=2))


def _model(which: str) -> type[BaseModel]:
    """Return the model of a file; importing that of the run file takes far longer than that of the cluster file."""
    if which == "cluster":
        from streamrl.config.cluster import ClusterConfig

        return ClusterConfig
    from streamrl.config.run import RunConfig

    return RunConfig
