"""What a run file's `speculation:` does not go with, found before anything starts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.errors import UserError
from streamrl.generation.instance.engine_config import is_recurrent
from streamrl.machine.model_files import resolve_model


def check_speculation(cluster: ClusterConfig, run: RunConfig) -> Iterable[str]:
    """Check that speculative decoding is proven exact on this hardware, for these pools and this model."""
    method = run.speculation.method
    if method == "none":
        return
    refused = f"speculation.method: {method}"
    if cluster.hardware == "cuda":
        yield f"{refused} has not been run on GPUs so far, so that nothing says that it is exact there; set it to none"
    for name, site in cluster.sites.items():
        for pool in site.generation:
            if pool.gpus_per_replica > 1:
                yield (
                    f"{refused} needs instances of one worker, whose drafts all agree, and pool {pool.name!r} of site "
                    f"{name!r} has gpus_per_replica: {pool.gpus_per_replica}; set the method to none"
                )
    try:
        model = Path(resolve_model(run.model.path))
    except UserError:
        return  # reported by `check_model`
    if is_recurrent(model):
        yield (
            f"{refused} does not go with {run.model.path}: its layers with a state in place of a KV cache cannot go "
            "back to before a rejected token; set it to none"
        )
