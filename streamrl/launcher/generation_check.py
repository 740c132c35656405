"""Whether instances compute the model's architecture rightly, have the 8 bits asked for, and room for one request."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from scheduler.cost.model_shapes import Transformer, keeps_heads
from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.errors import ErrorCode, UserError
from streamrl.generation.instance.architectures import no_architecture
from streamrl.generation.instance.eight_bits import choose_here, device_lacks
from streamrl.generation.instance.engine_config import CPU_BLOCK_SIZE, lacks_heads_on_cpus
from streamrl.launcher.gpu_checks import names_here, sites_here
from streamrl.launcher.model_check import config_of
from streamrl.machine.compute_type import choose, with_type
from streamrl.machine.model_files import resolve_model
from streamrl.verify.kept_comparison import COMPARED, kept_comparison


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


def check_eight_bits(cluster: ClusterConfig, run: RunConfig) -> Iterable[str]:
    """Check what no site could do about 8 bits, whatever machine it has."""
    kind = run.generation.compute
    if kind == "same" or kind == "auto":
        return
    if cluster.hardware == "cuda" and (lacks := device_lacks(kind, run.model.dtype, None)):
        yield f"generation.compute: {kind}: {lacks}; expected same or auto"
    for name, one in cluster.sites.items():
        for pool in (pool for pool in one.generation if pool.gpus_per_replica > 1):
            yield (
                f"generation.compute: {kind} needs instances of one worker, and pool {pool.name!r} of site {name!r} "
                f"has gpus_per_replica: {pool.gpus_per_replica}; expected same or auto"
            )


def check_architecture(cluster: ClusterConfig, run: RunConfig) -> Iterable[str]:
    """Check that vLLM generates with the model's architecture; without it every instance ends as it starts."""
    try:
        folder = Path(resolve_model(run.model.path))
    except UserError:
        return  # reported by `check_model`
    if reason := no_architecture(folder, cluster.hardware == "cpu"):
        yield ErrorCode.MODEL.refer(f"model.path: {reason}")


def check_comparison(cluster: ClusterConfig, run: RunConfig, site: str | None) -> Iterable[str]:
    """Check that `streamrl verify` has not found here that vLLM computes the model's architecture otherwise.

    Args:
        site: the only site started here; None: all.
    """
    if run.mismatch.on_mismatch != "warn" and (against := _found_here(cluster, run, site)):
        yield ErrorCode.MISMATCH.refer(f"{against}. mismatch.on_mismatch: warn trains nevertheless")


def comparison_warnings(cluster: ClusterConfig, run: RunConfig, site: str | None) -> Iterable[str]:
    """Say that vLLM computes the model's architecture otherwise than the trainer, or that nobody has compared them."""
    against = _found_here(cluster, run, site)
    if against and run.mismatch.on_mismatch == "warn":
        yield against
    elif against is None and (kind := config_of(run).get("model_type")) not in COMPARED:
        yield (
            f"model.path: whether vLLM computes {kind} as the trainer does was not compared so far on this machine; "
            f"`streamrl verify {run.model.path}` does it, in a minute or two"
        )


def _found_here(cluster: ClusterConfig, run: RunConfig, site: str | None) -> str | None:
    """Return what was found against the model; '': nothing, or nothing is generated here; None: nothing is known."""
    if cluster.hardware != "cpu" or not any(one.generation for one in sites_here(cluster, site)):
        return ""
    try:
        folder = Path(resolve_model(run.model.path))
    except UserError:
        return ""  # reported by `check_model`
    if against := kept_comparison(folder):
        path = run.model.path
        return f"model.path: vLLM computes it otherwise than the trainer, as `streamrl verify {path}` found: {against}"
    return against


def check_head_size(cluster: ClusterConfig, run: RunConfig) -> Iterable[str]:
    """Check that vLLM has attention for the model's heads on CPUs; without it an instance ends at its first token."""
    if cluster.hardware != "cpu":
        return
    try:
        values = config_of(run)
    except (UserError, ValueError):
        return
    if lacks := lacks_heads_on_cpus(run.model.path, values):
        yield f"model.path: {lacks}"


def check_kv_cache(cluster: ClusterConfig, run: RunConfig, site: str | None, emulated: bool = False) -> Iterable[str]:
    """Check that the KV cache of a CPU instance holds one request of `model.max_context`, without which vLLM ends.

    Models that the cost model does not know are left to vLLM.

    Args:
        site: the only site started here; None: all.
        emulated: whether the sites are emulated, with smaller caches.
    """
    if cluster.hardware != "cpu":
        return
    try:
        values = config_of(run)
        model = Transformer.from_config(run.model.path, values)
    except (UserError, ValueError):
        return
    if not keeps_heads(values):
        return
    size = 4 if choose(run.model, False).dtype == "float32" else 2
    # prompts are not prefilled in chunks (`engine_config`), and vLLM keeps a block free
    tokens = model.layers * model.most_cached(run.model.max_context, block=CPU_BLOCK_SIZE)
    tokens += model.layers_of_a_block * CPU_BLOCK_SIZE
    for name in names_here(cluster, site):
        for pool in cluster.sites[name].generation:
            copies = max(1.0, pool.gpus_per_replica / model.kv_heads)
            needed = tokens * model.shape.kv_width * size * copies / 2**30
            if needed > pool.kv_cache_gb:
                needs = f"{needed:.3f}" if needed >= 0.01 else f"{needed:.2g}"
                key = "emulation.kv_cache_gb and the pool's" if emulated else "kv_cache_gb:"
                yield (
                    f"sites.{name}.generation ({pool.name}).kv_cache_gb is {pool.kv_cache_gb:g}, and one request "
                    f"of model.max_context: {run.model.max_context} needs {needs}; expected {key} "
                    f"{math.ceil(100 * needed) / 100} or more, or a smaller context"
                )
