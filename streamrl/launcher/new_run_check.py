"""Checks that refuse a new run; one that an earlier version began with such files goes on, with a warning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from scheduler.schedule.schedules import SEPARATE
from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.config.weight_sync import COLLECTIVE_S, LONGER
from streamrl.runtime.device_turns import takes_turns
from streamrl.runtime.process_plan import ProcessSpec, plan_processes, possible_instances, rank_names


def check_new_run(cluster: ClusterConfig, run: RunConfig) -> Iterable[str]:
    """Check that processes have names of their own, can share GPUs where they take turns, and wait long enough."""
    yield from _check_names(cluster, run)
    yield from _check_pushes(cluster, run)
    home = cluster.trainer_site
    if takes_turns(cluster.hardware == "cuda", run) and cluster.sites[home].on_ray:
        yield (
            f"schedule: {run.schedule.name} gives the same GPUs to generation and training, and Ray gives each process "
            f"of site {home} its own, twice as many in all; expected one of {', '.join(SEPARATE)}, or "
            f"sites.{home}.launch.backend: local"
        )


def _check_pushes(cluster: ClusterConfig, run: RunConfig) -> Iterable[str]:
    """Check that a push ends before the trainer's other ranks have waited too long for rank 0."""
    trainer, limits = cluster.trainer, run.deadlines
    if run.weights.path.fetched or trainer.ranks == 1:
        return
    copies = trainer.nodes if trainer.sharding == "hybrid" else 1
    groups = copies, trainer.tensor_parallel, trainer.ranks // (copies * trainer.tensor_parallel)
    if any(1 < ranks < trainer.ranks for ranks in groups):
        collective_s, which = COLLECTIVE_S[cluster.hardware], "torch's limit for some of the ranks"
    else:
        collective_s = max(limits.training_s, limits.checkpoint_s)
        which = "the longer of deadlines.training_s and deadlines.checkpoint_s"
    if limits.weights_s > (longest_s := collective_s / LONGER):
        yield (
            f"deadlines.weights_s is {limits.weights_s:g}: with weights.backend: {run.weights.backend} the other ranks "
            f"of the trainer wait that long for rank 0 in a collective, which ends after {collective_s:g} s ({which}); "
            f"expected at most {longest_s:g}, or backend: stream"
        )


def _check_names(cluster: ClusterConfig, run: RunConfig) -> Iterable[str]:
    owners: dict[str, str] = {}
    told = set()
    for name, owner in _named(cluster, run):
        other = owners.setdefault(name, owner)
        if other != owner and (other, owner) not in told:
            told.add((other, owner))
            yield (
                f"{other} and {owner} would both have a process or log {name}: expected different names; rename one of "
                "these sites or pools"
            )


def _named(cluster: ClusterConfig, run: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the names of processes and of their logs, each with the key that it comes from."""
    for site in cluster.sites:
        for spec in (*plan_processes(cluster, run, Path(), [site]), *possible_instances(cluster, run, site, Path())):
            owner = f"sites.{site}.generation ({spec.pool})" if spec.pool is not None else f"sites.{site} ({spec.role})"
            for name in (spec.name, *_further(spec)):
                yield name, owner


def _further(spec: ProcessSpec) -> list[str]:
    if spec.role == "trainer":
        return rank_names(spec)
    return [f"{spec.name}-workers"] if spec.role in ("rewards", "agents") else []
