"""The checksums of a checkpoint's files, made and compared by all ranks. Collectives."""

from __future__ import annotations

import re
from pathlib import Path

import torch.distributed as dist

from streamrl.run_dir.checkpoint_sums import TRAINER_STATE, DamagedFile, FileSums, check_files, file_sums, read_sums
from streamrl.run_dir.checkpoints import unreadable
from streamrl.weights.sharded import deal

OF_RANK = re.compile(r"__(\d+)_\d+\.distcp")
"""Names of the files that torch's ranks write."""


def gathered_sums(checkpoint: Path) -> FileSums:
    """Return the checksums of all files of a checkpoint, whose writing has ended on every rank.

    Each rank reads what it has written, which its host still has in memory; rank 0 also what is of no rank.

    Raises:
        OSError: a file cannot be read.
    """
    files = [path for path in checkpoint.rglob("*") if path.is_file()]
    mine = [path for path in files if _writer(path) == dist.get_rank()]
    gathered: list[FileSums] = [{}] * dist.get_world_size()
    dist.all_gather_object(gathered, file_sums(checkpoint, mine))
    return {name: found for one in gathered for name, found in one.items()}


def check_trainer_state(checkpoint: Path) -> None:
    """Compare the trainer's part of a checkpoint with its checksums; each rank reads a share of the files.

    Raises:
        RunFailed: on every rank, if a file is damaged.
        OSError: on every rank, if one cannot be read now: a restarted trainer may read it.
    """
    problem: Exception | None = None
    try:
        sums = read_sums(checkpoint)
        names = [name for name in sorted(sums) if name.startswith(f"{TRAINER_STATE}/")]
        mine = deal([sums[name][0] for name in names], dist.get_world_size())[dist.get_rank()]
        check_files(checkpoint, sums, [names[index] for index in mine])
    except (OSError, DamagedFile) as error:
        problem = error
    gathered: list[Exception | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, problem)
    found = list(filter(None, gathered))
    for one in found:
        if isinstance(one, OSError):
            raise one
    if found:
        raise unreadable(checkpoint, found[0])


def _writer(path: Path) -> int:
    """Return the rank that has written a file of a checkpoint."""
    return int(named[1]) if (named := OF_RANK.fullmatch(path.name)) else 0
