"""The store through which the trainer's ranks find each other.

Ranks of one node share a file in a folder that only their user can enter. Ranks of several nodes need a network store,
and torch's neither authenticates nor encrypts. So rank 0's listens on one address alone, that of its node towards
the others, and not on all interfaces, as torch would let it. Whoever reaches that address may speak to it
(docs/explanation/security.md).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

from streamrl.errors import RunFailed
from streamrl.runtime.meeting_store import listening_store
from streamrl.runtime.process_plan import RANK_MEETING


def rank_store(environment: Mapping[str, str], limit_s: float) -> dist.Store:
    """Return the store of a rank whose environment `launcher/trainer_ranks.py` has made.

    Args:
        environment: its environment variables.
        limit_s: seconds to wait for the other nodes.

    Raises:
        RunFailed: rank 0's node does not have the stated address, or another node cannot reach it.
    """
    meeting, rank, ranks = environment[RANK_MEETING], int(environment["RANK"]), int(environment["WORLD_SIZE"])
    if meeting.startswith("/"):
        return dist.FileStore(meeting, ranks)
    host, _, port = meeting.rpartition(":")
    limit = timedelta(seconds=limit_s)
    if rank > 0:
        try:
            return dist.TCPStore(host, int(port), ranks, is_master=False, timeout=limit)
        except dist.DistError as error:
            raise RunFailed(f"rank {rank} cannot reach rank 0 at {meeting}: {error}") from error
    try:
        return listening_store(host, int(port), ranks, limit_s)
    except RunFailed as error:
        raise RunFailed(f"rank 0 {error}") from error


def join_ranks(backend: str, limit_s: float, collective_s: float) -> None:
    """Join this process, by its environment, to the trainer's process group.

    Args:
        backend: `nccl` or `gloo`.
        limit_s: seconds for all ranks to come.
        collective_s: seconds for which a rank waits in a collective for the others, who may still write files.

    Raises:
        RunFailed: as `rank_store`.
    """
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, limit = rank_store(os.environ, limit_s), timedelta(seconds=collective_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
