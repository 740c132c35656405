"""Values of Arrow columns as they were written: what their types alone say, Python's own conversion leaves out."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from typing import Any

import numpy as np

Convert = Callable[[Any], Any]
"""Makes of a value of `to_pylist` the one that was written."""
SHORT_FLOATS = {"halffloat": np.float16, "float": np.float32}
"""Types of numbers, by Arrow's names, that Python widens: 0.1 becomes 0.10000000149011612."""
SECONDS = "timestamp[s]"
"""What the reader of JSON makes of texts that are dates or times; Parquet has no such type."""


def converter(kind: Any) -> Convert | None:
    """Return what makes a type's values those that were written; None: `to_pylist` gives them.

    Numbers of 16 and 32 bits become the shortest decimals, so that 0.1 is 0.1; JSON texts, as which `datasets` keeps
    values of mixed types, become what they say; and dates that were read as the first second of their day, dates.

    Args:
        kind: `pyarrow.DataType`, whose lists and mappings are looked into.
    """
    from pyarrow import types

    if getattr(kind, "extension_name", None) == "arrow.json":
        return _unless_null(_from_json)
    if short := SHORT_FLOATS.get(str(kind)):
        return _unless_null(lambda value: float(str(short(value))))
    if str(kind) == SECONDS:
        return _unless_null(_day_or_time)
    if types.is_struct(kind):
        fields = {field.name: convert for field in kind if (convert := converter(field.type))}
        return _unless_null(lambda value: {k: fields.get(k, _same)(v) for k, v in value.items()}) if fields else None
    if types.is_map(kind):
        parts = converter(kind.key_type), converter(kind.item_type)
        first, second = (part or _same for part in parts)
        return _unless_null(lambda pairs: [(first(k), second(v)) for k, v in pairs]) if any(parts) else None
    inner = converter(kind.value_type) if hasattr(kind, "value_type") else None
    if inner is None or types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return inner
    return _unless_null(lambda items: [inner(item) for item in items])


def _unless_null(convert: Convert) -> Convert:
    return lambda value: None if value is None else convert(value)


def _same(value: Any) -> Any:
    return value


def _from_json(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except ValueError:
        return text  # the reader of `datasets` takes 007 and NaN for JSON and keeps these texts as they are


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _day_or_time(value: datetime.datetime) -> datetime.date:
    return value.date() if value.time() == datetime.time() else value
