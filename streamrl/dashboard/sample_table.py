"""All samples of a run as a table that is filtered, sorted and read a page at a time.

Only the light columns of the Parquet files are held, about 100 bytes per sample; texts and tokens are read for the
samples that are looked at (`sample_detail.py`). A file is read once, and again if it or one before it was replaced (a
resumed run).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ranker.data import ROW_IDS, first_rows
from streamrl.dashboard.text_search import Mark, TextSearch
from streamrl.errors import UserError
from streamrl.plain_files import plain_names
from streamrl.rollouts.parquet_files import read_columns, step_of
from streamrl.rollouts.rollout_store import SCHEMA

LIGHT: tuple[str, ...] = ("sample_id", "group_id", "prompt_id", "task", "step", "output_length", "finish_reason")
LIGHT += ("reward", "void_cause", "advantage", "route", "predicted_length")
"""Columns that are held of all samples."""
TRAINED, FILE, ROW = "_trained", "_file", "_row"
"""Further ones: whether a sample has a time at which it was trained, the number of its file, and of its row there."""
FEW = ("task", "finish_reason", "void_cause", "route")
"""Columns with few different texts, which are held as numbers."""
HELD = pa.schema(
    [
        *((name, pa.dictionary(pa.int16(), pa.string()) if name in FEW else SCHEMA.field(name).type) for name in LIGHT),
        *((TRAINED, pa.bool_()), (FILE, pa.int32()), (ROW, pa.int32())),
    ]
)
LISTED: tuple[str, ...] = (
    "sample_id",
    "group_id",
    "task",
    "step",
    "reward",
    "advantage",
    "output_length",
    "finish_reason",
)
LISTED += ("route", "void_cause", "predicted_length")
"""Columns of the list of samples; the outcome is added."""
SORTS = ("step", "task", "reward", "advantage", "output_length", "predicted_length")
OUTCOMES = ("trained", "void", "dropped", "masked", "skipped")
MOST_PAGE = 500
MOST_POINTS = 4_000
"""Most samples in the picture of predicted against actual lengths."""
SETTLED_S = 2.0
"""Seconds after which a folder whose time of change is the same has got no file at that very time: a clock of files may
tick 100 times a second only."""
LIST_EVERY_S = 10.0
"""Seconds after which the files of a folder that has not changed are looked at all the same: one may be rewritten."""
KEPT_SELECTIONS = 16
MOST_OTHERS = 200
"""Most groups that are offered to be compared with one."""
LONGEST_TEXT = 1_000
"""Characters of the longest text that is searched for."""


@dataclass(frozen=True)
class SampleFilter:
    """Which samples are listed; None: any."""

    task: str | None = None
    finish_reason: str | None = None
    route: str | None = None
    outcome: str | None = None
    """'trained', 'void' (its reward is void), 'dropped' (its whole group was never trained), 'masked' (cut by the
    token limit, and so without a loss) or 'skipped' (its step left the weights as they were)."""
    group_id: str | None = None
    text: str | None = None
    """Part of a prompt, of an answer or of a conversation; upper and lower case are the same."""
    reward_min: float | None = None
    reward_max: float | None = None
    length_min: float | None = None
    length_max: float | None = None
    step_min: float | None = None
    step_max: float | None = None
    sort: str = "step"
    descending: bool = True

    @classmethod
    def parse(cls, query: dict[str, str]) -> SampleFilter:
        """Return the filter of a page's query; keys of other things are ignored, empty values are None.

        Raises:
            UserError: a value is not what its key takes.
        """
        values: dict[str, Any] = {}
        for one in fields(cls):
            text = query.get(one.name, "")
            if not text:
                continue
            if one.name == "descending":
                values[one.name] = text == "true"
            elif one.name.endswith(("_min", "_max")):
                try:
                    values[one.name] = float(text)
                except ValueError as error:
                    raise UserError(f"{one.name}: expected a number, got {text!r}") from error
            else:
                values[one.name] = text
        for name, known in (("sort", SORTS), ("outcome", OUTCOMES)):
            if name in values and values[name] not in known:
                raise UserError(f"{name}: expected one of {', '.join(known)}, got {values[name]!r}")
        if len(values.get("text", "")) > LONGEST_TEXT:
            raise UserError(f"text: expected at most {LONGEST_TEXT} characters, got {len(values['text'])}")
        return cls(**values)


class SampleTable:
    """The samples in the `rollouts/` folder of one run, which may still grow."""

    def __init__(
        self,
        folder: Path,
        masks_truncated: Callable[[], bool] = lambda: False,
        skipped_steps: Callable[[], Set[int]] = frozenset,
    ) -> None:
        """Take the folder.

        Args:
            folder: the run's rollouts.
            masks_truncated: says whether the run masks truncated samples (`algorithm.mask_truncated`).
            skipped_steps: returns the steps that left the weights as they were.
        """
        self.folder = folder
        self._says_untrained = lambda: (masks_truncated(), skipped_steps())
        self._untrained: tuple[bool, Set[int]] = False, frozenset()
        self._notes: dict[Path, str] = {}
        """What is said of a file that cannot be read."""
        self._files: dict[Path, tuple[Mark, int]] = {}
        """What tells each looked-at file's contents apart, and its number of samples, in the files' order."""
        self._stamp: tuple[int, int] | None = None
        """What tells contents of the folder apart, as its files were last looked at; None: some wait to be."""
        self._stamp_since = self._listed = -math.inf
        """When the folder had this stamp first, and when its files were last looked at, in monotonic seconds."""
        self._table = HELD.empty_table()
        self._selections: OrderedDict[SampleFilter, npt.NDArray[np.int64]] = OrderedDict()
        self._search = TextSearch()

    @property
    def notes(self) -> list[str]:
        """What could not be read, one sentence each."""
        return list(self._notes.values())

    def look(self) -> pa.Table:
        """Read new and replaced files, forget deleted ones, and return the table."""
        self.look_for(math.inf)
        return self._table

    def look_for(self, limit_s: float) -> bool:
        """Do as `look`, but begin no further file after some seconds; return whether all files are read.

        One is read in any case: whoever calls it again and again sees the end.
        """
        if (untrained := self._says_untrained()) != self._untrained:
            self._untrained = untrained
            self._selections.clear()
        stamp, now = self._stamp_of_folder(), time.monotonic()
        is_settled = self._listed - self._stamp_since >= SETTLED_S and now - self._listed < LIST_EVERY_S
        before, self._stamp = self._stamp, None
        if stamp is not None and stamp == before and is_settled and not self._notes:
            self._stamp = before
            return True
        marks: dict[Path, Mark] = {}
        names = plain_names(self.folder, below=self.folder.parent)
        for path in (self.folder / name for name in names if step_of(name) is not None):
            with contextlib.suppress(FileNotFoundError):  # deleted by a resumed run since the listing
                stat = path.lstat()
                marks[path] = stat.st_ino, stat.st_size, stat.st_mtime_ns
        kept = 0
        for (path, mark), (known, (known_mark, _)) in zip(marks.items(), self._files.items(), strict=False):
            if (path, mark) != (known, known_mark) or (path in self._notes and len(self._read(path, kept))):
                break
            kept += 1
        if not kept == len(marks) == len(self._files):
            self._read_from(kept, marks, time.monotonic() + limit_s)
        if len(self._files) < len(marks):
            return False
        self._stamp, self._listed = stamp, now
        if stamp != before:
            self._stamp_since = now
        return True

    def _stamp_of_folder(self) -> tuple[int, int] | None:
        with contextlib.suppress(OSError):
            stat = self.folder.lstat()
            return stat.st_ino, stat.st_mtime_ns
        return None

    def _read_from(self, kept: int, marks: dict[Path, Mark], until: float) -> None:
        """Keep the samples of the first `kept` files, and read those of the others, as many as begin before `until`."""
        files = dict(list(self._files.items())[:kept])
        self._notes = {path: note for path, note in self._notes.items() if path in files}
        known = self._table.slice(0, sum(count for _, count in files.values()))
        batches = known.to_batches()
        for number, path in enumerate(list(marks)[kept:], kept):
            new = self._read(path, number)
            files[path] = marks[path], len(new)
            batches += new.combine_chunks().to_batches()
            # Each is at least twice as long as the next one, so that a row is copied a few times, not with each file.
            while len(batches) > 1 and len(batches[-2]) < 2 * len(batches[-1]):
                batches[-2:] = [pa.concat_batches(batches[-2:])]
            if time.monotonic() >= until:
                break
        self._files, self._table = files, pa.Table.from_batches(batches, HELD)
        self._selections.clear()

    def _read(self, path: Path, number: int) -> pa.Table:
        """Return the samples of a file, which gets a number; none, and a note, if it cannot be read."""
        self._notes.pop(path, None)
        try:
            return _light(path, number)
        except FileNotFoundError:
            pass  # deleted since the listing
        except (pa.ArrowException, OSError) as error:
            self._notes[path] = f"{path.name} could not be read and is left out: {error}."
        return HELD.empty_table()

    def place(self, index: int) -> tuple[Path, int]:
        """Return the file of a sample, and the number of its first row there."""
        row = self._table.slice(index, 1).to_pylist()[0]
        return list(self._files)[row[FILE]], row[ROW]

    def find(self, sample_id: str) -> int | None:
        """Return where a sample is in the table; the later one if it was written twice."""
        found = pc.indices_nonzero(pc.equal(self._table["sample_id"], sample_id))
        return found[-1].as_py() if len(found) else None

    def sample_id(self, index: int) -> str:
        """Return the id of a sample."""
        return str(self._table["sample_id"][index].as_py())

    def outcome(self, index: int) -> str:
        """Return the outcome of a sample."""
        return OUTCOMES[int(outcomes(self._table.slice(index, 1), *self._untrained)[0])]

    def of_group(self, group_id: str, names: Sequence[str]) -> list[dict[str, Any]]:
        """Return some of the columns `LIGHT` of all samples of a group."""
        rows = self._table.select(names).take(pa.array(self.select(SampleFilter(group_id=group_id))))
        found: list[dict[str, Any]] = rows.to_pylist()
        return found

    def groups_beside(self, index: int) -> dict[str, list[dict[str, Any]]]:
        """Return other groups with which a sample's group can be compared: of the same prompt, and of the same step."""
        row = self._table.slice(index, 1).to_pylist()[0]
        return {
            name: self._other_groups(column, row[column], row["group_id"])
            for name, column in (("prompt", "prompt_id"), ("step", "step"))
        }

    def _other_groups(self, column: str, value: Any, group_id: str) -> list[dict[str, Any]]:
        """Return the groups with a value, but one, in the order of their steps, with the mean of their rewards."""
        if value is None:
            return []
        table = self._table.select(["group_id", "step", "reward"])
        table = table.filter(pc.and_(pc.equal(self._table[column], value), pc.not_equal(table["group_id"], group_id)))
        groups = table.group_by(["group_id", "step"], use_threads=False).aggregate([("reward", "mean")])
        groups = groups.rename_columns(["group_id", "step", "reward"]).sort_by([("step", "ascending")])
        return groups.slice(0, MOST_OTHERS).to_pylist()

    def select(self, wanted: SampleFilter) -> npt.NDArray[np.int64]:
        """Return the indices of the samples that a filter keeps, sorted as it says; nulls come last."""
        return self._selected(wanted)[0]

    def _selected(self, wanted: SampleFilter) -> tuple[npt.NDArray[np.int64], int]:
        """Return what `select` does, and how many files have been searched for the filter's text."""
        if (known := self._selections.get(wanted)) is not None:
            self._selections.move_to_end(wanted)
            return known, len(self._files)
        table = self._table
        mask = np.ones(len(table), bool)
        for name in ("task", "finish_reason", "route", "group_id"):
            if (value := getattr(wanted, name)) is not None:
                mask &= _true(pc.equal(table[name], value))
        for name, column in (("reward", "reward"), ("length", "output_length"), ("step", "step")):
            if (least := getattr(wanted, f"{name}_min")) is not None:
                mask &= _true(pc.greater_equal(table[column].cast(pa.float64()), least))
            if (most := getattr(wanted, f"{name}_max")) is not None:
                mask &= _true(pc.less_equal(table[column].cast(pa.float64()), most))
        if wanted.outcome is not None:
            mask &= outcomes(table, *self._untrained) == OUTCOMES.index(wanted.outcome)
        searched = len(self._files)
        if wanted.text is not None:
            has, searched = self._with_text(wanted.text)
            mask &= has
        key = table[wanted.sort].cast(SCHEMA.field(wanted.sort).type)
        direction = "descending" if wanted.descending else "ascending"
        order = pc.sort_indices(pa.table({"key": key}), sort_keys=[("key", direction)]).to_numpy()
        chosen = order[mask[order]].astype(np.int64)
        if searched == len(self._files):
            self._selections[wanted] = chosen
        if len(self._selections) > KEPT_SELECTIONS:
            self._selections.popitem(last=False)
        return chosen, searched

    def _with_text(self, text: str) -> tuple[npt.NDArray[np.bool_], int]:
        """Return which samples have a text in any of their rows, as far as was searched, and how many files were."""
        found = self._search.look(text, {path: mark for path, (mark, _) in self._files.items()})
        has = np.zeros(len(self._table), bool)
        begin = 0
        for path, (_, count) in self._files.items():
            if path in found and count:
                # rows of an episode follow its first, which is the one in the table
                rows = self._table[ROW].slice(begin, count).to_numpy()
                has[begin + np.searchsorted(rows, found[path], side="right") - 1] = True
            begin += count
        return has, len(found)

    def page(self, wanted: SampleFilter, offset: int, limit: int) -> dict[str, Any]:
        """Return some of the samples that a filter keeps, as columns, with their number."""
        chosen, searched = self._selected(wanted)
        some = chosen[max(0, offset) : max(0, offset) + min(limit, MOST_PAGE)]
        rows = self._table.take(pa.array(some))
        columns = {name: rows[name].to_pylist() for name in LISTED}
        columns["outcome"] = [OUTCOMES[one] for one in outcomes(rows, *self._untrained)]
        counts = {"total": len(chosen), "all": len(self._table), "searched": searched, "files": len(self._files)}
        return counts | {"offset": offset, "columns": columns}

    def choices(self) -> dict[str, list[str]]:
        """Return the values that occur of each column that is filtered by name."""
        names = ("task", "finish_reason", "route")
        found = {name: pc.unique(self._table[name]).drop_null().to_pylist() for name in names}
        return {name: sorted(values) for name, values in found.items()}

    def lengths(self) -> dict[str, Any]:
        """Return predicted and actual lengths with routes, of samples evenly spread over the run."""
        table = self._table
        known = np.flatnonzero(_true(pc.is_valid(table["predicted_length"])))
        if len(known) > MOST_POINTS:
            known = known[np.linspace(0, len(known) - 1, MOST_POINTS).astype(np.int64)]
        rows = table.take(pa.array(known))
        names = ("sample_id", "predicted_length", "output_length", "route", "step")
        return {"of": len(table), "columns": {name: rows[name].to_pylist() for name in names}}


def outcomes(table: pa.Table, masked: bool = False, skipped: Set[int] = frozenset()) -> npt.NDArray[np.int8]:
    """Return the outcome of each sample as its place in `OUTCOMES`.

    Of an older file without `void_cause`, a sample without a reward counts as void.

    Args:
        table: the samples.
        masked: whether one cut by the token limit has no loss.
        skipped: steps that left the weights as they were.
    """
    trained = _true(table[TRAINED])
    void = _true(pc.or_(pc.is_valid(table["void_cause"]), pc.is_null(table["reward"])))
    cut = _true(pc.equal(table["finish_reason"], "length")) if masked else np.zeros(len(table), bool)
    unused = np.isin(table["step"].fill_null(-1).to_numpy(), list(skipped))
    return np.select([void, ~trained, unused, cut], [1, 2, 4, 3], 0).astype(np.int8)


def _true(mask: Any) -> npt.NDArray[np.bool_]:
    values: npt.NDArray[np.bool_] = pc.fill_null(mask, False).to_numpy(zero_copy_only=False)
    return values


def _light(path: Path, number: int) -> pa.Table:
    """Return what is held of a file's samples; the file gets a number.

    Columns that an older file lacks are null; its `sample_id` may be missing, too, and is then the place of the row.

    Raises:
        pa.ArrowException, OSError: it cannot be read.
    """
    table = read_columns(path, path.parents[1], (*LIGHT, *ROW_IDS, "t_trained"))
    table = table.append_column(ROW, pa.array(np.arange(len(table), dtype=np.int32)))
    if "sample_id" not in table.schema.names:
        table = table.append_column("sample_id", pa.array([f"{path.stem}:{row}" for row in range(len(table))]))
    table = first_rows(table)
    table = table.append_column(FILE, pa.array(np.full(len(table), number, np.int32)))
    if "t_trained" in table.schema.names:
        table = table.append_column(TRAINED, pc.is_valid(table["t_trained"]))
    columns = [
        table[field.name].cast(field.type) if field.name in table.schema.names else pa.nulls(len(table), field.type)
        for field in HELD
    ]
    return pa.Table.from_arrays(columns, schema=HELD)
