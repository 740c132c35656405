"""The paths that a run would take and that nobody has run so far, as its plan and its warnings name them.

A path leaves this list when it has run on the hardware that it is for, with a result kept in docs/results.md. Until
then it is written and tested as far as a CPU goes: by fake tensors, over gloo, or as a state machine.
"""

from __future__ import annotations

from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig


def untried(cluster: ClusterConfig, run: RunConfig) -> list[str]:
    """Name the untried paths of a run, each with what has been shown in its place; []: all of it has run."""
    if cluster.hardware != "cuda":
        return []
    found = []
    if run.weights.path.untried:
        found.append(f"weights.backend: {run.weights.backend} ({run.weights.path.untried})")
    trainer, pools = cluster.trainer, [pool for site in cluster.sites.values() for pool in site.generation]
    if not run.schedule.exclusive:
        found.append("trainer and instances on GPUs of their own (on one GPU, which all of them shared)")
    elif sum(pool.most_replicas * pool.gpus_per_replica for pool in pools) > 1:
        found.append("trainer and several instances in turns on their GPUs (one instance on one GPU)")
    if trainer.ranks > 1:
        found.append(f"{trainer.ranks} trainer ranks over NCCL, with compiled layers (over gloo, without)")
    if trainer.tensor_parallel > 1:
        found.append("trainer.tensor_parallel over NCCL (over gloo)")
    if trainer.sequence_parallel > 1:
        found.append("trainer.sequence_parallel over NCCL (over gloo)")
    if any(pool.gpus_per_replica > 1 for pool in pools):
        found.append("instances of several GPUs (of several CPU processes)")
    if run.weights.generation_dtype != "same":
        found.append(f"generation in {run.weights.generation_dtype} on CUDA (on CPUs)")
    if run.generation.compute == "fp8":
        found.append("matrix products in fp8 (its description of layers and its codes on CPUs, int8 as a whole)")
    if run.algorithm.router_replay:
        found.append("experts recorded by vLLM's second model runner (by its first one on CPUs, which we wrap)")
    return found


def untried_warning(cluster: ClusterConfig, run: RunConfig) -> list[str]:
    """Return the untried paths as one warning; []: all of the run has run."""
    found = untried(cluster, run)
    return [f"never run so far: {'; '.join(found)}"] if found else []
