"""Past rollouts as columns, read from a run's Parquet files or from any JSONL/Parquet with prompts and lengths."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress, repeat
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ranker.errors import RankerError
from ranker.segments import Array

ROLLOUTS = "rollouts"
"""Folder of a run's rollouts in the run's own."""
OF_RUNS = ("config.yaml", "metrics.jsonl")
"""Files one of which is in every run's folder."""
REQUIRED = ("prompt", "output_length")
TEXT = ("prompt", "task", "group_id", "finish_reason", "void_cause")
NUMBERS = ("output_length", "epoch", "step", "t_finished")
EPISODE = "metrics"
"""Column that has any value in an agent's episode, and none in a completion."""
COLUMNS = (*TEXT, *NUMBERS, EPISODE)
"""Columns to read; all but `REQUIRED` may be missing. The rollout format's `prompt_id` is not needed: the same text is
the same prompt, also across runs.
"""

FileOpener = Callable[[Path, Path], BinaryIO]
"""Opens a file for reading, given also the folder that it was found in or below, or itself."""

MOST = 1e9
"""Greatest plausible length, tokens."""

PILE = 0.02
"""Share of samples at exactly the greatest length from which it counts as a cap where no row has a `finish_reason`."""


@dataclass(frozen=True)
class Rollouts:
    """Finished samples, one entry per sample [N]; texts and names are stored once and referred to by number."""

    texts: list[str]
    """Distinct prompts."""
    prompt: Array
    """Index into `texts` [N]."""
    output_length: Array
    """Output length in tokens [N], at least 1."""
    tasks: list[str]
    """Distinct task names."""
    task: Array
    """Index into `tasks` [N]; -1 without a task."""
    run: Array
    """Number of the sample's folder (run) [N], which distinguishes steps and groups."""
    step: Array
    """Order in time within a run [N]: the step, or else the epoch, or else 0."""
    group: Array
    """Number of the group [N], distinct across runs; -1 without a group."""
    capped: Array
    """Whether generation was cut off at the length limit [N]."""
    finished: Array
    """Unix seconds of the end [N]; NaN if unknown."""
    notes: list[str] = field(default_factory=list)
    """Notes for the user on what was left out or assumed."""

    def __len__(self) -> int:
        return len(self.prompt)

    @property
    def cap(self) -> int | None:
        """The greatest limit of the samples in tokens: the greatest length, as limits may differ (runs with other
        limits, agents' episodes); None if no sample was cut off."""
        return int(self.output_length.max()) if self.capped.any() else None

    @property
    def unit(self) -> Array:
        """Number of each sample's unit [N], from 0: a prompt in one step of one run (the policy changes between
        steps)."""
        keys = np.stack((self.run, self.prompt, self.step), axis=1)
        number: Array = np.unique(keys, axis=0, return_inverse=True)[1].reshape(-1)
        return number

    def take(self, rows: Array, *notes: str) -> Rollouts:
        """Return some of the samples, by number or mask, with only their prompts."""
        used, prompt = np.unique(self.prompt[rows], return_inverse=True)
        names = ("output_length", "task", "run", "step", "group", "capped", "finished")
        columns = {name: getattr(self, name)[rows] for name in names}
        texts = [self.texts[i] for i in used]
        return replace(self, texts=texts, prompt=prompt, notes=[*self.notes, *notes], **columns)


def _open(file: Path, given: Path) -> BinaryIO:
    return file.open("rb")


def read_rollouts(paths: Iterable[str | Path], open_file: FileOpener = _open) -> Rollouts:
    """Read files, and all .parquet and .jsonl files in and below folders.

    Rows without a prompt or without a length in 0..`MOST`, and those that `says_length` refuses, are left out, and
    counted in `notes`.

    Args:
        paths: files and folders.
        open_file: opens a file, given the path of `paths` that it is or that it was found below.

    Raises:
        RankerError: a path does not exist or holds no such file, a file cannot be read or lacks a column, or nothing
            usable is left.
    """
    files = {file: Path(path) for path in paths for file in rollout_files(Path(path))}
    if not files:
        raise RankerError("no rollouts given: expected files or folders of .parquet or .jsonl")
    builder = Builder()
    for file, given in files.items():
        read = _read_parquet if file.suffix == ".parquet" else _read_jsonl
        for columns in read(file, partial(open_file, file, given)):
            builder.add(columns, str(file.parent) if file.name.startswith("step_") else str(file))
    rollouts = builder.build()
    if not len(rollouts):
        some = f"{next(iter(files))}{f' and {len(files) - 1} more' if len(files) > 1 else ''}"
        notes = f" ({'; '.join(rollouts.notes)})" if rollouts.notes else ""
        raise RankerError(f"{some}: no usable rows; expected rows with 'prompt' and 'output_length'{notes}")
    return rollouts


def from_rows(rows: Sequence[Mapping[str, Any]], run: str = "") -> Rollouts:
    """Build rollouts from rows with the columns of `COLUMNS`, all of one run; unknown keys are ignored."""
    builder = Builder()
    if rows:
        builder.add({name: [row.get(name) for row in rows] for name in COLUMNS}, run)
    return builder.build()


def says_length(
    output_length: float, finish_reason: str | None, void_cause: str | None = None, episode: Any = None
) -> bool:
    """Return whether a row says how long an answer is.

    One that was cut off before its first token does not: no site could generate it, or its prompt left no room. An
    answer of no tokens that ended by itself is a short one. A void episode does not either: its environment, its worker
    or its agent failed on the way. A completion whose reward is void is whole.

    Args:
        output_length: tokens.
        finish_reason: 'length' where it was cut off at a limit.
        void_cause: why its reward is void, if it is.
        episode: anything but None if an agent led it (the column `EPISODE`).
    """
    if void_cause is not None and episode is not None:
        return False
    return output_length > 0 or finish_reason != "length"


class Builder:
    """Collects columns of several files into one `Rollouts`."""

    def __init__(self) -> None:
        self._texts: dict[str, int] = {}
        self._tasks: dict[str, int] = {}
        self._groups: dict[tuple[int, str], int] = {}
        self._runs: dict[str, int] = {}
        self._parts: dict[str, list[Array]] = {}
        self._dropped = 0
        self._told = False  # whether a row says how its sample ended

    def add(self, columns: Mapping[str, Sequence[Any] | None], run: str) -> None:
        """Add rows given as columns (lists of equal length; None for a missing column)."""
        prompts, lengths = columns["prompt"], columns["output_length"]
        assert prompts is not None and lengths is not None
        length = _floats(lengths, len(prompts))
        usable = np.array([text is not None for text in prompts], dtype=bool) & np.isfinite(length)
        usable &= (length >= 0) & (length <= MOST)
        ends = (columns.get(name) or repeat(None) for name in ("finish_reason", "void_cause", EPISODE))
        usable &= np.array([*map(says_length, length, *ends)], dtype=bool)
        count = int(usable.sum())
        self._dropped += len(prompts) - count
        # before anything is numbered: a text, a task or a group without a sample would count for nothing
        columns = {name: None if values is None else list(compress(values, usable)) for name, values in columns.items()}
        reasons = columns.get("finish_reason") or [None] * count
        self._told |= any(reason is not None for reason in reasons)
        number = self._runs.setdefault(run, len(self._runs))
        step, epoch = _floats(columns.get("step"), count), _floats(columns.get("epoch"), count)
        parts = {
            "prompt": _codes(columns["prompt"], count, self._texts),
            "output_length": np.maximum(length[usable], 1).astype(np.int64),
            "task": _codes(columns.get("task"), count, self._tasks),
            "run": np.full(count, number),
            "step": np.nan_to_num(np.where(np.isfinite(step), step, epoch)).astype(np.int64),
            "group": self._group_codes(columns.get("group_id"), count, number),
            "capped": np.array([reason == "length" for reason in reasons], bool),
            "finished": _floats(columns.get("t_finished"), count),
        }
        for name, values in parts.items():
            self._parts.setdefault(name, []).append(values)

    def _group_codes(self, groups: Sequence[Any] | None, count: int, run: int) -> Array:
        if groups is None:
            return np.full(count, -1)
        known = self._groups
        return np.array([-1 if g is None else known.setdefault((run, g), len(known)) for g in groups], int)

    def build(self) -> Rollouts:
        """Return all that was added."""
        empty = np.zeros(0, dtype=np.int64)
        parts = {name: np.concatenate(values) for name, values in self._parts.items()}
        if not parts:
            names = ("prompt", "output_length", "task", "run", "step", "group", "finished")
            parts = {name: empty for name in names} | {"capped": empty.astype(bool)}
        notes = [f"{self._dropped} rows without a prompt or a length were left out"] if self._dropped else []
        length = parts["output_length"]
        if len(length) >= 50 and not self._told:
            at_most = length == length.max()
            if at_most.mean() >= PILE and not (length == length.min()).all():
                parts["capped"] = at_most
                share = 100 * at_most.mean()
                notes.append(f"{share:.0f} % of lengths are exactly {length.max()}: taken for the length limit")
        return Rollouts(texts=list(self._texts), tasks=list(self._tasks), notes=notes, **parts)


def _floats(values: Sequence[Any] | None, count: int) -> Array:
    """Return numbers [count] as float64, NaN for None."""
    return np.full(count, np.nan) if values is None else np.array(values, dtype=np.float64)


def _codes(values: Sequence[Any] | None, count: int, known: dict[str, int]) -> Array:
    """Return the numbers of names [count], adding new ones to `known`; -1 for None."""
    if values is None:
        return np.full(count, -1)
    return np.array([-1 if v is None else known.setdefault(v, len(known)) for v in values], int)


def rollout_files(path: Path) -> Iterator[Path]:
    """Yield the rollout files at a path, in a stable order; of a run's folder those in `rollouts/` alone.

    Raises:
        RankerError: there are none.
    """
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.suffix in (".parquet", ".jsonl") and not p.is_dir())
        runs = {folder.parent for folder in path.rglob(ROLLOUTS) if _is_run(folder.parent)}
        if not (kept := [p for p in found if not _is_beside_rollouts(p, runs)]):
            raise RankerError(f"{path}: no .parquet or .jsonl file in this folder or below it")
        yield from kept
    elif not path.exists():
        raise RankerError(f"{path}: no such file or folder; expected rollouts (.parquet or .jsonl)")
    elif path.suffix not in (".parquet", ".jsonl"):
        raise RankerError(f"{path}: expected a file that ends in .parquet or .jsonl, or a folder of such files")
    else:
        yield path


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in OF_RUNS) and (folder / ROLLOUTS).is_dir()


def _is_beside_rollouts(file: Path, runs: Collection[Path]) -> bool:
    """Return whether a file is in the folder of a run, and not in its rollouts."""
    run = next((folder for folder in file.parents if folder in runs), None)
    return run is not None and run / ROLLOUTS not in file.parents


def _missing(file: Path, there: Iterable[str]) -> None:
    there = sorted(set(there))
    for name in REQUIRED:
        if name not in there:
            shown = ", ".join(there[:30]) or "none"
            raise RankerError(f"{file}: no column '{name}'; expected 'prompt' and 'output_length', found: {shown}")


Rows = TypeVar("Rows", pa.Table, pa.RecordBatch)
ROW_IDS = ("sample_id", "trajectory_id")
"""Columns that are equal in a sample's first row; an episode's further rows repeat its length."""


def first_rows(rows: Rows) -> Rows:
    """Return the rows that are the first, and mostly the only ones, of their samples."""
    if not set(ROW_IDS) <= set(rows.schema.names):
        return rows
    return rows.filter(pc.fill_null(pc.equal(*(rows.column(name) for name in ROW_IDS)), True))


def _read_parquet(file: Path, opened: Callable[[], BinaryIO]) -> Iterator[dict[str, list[Any] | None]]:
    """Yield a file's columns, a batch of rows at a time."""
    try:
        with opened() as content, pq.ParquetFile(content) as parquet:
            schema = parquet.schema_arrow
            _missing(file, schema.names)
            names = [name for name in COLUMNS if name in schema.names]
            ids = [name for name in ROW_IDS if name in schema.names]
            for batch in map(first_rows, parquet.iter_batches(batch_size=65536, columns=[*names, *ids])):
                read = {name: _cast(file, name, batch.column(name)).to_pylist() for name in names}
                yield {name: read.get(name) for name in COLUMNS}
    except (OSError, pa.ArrowException) as error:
        raise RankerError(f"{file}: cannot be read as Parquet: {error}") from error


def _cast(file: Path, name: str, column: Any) -> Any:
    """Convert a column to text or to numbers; `EPISODE` to whether there is a value."""
    if name == EPISODE:
        return pc.if_else(column.is_valid(), True, None)
    wanted = pa.string() if name in TEXT else pa.float64()
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    fits = number if name in NUMBERS else text or (number and name != "prompt")
    if not fits and not pa.types.is_null(kind):
        expected = "text" if name in TEXT else "a number"
        raise RankerError(f"{file}: column '{name}' is {column.type}; expected {expected}")
    return column.cast(wanted, safe=False)


def _read_jsonl(file: Path, opened: Callable[[], BinaryIO]) -> Iterator[dict[str, list[Any] | None]]:
    """Yield a file's columns, some thousand lines at a time."""
    rows: list[tuple[Any, ...]] = []
    seen = False
    try:
        with opened() as content, io.TextIOWrapper(content, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                row = _parse(file, number, line)
                if not seen:
                    _missing(file, row)
                    seen = True
                rows.append(tuple(_value(file, number, name, row.get(name)) for name in COLUMNS))
                if len(rows) == 65536:
                    yield dict(zip(COLUMNS, map(list, zip(*rows, strict=True)), strict=True))
                    rows = []
    except (OSError, UnicodeDecodeError) as error:
        raise RankerError(f"{file}: cannot be read as JSONL: {error}") from error
    if rows:
        yield dict(zip(COLUMNS, map(list, zip(*rows, strict=True)), strict=True))


def _parse(file: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RankerError(f"{file}, line {number}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise RankerError(f"{file}, line {number}: expected an object with 'prompt' and 'output_length'")
    return row


def _value(file: Path, number: int, name: str, value: Any) -> Any:
    """Convert a value to its column's type."""
    if value is None:
        return None
    if name == EPISODE:
        return True
    if name in NUMBERS:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RankerError(f"{file}, line {number}: column '{name}' is {value!r:.60}; expected a number")
        return value if math.isfinite(value) else None
    if isinstance(value, str) or (name != "prompt" and isinstance(value, int)):
        return str(value)
    raise RankerError(f"{file}, line {number}: column '{name}' is {value!r:.60}; expected text")
