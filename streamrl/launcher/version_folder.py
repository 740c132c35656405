"""Where the sites on this machine keep versions of the weights: in shared memory if they fit, else in run folders."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.errors import FULL, ErrorCode, UserError
from streamrl.launcher.gpu_checks import sites_here
from streamrl.machine.model_files import resolve_model, weight_bytes
from streamrl.run_dir.layout import SHARED_MEMORY

VERSIONS = 2
"""Versions that a site has at once: the one that instances load from, and the next one, which is being received."""
PASSED_ON = 1
"""Further ones of a site that other sites fetch from: an older one, of which it makes a delta or an anchor."""
FP32_OVER_BF16 = 2
"""Bytes of a version in fp32 over those of a model's files, which usually are in bf16."""


def fits_into_shared_memory(
    cluster: ClusterConfig, run: RunConfig, sites: Collection[str], folder: Path = SHARED_MEMORY
) -> bool:
    """Return whether a folder in memory can be written to and has room for the versions of these sites.

    Args:
        cluster: the cluster file, for its hardware and sites.
        run: the run file, for its model.
        sites: names of the sites of which all processes are on this machine.
        folder: that folder.
    """
    return os.access(folder, os.W_OK | os.X_OK) and room_needed(cluster, run, sites) <= shutil.disk_usage(folder).free


def room_needed(cluster: ClusterConfig, run: RunConfig, sites: Collection[str]) -> int:
    """Return the most bytes that the versions of these sites take, as far as a launch counts them.

    0 if the trainer pushes weights into instances, or the model is missing, which is told elsewhere.
    """
    try:
        weights = weight_bytes(Path(resolve_model(run.model.path))) if run.weights.path.fetched else 0
    except UserError:
        return 0
    may_be_fp32 = run.model.dtype == "auto" and cluster.hardware == "cpu" and not cluster.remote_sites
    in_fp32 = run.model.dtype == "float32" or may_be_fp32
    passing_on = sum(name != cluster.trainer_site and cluster.sites[name].port > 0 for name in sites)
    versions = len(sites) * VERSIONS + passing_on * PASSED_ON
    return versions * weights * (FP32_OVER_BF16 if in_fp32 else 1)


def check_semaphores(cluster: ClusterConfig, site: str | None) -> Iterable[str]:
    """Check that processes here can make semaphores, which are files in shared memory: rewards need them."""
    if not sites_here(cluster, site):
        return
    try:
        multiprocessing.get_context("fork").Lock()
    except OSError as error:
        problem = (
            f"this user cannot make semaphores in {SHARED_MEMORY} ({error.strerror or error}), which the rewards "
            "process needs"
        )
        if error.errno in FULL:
            yield ErrorCode.DISK.refer(
                f"{problem}: delete files there that nothing uses, or give it more room (a container: --shm-size)"
            )
        else:
            remedy = f"mount -t tmpfs -o mode=1777 tmpfs {SHARED_MEMORY}"
            yield f"{problem}: mount it so that all users can write to it ({remedy})"


def shared_memory_warnings(
    cluster: ClusterConfig, run: RunConfig, sites: Collection[str], folder: Path = SHARED_MEMORY
) -> list[str]:
    """Warn if a machine has shared memory, as containers do, but too little of it, or none for this user.

    Args:
        cluster: the cluster file, for its hardware and sites.
        run: the run file, for its model.
        sites: names of the sites of which all processes are on this machine.
        folder: the folder in memory.
    """
    if not folder.is_dir() or not sites or fits_into_shared_memory(cluster, run, sites, folder):
        return []
    if not os.access(folder, os.W_OK | os.X_OK):
        return [f"{folder} cannot be written to: versions of the weights go through the run folder, which is slower"]
    free, needed = shutil.disk_usage(folder).free / 2**20, room_needed(cluster, run, sites) / 2**20
    return [
        f"{folder} has {free:.0f} MiB free and versions of the weights take {needed:.0f} MiB: they go through the run "
        f"folder instead, which is slower (a container gets more by --shm-size {needed / 1024 + 1:.0f}g)"
    ]
