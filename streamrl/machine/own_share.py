"""Memory, cores and threads that this process may use: those of the machine, or of its container if that has less."""

from __future__ import annotations

import math
import os
import resource

import psutil

from streamrl.machine.cgroups import read_limits


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use: whole ones, at least one."""
    cores, limit = len(core_numbers()), read_limits().cores
    return cores if math.isinf(limit) else min(cores, max(1, int(limit)))


def core_numbers() -> set[int]:
    """Return the numbers of the CPU cores that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def free_memory() -> float:
    """Return the bytes of memory that this process may still take without swapping."""
    return min(float(psutil.virtual_memory().available), read_limits().memory_left)


def total_memory() -> float:
    """Return the bytes of memory that this process and those beside it may use together."""
    return min(float(psutil.virtual_memory().total), read_limits().memory)


def free_tasks() -> float:
    """Return how many threads, of all processes together, this user and container may still start; infinite: any.

    Users who may pass over limits, such as root, are not counted by them.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    own = math.inf if limit == resource.RLIM_INFINITY or os.geteuid() == 0 else max(0, limit - _tasks_of_user())
    return min(own, read_limits().tasks_left)


def _tasks_of_user() -> int:
    """Count the threads of this user that can be seen."""
    processes = psutil.process_iter(["uids", "num_threads"])
    found = (one.info for one in processes if one.info["uids"] and one.info["uids"].real == os.getuid())
    return sum(info["num_threads"] or 1 for info in found)
