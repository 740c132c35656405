"""Check whether this machine's cores, memory and open files suffice for the processes that are to start on it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.errors import ErrorCode
from streamrl.launcher.gpu_checks import sites_here
from streamrl.launcher.model_check import trained_folders
from streamrl.machine.engine_settings import MOST_ARRANGED_BYTES
from streamrl.machine.model_files import in_slices, weight_bytes
from streamrl.runtime.device_turns import takes_turns
from streamrl.runtime.process_plan import ON_RAY, plan_processes

TRAINING_BYTES_PER_WEIGHT_BYTE = 10
"""Trainer memory relative to the bf16 weights: bf16 weights and gradients, fp32 weights, gradients and two AdamW
moments, 20 bytes per parameter."""
FROZEN_BYTES_PER_WEIGHT_BYTE = 2
"""Memory of a reference or proximal copy relative to the bf16 weights: at most fp32, the type that it computes in."""
WAITING_BYTES_PER_WEIGHT_BYTE = 6
"""Memory of what leaves a GPU that is used in turns (`colocated`), relative to the bf16 weights: fp32 weights and two
AdamW moments, 12 bytes per parameter."""
LOADING_BYTES_PER_WEIGHT_BYTE = 2
"""Memory of a rank that loads a whole model in fp32, relative to the bf16 weights: one alone does, as each of several
does whose files cannot be read in slices."""
WITH_WARDEN = 2
"""Threads of a process of a run that do not compute: its own main one, and its warden."""
FURTHER_FILES = 256
"""Files that a process which others connect to has open besides: journals, libraries, connections that are replaced."""
PROCESS_BYTES = 1.0 * 2**30
"""Memory of a process with torch and vLLM before it holds a model (measured on CPU: 0.7 to 1.2 GiB)."""


def check_cores(
    cluster: ClusterConfig, run: RunConfig, usable: Collection[int], site: str | None = None
) -> Iterable[str]:
    """Check that this process may use the CPU cores to which processes here are to be pinned.

    Args:
        usable: the numbers of those that it may use.
        site: the only site started here; None: all.
    """
    for name in [site] if site is not None else cluster.sites:
        one = cluster.sites[name]
        if one.on_ray:
            continue
        pinned = [(f"generation ({pool.name})", pool.cores) for pool in one.generation]
        pinned += [("trainer", one.trainer.cores)] if one.trainer else []
        pinned += [("agents", one.agents.cores)] if run.agent_tasks and one.generation else []
        for part, cores in pinned:
            if others := [core for core in cores or () if core not in usable]:
                asked, there = (", ".join(map(str, some)) for some in (others, sorted(usable)))
                yield (
                    f"sites.{name}.{part}.cores: this process may not use {asked}; expected some of the CPU cores "
                    f"{there}, or no such key"
                )


def check_open_files(cluster: ClusterConfig, run: RunConfig, most: int, site: str | None = None) -> Iterable[str]:
    """Check that services and controller can have all of their connections open, each of which is a file.

    They run beside the launcher, also where Ray places what connects to them.

    Args:
        most: files that a process of this machine can have open.
        site: the only site started here; None: all.
    """

    def problem(key: str, process: str, count: int, others: str, remedy: str) -> Iterable[str]:
        if (needed := count + FURTHER_FILES) > most:
            yield (
                f"{key}: {process} has connections with {count} {others} and needs {needed} open files, this machine "
                f"allows a process {most}: raise its hard limit (`ulimit -Hn`, LimitNOFILE in systemd, --ulimit nofile "
                f"in docker), or lower {remedy}"
            )

    for name, one in cluster.sites.items():
        if site not in (None, name):
            continue
        instances = sum(pool.most_replicas for pool in one.generation)
        of_pools = "replicas and max_replicas"
        yield from problem(f"sites.{name}.generation", "its service", instances, "instances", of_pools)
        if one.trainer:
            planned = plan_processes(cluster, run, Path())
            speaking = one.trainer.ranks + sum(spec.role in ("service", "rewards") for spec in planned)
            yield from problem(f"sites.{name}", "the controller", speaking, "processes", "trainer.ranks")


def thread_warnings(cluster: ClusterConfig, run: RunConfig, cores: int, site: str | None = None) -> list[str]:
    """Warn about far more compute threads than cores, which slow everything down, heartbeats too.

    Up to twice the cores is usual, as the trainer and the instances seldom compute all at once.
    """
    if cluster.hardware != "cpu":
        return []
    specs = plan_processes(cluster, run, Path(), None if site is None else [site])
    threads = sum(
        spec.threads * spec.ranks
        for spec in specs
        if spec.role in ("trainer", "instance") and not cluster.sites[spec.site].on_ray
    )
    if threads <= 2 * cores:
        return []
    return [
        f"the cluster file asks for {threads} computing threads, this machine has {cores} cores: expect it to be slow"
    ]


def task_warnings(cluster: ClusterConfig, run: RunConfig, free: float, site: str | None = None) -> list[str]:
    """Warn if the run's processes and computing threads are more than this user or container may still start.

    Workers of rewards and agents, and threads of libraries, are not counted, so that a run needs some more.

    Args:
        free: threads, of all processes together, that may still be started.
        site: the only site started here; None: all.
    """
    specs = plan_processes(cluster, run, Path(), None if site is None else [site])
    here = [spec for spec in specs if not (cluster.sites[spec.site].on_ray and spec.role in ON_RAY)]
    needed = sum(WITH_WARDEN + spec.ranks * max(1, spec.threads) for spec in here)
    if needed <= free:
        return []
    return [
        f"the run starts {needed} processes and computing threads at least, {free:.0f} more may be started here: raise "
        "the limit on processes and threads (`ulimit -u`, a cgroup's `pids.max`, --pids-limit in docker)"
    ]


def memory_warnings(cluster: ClusterConfig, run: RunConfig, free: float, site: str | None = None) -> list[str]:
    """Warn if a rough sum of the processes' memory exceeds the free memory (bytes); activations are not counted.

    Of processes on GPUs, only what the trainer's ranks have in host memory counts: the model as they load it, or their
    state as it waits there.
    """
    trained = [(folder, weight_bytes(folder)) for folder in trained_folders(run)]
    weights, learning = trained[0][1], sum(size for _, size in trained)
    frozen = run.algorithm.needs_reference + run.algorithm.needs_proximal(run.updates_per_version)
    copies = frozen * FROZEN_BYTES_PER_WEIGHT_BYTE * weights
    if cluster.hardware == "cuda":
        copies += learning * WAITING_BYTES_PER_WEIGHT_BYTE
        ranks = sum(one.trainer.ranks for one in sites_here(cluster, site) if one.trainer)
        whole = [size for folder, size in trained if ranks == 1 or not in_slices(folder)]  # one after the other
        loading = ranks * LOADING_BYTES_PER_WEIGHT_BYTE * max(whole, default=0)
        most = max(loading, copies if ranks and takes_turns(True, run) else 0)
        return _too_little(most + ranks * PROCESS_BYTES, free, "host memory") if ranks else []
    needed = 0.0
    for one in sites_here(cluster, site):
        if one.trainer:
            training = learning * TRAINING_BYTES_PER_WEIGHT_BYTE + copies
            needed += training + one.trainer.ranks * PROCESS_BYTES
        for pool in one.generation:
            held = weights + min(weights, MOST_ARRANGED_BYTES) + pool.kv_cache_gb * 2**30 + PROCESS_BYTES
            needed += pool.replicas * held
    return _too_little(needed, free, "memory")


def numa_warnings(cluster: ClusterConfig, nodes: int, site: str | None = None) -> list[str]:
    """Warn about instances that all would get the memory of one NUMA node.

    vLLM's CPU worker binds its memory to the node of the first core that it may use, which is the same for all
    instances without cores of their own.

    Args:
        nodes: NUMA nodes of this machine.
        site: the only site started here; None: all.
    """
    if cluster.hardware != "cpu" or nodes < 2:
        return []
    anywhere = [pool.name for one in sites_here(cluster, site) for pool in one.generation if pool.cores is None]
    if not anywhere:
        return []
    return [
        f"this machine has {nodes} NUMA nodes, and the instances of {', '.join(anywhere)} would all keep their memory "
        "on the first: give these pools `cores` of a node each"
    ]


def numa_nodes() -> int:
    """Return the number of NUMA nodes of this machine; 1 if it lists none."""
    return len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1


def _too_little(needed: float, free: float, what: str) -> list[str]:
    if needed <= free:
        return []
    figures = f"the run needs about {needed / 2**30:.1f} GiB of {what}, {free / 2**30:.1f} GiB are free"
    return [ErrorCode.MEMORY.refer(f"{figures}, {(needed - free) / 2**30:.1f} GiB are missing: it may be killed")]
