"""Reading of prompts and answers from JSONL, Parquet or Hugging Face data sets, with precise error locations."""

from __future__ import annotations

import datetime
import decimal
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.config.tasks import FileTask
from streamrl.errors import UserError
from streamrl.tasks.extras import import_extra
from streamrl.tasks.procedural import nearest


@dataclass(frozen=True)
class TaskRow:
    """One prompt of a file."""

    prompt: str
    answer: Any
    """Reference answer (str, int, float, bool, list, dict); None if the task has no answer column."""


def load_rows(task: FileTask) -> list[TaskRow]:
    """Read all rows, in the file's order.

    Raises:
        UserError: missing or empty file, missing column, null or wrong type (with file and line or row).
    """
    if task.kind == "hf_dataset":
        rows = list(_table_rows(task, _hf_table(task), f"{task.path} (split {task.split})"))
    else:
        rows = list(_file_rows(task))
    if not rows:
        raise UserError(f"task {task.key!r}: {task.path} holds no prompts")
    return rows


def _file_rows(task: FileTask) -> Iterator[TaskRow]:
    path = Path(task.path).expanduser()
    if path.is_dir():
        raise UserError(f"task {task.key!r}: {path} is a folder; kind: hf_dataset reads folders")
    if not path.is_file():
        raise UserError(f"task {task.key!r}: no file {path}")
    match path.suffix.lower():
        case ".jsonl" | ".ndjson":
            return _jsonl_rows(task, path)
        case ".parquet":
            return _parquet_rows(task, path)
    raise UserError(f"task {task.key!r}: {path} must end in .jsonl or .parquet")


def _jsonl_rows(task: FileTask, path: Path) -> Iterator[TaskRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                record = json.loads(line.decode("utf-8-sig"), parse_constant=_no_constant)
            except ValueError as error:
                raise UserError(f"{where}: expected one JSON object per line: {error}") from error
            if not isinstance(record, dict):
                raise UserError(f"{where}: expected a JSON object, got {_kind(record)}")
            _check_columns(task, where, list(record))
            yield _row(task, where, record)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _parquet_rows(task: FileTask, path: Path) -> Iterator[TaskRow]:
    parquet = import_extra("pyarrow.parquet", f"task {task.key!r}")
    arrow = import_extra("pyarrow", f"task {task.key!r}")
    try:
        _check_columns(task, str(path), parquet.read_schema(path).names)
        table = parquet.read_table(path, columns=_columns(task))
    except (arrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable Parquet file: {error}") from error
    return _table_rows(task, table, str(path))


def _hf_table(task: FileTask) -> Any:
    datasets = import_extra("datasets", f"task {task.key!r}")
    folder = Path(task.path).expanduser()
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():  # save_to_disk
            data = datasets.load_from_disk(str(folder))
        else:
            name, _, subset = task.path.partition(":")
            source = str(folder) if folder.is_dir() else name
            data = datasets.load_dataset(source, name=subset or None)
    except Exception as error:  # the library raises its own, the hub's, and the file system's errors
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"task {task.key!r}: cannot load the data set {task.path!r}: {reason}") from error
    if isinstance(data, datasets.DatasetDict):
        if task.split not in data:
            raise UserError(f"task {task.key!r}: {task.path} has no split {task.split!r}, but {', '.join(data)}")
        data = data[task.split]
    _check_columns(task, task.path, data.column_names)
    return data.with_format("arrow")[:]  # a table with the rows in the data set's own order


def _table_rows(task: FileTask, table: Any, where: str) -> Iterator[TaskRow]:
    columns = _columns(task)
    values = [table.column(name).to_pylist() for name in columns]
    for number, cells in enumerate(zip(*values, strict=True), start=1):
        yield _row(task, f"{where}, row {number}", dict(zip(columns, cells, strict=True)))


def _columns(task: FileTask) -> list[str]:
    return [task.prompt_column, *([task.answer_column] if task.answer_column is not None else [])]


def _row(task: FileTask, where: str, record: dict[str, Any]) -> TaskRow:
    prompt = record[task.prompt_column]
    if not isinstance(prompt, str):
        raise UserError(f"{where}: column {task.prompt_column!r} must be text, got {_kind(prompt)}")
    if not prompt.strip():
        raise UserError(f"{where}: column {task.prompt_column!r} is empty")
    answer = None
    if task.answer_column is not None:
        answer = record[task.answer_column]
        if answer is None:
            raise UserError(f"{where}: column {task.answer_column!r} is null; every prompt needs its answer")
        try:
            answer = plain(answer)
        except TypeError as error:
            raise UserError(f"{where}: column {task.answer_column!r}: {error}") from error
    return TaskRow(prompt, answer)


def plain(value: Any) -> Any:
    """Convert a value to types that messages can carry; dates, decimals and integers beyond 64 bits become text.

    Raises:
        TypeError: bytes, or a number that is not finite.
    """
    match value:
        case None | bool() | str():
            return value
        case int():
            return value if -(2**63) <= value < 2**64 else str(value)
        case float():
            if not math.isfinite(value):
                raise TypeError(f"expected a finite number, got {value}")
            return value
        case list() | tuple():
            return [plain(item) for item in value]
        case dict():
            return {str(key): plain(item) for key, item in value.items()}
        case decimal.Decimal():
            return str(value)
        case datetime.datetime() | datetime.date() | datetime.time():
            return value.isoformat()
    raise TypeError(f"expected text, a number, a list or a mapping, got {_kind(value)}")


def _check_columns(task: FileTask, where: str, names: list[str]) -> None:
    for column in _columns(task):
        if column not in names:
            key = "prompt_column" if column == task.prompt_column else "answer_column"
            hint = "" if key == "prompt_column" else "; answer_column: null means that there is none"
            raise UserError(
                f"{where}: no column {column!r} ({key} of task {task.key!r}){nearest(column, names)}; "
                f"there is {', '.join(names) or 'nothing'}{hint}"
            )


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
