"""The checksums of a checkpoint's files, `checksums.json` in it: what a disk or a copy has damaged is never loaded.

The formats of the files would notice little of it: a bit that has flipped, or a page of zeros, in a tensor is another
tensor. Checkpoints of earlier versions have no such file, and their files are not checked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from blake3 import blake3

SUMS_FILE = "checksums.json"
STATE_FILE = "state.json"
"""The controller's part of a checkpoint."""
TRAINER_STATE = "trainer_state"
"""Folder of the trainer's part of a checkpoint."""
TENSORS_FILE = f"{TRAINER_STATE}/.metadata"
"""torch's list of the tensors in it."""
CHUNK_BYTES = 16 << 20
"""Bytes that are read and hashed at once."""
THREADS = 4
"""Threads that hash a chunk."""

FileSums = dict[str, tuple[int, str]]
"""(bytes, BLAKE3) of files by their names, relative to the checkpoint."""


class DamagedFile(ValueError):
    """A file of a checkpoint is not the one that was written; the message names it."""


def file_sums(checkpoint: Path, paths: Iterable[Path]) -> FileSums:
    """Read files of a checkpoint and return their checksums.

    Raises:
        OSError: one cannot be read.
    """
    return {path.relative_to(checkpoint).as_posix(): _sum(path) for path in paths}


def write_sums(checkpoint: Path, step: int, sums: FileSums) -> None:
    """Write `checksums.json` into a checkpoint of a step that is not complete yet.

    Raises:
        OSError: it cannot be written.
    """
    (checkpoint / SUMS_FILE).write_text(json.dumps({"step": step, "files": sums}), encoding="utf-8")


def read_sums(checkpoint: Path) -> FileSums:
    """Return the checksums of a checkpoint's files; {}: it has none.

    Raises:
        DamagedFile: they cannot be read, or are of another step.
        OSError: they cannot be read now.
    """
    try:
        values = json.loads((checkpoint / SUMS_FILE).read_bytes())
        step, sums = int(values["step"]), {str(name): (int(n), str(s)) for name, (n, s) in values["files"].items()}
    except FileNotFoundError:
        return {}
    except (ValueError, OverflowError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedFile(f"{SUMS_FILE} is damaged") from error
    if checkpoint.name != f"step_{step}":
        raise DamagedFile(f"{SUMS_FILE} is of step {step}")
    return sums


def check_files(checkpoint: Path, sums: Mapping[str, tuple[int, str]], names: Iterable[str], read: bool = True) -> None:
    """Compare files of a checkpoint with their checksums; one without is not read.

    Args:
        checkpoint: folder of the checkpoint.
        sums: sizes and checksums by name.
        names: names of the files.
        read: whether to read them; False: only their sizes are compared.

    Raises:
        DamagedFile: one is missing or another one than was written.
        OSError: one cannot be read now.
    """
    for name in names:
        if name not in sums:
            continue
        path = checkpoint / name
        try:
            there, size = path.stat().st_size, sums[name][0]
            if there != size:
                raise DamagedFile(f"{name} has {there:,} bytes, and had {size:,} when it was written")
            if read and _sum(path) != sums[name]:
                raise DamagedFile(f"{name} does not match its checksum")
        except FileNotFoundError as error:
            raise DamagedFile(f"{name} is missing") from error


def check_whole(checkpoint: Path) -> None:
    """Check that a checkpoint has what every version has written: a copy that was cut off may lack its checksums, too.

    Raises:
        DamagedFile: a file is missing or empty.
        OSError: one cannot be looked at now.
    """
    for name in (STATE_FILE, TENSORS_FILE):
        try:
            if not (checkpoint / name).stat().st_size:
                raise DamagedFile(f"{name} is empty")
        except (FileNotFoundError, NotADirectoryError) as error:
            raise DamagedFile(f"{name} is missing") from error


def _sum(path: Path) -> tuple[int, str]:
    found, size = blake3(max_threads=THREADS), 0
    chunk = memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:  # a mapped file that cannot be read would end the process
        while count := file.readinto(chunk):
            found.update(chunk[:count])
            size += count
    return size, found.hexdigest()
