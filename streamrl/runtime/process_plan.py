"""Turns a cluster and a run into the list of processes to start: pure, so `--dry-run` shows what launch does."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from streamrl.config.cluster import ClusterConfig, GenerationPool
from streamrl.config.run import RunConfig

Role = Literal["controller", "trainer", "service", "instance", "rewards"]

PASSIVE_WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}
"""OpenMP threads sleep at barriers, after some microseconds. Spinning ones made a 2-thread trainer 7 x slower beside
two busy instances on two cores, because whoever waits takes the core from whoever is waited for; ones that sleep ten
times sooner made it a fifth slower while it had the cores for itself."""

KEPT_HEAP = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": f"{1 << 40}",
    "MALLOC_TRIM_THRESHOLD_": f"{1 << 40}",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""glibc keeps the memory of tensors that are freed. Given back to the system, as large blocks are by default, every
page of the next tensor is made anew and cleared: a quarter of a CPU trainer's time. One heap, because those of further
threads cannot hold large blocks; of huge pages, where the system has them, which are made 512 x more rarely and found
faster (another twelfth)."""

ONE_BLAS_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""NumPy's library starts its threads as it is loaded, and an instance's process is to have one until it has forked its
engine (`generation/instance/engine.py`)."""

CORES = "STREAMRL_CORES"
"""Environment variable: numbers of the CPU cores that a process is pinned to, with commas."""

MEETING, NODE = "{meeting}", "{node}"
"""In a command: where the nodes of a trainer, or of an instance, meet (host:port), known once they have been found; and
an instance's number of a node."""

STARTER = "STREAMRL_PARENT"
"""Environment variable: id of the process whose death ends this one (the launcher, or the actor on a Ray node)."""
PROCESS = "STREAMRL_PROCESS"
"""Environment variable: number of an instance's process (`run_dir/instance_files.py`)."""

SAME_HASHES = {"PYTHONHASHSEED": "0"}
"""Some of reasoning-gym's questions depend on the order of sets of strings: the process that asks and the one that
verifies must agree, and a resumed run must ask the same."""


@dataclass(frozen=True)
class ProcessSpec:
    """One operating-system process (for the trainer: torch's elastic launcher, which starts its ranks)."""

    name: str
    """Unique in the run: 'controller', 'trainer', 'service-here', 'here-regular-0', 'rewards-here'."""
    role: Role
    site: str
    pool: str | None
    command: list[str]
    env: dict[str, str] = field(default_factory=dict)
    threads: int = 1
    """CPU threads the process (each of its ranks) computes with."""
    ranks: int = 1
    """Processes with that many threads each: those of the trainer that it starts, the workers of an instance."""
    nodes: int = 1
    """That one instance is spread over: its command is run on each."""
    cores: tuple[int, ...] = ()
    """CPU cores that it is pinned to; (): any."""
    gpu: str = "cpu"
    gpu_ids: tuple[int, ...] = ()
    """CUDA devices of this machine that the process sees (hardware: cuda)."""
    price_per_hour: float = 0.0
    """USD per hour for the whole process."""
    index: int = 0
    """Of an instance: its number within its pool; of the trainer: of its node."""


def plan_processes(
    cluster: ClusterConfig,
    run: RunConfig,
    run_dir: Path,
    sites: Collection[str] | None = None,
    folders: Mapping[str, Path] | None = None,
) -> list[ProcessSpec]:
    """Processes of a run in the order in which they are started.

    CUDA devices are numbered in order at each site: the trainer's ranks first, then those of every instance that a pool
    may have; colocated ones share them.

    Args:
        cluster: the resolved cluster file.
        run: the resolved run file.
        run_dir: the run's folder.
        sites: only those of these sites; None: of all.
        folders: of sites that have one of their own.
    """
    specs: list[ProcessSpec] = []
    if sites is None or cluster.trainer_site in sites:
        specs += _home_processes(cluster, run, (folders or {}).get(cluster.trainer_site, run_dir))
    for name in cluster.sites:
        if sites is None or name in sites:
            specs += _site_processes(cluster, run, name, (folders or {}).get(name, run_dir))
    return specs


def usd_per_hour(specs: Iterable[ProcessSpec]) -> float:
    """Of all processes, by the cluster file's prices."""
    return sum(spec.price_per_hour for spec in specs)


def instance_name(site: str, pool: str, index: int) -> str:
    """Unique in the run."""
    return f"{site}-{pool}-{index}"


def possible_instances(cluster: ClusterConfig, run: RunConfig, site_name: str, run_dir: Path) -> list[ProcessSpec]:
    """All instances that a site may have, those that a run begins with and those that it may be scaled to. Each has
    its devices, so that none moves to others when the number changes."""
    cuda, site = cluster.hardware == "cuda", cluster.sites[site_name]
    of_trainer = site.trainer.ranks if site.trainer and run.schedule.name != "colocated" else 0
    gpus_taken = itertools.count(of_trainer)
    specs = []
    for pool in site.generation:
        for index in range(pool.most_replicas):
            gpus = tuple(itertools.islice(gpus_taken, pool.gpus_per_replica)) if cuda else ()
            specs.append(_instance(pool, index, site_name, gpus, cuda, run_dir))
    return specs


def _role_command(run_dir: Path, role: Role, *extra: str) -> list[str]:
    return [sys.executable, "-m", "streamrl.launcher.entry_point", role, "--run-dir", str(run_dir), *extra]


def _home_processes(cluster: ClusterConfig, run: RunConfig, run_dir: Path) -> list[ProcessSpec]:
    """Controller and trainer."""
    cuda, home = cluster.hardware == "cuda", cluster.trainer_site
    controller_env = SAME_HASHES | {"OMP_NUM_THREADS": "1"} | PASSIVE_WAITING  # LightGBM's threads
    trainer = cluster.sites[home].trainer
    assert trainer is not None
    ranks = trainer.ranks // trainer.nodes
    gpus = tuple(range(ranks)) if cuda else ()
    specs = [ProcessSpec("controller", "controller", home, None, _role_command(run_dir, "controller"), controller_env)]
    for node in range(trainer.nodes):
        meeting = [
            *[f"--nnodes={trainer.nodes}", f"--node-rank={node}"],
            *["--rdzv-backend=static", f"--rdzv-endpoint={MEETING}"],
        ]
        if trainer.nodes == 1:
            meeting = ["--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
        specs.append(
            ProcessSpec(
                name="trainer" if node == 0 else f"trainer-node-{node}",
                role="trainer",
                site=home,
                pool=None,
                command=[
                    *[sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"],
                    *[*meeting, "--max-restarts=0", "--no-python"],
                    *_role_command(run_dir, "trainer"),
                ],
                env={"OMP_NUM_THREADS": str(trainer.threads)}
                | PASSIVE_WAITING
                | ({} if cuda else KEPT_HEAP)
                | _pinned(trainer.cores or ())
                | _visible(gpus, cuda),
                threads=trainer.threads,
                ranks=ranks,
                cores=tuple(trainer.cores or ()),
                gpu=trainer.gpu,
                gpu_ids=gpus,
                price_per_hour=trainer.price_per_hour * ranks,
                index=node,
            )
        )
    return specs


def _site_processes(cluster: ClusterConfig, run: RunConfig, site_name: str, run_dir: Path) -> list[ProcessSpec]:
    """A site's service, instances and reward workers."""
    site = cluster.sites[site_name]
    specs: list[ProcessSpec] = []
    if site.generation:
        command = _role_command(run_dir, "service", "--site", site_name)
        specs.append(ProcessSpec(f"service-{site_name}", "service", site_name, None, command))
        replicas = {pool.name: pool.replicas for pool in site.generation}
        possible = possible_instances(cluster, run, site_name, run_dir)
        specs += [spec for spec in possible if spec.index < replicas[str(spec.pool)]]
    if site.rewards or site.trainer:
        workers = site.rewards.workers if site.rewards else 1
        command = _role_command(run_dir, "rewards", "--site", site_name)
        specs.append(
            ProcessSpec(f"rewards-{site_name}", "rewards", site_name, None, command, SAME_HASHES, threads=workers)
        )
    return specs


def _instance(
    pool: GenerationPool, index: int, site: str, gpus: tuple[int, ...], cuda: bool, run_dir: Path
) -> ProcessSpec:
    name, cores = instance_name(site, pool.name, index), _cores_of(pool, index)
    parts = ["--node", NODE, "--meeting", MEETING] if pool.nodes > 1 else []
    return ProcessSpec(
        name=name,
        role="instance",
        site=site,
        pool=pool.name,
        command=_role_command(run_dir, "instance", "--site", site, "--pool", pool.name, "--name", name, *parts),
        env={"OMP_NUM_THREADS": str(pool.threads)}
        | ONE_BLAS_THREAD
        | PASSIVE_WAITING
        | _pinned(cores)
        | _visible(gpus, cuda),
        threads=pool.threads,
        ranks=pool.gpus_per_replica,
        nodes=pool.nodes,
        cores=cores,
        gpu=pool.gpu,
        gpu_ids=gpus,
        price_per_hour=pool.price_per_hour,
        index=index,
    )


def _cores_of(pool: GenerationPool, index: int) -> tuple[int, ...]:
    """CPU cores of a pool's instance: its own share if there are enough for all, else all of the pool's."""
    cores = tuple(pool.cores or ())
    if len(cores) < pool.most_replicas * pool.threads:
        return cores
    return cores[index * pool.threads : (index + 1) * pool.threads]


def _pinned(cores: Iterable[int]) -> dict[str, str]:
    names = ",".join(map(str, cores))
    return {CORES: names} if names else {}


def _visible(gpus: tuple[int, ...], cuda: bool) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if cuda else {}
