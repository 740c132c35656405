"""Checks whether a run with router replay can record and replay experts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.errors import UserError
from streamrl.machine.model_files import resolve_model
from streamrl.machine.router_shape import router_shape


def check_router_replay(cluster: ClusterConfig, run: RunConfig) -> Iterable[str]:
    """Check that the model's routers can be replayed, and that its layers and instances are divided as was tested."""
    if not run.algorithm.router_replay:
        return
    try:
        folder = Path(resolve_model(run.model.path))
    except UserError:
        return  # reported by `check_model`
    try:
        router_shape(folder)
    except UserError as error:
        yield str(error)
    trainer = cluster.trainer
    for key, ranks, shared in (
        ("tensor_parallel", trainer.tensor_parallel, "layers"),
        ("sequence_parallel", trainer.sequence_parallel, "rows"),
    ):
        if ranks > 1:
            yield (
                f"algorithm.router_replay: sites.{cluster.trainer_site}.trainer.{key} is {ranks}, expected 1: replay "
                f"is not proven for {shared} that ranks share"
            )
    for name, site in cluster.sites.items():
        for pool in site.generation:
            if cluster.hardware == "cpu" and pool.gpus_per_replica > 1:
                yield (
                    f"algorithm.router_replay: sites.{name}.generation ({pool.name}).gpus_per_replica is "
                    f"{pool.gpus_per_replica}, expected 1: experts are recorded by CPU instances of one worker only"
                )
