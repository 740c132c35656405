"""Read a finished or unfinished run folder for the report: metrics, trace, rollouts, configuration, status.

Every part may be missing; `RunData.notes` collects what could not be read, for the report to show.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from streamrl.config.load import RESOLVED_NAME, read_resolved
from streamrl.errors import UserError
from streamrl.plain_files import plain_names
from streamrl.report.conversation import conversation_text
from streamrl.report.run_decoder import Decoder, find_decoder
from streamrl.rollouts.void import MOST_REWARD
from streamrl.run_dir import layout
from streamrl.run_dir.evaluations import EvaluationRow, read_evaluations
from streamrl.run_dir.metrics import MetricsRow, read_metrics
from streamrl.run_dir.status import RunStatus, read_status
from streamrl.run_dir.trace_spans import TraceSpans

Loaded = TypeVar("Loaded")

SAMPLES_OF_EACH_KIND = 3
"""Samples that the report shows under each title."""


MOST_TEXTS = 10_000
"""Most different texts of a column of all samples; further ones count as `OTHER`."""
LONGEST_TEXT = 1_000
"""Characters that are kept of such a text."""
OTHER = "(other)"


@dataclass(frozen=True)
class TextColumn:
    """A text of each sample, of which there are few different ones: held as numbers."""

    texts: list[str]
    numbers: npt.NDArray[np.int16]
    """Place of each sample's text in `texts`."""

    def __getitem__(self, index: int) -> str:
        return self.texts[self.numbers[index]]

    def equal(self, text: str) -> npt.NDArray[np.bool_]:
        """Return which samples have a text."""
        number: int = self.texts.index(text) if text in self.texts else -1
        return self.numbers == number

    def counts(self) -> dict[str, int]:
        """Return the number of samples of each text that occurs, in alphabetical order."""
        counts = np.bincount(self.numbers, minlength=len(self.texts)).tolist()
        return {text: count for text, count in sorted(zip(self.texts, counts, strict=True)) if count}


@dataclass(frozen=True)
class RunRollouts:
    """All samples of a run, one entry each, in about 60 bytes; if a sample was written twice, the later one."""

    group: npt.NDArray[np.int64]
    """Hash of the group's id; 0 where none is known."""
    task: TextColumn
    step: npt.NDArray[np.int32]
    output_length: npt.NDArray[np.int32]
    finish_reason: TextColumn
    reward: npt.NDArray[np.float64]
    """NaN where the sample was never scored, or got what no reward can be (`MOST_REWARD`)."""
    reward_error: TextColumn
    """Error message, or ''."""
    pool: TextColumn
    route: TextColumn
    predicted_length: npt.NDArray[np.float64]
    """Predicted before dispatch, in tokens; NaN where nothing was predicted."""
    files: list[Path] = field(repr=False)
    file: npt.NDArray[np.int32] = field(repr=False)
    row: npt.NDArray[np.int32] = field(repr=False)

    def __len__(self) -> int:
        return len(self.step)

    def place(self, index: int) -> tuple[Path, int]:
        """Return the file of a sample and the number of its first row there, for reading its text."""
        return self.files[self.file[index]], int(self.row[index])


@dataclass(frozen=True)
class RunData:
    """Everything that a report is made from."""

    run_dir: Path
    status: RunStatus | None
    rows: list[MetricsRow]
    evaluations: list[EvaluationRow]
    spans: TraceSpans
    rollouts: RunRollouts | None
    config_text: str | None
    notes: list[str]
    """Remarks on what could not be read, one sentence each."""


def load_run(run_dir: Path) -> RunData:
    """Read everything that the folder holds.

    Raises:
        UserError: the folder does not exist, holds none of a run's files, or is that of a site that only generates.
    """
    config = run_dir / RESOLVED_NAME
    metrics = run_dir / layout.METRICS
    status, notes = None, list[str]()
    try:
        status = read_status(run_dir)
    except UserError as error:
        generates = (run_dir / layout.SITE_STATUS).exists()  # its controller is on another machine
        if not metrics.exists() and (generates or not config.exists()):
            raise
        notes.append(f"The run's state is unknown: {error}.")
    spans = TraceSpans(run_dir / layout.TRACE, details=False)
    _left_out_if_not_plain(spans.look, notes)
    if spans.forgotten:
        notes.append(f"The first {spans.forgotten:,} spans of {layout.TRACE} are left out of the timeline.")
    return RunData(
        run_dir=run_dir,
        status=status,
        rows=_left_out_if_not_plain(lambda: read_metrics(metrics), notes) or [],
        evaluations=_left_out_if_not_plain(lambda: read_evaluations(run_dir / layout.EVALUATIONS), notes) or [],
        spans=spans,
        rollouts=_left_out_if_not_plain(lambda: _read_rollouts(run_dir / layout.ROLLOUTS, notes), notes),
        config_text=_left_out_if_not_plain(lambda: read_resolved(run_dir), notes) if config.exists() else None,
        notes=notes,
    )


def _left_out_if_not_plain(read: Callable[[], Loaded], notes: list[str]) -> Loaded | None:
    """Return what is read; None and a note if the file is refused."""
    try:
        return read()
    except UserError as error:
        notes.append(f"Left out: {error}.")
        return None


_TEXTS = {"task": "(no task)", "finish_reason": "(none)", "reward_error": "", "pool": "", "route": ""}
"""Column of the rollouts with few different texts -> what stands for a missing value."""
_NUMBERS = {"step": 0, "output_length": 0, "reward": np.nan, "predicted_length": np.nan}
"""The same for columns of numbers: whole ones, or with NaN."""
SampleColumns = dict[str, npt.NDArray[Any]]


def _read_rollouts(folder: Path, notes: list[str]) -> RunRollouts | None:
    import pyarrow as pa

    files: list[Path] = []
    texts = {name: {default: 0} for name, default in _TEXTS.items()}
    held: defaultdict[str, bytearray] = defaultdict(bytearray)
    kinds: dict[str, np.dtype[Any]] = {}
    for path in (folder / name for name in plain_names(folder, below=folder.parent) if name.endswith(".parquet")):
        try:
            found = list(_read_file(path, folder.parent, texts))
        except (pa.ArrowException, OSError) as error:
            # A killed run leaves the file that it was writing without a footer.
            notes.append(f"{path.name} could not be read and is left out: {error}.")
            continue
        for batch in found:
            batch["file"] = np.full(len(batch["row"]), len(files), np.int32)
            for name, values in batch.items():
                held[name] += values.tobytes()
                kinds[name] = values.dtype
        files.append(path)
    columns: dict[str, Any] = {name: np.frombuffer(held[name], kind) for name, kind in kinds.items()}
    if not columns or not (count := len(columns["row"])):
        return None
    last = count - 1 - np.unique(columns.pop("sample")[::-1], return_index=True)[1]
    if len(last) < count:
        last.sort()
        columns = {name: values[last] for name, values in columns.items()}
    columns |= {name: TextColumn(list(numbers), columns[name]) for name, numbers in texts.items()}
    return RunRollouts(files=files, **columns)


def _read_file(path: Path, below: Path, texts: dict[str, dict[str, int]]) -> Iterator[SampleColumns]:
    """Yield the columns of a file's samples, some rows at a time; `texts`: the number of each text, by column.

    Raises:
        OSError, pa.ArrowException: it cannot be read.
    """
    import pyarrow as pa

    from ranker.data import ROW_IDS, first_rows
    from streamrl.rollouts.parquet_files import BATCH, open_parquet

    begin = 0
    with open_parquet(path, below) as file:
        there = set(file.schema_arrow.names)
        names = [name for name in (*ROW_IDS, "group_id", *_TEXTS, *_NUMBERS) if name in there]
        for batch in file.iter_batches(BATCH, columns=names, use_threads=False):
            rows = pa.array(np.arange(begin, begin + len(batch), dtype=np.int32))
            begin += len(batch)
            batch = first_rows(batch.append_column("row", rows))
            columns: SampleColumns = {"row": batch["row"].to_numpy()}
            ids = zip(_column(batch, "sample_id", "").to_pylist(), columns["row"], strict=True)
            samples = (one or f"{path.name}:{row}" for one, row in ids)
            columns["sample"] = np.fromiter(map(hash, samples), np.int64, len(batch))
            groups = _column(batch, "group_id", "").to_pylist()
            columns["group"] = np.fromiter((hash(one) if one else 0 for one in groups), np.int64, len(batch))
            for name, text in _TEXTS.items():
                columns[name] = _numbered(_column(batch, name, text), texts[name])
            for name, number in _NUMBERS.items():
                columns[name] = _column(batch, name, number).to_numpy()
            can_be = np.abs(columns["reward"]) <= MOST_REWARD  # earlier versions have trained on larger ones
            columns["reward"] = np.where(can_be, columns["reward"], np.nan)
            yield columns


def _column(batch: Any, name: str, default: str | float) -> Any:
    """Return a column of a pyarrow batch as texts, whole numbers or floats, as its default is; it may be missing."""
    import pyarrow as pa

    kind = {str: pa.string(), int: pa.int32(), float: pa.float64()}[type(default)]
    if name not in batch.schema.names:
        return pa.repeat(pa.scalar(default, kind), len(batch))
    return batch[name].cast(kind).fill_null(default)


def _numbered(column: Any, known: dict[str, int]) -> npt.NDArray[np.int16]:
    """Return the number of each text of a pyarrow column; new texts get the next ones."""

    def number(text: str) -> int:
        text = text[:LONGEST_TEXT]
        return known.setdefault(text if text in known or len(known) < MOST_TEXTS else OTHER, len(known))

    coded = column.dictionary_encode()
    return np.array([number(text) for text in coded.dictionary.to_pylist()], np.int16)[coded.indices.to_numpy()]


def error_counts(rollouts: RunRollouts, most: int = 5) -> list[tuple[str, int]]:
    """Return the most frequent reward errors (first line of each) with their counts."""
    counts: Counter[str] = Counter()
    for text, count in rollouts.reward_error.counts().items():
        if text.strip():
            counts[text.strip().splitlines()[0]] += count
    return counts.most_common(most)


def pick_samples(rollouts: RunRollouts) -> dict[str, list[int]]:
    """Return the indices of samples worth reading, by title; each sample once, and each prompt once per title.

    Among equals the latest steps come first: they show the current state of the policy.
    """
    scored = np.flatnonzero(~np.isnan(rollouts.reward))
    everything = np.arange(len(rollouts))
    step = rollouts.step
    orders = {
        "Highest reward": scored[np.lexsort((-step[scored], -rollouts.reward[scored]))],
        "Lowest reward": scored[np.lexsort((-step[scored], rollouts.reward[scored]))],
        "Longest": everything[np.lexsort((-step, -rollouts.output_length))],
    }
    taken: set[int] = set()
    picked: dict[str, list[int]] = {}
    for title, order in orders.items():
        groups: set[int] = set()
        chosen: list[int] = []
        for index in map(int, order):
            group = int(rollouts.group[index])
            if index in taken or (group and group in groups):
                continue
            chosen.append(index)
            groups.add(group)
            if len(chosen) == SAMPLES_OF_EACH_KIND:
                break
        taken.update(chosen)
        picked[title] = chosen
    return picked


def read_texts(data: RunData, indices: list[int]) -> dict[int, tuple[str | None, str | None]]:
    """Return (prompt, completion) of some samples; None where only token ids exist and there is no tokenizer.

    What cannot be read is None, too, and noted in `data.notes`.
    """
    import pyarrow as pa

    rollouts = data.rollouts
    if rollouts is None or not indices:
        return {}
    decoder = cache(lambda: _decoder(data))  # made when the first text has to be decoded

    def text(record: dict[str, Any], name: str) -> str | None:
        if record.get(name) is not None:
            return str(record[name])
        tokens = record.get(f"{name}_tokens")
        if tokens is None or (decode := decoder()) is None:
            return None
        return decode(list(tokens))

    by_file: dict[Path, list[int]] = {}
    for index in indices:
        by_file.setdefault(rollouts.place(index)[0], []).append(index)
    texts: dict[int, tuple[str | None, str | None]] = {}
    for path, wanted in by_file.items():
        try:
            found = _records(path, data.run_dir, {rollouts.place(index)[1] for index in wanted})
            records = [found[rollouts.place(index)[1]] for index in wanted]
        except (pa.ArrowException, OSError, KeyError) as error:  # KeyError: it has fewer rows by now
            data.notes.append(f"The texts of {path.name} could not be read: {error}.")
            texts |= dict.fromkeys(wanted, (None, None))
            continue
        for index, record in zip(wanted, records, strict=True):
            told, answer = record.get("conversation"), None
            try:
                answer = conversation_text(told, record.get("metrics") or ()) if told else None
            except (ValueError, KeyError, TypeError, RecursionError):
                data.notes.append(f"The conversation of sample {record.get('sample_id')} could not be read.")
            texts[index] = text(record, "prompt"), answer if told else text(record, "completion")
    return texts


def _records(path: Path, below: Path, rows: set[int]) -> dict[int, dict[str, Any]]:
    """Return what a file has of the texts of some rows, by their numbers; it is read some rows at a time."""
    from streamrl.rollouts.parquet_files import BATCH, open_parquet

    wanted = ("sample_id", "prompt", "prompt_tokens", "completion", "completion_tokens", "conversation", "metrics")
    found, begin = {}, 0
    with open_parquet(path, below) as file:
        there = set(file.schema_arrow.names)
        names = [name for name in wanted if name in there]
        for batch in file.iter_batches(BATCH, columns=names, use_threads=False):
            for row in rows & set(range(begin, begin + len(batch))):
                found[row] = batch.slice(row - begin, 1).to_pylist()[0]
            begin += len(batch)
    return found


def _decoder(data: RunData) -> Decoder | None:
    """Return the run's decoder; without one, say so in the notes."""
    decoder, why_not = find_decoder(data.run_dir, data.config_text)
    if decoder is None:
        data.notes.append(why_not)
    return decoder
