"""Files that commands are to write: checked before the work that fills them, and replaced in one piece after it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from streamrl.atomic_files import replace_text
from streamrl.errors import UserError


def write_output(path: Path, text: str) -> None:
    """Write a file; an earlier one stays as it is where the disk has no room for the new one.

    Args:
        path: the file; a link stays one, and a device or a pipe is written to.
        text: its new text.

    Raises:
        OSError: it cannot be written.
    """
    target = path.resolve()
    if target.exists() and (not target.is_file() or not os.access(target.parent, os.W_OK)):
        target.write_text(text, encoding="utf-8")  # which nothing can take the place of
    else:
        replace_text(target, text)


def check_output(option: str, path: Path) -> None:
    """Check that a file can be written at a path; nothing is left there, and a file that is there stays as it is.

    Args:
        option: the option that names the file, for the message.
        path: the file, which need not exist.

    Raises:
        UserError: it is a folder, its folder does not exist, or this user cannot write it.
    """
    try:
        if path.is_dir():
            raise UserError(f"{option} {path}: is a folder; expected a file's name")
        folder = path.resolve().parent  # of a link's target, which may be elsewhere
        if not folder.is_dir():
            raise UserError(f"{option} {path}: its folder does not exist")
        if not path.exists():
            tempfile.TemporaryFile(dir=folder).close()  # permissions do not say whether root may, nor what /proc takes
        elif not os.access(path, os.W_OK):
            raise UserError(f"{option} {path}: this file is not writable")
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a link to itself; ValueError: a null byte
        why = getattr(error, "strerror", None) or error
        raise UserError(f"{option} {path}: cannot be written: {why}") from error
