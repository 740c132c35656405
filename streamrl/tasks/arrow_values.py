"""Values of Arrow columns as they were written: what their types alone say, Python's own conversion leaves out."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np

Convert = Callable[[Any], Any]
"""Makes of a value of `to_pylist` the one that was written."""
Values = Callable[[], Iterable[Any]]
"""Gives the values of a part of a column, as often as it is called."""
SHORT_FLOATS = {"halffloat": np.float16, "float": np.float32}
"""Types of numbers, by Arrow's names, that Python widens: 0.1 becomes 0.10000000149011612."""
SECONDS = "timestamp[s]"
"""What the reader of JSON makes of texts that are dates or times; Parquet has no such type."""


def cells(column: Any) -> list[Any]:
    """Return a column's values as they were written.

    Numbers of 16 and 32 bits become the shortest decimals, so that 0.1 is 0.1; JSON texts, as which `datasets` keeps
    values of mixed types, become what they say; times that are all the first second of their day, dates; and maps,
    which are lists of pairs in `to_pylist`, mappings, in which the last of equal keys counts.

    Args:
        column: `pyarrow.Array` or `pyarrow.ChunkedArray`, whose lists and mappings are looked into.
    """
    values: list[Any] = column.to_pylist()
    convert = _converter(column.type, lambda: values)
    return [convert(value) for value in values] if convert else values


def _converter(kind: Any, values: Values) -> Convert | None:
    """Return what makes a type's values those that were written; None: `to_pylist` gives them.

    Args:
        kind: `pyarrow.DataType`.
        values: all that the column holds of this type.
    """
    from pyarrow import BaseExtensionType, types

    if isinstance(kind, BaseExtensionType):
        # an extension's own attributes may have the names of those below, and mean something else
        from_json = kind.extension_name == "arrow.json"
        return _unless_null(_from_json) if from_json else _converter(kind.storage_type, values)
    if short := SHORT_FLOATS.get(str(kind)):
        return _unless_null(lambda value: float(str(short(value))))
    if str(kind) == SECONDS:
        days = all(value.time() == datetime.time() for value in _there(values))
        return _unless_null(datetime.datetime.date) if days else None
    if types.is_struct(kind):
        inside = {field.name: _converter(field.type, partial(_of_field, values, field.name)) for field in kind}
        fields = {name: convert for name, convert in inside.items() if convert}
        return _unless_null(lambda value: {k: fields.get(k, _same)(v) for k, v in value.items()}) if fields else None
    if types.is_map(kind):
        kinds = kind.key_type, kind.item_type
        parts = [_converter(part, partial(_of_pairs, values, index)) for index, part in enumerate(kinds)]
        first, second = (part or _same for part in parts)
        into = list if types.is_nested(kind.key_type) else dict  # a mapping has no lists and mappings as keys
        return _unless_null(lambda pairs: into((first(k), second(v)) for k, v in pairs))
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _converter(kind.value_type, values)
    if not hasattr(kind, "value_type"):
        return None
    inner = _converter(kind.value_type, lambda: (one for value in _there(values) for one in value))
    return _unless_null(lambda items: [inner(item) for item in items]) if inner else None


def _there(values: Values) -> Iterator[Any]:
    return (value for value in values() if value is not None)


def _of_field(values: Values, name: str) -> Iterator[Any]:
    return (value[name] for value in _there(values))


def _of_pairs(values: Values, index: int) -> Iterator[Any]:
    return (pair[index] for value in _there(values) for pair in value)


def _unless_null(convert: Convert) -> Convert:
    return lambda value: None if value is None else convert(value)


def _same(value: Any) -> Any:
    return value


def _from_json(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        # the reader of `datasets` takes 007 and NaN for JSON and keeps these texts as they are; or it is too deep
        return text


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
