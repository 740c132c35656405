"""Finds a text in the prompts, answers and conversations of a run's samples, without holding these texts.

A file is searched once for each text. Runs may have gigabytes of texts, so a search takes a limited time, newest files
first, and goes on where it was when it is asked again.
"""

from __future__ import annotations

import json
import re
import time
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamrl.rollouts.parquet_files import open_parquet

PLAIN, CONVERSATION = ("prompt", "completion"), "conversation"
"""Columns that are searched: texts, and JSON, in which some characters are written otherwise."""
NOT_TEXTS = frozenset({"role", "kind", "type", "id", "tool_call_id"})
"""Keys of a conversation whose values are no texts."""
SEARCH_S = 1.5
"""Seconds after which a search stops until it is asked again; the file that it is at is finished first."""
BATCH = 512
"""Rows that are read at once."""
MOST_MATCHED = 100
"""Characters of a text by which conversations are chosen to be looked through: a longer pattern takes much memory."""
KEPT_TEXTS = 8
"""Texts whose results are kept."""

Mark = tuple[int, int, int]
"""What tells two contents of a file apart: inode, size, time of the last change."""


class TextSearch:
    """The rows of Parquet files in which texts were found."""

    def __init__(self) -> None:
        self._found: OrderedDict[str, dict[Path, tuple[Mark, npt.NDArray[np.int64]]]] = OrderedDict()

    def look(
        self, text: str, files: Mapping[Path, Mark], limit_s: float = SEARCH_S
    ) -> dict[Path, npt.NDArray[np.int64]]:
        """Return the numbers of the rows that have a text, by file; files that were not searched yet are missing.

        A file that cannot be read, or is gone, counts as one without the text.

        Args:
            text: what is looked for; upper and lower case are the same.
            files: the files, in the order of their steps, with their marks.
            limit_s: seconds after which no further file is begun; one is searched in any case.
        """
        known = self._found.setdefault(text, {})
        self._found.move_to_end(text)
        while len(self._found) > KEPT_TEXTS:
            self._found.popitem(last=False)
        for gone in known.keys() - files.keys():
            del known[gone]
        until = time.monotonic() + limit_s
        for path in reversed(list(files)):
            if path not in known or known[path][0] != files[path]:
                try:
                    rows = rows_with(path, text)
                except (OSError, pa.ArrowException):
                    rows = np.zeros(0, np.int64)
                known[path] = files[path], rows
                if time.monotonic() > until:
                    break
        return {path: rows for path, (mark, rows) in known.items() if files[path] == mark}


def rows_with(path: Path, text: str) -> npt.NDArray[np.int64]:
    """Return the numbers of a file's rows whose prompt, completion or conversation has a text.

    Raises:
        OSError, pa.ArrowException: the file cannot be read.
    """
    written = _in_json(text[:MOST_MATCHED])
    found = []
    begin = 0
    with open_parquet(path, path.parents[1]) as file:
        names = [name for name in (*PLAIN, CONVERSATION) if name in file.schema_arrow.names]
        if not names:
            return np.zeros(0, np.int64)
        for batch in file.iter_batches(BATCH, columns=names, use_threads=False):
            has = np.zeros(len(batch), bool)
            for name in names:
                column = batch.column(name)
                if name == CONVERSATION:
                    may_have = _bools(pc.match_substring_regex(column, written, ignore_case=True))
                    for row in np.flatnonzero(may_have & ~has):
                        has[row] = _is_said(column[int(row)].as_py(), text.casefold())
                else:
                    has |= _bools(pc.match_substring(column, text, ignore_case=True))
            found.append(begin + np.flatnonzero(has))
            begin += len(batch)
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def _bools(matches: pa.Array) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = pc.fill_null(matches, False).to_numpy(zero_copy_only=False)
    return found


def _in_json(text: str) -> str:
    """Return a pattern of a text in JSON, in upper and lower case.

    Files of earlier versions have an escape for each character that is not ASCII, of which no search knows the case.
    """
    pattern = []
    for one in text:
        cases = (one,) if one.isascii() else (one, one.lower(), one.upper())
        forms = dict.fromkeys(json.dumps(case, ensure_ascii=ascii)[1:-1] for case in cases for ascii in (False, True))
        pattern.append(f"(?:{'|'.join(map(re.escape, forms))})" if len(forms) > 1 else re.escape(*forms))
    return "".join(pattern)


def _is_said(conversation: str, text: str) -> bool:
    """Whether a text is in what is said in a conversation, not only in the JSON around it."""
    try:
        told = json.loads(conversation)
    except (ValueError, RecursionError):
        return False
    left = [told]
    while left:
        one = left.pop()
        if isinstance(one, str) and text in one.casefold():
            return True
        if isinstance(one, dict):
            left += [value for key, value in one.items() if key not in NOT_TEXTS]
        elif isinstance(one, list):
            left += one
    return False
