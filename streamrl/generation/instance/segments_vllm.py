"""Shared memory between the workers of a vLLM CPU engine that goes when its processes do, however they end.

vLLM leaves the segments by which workers add up their results, 4 MB of each, in /dev/shm for good when it ends its
workers by signals, as it does at every end of an engine.
"""

from __future__ import annotations

import torch
from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

from streamrl.run_dir.layout import SHARED_MEMORY

_share = _CPUSHMDistributed._init_cpu_shm


def share(group: _CPUSHMDistributed) -> int:
    """Do the work of `_CPUSHMDistributed._init_cpu_shm`; then all workers hold the segments, which need no name more.

    Returns:
        vLLM's handle of the segments.
    """
    handle = _share(group)
    rank = torch.distributed.get_rank(group.communicator.device_group)
    (SHARED_MEMORY / f"{group.group_name}_{rank}").unlink(missing_ok=True)
    return handle


def install() -> None:
    """Replace vLLM's way in this process."""
    setattr(_CPUSHMDistributed, "_init_cpu_shm", share)  # noqa: B010  # mypy refuses to assign a method
