"""Files that are replaced in one piece, and names that a restart may trust. Standard library only."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{16}")
"""Names of the files that `replacing` gives."""


@contextlib.contextmanager
def replacing(path: Path, *, lasting: bool = False) -> Iterator[Path]:
    """Give an empty file to write to, which replaces another one atomically if the block ends well, else is deleted.

    Nobody knows its name before, so that no link can be in its place.

    Args:
        path: the file that is replaced, or is not there yet.
        lasting: write file and name to disk, so that the new file survives a power failure once the block has ended.

    Raises:
        OSError: the file cannot be replaced.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    try:
        yield temporary
        if lasting:
            _sync_file(temporary)
        os.replace(temporary, path)
        if lasting:
            sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def remove_left(folder: Path, replaced: Callable[[str], bool]) -> None:
    """Delete what killed processes have left of `replacing`; none may be replacing these files now.

    Args:
        folder: folder of the files; it may be missing.
        replaced: whether a file of this name was to be replaced.

    Raises:
        OSError: one cannot be deleted.
    """
    for path in folder.glob(".*"):
        if (found := TEMPORARY.fullmatch(path.name)) and replaced(found[1]):
            path.unlink(missing_ok=True)


def overwrite(path: Path, texts: Iterable[bytes]) -> None:
    """Write the first of some texts that fits in place of a file's content, with blanks after it; else nothing.

    A full disk allows that: the file keeps its blocks. It is written at once, and of the same length, so that readers
    see no half of it. Without a file nothing is written.
    """
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            room = os.fstat(file).st_size
            if (text := next((one for one in texts if len(one) <= room), None)) is not None:
                os.pwrite(file, text.ljust(room), 0)
        finally:
            os.close(file)


def replace_text(path: Path, text: str, *, lasting: bool = False) -> None:
    """Replace a file by new text atomically.

    Args:
        path: the file.
        text: its new text.
        lasting: as for `replacing`.

    Raises:
        OSError: the file cannot be written.
    """
    with replacing(path, lasting=lasting) as temporary:
        temporary.write_text(text, encoding="utf-8")


def replace_json(path: Path, values: Any, *, lasting: bool = False) -> None:
    """Replace a JSON file atomically; arguments as for `replace_text`.

    Raises:
        OSError: the file cannot be written.
        ValueError: a value cannot be expressed in JSON (NaN or an infinity).
    """
    replace_text(path, json.dumps(values, allow_nan=False), lasting=lasting)


def sync_folder(folder: Path) -> None:
    """Write a folder's names to disk, so that they survive a power failure.

    Raises:
        OSError: the folder cannot be written.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_files(folder: Path) -> None:
    """Write all files below a folder to disk, before it gets the name under which a restart trusts it.

    Raises:
        OSError: a file cannot be written.
    """
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
        else:
            _sync_file(path)
    sync_folder(folder)


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
