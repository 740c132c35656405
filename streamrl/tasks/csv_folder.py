"""How `datasets` reads a folder of CSV files: cells stay the texts that they are, and no field gets lost."""

from __future__ import annotations

import contextlib
import csv
import importlib
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.errors import UserError


@dataclass(frozen=True)
class CsvFolder:
    """A folder of CSV files."""

    config: Any
    """`CsvConfig` of `datasets`: what the folder's card says, or defaults."""
    untyped: frozenset[str]
    """Columns, if the card declares no types; left alone, pandas would make 7.0 of 007, and null of NA and None."""

    @property
    def settings(self) -> dict[str, Any]:
        """Settings for `load_dataset`, besides the folder."""
        as_texts = {"converters": dict.fromkeys(sorted(self.untyped), str), "na_filter": False} if self.untyped else {}
        return _own_index(self.config) | as_texts

    def null_if_empty(self, table: Any) -> Any:
        """Return a `pyarrow.Table` of the folder with null for each empty text of an untyped column."""
        compute = importlib.import_module("pyarrow.compute")
        for place, column in enumerate(table.column_names):
            if column in self.untyped:
                texts = table.column(column)
                table = table.set_column(place, column, compute.if_else(compute.equal(texts, ""), None, texts))
        return table


def csv_folder(datasets: Any, folder: str, subset: str) -> CsvFolder | None:
    """Return what a folder of CSV files holds; None: it is another folder.

    Args:
        datasets: the module.
        folder: the folder.
        subset: a subset that its card describes; '': the default.

    Raises:
        UserError: a row has more fields than the header, with file and line.
        Exception: `datasets` cannot read the folder.
    """
    csv_module = importlib.import_module("datasets.packaged_modules.csv.csv")
    with tempfile.TemporaryDirectory() as empty:  # in its own cache, types that were guessed count as the card's
        builder = datasets.load_dataset_builder(folder, name=subset or None, cache_dir=empty)
        if not isinstance(config := builder.config, csv_module.CsvConfig):
            return None
        if builder.info.features is not None:
            return CsvFolder(config, frozenset())
        settings = _own_index(config)
        builder = datasets.load_dataset_builder(folder, name=subset or None, cache_dir=empty, **settings)
        with no_field_lost(config):
            rows = [row for split in builder.as_streaming_dataset().values() for row in split.take(1)]
    return CsvFolder(config, frozenset(column for row in rows for column in row))


@contextlib.contextmanager
def no_field_lost(config: Any) -> Iterator[None]:
    """Refuse rows that have more fields than the header, while `datasets` reads the files.

    Args:
        config: `CsvConfig` of the files.

    Raises:
        UserError: there is such a row, with file and line; of a compressed file, without.
    """
    errors = importlib.import_module("pandas.errors")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", errors.ParserWarning)
            yield
    except Exception as error:
        raised = (error, error.__cause__)  # `datasets` wraps what its readers raise
        lost = any(isinstance(one, errors.ParserWarning) for one in raised)
        if lost or any(isinstance(one, errors.ParserError) for one in raised):
            place = _long_row(config) or ("a row has more fields than the header of its file" if lost else "")
            if place:
                raise UserError(place) from error
        raise


def _own_index(config: Any) -> dict[str, Any]:
    """Return the setting by which pandas takes no field for the number of its row.

    If the first row has one field more than the header, it would do so, and move all other fields by one column.
    """
    return {"index_col": False} if config.index_col is None else {}


def _long_row(config: Any) -> str:
    """Return file, line and number of fields of the first row that has more than its header; '': none is found."""
    for path in sorted({str(path) for files in config.data_files.values() for path in files}):
        with contextlib.suppress(OSError, ValueError, csv.Error), Path(path).open(encoding="utf-8", newline="") as file:
            reader = csv.reader(file, delimiter=config.sep, quotechar=config.quotechar)
            header = len(config.names or next(reader, []))
            before = reader.line_num
            for row in reader:
                if len(row) > header:
                    return f"{path}:{before + 1}: expected {header} fields, as the header has, got {len(row)}"
                before = reader.line_num
    return ""
