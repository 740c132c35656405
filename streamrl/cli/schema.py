"""`streamrl schema`: prints the JSON Schema of the cluster file or the run file."""

from __future__ import annotations

import json

import click


@click.command()
@click.argument("which", type=click.Choice(["cluster", "run"]))
def command(which: str) -> None:
    """Print the JSON Schema of the cluster file or the run file, for completion and checks in editors.

    \b
    Example:
      streamrl schema run > run.schema.json
    """
    from streamrl.config.cluster import ClusterConfig
    from streamrl.config.run import RunConfig

    model = ClusterConfig if which == "cluster" else RunConfig
    click.echo(json.dumps(model.model_json_schema(), indent=2))
