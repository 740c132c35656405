"""Append-only files of one JSON object per line: writing, reading, and rewinding on resume.

A killed run may leave a cut last line: readers skip it, and the writer removes it before appending.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, Generic, Self, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from streamrl.atomic_files import replacing, sync_folder
from streamrl.errors import writing
from streamrl.plain_files import open_plain
from streamrl.run_dir.layout import LARGEST_ROWS

LARGEST_NUMBER = 1e150
"""Largest figure, above and below 0: of larger ones, sums and squares would be infinite wherever a run is shown."""


def finite(value: Any) -> Any:
    """Replace NaN and numbers beyond `LARGEST_NUMBER` by None, at any depth of dicts, lists and tuples."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, int | float):
        return value if abs(value) <= LARGEST_NUMBER else None
    return value


class Row(BaseModel):
    """Base of the rows of a file; unknown keys are errors when a row is made, what `finite` takes out becomes None."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _no_nan(cls, values: Any) -> Any:
        return finite(values)


class StepRow(Row):
    """Base of the rows of a file with one row per optimizer step."""

    step: int


class BriefRow(msgspec.Struct):
    """A part of a `StepRow`, by the names of its fields: what a reader of many rows needs, decoded in a tenth of the
    time."""

    step: int


Brief = TypeVar("Brief", bound=BriefRow)

TAIL_BYTES = 256 * 1024
"""Bytes at the end of a file in which its newest rows are looked for; a row takes a few kilobytes."""

AnyRow = TypeVar("AnyRow", bound=StepRow)


def parse_row(model: type[AnyRow], line: bytes) -> AnyRow | None:
    """Return the row of one line, without keys of a newer version; None for a cut or foreign line."""
    try:
        values = json.loads(line)
        row = model(**{key: item for key, item in values.items() if key in model.model_fields})
    except (ValueError, AttributeError, ValidationError, RecursionError):
        return None
    object.__setattr__(row, "__pydantic_fields_set__", _all_fields(model))
    return row


def parse_briefly(brief: type[Brief], model: type[StepRow], line: bytes) -> Brief | None:
    """Return a part of the row of one line, which is not validated as a whole; else like `parse_row`."""
    try:
        part = msgspec.json.decode(line, type=brief)
        values = [getattr(part, name) for name in brief.__struct_fields__]
        if finite(values) == values:
            return part
    except (ValueError, RecursionError):
        pass
    row = parse_row(model, line)  # an earlier version, or somebody else, may have written what only that takes
    return None if row is None else brief(**{name: getattr(row, name) for name in brief.__struct_fields__})


@cache
def _all_fields(model: type[Row]) -> set[str]:
    """Return the names of a model's fields, one set for all its rows: one for each row would be half of its memory."""
    return set(model.model_fields)


def read_rows(path: Path, model: type[AnyRow]) -> list[AnyRow]:
    """Read all complete rows in order; a missing file has none, unreadable lines are skipped.

    Raises:
        NotPlainFile: it is a link, no regular file, or has more than `LARGEST_ROWS` bytes.
    """
    return list(_rows(path, model, LARGEST_ROWS))


def iter_rows(path: Path, model: type[AnyRow]) -> Iterator[AnyRow]:
    """Yield all complete rows in order, one at a time, of a file of any size; else like `read_rows`.

    Its owner reads it so: a run must be able to go on however long it has been.

    Raises:
        NotPlainFile: it is a link, or no regular file.
    """
    return _rows(path, model, None)


def _rows(path: Path, model: type[AnyRow], largest: int | None) -> Iterator[AnyRow]:
    try:
        lines = open_plain(path, largest=largest)
    except FileNotFoundError:
        return
    with lines:
        yield from (row for line in lines if (row := parse_row(model, line)) is not None)


def last_lines(path: Path, tail_bytes: int = TAIL_BYTES) -> list[bytes]:
    """Return the lines in the last `tail_bytes` of a file, the first perhaps cut off; none if there is no file.

    Raises:
        NotPlainFile: it is a link, or no regular file.
        OSError: it exists and cannot be read.
    """
    try:
        with open_plain(path, largest=None) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - tail_bytes))
            return file.read().splitlines()
    except FileNotFoundError:
        return []


def _whole_lines_end(file: BinaryIO) -> int:
    """Return how many bytes of a file its whole lines take; only its end is read."""
    end = file.seek(0, os.SEEK_END)
    while end:
        begin = max(0, end - TAIL_BYTES)
        file.seek(begin)
        if found := file.read(end - begin).rfind(b"\n") + 1:
            return begin + found
        end = begin
    return 0


def _encode(row: StepRow) -> bytes:
    return json.dumps(row.model_dump(), allow_nan=False).encode() + b"\n"


def append_whole(file: FileIO, content: bytes) -> None:
    """Append all of `content` to an unbuffered file, or nothing.

    Raises:
        RunFailed: the disk is full; what it had taken is cut off again, as the next row would be glued to it.
    """
    before = os.fstat(file.fileno()).st_size
    rest = memoryview(content)
    with writing(file.name):
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            with suppress(OSError):
                file.truncate(before)
            raise


class RowWriter(Generic[AnyRow]):
    """The writer of rows, each on disk before `append` returns, as a checkpoint may follow; one per file."""

    def __init__(self, path: Path, model: type[AnyRow]) -> None:
        """Open or create the file, and remove a last line that was cut by a kill."""
        self.path, self._model = path, model
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.touch()
            sync_folder(path.parent)
        with path.open("rb+") as file:
            file.truncate(_whole_lines_end(file))
        self._file = path.open("ab", buffering=0)

    def append(self, row: AnyRow) -> None:
        """Write one row to disk; raise `RunFailed` if that is full."""
        append_whole(self._file, _encode(row))
        with writing(self.path):
            os.fsync(self._file.fileno())

    def rewind(self, step: int) -> int:
        """Drop the rows after `step`, which a run resumed from that checkpoint repeats; return how many.

        Raises:
            RunFailed: it cannot be written.
        """
        return self.rewind_reading(step, BriefRow)[0]

    def rewind_reading(self, step: int, brief: type[Brief]) -> tuple[int, list[Brief]]:
        """Do as `rewind`; return how many rows were dropped, and a part of each that stays.

        The file is replaced atomically: a kill, or a power failure, leaves the old or the new one. One line at a time
        is held, and those that stay are copied as they are.

        Raises:
            RunFailed: it cannot be written.
        """
        dropped, parts = 0, list[Brief]()
        self._file.close()
        with (
            writing(self.path),
            replacing(self.path, lasting=True) as temporary,
            temporary.open("wb") as kept,
            open_plain(self.path, largest=None) as lines,
        ):
            for line in lines:
                if (row := parse_briefly(brief, self._model, line)) is None:
                    continue  # it is no row, and would be skipped for ever
                if row.step <= step:
                    kept.write(line)
                    parts.append(row)
                else:
                    dropped += 1
        self._file = self.path.open("ab", buffering=0)
        return dropped, parts

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
