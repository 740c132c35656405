"""Parquet files of a run's folder, which may be somebody else's: plain files, and no more than fits into memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from streamrl.plain_files import NotPlainFile, open_plain

LARGEST_PARQUET = 16 << 30
"""Most bytes of a file; few of them are read at a time."""
MOST_ROWS = 2_000_000
"""Most rows of a file: one optimizer step's."""
MOST_DECODED = 4 << 30
"""Most bytes that some columns of a file may take in memory: a few kilobytes can unpack to any number of rows."""
BATCH = 1_024
"""Rows that are unpacked at a time."""

OF_STEP = re.compile(r"step_([0-9]+)\.parquet")


def step_file(step: int) -> str:
    """Return the name of a step's file."""
    return f"step_{step:06d}.parquet"


def step_of(name: str) -> int | None:
    """Return the step whose file has this name; None: it is no step's, such as `step_000003.old.parquet`."""
    match = OF_STEP.fullmatch(name)
    return int(match[1]) if match and name == step_file(int(match[1])) else None


def step_files(folder: Path) -> list[tuple[int, Path]]:
    """Return the steps that have a file in a folder, in order, and their files; [] if there is no such folder."""
    return sorted((step, path) for path in folder.glob("step_*") if (step := step_of(path.name)) is not None)


@contextmanager
def open_parquet(path: Path, below: Path) -> Iterator[pq.ParquetFile]:
    """Open a file for reading.

    Args:
        path: the file.
        below: the folder that the user named, of which the file is a part.

    Raises:
        NotPlainFile: it is a link, no regular file, has too many rows, or has two columns of one name.
        OSError, pa.ArrowException: it cannot be read.
    """
    with open_plain(path, below=below, largest=LARGEST_PARQUET) as opened, pq.ParquetFile(opened) as file:
        if file.metadata.num_rows > MOST_ROWS:
            rows = f"{path} has {file.metadata.num_rows:,} rows"
            raise NotPlainFile(f"{rows}: of such a file at most {MOST_ROWS:,} are read")
        names = file.schema_arrow.names
        if len(set(names)) < len(names):
            raise NotPlainFile(f"{path} has two columns of one name, which no rollouts have, and is not read")
        yield file


def read_columns(path: Path, below: Path, columns: Sequence[str] | None = None, per_byte: int = 0) -> pa.Table:
    """Return those of some columns that a file has; None: all.

    Args:
        path: the file.
        below: as in `open_parquet`.
        columns: names of columns.
        per_byte: bytes that may be unpacked per byte of the file, where that is more than `MOST_DECODED`.

    Raises:
        NotPlainFile: it is a link, no regular file, unpacks to more than that, or has two columns of one name.
        OSError, pa.ArrowException: it cannot be read.
    """
    with open_parquet(path, below) as file:
        there = file.schema_arrow
        names = there.names if columns is None else [name for name in dict.fromkeys(columns) if name in there.names]
        batches: list[pa.RecordBatch] = []
        size, most = 0, max(MOST_DECODED, per_byte * path.stat().st_size)
        for batch in file.iter_batches(batch_size=BATCH, columns=names, use_threads=False):
            batches.append(batch)
            size += batch.nbytes
            if size > most:
                raise NotPlainFile(f"{path} unpacks to more than {most:,} bytes, and is not read")
        schema = pa.schema([there.field(name) for name in names], there.metadata)
        return pa.Table.from_batches(batches, schema)
