"""The list of processes to start for a cluster and a run; pure, so `--dry-run` shows exactly what launch does."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from streamrl.config.cluster import AgentPoolConfig, ClusterConfig, GenerationPool, TrainerPool
from streamrl.config.run import RunConfig
from streamrl.runtime.interfaces import LOOPBACK_INTERFACE

Role = Literal["controller", "trainer", "service", "instance", "rewards", "agents"]

PASSIVE_WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}
"""Environment that makes OpenMP threads sleep at barriers after some microseconds. Spinning threads made a 2-thread
trainer 7 x slower beside two busy instances on two cores, because they held the cores that the others needed; sleeping
ten times sooner cost a fifth of the speed when the trainer had the cores to itself."""

KEPT_HEAP = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": f"{1 << 40}",
    "MALLOC_TRIM_THRESHOLD_": f"{1 << 40}",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""Environment that makes glibc keep the memory of freed tensors. By default large blocks return to the system, and
every page of the next tensor must be allocated and cleared again: a quarter of a CPU trainer's time. There is one heap,
because the heaps of further threads cannot hold large blocks. Huge pages, where available, need 512 x fewer page faults
and are looked up faster (another twelfth). A CPU instance decodes in a tenth less time with it."""

ONE_BLAS_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""Environment that keeps OpenBLAS to one thread. It starts its threads when loaded, and an instance's process must be
single-threaded until it has forked its engine (`generation/instance/engine.py`)."""

GLOO_INSIDE = {"GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE}
"""Environment of an instance on one node: gloo would listen on the address of the host's name."""

CORES = "STREAMRL_CORES"
"""Environment variable: comma-separated numbers of the CPU cores that a process is pinned to."""

MEETING, NODE = "{meeting}", "{node}"
"""Placeholders in a command, filled in once the nodes are known: the rendezvous (host:port) of a trainer's or an
instance's nodes, and the number of the node."""

RANK_MEETING = "STREAMRL_RANK_MEETING"
"""Environment variable of a trainer's rank: path of the file, or host:port, at which the ranks meet."""

ON_RAY: frozenset[Role] = frozenset({"trainer", "instance", "rewards", "agents"})
"""Roles that Ray places, at a site with `launch: {backend: ray}`."""

HIDDEN = "STREAMRL_HIDDEN"
"""Environment variable: a JSON list of the files and folders with the keys and sockets of the run, which no sandbox
shows."""
SOCKETS_OF_VLLM = "VLLM_RPC_BASE_PATH"
"""vLLM's variable for the folder in which an engine has its sockets; multiprocessing's are there, too."""
STARTER = "STREAMRL_PARENT"
"""Environment variable: PID of the process whose death ends this one (the launcher, or the actor on a Ray node)."""
PROCESS = "STREAMRL_PROCESS"
"""Environment variable: generation number of an instance's process (`run_dir/instance_files.py`)."""

SAME_HASHES = {"PYTHONHASHSEED": "0"}
"""Environment that fixes Python's string hashes. Some reasoning-gym questions depend on the order of sets of strings:
the processes that ask and verify must agree, and a resumed run must ask the same questions."""


@dataclass(frozen=True)
class ProcessSpec:
    """One operating-system process (for the trainer: `launcher/trainer_ranks.py`, which starts the ranks of a node)."""

    name: str
    """Name, unique in the run: 'controller', 'trainer', 'service-here', 'here-regular-0', 'rewards-here',
    'agents-here'."""
    role: Role
    site: str
    pool: str | None
    command: list[str]
    env: dict[str, str] = field(default_factory=dict)
    threads: int = 1
    """CPU threads with which the process (each of its ranks) computes."""
    ranks: int = 1
    """Computing processes inside it: the trainer ranks it starts, or the workers of an instance."""
    nodes: int = 1
    """Nodes that one instance spans; its command runs on each."""
    cores: tuple[int, ...] = ()
    """CPU cores the process is pinned to; (): any."""
    gpu: str = "cpu"
    gpu_ids: tuple[int, ...] = ()
    """CUDA devices that the process sees, by their positions among those that the launcher may use (hardware: cuda)."""
    price_per_hour: float = 0.0
    """USD per hour for the whole process."""
    memory_gb: float = 0.0
    """GiB that the processes of its environments may use together; 0: it has none."""
    index: int = 0
    """Number of an instance within its pool, or of a trainer's node."""


def plan_processes(
    cluster: ClusterConfig,
    run: RunConfig,
    run_dir: Path,
    sites: Collection[str] | None = None,
    folders: Mapping[str, Path] | None = None,
) -> list[ProcessSpec]:
    """List the processes of a run in start order.

    Each site numbers its CUDA devices in order: the trainer's ranks first, then every instance that a pool may have;
    colocated instances share the trainer's.

    Args:
        run_dir: folder of the sites that have none of their own.
        sites: the sites to include; None: all.
        folders: folders of the sites that have their own, by site.
    """
    specs: list[ProcessSpec] = []
    sites, folders = cluster.sites if sites is None else sites, folders or {}
    if cluster.trainer_site in sites:
        specs += _home_processes(cluster, folders.get(cluster.trainer_site, run_dir))
    for name in cluster.sites:
        if name in sites:
            specs += _site_processes(cluster, run, name, folders.get(name, run_dir))
    return specs


def usd_per_hour(specs: Iterable[ProcessSpec]) -> float:
    """Sum the prices of all processes, by the cluster file."""
    return sum(spec.price_per_hour for spec in specs)


def instance_name(site: str, pool: str, index: int) -> str:
    """Return an instance's name, unique in the run."""
    return f"{site}-{pool}-{index}"


def rank_name(rank: int) -> str:
    """Return the name under which a rank of the trainer speaks, unique in the run."""
    return f"trainer-{rank}"


def rank_names(spec: ProcessSpec) -> list[str]:
    """Return the names of the ranks that a process of a trainer's node starts."""
    return [rank_name(spec.index * spec.ranks + number) for number in range(spec.ranks)]


def possible_instances(cluster: ClusterConfig, run: RunConfig, site_name: str, run_dir: Path) -> list[ProcessSpec]:
    """List all instances that a site may have, at the start or after scaling.

    Each has devices of its own, so that none changes devices when the number changes.
    """
    cuda, site = cluster.hardware == "cuda", cluster.sites[site_name]
    of_trainer = site.trainer.ranks if site.trainer and not run.schedule.exclusive else 0
    gpus_taken = itertools.count(of_trainer)
    specs = []
    for pool in site.generation:
        for index in range(pool.most_replicas):
            gpus = tuple(itertools.islice(gpus_taken, pool.gpus_per_replica)) if cuda else ()
            specs.append(_instance(pool, index, site_name, gpus, run_dir, cuda))
    return specs


def _role_command(run_dir: Path, role: Role, *extra: str) -> list[str]:
    return [sys.executable, "-m", "streamrl.launcher.entry_point", role, "--run-dir", str(run_dir), *extra]


def _home_processes(cluster: ClusterConfig, run_dir: Path) -> list[ProcessSpec]:
    """List the processes of the trainer's site: controller and trainer."""
    cuda, home = cluster.hardware == "cuda", cluster.trainer_site
    controller_env = SAME_HASHES | {"OMP_NUM_THREADS": "1"} | PASSIVE_WAITING  # LightGBM's threads
    trainer = cluster.trainer
    ranks = trainer.ranks // trainer.nodes
    gpus = tuple(range(ranks)) if cuda else ()
    specs = [ProcessSpec("controller", "controller", home, None, _role_command(run_dir, "controller"), controller_env)]
    for node in range(trainer.nodes):
        several = [f"--nodes={trainer.nodes}", f"--node={node}", f"--meeting={MEETING}"] if trainer.nodes > 1 else []
        specs.append(
            ProcessSpec(
                name="trainer" if node == 0 else f"trainer-node-{node}",
                role="trainer",
                site=home,
                pool=None,
                command=[
                    *[sys.executable, "-m", "streamrl.launcher.trainer_ranks", f"--ranks={ranks}", *several, "--"],
                    *_role_command(run_dir, "trainer"),
                ],
                env=_computing(trainer, trainer.cores or (), cuda),
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
    """List a site's service, instances, agents and reward workers."""
    site = cluster.sites[site_name]
    specs: list[ProcessSpec] = []
    if site.generation:
        command = _role_command(run_dir, "service", "--site", site_name)
        specs.append(ProcessSpec(f"service-{site_name}", "service", site_name, None, command))
        replicas = {pool.name: pool.replicas for pool in site.generation}
        possible = possible_instances(cluster, run, site_name, run_dir)
        specs += [spec for spec in possible if spec.index < replicas[str(spec.pool)]]
        if run.agent_tasks:
            specs.append(_agents(site.agents, run, site_name, run_dir))
    if site.rewards or site.trainer:
        workers = site.rewards.workers if site.rewards else 1
        command = _role_command(run_dir, "rewards", "--site", site_name)
        env = SAME_HASHES | ONE_BLAS_THREAD | {"OMP_NUM_THREADS": "1"}  # one core per worker
        specs.append(ProcessSpec(f"rewards-{site_name}", "rewards", site_name, None, command, env, threads=workers))
    return specs


def _agents(pool: AgentPoolConfig, run: RunConfig, site: str, run_dir: Path) -> ProcessSpec:
    """Return the agents process of a site, with room for its workers and the processes of its environments."""
    cores = tuple(pool.cores or ())
    return ProcessSpec(
        name=f"agents-{site}",
        role="agents",
        site=site,
        pool=None,
        command=_role_command(run_dir, "agents", "--site", site),
        env=SAME_HASHES | ({CORES: ",".join(map(str, cores))} if cores else {}),
        threads=pool.workers + sum(use.processes for use in run.environments),
        cores=cores,
        memory_gb=sum(use.processes * use.memory_gb for use in run.environments),
    )


def _instance(
    pool: GenerationPool, index: int, site: str, gpus: tuple[int, ...], run_dir: Path, cuda: bool
) -> ProcessSpec:
    name, cores = instance_name(site, pool.name, index), _cores_of(pool, index, cuda)
    parts = ["--node", NODE, "--meeting", MEETING] if pool.nodes > 1 else []
    return ProcessSpec(
        name=name,
        role="instance",
        site=site,
        pool=pool.name,
        command=_role_command(run_dir, "instance", "--site", site, "--pool", pool.name, "--name", name, *parts),
        env=_computing(pool, cores, cuda) | ONE_BLAS_THREAD | ({} if parts else GLOO_INSIDE),
        threads=pool.threads,
        ranks=pool.gpus_per_replica,
        nodes=pool.nodes,
        cores=cores,
        gpu=pool.gpu,
        gpu_ids=gpus,
        price_per_hour=pool.price_per_hour,
        index=index,
    )


def _cores_of(pool: GenerationPool, index: int, cuda: bool) -> tuple[int, ...]:
    """Return an instance's CPU cores: its own share if the pool has enough for all, else all of the pool's."""
    cores, count = tuple(pool.cores or ()), pool.most_replicas
    workers = pool.gpus_per_replica // pool.nodes  # on one machine
    # `threads` counts what computes on CPUs; beside GPUs a core feeds each worker, and one more the scheduler
    each = workers + 1 if cuda else pool.threads * workers
    if len(cores) < count * each:
        return cores
    if cuda:
        return cores[index * len(cores) // count : (index + 1) * len(cores) // count]
    return cores[index * each : (index + 1) * each]


def _computing(pool: GenerationPool | TrainerPool, cores: Iterable[int], cuda: bool) -> dict[str, str]:
    """Return the environment of a process that computes with a pool's threads, pinned to `cores` if there are any."""
    env = {"OMP_NUM_THREADS": str(pool.threads)} | PASSIVE_WAITING | ({} if cuda else KEPT_HEAP)
    if names := ",".join(map(str, cores)):
        env[CORES] = names
    return env
