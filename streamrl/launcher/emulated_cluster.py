"""The cluster that `launch --emulate` runs: every site on this machine, with CPU processes."""

from __future__ import annotations

from streamrl.config.cluster import ClusterConfig, Emulation, GenerationPool, LaunchConfig, TrainerPool
from streamrl.errors import UserError


def emulated(cluster: ClusterConfig) -> ClusterConfig:
    """Shrink a cluster to the CPU processes of its `emulation` section; sites, links, GPU names and prices stay.

    No process is pinned: the numbers of cores in the file are those of other machines.

    Raises:
        UserError: the cluster has only one site.
    """
    if not cluster.remote_sites:
        raise UserError("--emulate is for clusters of several sites; this one has one: launch it without")
    options, sites = cluster.emulation, {}
    for name, site in cluster.sites.items():
        trainer = site.trainer and _trainer(site.trainer, options)
        generation = [_pool(pool, options) for pool in site.generation]
        agents = site.agents.model_copy(update={"cores": None})
        update = {"trainer": trainer, "generation": generation, "agents": agents, "launch": LaunchConfig()}
        sites[name] = site.model_copy(update=update)
    return cluster.model_copy(update={"hardware": "cpu", "sites": sites})


def _trainer(pool: TrainerPool, options: Emulation) -> TrainerPool:
    ranks = min(pool.ranks, options.trainer_ranks)
    whole = {"nodes": 1, "tensor_parallel": 1, "sequence_parallel": 1}
    return pool.model_copy(update={"ranks": ranks, **whole, "threads": options.trainer_threads, "cores": None})


def _pool(pool: GenerationPool, options: Emulation) -> GenerationPool:
    return pool.model_copy(
        update={
            "replicas": max(pool.min_replicas, min(pool.replicas, options.replicas)),
            "gpus_per_replica": 1,
            "nodes": 1,
            "threads": options.threads,
            "cores": None,
            "max_batch": min(pool.max_batch, options.max_batch),
            "kv_cache_gb": min(pool.kv_cache_gb, options.kv_cache_gb),
        }
    )
