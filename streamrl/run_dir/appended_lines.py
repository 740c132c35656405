"""Read what has been appended to a file since the last look, and notice when the file began anew.

Files of a run only grow, except when the run is resumed from an older checkpoint: then a file is replaced by a shorter
one, or cut. Both are noticed, also after it has grown again, and the file is read from its start again.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic

from streamrl.plain_files import open_plain
from streamrl.run_dir.jsonl import AnyRow, last_lines, parse_row
from streamrl.run_dir.layout import LARGEST_ROWS

READ_AT_ONCE = 16 << 20
"""Most bytes that are read at one look, so that a huge file does not fill the memory."""
SHOWN_BYTES = 4 << 20
"""Bytes at the end of a file whose rows are shown at once: over a thousand steps, read in a tenth of a second."""
COMPARED = 4096
"""Bytes before the place of the last look that must be what they were, more than the ends of two rows have in common: a
file that was replaced twice between two looks may have its first inode again."""


class AppendedLines:
    """The complete lines of a file, each returned once; a last line without its end waits until it has one."""

    def __init__(
        self, path: Path, last_line: bytes = b"", below: Path | None = None, largest: int | None = LARGEST_ROWS
    ) -> None:
        """Take the file.

        Args:
            path: the file.
            last_line: the line that closes it, if it has one: a writer that goes on removes it.
            below: the run's folder; default: the one that holds the file.
            largest: most bytes that it may have; None: any number, for a reader that holds few of its lines, or a
                run's own launcher, whose file it is.
        """
        self.path, self._below, self._largest = path, below, largest
        self._last_line = last_line
        self._offset = 0
        self._before = b""
        """The last bytes read, up to `_offset`."""
        self._inode: int | None = None

    def read(self) -> tuple[bool, list[bytes]]:
        """Return whether the file began anew (or is gone), and the lines since the last look.

        Raises:
            NotPlainFile: the file is a link, no regular file, or has too many bytes.
            OSError: the file exists and cannot be read.
        """
        try:
            with open_plain(self.path, below=self._below, largest=self._largest) as file:
                stat = os.fstat(file.fileno())
                size, inode = stat.st_size, stat.st_ino
                anew = self._inode is not None and (inode != self._inode or size < self._offset)
                file.seek(max(0, self._offset - COMPARED))
                anew = anew or file.read(len(self._before)) != self._before
                if anew:
                    self._offset, self._before = 0, b""
                self._inode = inode
                file.seek(self._offset)
                content = file.read(min(size - self._offset, READ_AT_ONCE))
        except FileNotFoundError:
            anew, self._inode, self._offset, self._before = self._inode is not None, None, 0, b""
            return anew, []
        end = content.rfind(b"\n") + 1
        if not end and len(content) == READ_AT_ONCE:  # one line longer than all that is read: it is none of ours
            end = len(content)
        elif self._last_line and content[:end].splitlines()[-1:] == [self._last_line]:
            end = content.rfind(self._last_line)
        self._offset += end
        self._before = (self._before + content[:end])[-COMPARED:]
        return anew, content[:end].splitlines()

    def read_all(self) -> Iterator[tuple[bool, list[bytes]]]:
        """Yield the same, one look after the other, up to the end of the file."""
        anew, lines = self.read()
        while anew or lines:
            yield anew, lines
            anew, lines = self.read()


class AppendedRows(Generic[AnyRow]):
    """All rows of a JSONL file, of which each look parses only the new ones.

    `generation` counts how often the file began anew; so a reader that has seen the first n rows of a generation needs
    only those behind them.
    """

    def __init__(self, path: Path, model: type[AnyRow], largest: int | None = LARGEST_ROWS) -> None:
        """Take the file, its rows' class, and the most bytes that it may have (see `AppendedLines`)."""
        self._lines, self._model = AppendedLines(path, largest=largest), model
        self.path = path
        self.generation = 0
        self.rows: list[AnyRow] = []

    def look(self, enough: float = math.inf) -> list[AnyRow]:
        """Read what is new and return all rows; unreadable lines are skipped.

        Args:
            enough: rows at which the rest of the file is left for the next look.
        """
        for anew, lines in self._lines.read_all():
            if anew:
                self.generation += 1
                self.forget()
            self.rows += [self.hold(row) for line in lines if (row := parse_row(self._model, line)) is not None]
            if len(self.rows) >= enough:
                break
        return self.rows

    def forget(self) -> None:
        """Forget all rows, as the file began anew."""
        self.rows = []

    def hold(self, row: AnyRow) -> AnyRow:
        """Return what is held of a new row; a subclass may leave out what it keeps in another form."""
        return row

    def since(self, cursor: str) -> tuple[list[AnyRow], bool]:
        """Return the rows that a reader with this cursor has not seen, and whether it must forget those it has."""
        generation, _, seen = cursor.partition(".")
        if generation == str(self.generation) and seen.isdecimal() and int(seen) <= len(self.rows):
            return self.rows[int(seen) :], False
        return list(self.rows), True

    @property
    def cursor(self) -> str:
        """What a reader that has all rows gives to `since` next time."""
        return f"{self.generation}.{len(self.rows)}"


def newest_rows(path: Path, model: type[AnyRow]) -> list[AnyRow]:
    """Return the readable rows at the end of a JSONL file of any size, of which only the last `SHOWN_BYTES` are read.

    Raises:
        NotPlainFile: the file is a link, or no regular file.
        OSError: the file exists and cannot be read.
    """
    return [row for line in last_lines(path, SHOWN_BYTES) if (row := parse_row(model, line)) is not None]


def newest_row(path: Path, model: type[AnyRow]) -> AnyRow | None:
    """Return the last readable row of a JSONL file, of which only the end is read; None without one.

    Raises:
        NotPlainFile: the file is a link, or no regular file.
        OSError: the file exists and cannot be read.
    """
    lines = last_lines(path)
    return next((row for line in reversed(lines) if (row := parse_row(model, line)) is not None), None)


def parse_event(line: bytes) -> dict[str, Any] | None:
    """Return the event of one line of `trace.json`; None for its brackets, and for a line that is no event."""
    try:
        value = json.loads(line.strip().rstrip(b","))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
