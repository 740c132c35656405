"""Checks of this machine's GPUs against what a run asks of them, before anything starts.

The checks are pure; `read_uses` asks nvidia-smi.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scheduler.capacity.gpu_memory import GIB, MemoryPhase, MemoryShape, phases, smallest_change
from scheduler.cost.generation_cost import tokens_in_flight
from scheduler.cost.model_shapes import Transformer, keeps_heads
from streamrl.config.cluster import ClusterConfig, GenerationPool, Site
from streamrl.config.run import CRITIC_KEY, RunConfig
from streamrl.errors import ErrorCode, UserError
from streamrl.launcher.model_check import config_of
from streamrl.machine.compute_type import AMPERE, dotted, no_bf16
from streamrl.machine.gpus import (
    VISIBLE,
    Gpu,
    cuda_of_driver,
    gpu_names,
    gpus_here,
    pairs_without_peer_access,
    usable_devices,
)
from streamrl.machine.model_files import read_config, resolve_model
from streamrl.runtime.device_turns import takes_turns
from streamrl.runtime.process_plan import ProcessSpec, plan_processes, possible_instances
from streamrl.runtime.training_work import work_of

NEEDED_DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""Oldest Linux driver by CUDA's major version, which runs all its minor ones (NVIDIA, CUDA Toolkit release notes,
"CUDA Toolkit and Minimum Required Driver Version for CUDA Minor Version Compatibility")."""
KERNELS = re.compile(r"(?P<kind>sm|compute)_(?P<major>\d+)(?P<minor>\d)(?P<only>[af]?)")
"""What torch was compiled for: machine code (sm) or PTX (compute) of a compute capability; a: of this one alone, f: of
its family."""
OTHERS_BYTES = 1.0 * GIB
"""Memory in use that is worth a warning: an idle GPU shows less, for its driver or a display."""


@dataclass(frozen=True)
class GpuUse:
    """GPUs that one process of a run computes on, all together."""

    process: str
    pool: tuple[str, str] | None
    """Site and name of the instance's pool; None: the trainer."""
    gpus: tuple[Gpu, ...]


def sites_here(cluster: ClusterConfig, site: str | None) -> list[Site]:
    """List the sites whose processes all run on this machine."""
    return [cluster.sites[name] for name in names_here(cluster, site)]


def names_here(cluster: ClusterConfig, site: str | None) -> list[str]:
    """List the names of the sites whose processes all run on this machine."""
    return [name for name in ([site] if site is not None else cluster.sites) if not cluster.sites[name].on_ray]


def check_gpus(
    cluster: ClusterConfig,
    run: RunConfig,
    names: Sequence[str],
    site: str | None = None,
    visible: str | None = None,
    most: bool = True,
) -> Iterable[str]:
    """Check that this machine has the GPUs that `process_plan` gives out.

    Args:
        names: the machine's GPUs, as `gpu_names` lists them.
        visible: this user's CUDA_VISIBLE_DEVICES; None: not set.
        most: count those of the instances that may be added too, up to `max_replicas`.
    """
    if cluster.hardware != "cuda":
        return
    try:
        usable = len(usable_devices(visible, names))
    except UserError as error:
        yield str(error)
        return
    here = names_here(cluster, site)
    at_first = sum(_devices(plan_processes(cluster, run, Path(), [name])) for name in here)
    later = sum(_devices(possible_instances(cluster, run, name, Path())) for name in here) if most else 0
    if (wanted := max(at_first, later)) > usable:
        grows = any(pool.most_replicas > pool.replicas for name in here for pool in cluster.sites[name].generation)
        grown = " (max_replicas counts: every instance that may be added has its own)" if grows else ""
        who = f"site {site}" if site is not None else "the cluster"
        way_out = "; --emulate runs all sites here on CPU" if cluster.remote_sites else ""
        has = (
            f"this machine has {usable}" if visible is None else f"{VISIBLE}={visible} leaves {usable} of this machine"
        )
        yield ErrorCode.INSTALLATION.refer(f"{who} asks for {wanted} GPUs{grown}, {has}{way_out}")


def _devices(specs: Iterable[ProcessSpec]) -> int:
    """Return how many devices a site needs for processes that have them by their positions."""
    return max((1 + max(spec.gpu_ids) for spec in specs if spec.gpu_ids), default=0)


def check_driver(driver: str, cuda: str | None, library: Callable[[], int | None] = cuda_of_driver) -> Iterable[str]:
    """Check that the driver, or the newer library of a container, can run the CUDA that torch was built with.

    Args:
        driver: its version; '': unknown.
        cuda: `torch.version.cuda`; None: torch was built without CUDA.
        library: returns the newest CUDA of the driver's library, as `cuda_of_driver`; asked of an old driver alone.
    """
    if cuda is None:
        text = (
            "hardware: cuda, but the installed torch was built without CUDA; install with: pip install 'streamrl[gpu]'"
        )
        yield ErrorCode.INSTALLATION.refer(text)
        return
    major = int(cuda.partition(".")[0])
    needed = NEEDED_DRIVERS.get(major)
    if driver and needed and _numbers(driver) < _numbers(needed) and (library() or 0) < 1000 * major:
        yield ErrorCode.INSTALLATION.refer(
            f"the NVIDIA driver is {driver}, and the installed torch (CUDA {cuda}) needs {needed} or newer: update the "
            f"driver, or install a torch that was built for an older CUDA"
        )


def check_kernels(uses: Iterable[GpuUse], compiled: Sequence[str], cuda: str | None) -> Iterable[str]:
    """Check that the installed torch has kernels for the GPUs that are used.

    Args:
        uses: the GPUs.
        compiled: what torch was compiled for (`torch.cuda.get_arch_list`), such as sm_80, or compute_90 for code that
            the driver compiles for newer GPUs; empty: unknown.
        cuda: `torch.version.cuda`.
    """
    found = [KERNELS.fullmatch(one) for one in compiled]
    made = [(one["kind"], (int(one["major"]), int(one["minor"])), one["only"]) for one in found if one]
    if not made:
        return
    for gpu in {gpu.number: gpu for use in uses for gpu in use.gpus}.values():
        if gpu.capability is None or any(_runs(gpu.capability, *one) for one in made):
            continue
        there = ", ".join(dotted(one) for one in sorted({version for _, version, _ in made}))
        yield ErrorCode.INSTALLATION.refer(
            f"GPU {gpu.number} ({gpu.name}) has compute capability {dotted(gpu.capability)}, and the installed torch "
            f"(CUDA {cuda}) has kernels for {there}, oldest first: leave the GPU out of {VISIBLE}, or install a torch "
            "that was built for it"
        )


def _runs(capability: tuple[int, int], kind: str, version: tuple[int, int], only: str) -> bool:
    """Return whether code compiled for a compute capability runs on a GPU: machine code does on later minor ones."""
    if only == "a":  # with instructions of this one alone
        return capability == version
    return capability >= version and ((kind == "compute" and not only) or capability[0] == version[0])


def check_type(run: RunConfig, uses: Iterable[GpuUse]) -> Iterable[str]:
    """Check that no GPU is to compute in bf16 that cannot."""
    if run.model.dtype != "bfloat16":
        return
    for gpu in {gpu.number: gpu for use in uses for gpu in use.gpus}.values():
        if gpu.capability is not None and gpu.capability < AMPERE:
            yield f"model.dtype: bfloat16: GPU {gpu.number} ({gpu.name}): {no_bf16(gpu.capability)}"


def check_kinds(uses: Iterable[GpuUse]) -> Iterable[str]:
    """Check that GPUs that work in step are of one kind: the slowest makes all wait, and the smallest fills first."""
    for use in uses:
        kinds = {gpu.name: gpu.number for gpu in use.gpus}
        if len(kinds) > 1:
            found = ", ".join(f"GPU {gpu.number} is a {gpu.name}" for gpu in use.gpus)
            yield (
                f"{use.process} would compute on GPUs of several kinds ({found}); expected one kind: order them with "
                f"{VISIBLE}, or give each kind a pool of its own"
            )


def check_free(cluster: ClusterConfig, uses: Iterable[GpuUse]) -> Iterable[str]:
    """Check that nobody else holds memory that vLLM will ask for as it starts."""
    for use in uses:
        if use.pool is None:
            continue
        fraction = _pool(cluster, *use.pool).gpu_memory_fraction
        for gpu in use.gpus:
            left = int(100 * (1 - gpu.used_bytes / gpu.total_bytes)) / 100
            if (over := gpu.used_bytes + fraction * gpu.total_bytes - gpu.total_bytes) > 0:
                yield ErrorCode.MEMORY.refer(
                    f"{use.process} asks for {fraction:.0%} of GPU {gpu.number}'s {gpu.total_bytes / GIB:.1f} GiB, "
                    f"and {_used(gpu)}: {over / GIB:.1f} GiB are missing; end what uses it, leave the GPU out of "
                    f"{VISIBLE}, or set gpu_memory_fraction to {left:.2f}"
                )


def check_memory(cluster: ClusterConfig, run: RunConfig, uses: Sequence[GpuUse]) -> Iterable[str]:
    """Check that every GPU holds what it trains and generates with, by the formulas of the cost model."""
    for title, shape in memory_shapes(cluster, run, uses):
        for phase in (one for one in phases(shape) if one.over > 0):
            change = smallest_change(shape)
            way_out = f"the smallest change that fits: {change}" if change else "no change of one or two keys fits"
            yield ErrorCode.MEMORY.refer(f"{title}, {phase}; {way_out}")


def gpu_warnings(uses: Sequence[GpuUse], missing_peers: set[tuple[int, int]]) -> Iterable[str]:
    """Say which GPUs are used by others, and which cannot exchange data directly."""
    for gpu in {gpu.number: gpu for use in uses for gpu in use.gpus}.values():
        if gpu.used_bytes > OTHERS_BYTES:
            yield f"GPU {gpu.number} is used by others: {_used(gpu)}; what they take later may end this run"
    for use in uses:
        own = {gpu.number for gpu in use.gpus}
        if pairs := sorted(pair for pair in missing_peers if own.issuperset(pair)):
            listed = ", ".join(f"{a} - {b}" for a, b in pairs[:8]) + (", ..." if len(pairs) > 8 else "")
            yield (
                f"{use.process}: no peer access between GPUs {listed}: they exchange data through host memory, which "
                "is several times slower"
            )


def memory_shapes(cluster: ClusterConfig, run: RunConfig, uses: Sequence[GpuUse]) -> list[tuple[str, MemoryShape]]:
    """Return (what, shape) of each kind of GPU use: one per generation pool, beside the trainer, or the trainer alone.

    A model that the cost model does not know, that caches something else than keys and values by heads, or that is not
    here, has none. Nor has a run with such a critic.
    """
    work = work_of(run)
    try:
        values = config_of(run)
        model = Transformer.from_config(run.model.path, values)
        if run.critic_path is not None:
            of_critic = read_config(Path(resolve_model(run.critic_path, CRITIC_KEY)))
            if not keeps_heads(of_critic):
                return []
            # without an output head, as if that were the embedding
            work = replace(work, critic=replace(Transformer.from_config(run.critic_path, of_critic), tied=True))
    except (UserError, ValueError):
        return []
    if not keeps_heads(values):  # its cache is smaller, or its layers have other weights
        return []
    trainer, own = cluster.trainer, next((use for use in uses if use.pool is None), None)
    pools = list(dict.fromkeys(use.pool for use in uses if use.pool is not None))
    found = []
    for pool in [None] if _trains_alone(uses) else pools:
        entry = _pool(cluster, *pool) if pool else GenerationPool()  # one that asks nothing of these GPUs
        engine = [gpu for use in uses if use.pool == pool for gpu in use.gpus] if pool else []
        of_trainer = [gpu.total_bytes for gpu in own.gpus] if own else []
        shape = MemoryShape(
            model=model,
            work=work,
            micro_tokens=run.batch.micro_batch_tokens,
            longest=run.model.max_context,
            in_flight=max((tokens_in_flight(gpu.name, gpu.total_bytes, entry.max_batch) for gpu in engine), default=0),
            ranks=trainer.ranks // (trainer.nodes if trainer.sharding == "hybrid" else 1),
            tensor_parallel=trainer.tensor_parallel,
            gpus_per_replica=entry.gpus_per_replica,
            fraction=entry.gpu_memory_fraction,
            shared=takes_turns(cluster.hardware == "cuda", run),
            trainer_gpu_bytes=min(of_trainer, default=math.inf),
            engine_gpu_bytes=min((gpu.total_bytes for gpu in engine), default=math.inf),
            sequence_parallel=trainer.sequence_parallel,
            nodes=1 if trainer.sharding == "hybrid" else trainer.nodes,
            reduction=trainer.reduce_gradients,
        )
        found.append((f"memory of a GPU ({entry.name if pool else 'trainer'})", shape))
    return found


def uses_here(cluster: ClusterConfig, run: RunConfig, gpus: Sequence[Gpu], site: str | None = None) -> list[GpuUse]:
    """Return which of this machine's GPUs each process will use, as `process_plan` numbers them.

    Args:
        gpus: those that this user may use, in the order of CUDA_VISIBLE_DEVICES.
    """
    return [
        GpuUse(
            spec.name,
            None if spec.pool is None else (spec.site, spec.pool),
            tuple(gpus[position] for position in spec.gpu_ids),
        )
        for spec in plan_processes(cluster, run, Path(), names_here(cluster, site))
        if spec.gpu_ids and max(spec.gpu_ids) < len(gpus)
    ]


def read_uses(cluster: ClusterConfig, run: RunConfig, site: str | None) -> list[GpuUse]:
    """Read this machine's GPUs and return their uses; [] where they are parts (MIG) or unknown.

    Raises:
        UserError: nvidia-smi does not answer, or CUDA_VISIBLE_DEVICES names what is not there.
    """
    if cluster.hardware != "cuda":
        return []
    here = gpus_here()
    by_name = {str(gpu.number): gpu for gpu in here} | {gpu.uuid: gpu for gpu in here}
    usable = usable_devices(os.environ.get(VISIBLE), gpu_names())
    found = [
        next((gpu for name, gpu in by_name.items() if name == one or _is_start(one, name)), None) for one in usable
    ]
    return uses_here(cluster, run, [gpu for gpu in found if gpu], site) if all(found) else []


def check_this_machine(
    cluster: ClusterConfig, run: RunConfig, site: str | None = None, resumed: bool = False
) -> Iterable[str]:
    """Check the GPUs of this machine: number, driver, kernels, type, kinds, free memory, and memory for this run.

    Args:
        resumed: whether the run is continued: then only the instances that it begins with must have GPUs.
    """
    if cluster.hardware != "cuda":
        return
    few = list(check_gpus(cluster, run, gpu_names(), site, os.environ.get(VISIBLE), most=not resumed))
    yield from few
    if few:
        return
    uses = read_uses(cluster, run, site)
    if importlib.util.find_spec("torch") is not None:  # else `check_packages` says so
        import torch

        yield from check_driver(next((gpu.driver for use in uses for gpu in use.gpus), ""), torch.version.cuda)
        yield from check_kernels(uses, torch.cuda.get_arch_list(), torch.version.cuda)
    if not resumed:  # then it is a warning
        yield from check_type(run, uses)
    yield from check_kinds(uses)
    yield from check_free(cluster, uses)
    if not (resumed and _trains_alone(uses)):  # earlier versions began such runs
        yield from check_memory(cluster, run, uses)


def warnings_here(cluster: ClusterConfig, run: RunConfig, site: str | None = None) -> list[str]:
    """Return the warnings about the GPUs of this machine."""
    if cluster.hardware != "cuda":
        return []
    few = list(check_gpus(cluster, run, gpu_names(), site, os.environ.get(VISIBLE)))  # one that is continued
    uses = read_uses(cluster, run, site)
    if not uses:
        return few
    large = check_memory(cluster, run, uses) if _trains_alone(uses) else ()  # of a run that is continued
    return [*few, *large, *gpu_warnings(uses, pairs_without_peer_access())]


def memory_plan(cluster: ClusterConfig, run: RunConfig, site: str | None = None) -> list[tuple[str, MemoryPhase]]:
    """Return (what, phase) for each phase of this machine's GPUs, as `launch --dry-run` prints them."""
    shapes = memory_shapes(cluster, run, read_uses(cluster, run, site))
    return [(title, phase) for title, shape in shapes for phase in phases(shape)]


def _trains_alone(uses: Iterable[GpuUse]) -> bool:
    """Return whether only the trainer is here, as at a site without a pool."""
    return {use.pool for use in uses} == {None}


def _pool(cluster: ClusterConfig, site: str, name: str) -> GenerationPool:
    return next(pool for pool in cluster.sites[site].generation if pool.name == name)


def _used(gpu: Gpu) -> str:
    who = f" ({', '.join(gpu.users[:3])})" if gpu.users else ""
    return f"{gpu.used_bytes / GIB:.1f} GiB of it are in use{who}"


def _is_start(given: str, name: str) -> bool:
    return not given.isdecimal() and name.startswith(given)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
