"""Whether instances can compute what a run file's `generation:` asks for, found before anything starts."""

from __future__ import annotations

from collections.abc import Iterable

from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.errors import UserError
from streamrl.generation.instance.eight_bits import choose_here
from streamrl.launcher.gpu_checks import sites_here
from streamrl.machine.compute_type import choose, with_type
from streamrl.machine.model_files import resolve_model


def check_generation(cluster: ClusterConfig, run: RunConfig, site: str | None) -> Iterable[str]:
    """Check that instances started on this machine can compute in 8 bits, if that was asked for by name.

    Args:
        site: the only site started here; None: all.
    """
    if run.generation.compute in ("same", "auto"):
        return
    try:
        resolve_model(run.model.path)
    except UserError:
        return  # reported by `check_model`
    cuda = cluster.hardware == "cuda"
    typed = with_type(run, choose(run.model, cuda))
    for one in sites_here(cluster, site):
        for pool in one.generation:
            try:
                choose_here(typed, cuda, pool.gpus_per_replica)
            except UserError as error:
                yield str(error)
