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

ROLLOUT_ENDINGS = (".parquet", ".jsonl")
"""Endings of files of rollouts."""

FileOpener = Callable[[Path, Path], BinaryIO]
"""Opens a file for reading, given also the folder that it was found in or below, or itself."""

MOST = 1e9
"""Greatest plausible length, tokens."""

MISSING = "without a prompt or a length"
OUT_OF_RANGE = f"with a length that is negative or above {MOST:,.0f} tokens"
CUT_SHORT = "of void episodes, or cut off before their first token,"
"""Why rows are left out, in words."""

CUT = ("length", "max_tokens", "max_new_tokens", "max_output_tokens", "max_length", "token_limit", "truncated")
"""Reasons that say, in any case of letters, that a sample was cut off at a limit: ours, and those of other systems."""
ENDED = (
    "stop",
    "end_turn",
    "stop_sequence",
    "eos",
    "eos_token",
    "end",
    "finished",
    "completed",
    "tool_calls",
    "tool_use",
)
"""Reasons that say that a sample ended by itself."""
PILE, PILE_LEAST = 0.02, 5
"""Share and number of samples at exactly the greatest length from which it counts as a cap where no row of a run has a
`finish_reason`."""
JUDGED_ALONE = 50
"""Fewest samples of a run whose greatest length is judged; smaller runs are judged together."""


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
    counted in `notes` by these reasons.

    Args:
        paths: files and folders.
        open_file: opens a file, given the path of `paths` that it is or that it was found below.

    Raises:
        RankerError: a path does not exist or holds no such file, a file cannot be read or lacks a column, or nothing
            usable is left.
    """
    files: dict[Path, tuple[Path, Path]] = {}  # by their real paths, so that a file of two names is read once
    for path in map(Path, paths):
        for file in rollout_files(path):
            files.setdefault(file.resolve(), (file, path))
    if not files:
        raise RankerError("no rollouts given: expected files or folders of .parquet or .jsonl")
    builder = Builder()
    alone: dict[Path, list[str]] = {}
    for real, (file, given) in files.items():
        run = str(real.parent) if file.name.startswith("step_") else str(real)
        if run == str(real):
            alone.setdefault(real.parent, []).append(run)
        read = _read_parquet if file.suffix == ".parquet" else _read_jsonl
        for columns in read(file, partial(open_file, file, given)):
            builder.add(columns, run)
    for runs in alone.values():
        builder.join(runs)
    rollouts = builder.build()
    if not len(rollouts):
        some = f"{next(iter(files.values()))[0]}{f' and {len(files) - 1} more' if len(files) > 1 else ''}"
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
        finish_reason: one of `CUT` where it was cut off at a limit.
        void_cause: why its reward is void, if it is.
        episode: anything but None if an agent led it (the column `EPISODE`).
    """
    if void_cause is not None and episode is not None:
        return False
    return output_length > 0 or not _is_cut(finish_reason)


def _is_cut(finish_reason: str | None) -> bool:
    return finish_reason is not None and finish_reason.lower() in CUT


class Builder:
    """Collects columns of several files into one `Rollouts`."""

    def __init__(self) -> None:
        self._texts: dict[str, int] = {}
        self._tasks: dict[str, int] = {}
        self._groups: dict[tuple[int, str], int] = {}
        self._runs: dict[str, int] = {}
        self._parts: dict[str, list[Array]] = {}
        self._dropped = dict.fromkeys((MISSING, OUT_OF_RANGE, CUT_SHORT), 0)
        self._told: set[int] = set()  # runs of which a row says how its sample ended
        self._steps: dict[int, set[float]] = {}  # steps of each run, NaN where a row has none
        self._notes: list[str] = []

    def add(self, columns: Mapping[str, Sequence[Any] | None], run: str) -> None:
        """Add rows given as columns (lists of equal length; None for a missing column)."""
        prompts, lengths = columns["prompt"], columns["output_length"]
        assert prompts is not None and lengths is not None
        length = _floats(lengths, len(prompts))
        ends = (columns.get(name) or repeat(None) for name in ("finish_reason", "void_cause", EPISODE))
        usable = np.ones(len(prompts), dtype=bool)
        for why, fits in {
            MISSING: np.array([text is not None for text in prompts], dtype=bool) & ~np.isnan(length),
            OUT_OF_RANGE: (length >= 0) & (length <= MOST),
            CUT_SHORT: np.array([*map(says_length, length, *ends)], dtype=bool),
        }.items():  # a row counts for the first reason alone
            self._dropped[why] += int((usable & ~fits).sum())
            usable &= fits
        count = int(usable.sum())
        # before anything is numbered: a text, a task or a group without a sample would count for nothing
        columns = {name: None if values is None else list(compress(values, usable)) for name, values in columns.items()}
        reasons = columns.get("finish_reason") or [None] * count
        number = self._runs.setdefault(run, len(self._runs))
        if any(reason is not None for reason in reasons):
            self._told.add(number)
        step, epoch = _floats(columns.get("step"), count), _floats(columns.get("epoch"), count)
        step = np.where(np.isfinite(step), step, epoch)
        self._steps.setdefault(number, set()).update(np.unique(step).tolist())
        parts = {
            "prompt": _codes(columns["prompt"], count, self._texts),
            "output_length": np.maximum(length[usable], 1).astype(np.int64),
            "task": _codes(columns.get("task"), count, self._tasks),
            "run": np.full(count, number),
            "step": np.nan_to_num(step).astype(np.int64),
            "group": self._group_codes(columns.get("group_id"), count, number),
            "capped": np.array([_is_cut(reason) for reason in reasons], bool),
            "unsaid": np.array([reason is None or reason.lower() not in CUT + ENDED for reason in reasons], bool),
            "finished": _floats(columns.get("t_finished"), count),
        }
        for name, values in parts.items():
            self._parts.setdefault(name, []).append(values)

    def _group_codes(self, groups: Sequence[Any] | None, count: int, run: int) -> Array:
        if groups is None:
            return np.full(count, -1)
        known = self._groups
        return np.array([-1 if g is None else known.setdefault((run, g), len(known)) for g in groups], int)

    def join(self, runs: Sequence[str]) -> None:
        """Make one run of those of the files of a folder, if no two of them have a step in common."""
        numbers = [self._runs[run] for run in runs if run in self._runs]
        steps = [self._steps[number] for number in numbers]
        if len(numbers) < 2 or any(math.isnan(step) for some in steps for step in some):
            return
        if len(set().union(*steps)) == sum(map(len, steps)):
            for values in self._parts["run"]:
                values[np.isin(values, numbers)] = numbers[0]
            if self._told & set(numbers):
                self._told.add(numbers[0])
        elif max(map(len, steps)) > 1:
            name = f"{len(numbers)} files of {Path(runs[0]).parent}"
            self._notes.append(f"{name} have steps in common: each counts as a run of its own")

    def build(self) -> Rollouts:
        """Return all that was added."""
        empty = np.zeros(0, dtype=np.int64)
        parts = {name: np.concatenate(values) for name, values in self._parts.items()}
        if not parts:
            names = ("prompt", "output_length", "task", "run", "step", "group", "finished")
            parts = {name: empty for name in names} | {"capped": empty.astype(bool), "unsaid": empty.astype(bool)}
        notes = [f"{count} rows {why} were left out" for why, count in self._dropped.items() if count]
        notes += [*self._notes, *self._guess_limits(parts.pop("unsaid"), **parts)]
        return Rollouts(texts=list(self._texts), tasks=list(self._tasks), notes=notes, **parts)

    def _guess_limits(self, unsaid: Array, run: Array, output_length: Array, capped: Array, **_: Array) -> list[str]:
        """Mark in `capped` the samples at the limit of runs that say of none how it ended; return notes on this.

        Args:
            unsaid: whether nothing is known of how the sample ended [N].
            run: number of the run [N].
            output_length: tokens [N].
            capped: whether the sample was cut off at a limit [N].
        """
        told = np.isin(run, list(self._told))
        few = np.bincount(run)[run] < JUDGED_ALONE if len(run) else told
        part = np.where(told, run + 1, np.where(few, 0, -run - 1))  # smaller runs that do not tell are one part
        guessed: dict[int, int] = {}
        notes = []
        order = np.argsort(part, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(part[order])) + 1) if len(part) else ():
            number, length = part[rows[0]], output_length[rows]
            most = int(length.max())
            at_most = rows[length == most]
            if len(rows) < JUDGED_ALONE or len(at_most) < max(PILE_LEAST, PILE * len(rows)) or most == length.min():
                continue
            if number <= 0:
                capped[at_most] = True
                guessed[most] = guessed.get(most, 0) + len(at_most)
            elif unsaid[at_most].all():
                share = 100 * len(at_most) / len(rows)
                notes.append(
                    f"{share:.0f} % of a run's lengths are exactly {most}, and no known finish_reason says whether "
                    f"they were cut off; expected {CUT[0]} of those that were"
                )
        if guessed:
            share = 100 * sum(guessed.values()) / max(1, int((~told).sum()))
            limits = " or ".join(map(str, sorted(guessed)))
            notes.append(f"{share:.0f} % of lengths are exactly {limits}: taken for the length limit")
        return list(dict.fromkeys(notes))


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
        found = sorted(p for p in path.rglob("*") if p.suffix in ROLLOUT_ENDINGS and not p.is_dir())
        runs = {folder.parent for folder in path.rglob(ROLLOUTS) if _is_run(folder.parent)}
        if not (kept := [p for p in found if not _is_beside_rollouts(p, runs)]):
            raise RankerError(f"{path}: no .parquet or .jsonl file in this folder or below it")
        yield from kept
    elif not path.exists():
        raise RankerError(f"{path}: no such file or folder; expected rollouts (.parquet or .jsonl)")
    elif path.suffix not in ROLLOUT_ENDINGS:
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


def read_jsonl(file: Path, opened: Callable[[], BinaryIO]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line, row) of each sample's first row in a JSONL file of rollouts, with a byte order mark or without.

    Raises:
        RankerError: it cannot be read, or a line is no JSON object.
    """
    try:
        # editors of Windows write a byte order mark, which no JSON has
        with opened() as content, io.TextIOWrapper(content, encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                row = _parse(file, number, line)
                ids = [row.get(name) for name in ROW_IDS]
                if None in ids or ids[0] == ids[1]:
                    yield number, row
    except (OSError, UnicodeDecodeError) as error:
        raise RankerError(f"{file}: cannot be read as JSONL: {error}") from error


def _read_jsonl(file: Path, opened: Callable[[], BinaryIO]) -> Iterator[dict[str, list[Any] | None]]:
    """Yield a file's columns, some thousand lines at a time."""
    rows: list[tuple[Any, ...]] = []
    seen = False
    for number, row in read_jsonl(file, opened):
        if not seen:
            _missing(file, row)
            seen = True
        rows.append(tuple(_value(file, number, name, row.get(name)) for name in COLUMNS))
        if len(rows) == 65536:
            yield dict(zip(COLUMNS, map(list, zip(*rows, strict=True)), strict=True))
            rows = []
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
        try:
            return value if math.isfinite(value) else None
        except OverflowError:  # an integer that no float can hold
            return (-math.inf if value < 0 else math.inf) if name == "output_length" else None
    if isinstance(value, str) or (name != "prompt" and isinstance(value, int)):
        return str(value)
    raise RankerError(f"{file}, line {number}: column '{name}' is {value!r:.60}; expected text")
