"""Read a finished or unfinished run folder for the report: metrics, trace, rollouts, configuration, status.

Every part may be missing; `RunData.notes` collects what could not be read, for the report to show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
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
from streamrl.run_dir import layout
from streamrl.run_dir.evaluations import EvaluationRow, read_evaluations
from streamrl.run_dir.metrics import MetricsRow, read_metrics
from streamrl.run_dir.status import RunStatus, read_status
from streamrl.run_dir.trace import Event, read_trace, trace_origin

Loaded = TypeVar("Loaded")

SAMPLES_OF_EACH_KIND = 3
"""Samples that the report shows under each title."""


@dataclass(frozen=True)
class RunRollouts:
    """All samples of a run, one entry each; if a sample was written twice, the later one."""

    sample_id: npt.NDArray[np.object_]
    group_id: npt.NDArray[np.object_]
    task: npt.NDArray[np.object_]
    step: npt.NDArray[np.int64]
    output_length: npt.NDArray[np.int64]
    finish_reason: npt.NDArray[np.object_]
    reward: npt.NDArray[np.float64]
    """NaN where the sample was never scored."""
    reward_error: npt.NDArray[np.object_]
    """Error message, or None."""
    pool: npt.NDArray[np.object_]
    route: npt.NDArray[np.object_]
    predicted_length: npt.NDArray[np.float64]
    """Predicted before dispatch, in tokens; NaN where nothing was predicted."""
    place: list[tuple[Path, int]] = field(repr=False)
    """File and row of each sample, for reading its text."""

    def __len__(self) -> int:
        return len(self.sample_id)

    @property
    def tasks(self) -> list[str]:
        """Task names in alphabetical order."""
        return sorted(set(self.task))


@dataclass(frozen=True)
class RunData:
    """Everything that a report is made from."""

    run_dir: Path
    status: RunStatus | None
    rows: list[MetricsRow]
    evaluations: list[EvaluationRow]
    events: list[Event]
    origin: float | None
    """The trace's time zero, in unix seconds."""
    rollouts: RunRollouts | None
    config_text: str | None
    notes: list[str]
    """Remarks on what could not be read, one sentence each."""


def load_run(run_dir: Path) -> RunData:
    """Read everything that the folder holds.

    Raises:
        UserError: the folder does not exist, or holds none of a run's files.
    """
    config = run_dir / RESOLVED_NAME
    metrics = run_dir / layout.METRICS
    status, notes = None, list[str]()
    try:
        status = read_status(run_dir)
    except UserError as error:
        if not config.exists() and not metrics.exists():
            raise
        notes.append(f"The run's state is unknown: {error}.")
    events = _left_out_if_not_plain(lambda: read_trace(run_dir / layout.TRACE), notes) or []
    return RunData(
        run_dir=run_dir,
        status=status,
        rows=_left_out_if_not_plain(lambda: read_metrics(metrics), notes) or [],
        evaluations=_left_out_if_not_plain(lambda: read_evaluations(run_dir / layout.EVALUATIONS), notes) or [],
        events=events,
        origin=trace_origin(events),
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


_DEFAULTS: dict[str, tuple[Any, Any]] = {
    **dict.fromkeys(("group_id", "pool", "route"), ("", object)),
    **dict.fromkeys(("step", "output_length"), (0, np.int64)),
    **dict.fromkeys(("reward", "predicted_length"), (np.nan, np.float64)),
    "task": ("(no task)", object),
    "finish_reason": ("(none)", object),
    "reward_error": (None, object),
}
"""Column of the rollouts -> what stands for a missing value, and the type of its array."""


ROW = "row"
"""Name of the column with a sample's row number in its file."""


def _read_rollouts(folder: Path, notes: list[str]) -> RunRollouts | None:
    import pyarrow as pa

    from ranker.data import ROW_IDS, first_rows
    from streamrl.rollouts.parquet_files import read_columns

    latest: dict[str, tuple[dict[str, Any], Path, int]] = {}
    columns = [*(one.name for one in fields(RunRollouts)), *ROW_IDS]
    for path in (folder / name for name in plain_names(folder, below=folder.parent) if name.endswith(".parquet")):
        try:
            table = read_columns(path, folder.parent, columns)
            records = first_rows(table.append_column(ROW, pa.array(range(len(table)), pa.int64()))).to_pylist()
        except (pa.ArrowException, OSError) as error:
            # A killed run leaves the file that it was writing without a footer.
            notes.append(f"{path.name} could not be read and is left out: {error}.")
            continue
        for record in records:
            index = record[ROW]
            latest[str(record.get("sample_id") or f"{path.name}:{index}")] = (record, path, index)
    if not latest:
        return None
    records = [record for record, _, _ in latest.values()]

    arrays = {
        name: np.array([default if (value := record.get(name)) is None else value for record in records], dtype=kind)
        for name, (default, kind) in _DEFAULTS.items()
    }
    place = [(path, index) for _, path, index in latest.values()]
    return RunRollouts(sample_id=np.array(list(latest), dtype=object), place=place, **arrays)


def error_counts(rollouts: RunRollouts, most: int = 5) -> list[tuple[str, int]]:
    """Return the most frequent reward errors (first line of each) with their counts."""
    messages = [str(text).strip().splitlines()[0] for text in rollouts.reward_error if str(text or "").strip()]
    return Counter(messages).most_common(most)


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
        groups: set[str] = set()
        chosen: list[int] = []
        for index in map(int, order):
            group = rollouts.group_id[index]
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

    from streamrl.rollouts.parquet_files import read_columns

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
        by_file.setdefault(rollouts.place[index][0], []).append(index)
    texts: dict[int, tuple[str | None, str | None]] = {}
    for path, wanted in by_file.items():
        columns = ("prompt", "prompt_tokens", "completion", "completion_tokens", "conversation", "metrics")
        try:
            table = read_columns(path, data.run_dir, columns)
            records = [table.slice(rollouts.place[index][1], 1).to_pylist()[0] for index in wanted]
        except (pa.ArrowException, OSError, IndexError) as error:  # IndexError: it has fewer rows by now
            data.notes.append(f"The texts of {path.name} could not be read: {error}.")
            texts |= dict.fromkeys(wanted, (None, None))
            continue
        for index, record in zip(wanted, records, strict=True):
            told, answer = record.get("conversation"), None
            try:
                answer = conversation_text(told, record.get("metrics") or ()) if told else None
            except (ValueError, KeyError, TypeError):
                data.notes.append(f"The conversation of sample {rollouts.sample_id[index]} could not be read.")
            texts[index] = text(record, "prompt"), answer if told else text(record, "completion")
    return texts


def _decoder(data: RunData) -> Decoder | None:
    """Return the run's decoder; without one, say so in the notes."""
    decoder, why_not = find_decoder(data.run_dir, data.config_text)
    if decoder is None:
        data.notes.append(why_not)
    return decoder
