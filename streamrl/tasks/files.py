"""Items of file tasks, from JSONL, Parquet or Hugging Face data sets, with precise error locations."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import importlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgpack

from streamrl.config.tasks import PYTHON_TESTS, AgentTask, FileTask, name_and_subset
from streamrl.errors import UserError, reaching, why_unusable
from streamrl.rollouts.plain_text import plain_text
from streamrl.tasks.arrow_values import cells
from streamrl.tasks.csv_folder import csv_folder, no_field_lost
from streamrl.tasks.extras import import_extra
from streamrl.tasks.procedural import nearest
from streamrl.tasks.task_items import PromptMessage, TaskItems, digest_of, with_suffix

T = TypeVar("T")
MOST_BYTES = 8 * 2**20
"""Most bytes of a row as it goes to rewards and agents: half of what a message of the transport may have."""
MOST_LEVELS = 200
"""Most levels of lists and mappings in a value: Python recurses to read and write them."""
ROLES = ("system", "user", "assistant")
"""Roles of a prompt's messages; a system message comes first, and the user's last."""
FILES = (".jsonl", ".ndjson", ".parquet")
"""Suffixes of the files that `kind: file` reads."""
ONE_ANSWER = ("math_verify", "exact_match")
"""Rewards that compare with a single text or number."""


@dataclass(frozen=True)
class TaskRow:
    """One prompt of a file."""

    prompt: str
    """The user's message, the last one."""
    answer: Any
    """Reference answer (str, int, float, bool, list, dict); None if the task has no answer column."""
    earlier: tuple[PromptMessage, ...] = ()
    """Messages before it, if the prompt column holds a conversation."""
    problem: str = ""
    """Why no completion can get the reward, with the place; '': nothing is known."""


RowsTask = FileTask | AgentTask
"""A task that reads rows."""
Record = tuple[str, dict[str, Any]]
"""Where a row is, and its values by column."""


def load_rows(task: FileTask) -> list[TaskRow]:
    """Read all rows, in the file's order.

    Raises:
        UserError: missing or empty file, missing column, null or wrong type (with file and line or row).
    """
    if task.kind == "hf_dataset":
        records = _table_records(_columns(task), _hf_table(task), f"{task.path} (split {task.split_read})")
    else:
        records = _file_records(task, task.path)
    return _not_empty(task, [_row(task, where, record) for where, record in records])


class FileItems(TaskItems):
    """The items of a file task, held in memory."""

    def __init__(self, task: FileTask, seed: int) -> None:
        """Read the file, whatever the seed.

        Raises:
            UserError: the file or a row is wrong (see `load_rows`).
        """
        self._rows = load_rows(task)
        self._suffix = task.suffix
        self.count = len(self._rows)
        self.problem = next((row.problem for row in self._rows if row.problem), "")

    def question(self, index: int) -> str:
        """Return the prompt of row `index`."""
        return self._rows[index].prompt

    def earlier(self, index: int) -> tuple[PromptMessage, ...]:
        """Return the messages before the user's of row `index`."""
        return self._rows[index].earlier

    def reward_input(self, index: int) -> dict[str, Any]:
        """Return the user's message and the reference answer, as a reward function receives them."""
        row = self._rows[index]
        return {"prompt": with_suffix(row.prompt, self._suffix), "answer": row.answer}

    def digest(self) -> str:
        """Return a digest of the file's rows."""
        return digest_of((row.earlier, row.prompt, row.answer) for row in self._rows)


def load_records(task: AgentTask) -> list[dict[str, Any]]:
    """Read all rows of an agent's file with all their columns, those of prompt and answer as `prompt` and `answer`.

    Raises:
        UserError: as `load_rows`; or a column is already named `prompt` or `answer`, or holds no plain value.
    """
    assert task.path is not None
    return _not_empty(task, [_item(task, where, record) for where, record in _file_records(task, task.path)])


def _not_empty(task: RowsTask, rows: list[T]) -> list[T]:
    if not rows:
        raise UserError(f"task {task.key!r}: {task.path} holds no prompts")
    return rows


def _item(task: AgentTask, where: str, record: dict[str, Any]) -> dict[str, Any]:
    row = _row(task, where, record)
    named = {task.prompt_column, task.answer_column}
    item: dict[str, Any] = {"prompt": row.prompt}
    if task.answer_column is not None:
        item["answer"] = row.answer
    for column, value in record.items():
        if column in named:
            continue
        name = plain_text(column)
        if name in item:
            raise UserError(f"{where}: column {name!r} is in the way: the agent gets {name}_column under this name")
        try:
            item[name] = plain(value)
        except TypeError as error:
            raise UserError(f"{where}: column {name!r}: {error}") from error
    if reason := unsendable(item):
        raise UserError(f"{where}: {reason}")
    return item


def _file_records(task: RowsTask, name: str) -> Iterator[Record]:
    path = Path(name).expanduser()
    with reaching(f"task {task.key!r}: path"):
        if path.is_dir():
            hint = "" if isinstance(task, AgentTask) else "; kind: hf_dataset reads folders"
            raise UserError(f"task {task.key!r}: path: {path} is a folder{hint}")
        if not path.is_file():
            raise UserError(f"task {task.key!r}: path: no file {path}")
    match path.suffix.lower():
        case ".jsonl" | ".ndjson":
            return _jsonl_records(task, path)
        case ".parquet":
            return _parquet_records(task, path)
    hint = "; kind: hf_dataset reads the folder of a CSV file" if path.suffix.lower() in (".csv", ".tsv") else ""
    hint = "" if isinstance(task, AgentTask) else hint
    raise UserError(f"task {task.key!r}: path: {path} must end in .jsonl, .ndjson or .parquet{hint}")


def _jsonl_records(task: RowsTask, path: Path) -> Iterator[Record]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise UserError(f"task {task.key!r}: path: {path}: {why_unusable(error)}") from error
    with file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                record = json.loads(line.decode("utf-8-sig"), parse_constant=_no_constant)
            except json.JSONDecodeError as error:  # its own line number is that inside this line
                reason = f"{error.msg}, at character {error.pos + 1}"
                raise UserError(f"{where}: expected one JSON object per line: {reason}") from error
            except ValueError as error:
                raise UserError(f"{where}: expected one JSON object per line: {error}") from error
            except RecursionError as error:
                raise UserError(f"{where}: its lists and mappings are nested too deeply") from error
            if not isinstance(record, dict):
                raise UserError(f"{where}: expected a JSON object, got {_kind(record)}")
            _check_columns(task, where, list(record))
            yield where, record


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _parquet_records(task: RowsTask, path: Path) -> Iterator[Record]:
    parquet = import_extra("pyarrow.parquet", f"task {task.key!r}")
    arrow = import_extra("pyarrow", f"task {task.key!r}")
    try:
        names = parquet.read_schema(path).names
        _check_columns(task, str(path), names)
        columns = names if isinstance(task, AgentTask) else _columns(task)
        table = parquet.read_table(path, columns=columns)
    except (arrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not a readable Parquet file: {error}") from error
    return _table_records(columns, table, str(path))


def _hf_table(task: FileTask) -> Any:
    datasets = import_extra("datasets", f"task {task.key!r}")
    cannot = f"task {task.key!r}: path: cannot load the data set {task.path!r}"
    name, subset = name_and_subset(task.path)
    file, folder = Path(task.path).expanduser(), Path(name)
    if file.is_file():
        remedy = "kind: file reads it" if file.suffix.lower() in FILES else "expected a folder or a name of the Hub"
        raise UserError(f"task {task.key!r}: path: {task.path} is a file; {remedy}")
    if not (here := folder.is_dir()) and name.startswith(("/", "./", "../", "~")):
        raise UserError(f"{cannot}: there is no such folder")
    hub = importlib.import_module("huggingface_hub.utils.logging")
    verbosity = hub.get_verbosity()
    csv = None
    try:
        hub.set_verbosity_error()  # without a line for each time that it asks the Hub again
        if not subset and ((folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()):
            data = datasets.load_from_disk(name)  # as save_to_disk wrote it
        else:
            csv = csv_folder(datasets, name, subset) if here else None
            with no_field_lost(csv.config) if csv else contextlib.nullcontext():
                data = datasets.load_dataset(name, name=subset or None, **(csv.settings if csv else {}))
    except Exception as error:  # the library raises its own, the hub's, and the file system's errors
        reason = (str(error) or type(error).__name__).splitlines()[0]
        tried = "" if here else f"there is no folder {name} here, and as a data set of the Hub: "
        raise UserError(f"{cannot}: {tried}{reason}") from error
    finally:
        hub.set_verbosity(verbosity)
    if isinstance(data, datasets.DatasetDict):
        if (split := task.split_read) not in data:
            raise UserError(f"task {task.key!r}: {task.path} has no split {split!r}, but {', '.join(data)}")
        data = data[split]
    elif not _is_split(task.split, data.split):  # saved alone
        holds = "of no known split" if data.split is None else f"of split {str(data.split)!r}"
        raise UserError(
            f"task {task.key!r}: split is {task.split!r}, but {task.path} was saved alone and is {holds}: leave split "
            "out, or save a `DatasetDict` of all splits"
        )
    _check_columns(task, task.path, data.column_names)
    table = data.with_format("arrow")[:]  # a table with the rows in the data set's own order
    return csv.null_if_empty(table) if csv else table


def _is_split(asked: str | None, held: object) -> bool:
    """Return whether the rows of a data set that was saved alone are those of a split; `train` is what most are."""
    if asked is None or str(held) == asked:
        return True
    return asked == "train" and (held is None or str(held).startswith("train"))


def _table_records(columns: list[str], table: Any, where: str) -> Iterator[Record]:
    values = [_cells(where, table, name) for name in columns]
    for number, row in enumerate(zip(*values, strict=True), start=1):
        yield f"{where}, row {number}", dict(zip(columns, row, strict=True))


def _cells(where: str, table: Any, name: str) -> list[Any]:
    try:
        return cells(table.column(name))
    # a year after 9999, an unknown time zone, text that is not UTF-8
    except (ArithmeticError, LookupError, ValueError) as error:
        cannot = f"column {name!r} of type {table.schema.field(name).type} has a value that Python cannot hold"
        raise UserError(f"{where}: {cannot}: {type(error).__name__}: {error}") from error


def _columns(task: RowsTask) -> list[str]:
    return [task.prompt_column, *([task.answer_column] if task.answer_column is not None else [])]


def _row(task: RowsTask, where: str, record: dict[str, Any]) -> TaskRow:
    prompt = record[task.prompt_column]
    earlier: tuple[PromptMessage, ...] = ()
    if isinstance(prompt, list) and isinstance(task, FileTask):
        *before, last = _messages(f"{where}: column {task.prompt_column!r}", prompt)
        prompt, earlier = last["content"], tuple(before)
    if not isinstance(prompt, str):
        kinds = "text or a list of chat messages" if isinstance(task, FileTask) else "text"
        raise UserError(f"{where}: column {task.prompt_column!r} must be {kinds}, got {_kind(prompt)}")
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
        if isinstance(task, FileTask) and task.reward == PYTHON_TESTS:
            answer = _tests(f"{where}: column {task.answer_column!r}", answer)
        elif isinstance(task, FileTask) and task.reward in ONE_ANSWER and isinstance(answer, list | dict):
            raise UserError(
                f"{where}: column {task.answer_column!r}: reward {task.reward} compares with one text or number, got "
                f"{_kind(answer)}; write its answer into a column of its own, or name a reward function that takes it"
            )
    problem = ""
    if isinstance(task, FileTask) and task.reward in ONE_ANSWER and isinstance(answer, str) and not answer.strip():
        problem = f"{where}: column {task.answer_column!r} is empty; every prompt needs its answer"
    row = TaskRow(plain_text(prompt), answer, earlier, problem)
    if isinstance(task, FileTask) and (reason := unsendable({"prompt": row.prompt, "answer": answer})):
        raise UserError(f"{where}: {reason}")  # of an agent's row, all columns count: see `_item`
    return row


def _tests(where: str, answer: Any) -> str:
    """Return the text of the tests that an answer column holds, joined if there are several.

    Raises:
        UserError: it holds something that no program could fail, such as data of which tests would have to be made.
    """
    expected = f"reward {PYTHON_TESTS} expects Python that uses the program, or a list of such texts"
    texts = answer if isinstance(answer, list) else [answer]
    among = "a list with " if isinstance(answer, list) else ""
    for one in texts:
        if not isinstance(one, str):
            raise UserError(f"{where}: {expected}, got {among}{_kind(one)}")
        with contextlib.suppress(ValueError):
            raise UserError(f"{where}: {expected}, got {among}JSON text of {_kind(json.loads(one))}")
    joined = "\n".join(texts)
    if not joined.strip():
        raise UserError(f"{where}: {expected}, got no test")
    return joined


def _messages(where: str, given: list[Any]) -> list[PromptMessage]:
    """Return a conversation that a prompt column holds; keys without a value, as Parquet adds them, are left out."""
    found: list[PromptMessage] = []
    for number, one in enumerate(given):
        if not isinstance(one, dict):
            raise UserError(f"{where}: message {number} must be a mapping with role and content, got {_kind(one)}")
        message = {key: value for key, value in one.items() if value is not None}
        if extra := sorted(set(message) - {"role", "content"}):
            raise UserError(f"{where}: message {number} has {', '.join(extra)}; expected role and content alone")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES or (role == "system" and number):
            allowed = ", ".join(ROLES if number == 0 else ROLES[1:])
            raise UserError(f"{where}: message {number} has the role {role!r}, expected one of: {allowed}")
        if not isinstance(content, str):
            raise UserError(f"{where}: message {number} must have a text as content, got {_kind(content)}")
        found.append({"role": role, "content": plain_text(content)})
    if not found or found[-1]["role"] != "user":
        got = found[-1]["role"] if found else "no message"
        raise UserError(f"{where}: expected a conversation that ends with a message of the user, got {got}")
    return found


def unsendable(values: dict[str, Any]) -> str:
    """Return why a row or an item cannot be sent with every completion; '': it can.

    Args:
        values: what a reward or an agent gets, plain values by name.
    """
    sizes = {name: len(msgpack.packb(value)) for name, value in values.items()}
    if (size := sum(sizes.values())) <= MOST_BYTES:
        return ""
    largest = max(sizes, key=sizes.__getitem__)
    return (
        f"{size:,} bytes would be sent with every completion, {sizes[largest]:,} of them in {largest!r}: expected at "
        f"most {MOST_BYTES:,}"
    )


def plain(value: Any, levels: int = MOST_LEVELS) -> Any:
    """Convert a value to types that messages can carry; dates, decimals and integers beyond 64 bits become text.

    Halves of surrogate pairs in texts and keys become the replacement character.

    Args:
        value: the value.
        levels: most levels of lists and mappings in it.

    Raises:
        TypeError: bytes, a number that is not finite, or more levels.
    """
    if isinstance(value, list | tuple | dict) and not levels:
        raise TypeError(f"its lists and mappings have more than {MOST_LEVELS} levels")
    match value:
        case None | bool():
            return value
        case str():
            return plain_text(value)
        case int():
            return value if -(2**63) <= value < 2**64 else str(value)
        case float():
            if not math.isfinite(value):
                raise TypeError(f"expected a finite number, got {value}")
            return value
        case list() | tuple():
            return [plain(item, levels - 1) for item in value]
        case dict():
            return {plain_text(str(key)): plain(item, levels - 1) for key, item in value.items()}
        case decimal.Decimal():
            return str(value)
        case datetime.datetime() | datetime.date() | datetime.time():
            return value.isoformat()
    raise TypeError(f"expected text, a number, a list or a mapping, got {_kind(value)}")


def _check_columns(task: RowsTask, where: str, names: list[str]) -> None:
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
