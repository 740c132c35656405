"""What a cluster file sets and a launch does not use, and what a run file sets and its cluster has no use for.

People share such files between machines and clusters, so none is refused.
"""

from __future__ import annotations

from collections.abc import Iterable

from streamrl.config.cluster import AgentPoolConfig, ClusterConfig, GenerationPool, Site
from streamrl.config.run import RunConfig
from streamrl.config.weight_sync import FETCHING, WeightSyncConfig
from streamrl.controller.schedule_tuner import first_free_step

OF_OTHERS = {"cuda": ("kv_cache_gb", "cpu"), "cpu": ("gpu_memory_fraction", "cuda")}
"""By hardware, the key of a pool that only the other hardware uses."""


def cluster_warnings(cluster: ClusterConfig) -> Iterable[str]:
    """Say which keys have another value than their default and no use; not of an emulated cluster, which is changed."""
    key, other = OF_OTHERS[cluster.hardware]
    default = GenerationPool.model_fields[key].default
    for name, site in cluster.sites.items():
        yield from _about_ranks(name, site)
        if cluster.hardware == "cpu" and not site.on_ray:
            yield from _about_gpu_types(name, site)
        for pool in site.generation:
            if getattr(pool, key) != default:
                yield (
                    f"sites.{name}.generation ({pool.name}).{key} has no use with hardware: {cluster.hardware}, only "
                    f"with {other}"
                )
        if not site.generation and site.agents != AgentPoolConfig():
            yield f"sites.{name}.agents has no use at a site without a generation pool: agents work beside those"


def _about_ranks(name: str, site: Site) -> Iterable[str]:
    if (trainer := site.trainer) is None:
        return
    if trainer.sharding == "hybrid" and trainer.nodes == 1:
        yield f"sites.{name}.trainer.sharding: hybrid is the same as full on one node"
    if trainer.reduce_gradients != "auto" and trainer.ranks == trainer.tensor_parallel:
        how = trainer.reduce_gradients
        yield f"sites.{name}.trainer.reduce_gradients: {how} has no use: no other rank has gradients to sum"


def _about_gpu_types(name: str, site: Site) -> Iterable[str]:
    """Name GPU types at a site without GPUs; `streamrl plan` and Ray go by them all the same."""
    typed = [("trainer", site.trainer.gpu)] if site.trainer is not None else []
    typed += [(f"generation ({pool.name})", pool.gpu) for pool in site.generation]
    for part, gpu in typed:
        if gpu != "cpu":
            yield f"sites.{name}.{part}.gpu: {gpu} has no use with hardware: cpu, only with cuda or in a plan"


def unused_here(cluster: ClusterConfig, run: RunConfig) -> Iterable[str]:
    """Say which keys of a run file have another value than their default and no use on one machine or at one site."""
    if not cluster.remote_sites and not cluster.sites[cluster.trainer_site].on_ray and run.weights.path.fetched:
        for key in FETCHING:
            if (value := getattr(run.weights, key)) != WeightSyncConfig.model_fields[key].default:
                yield f"weights.{key}: {value} has no use on one machine, where weights are copied and nothing is sent"
    if sum(bool(site.generation) for site in cluster.sites.values()) == 1 and run.dispatch.price_tolerance:
        yield (
            f"dispatch.price_tolerance: {run.dispatch.price_tolerance} has no use: one site generates, so none can be "
            "chosen for its price"
        )
    pools = [pool for site in cluster.sites.values() for pool in site.generation]
    if run.elasticity.enabled and all(pool.min_replicas == pool.most_replicas for pool in pools):
        yield (
            "elasticity.enabled has no use: every pool has as many instances as it may have, and as it must; set "
            "max_replicas or min_replicas"
        )
    together = [sum(pool.most_replicas for pool in site.generation) for site in cluster.sites.values()]
    if run.schedule.rolling and run.weights.path.fetched and max(together) == 1:
        yield "schedule.rolling has no use: no site has several instances that could load one after the other"
    if run.steps < (first := first_free_step(cluster, run)):
        yield (
            f"schedule: auto runs what it chooses from step {first} on, and the run has {run.steps} steps: name a "
            "schedule, or set fewer schedule.profile_steps or more steps"
        )
