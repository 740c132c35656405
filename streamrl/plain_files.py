"""Files of a folder that somebody else may have made or may write to: opened without following links out of it.

A run's folder may be a copy from elsewhere, or another user's. Whoever wrote it could put a link to a file of the
reader in the place of `status.json`, a named pipe at which a reader waits for ever, or a file of a terabyte. So
whatever reads such a folder opens its files here:

    the folder itself   is what the user named; links in its own name are followed
    below it            no link is followed, neither to a file nor to a folder, and no '..'
    what is opened      regular files only, up to a size; no file of somebody else under a further name
    before it is        everything is looked at: opening a named pipe or a device can already do something (release who
                        waits at the pipe, wind back a tape, arm a watchdog that ends the machine)

Libraries that open paths by themselves get an open file instead, or a folder that `check_plain` has looked through.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Collection, Iterator
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from streamrl.errors import UserError, why_unusable

LARGEST = 64 << 20
"""Most bytes of a file, unless its reader says otherwise."""
SEARCH = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
"""Flags with which a folder is opened only to open what is in it."""
LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags with which an entry is held and looked at without being opened, a link itself included."""
KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


class NotPlainFile(UserError, OSError):
    """An entry of a folder that is not opened: a link, no regular file, or larger than what is read of such a file."""


class NotReadable(UserError, PermissionError):
    """A file or folder that this user may not open."""

    def __str__(self) -> str:
        return f"{self.filename}: {why_unusable(self)}"


def open_plain(path: Path, *, below: Path | None = None, largest: int | None = LARGEST) -> BinaryIO:
    """Open a file for reading.

    Args:
        path: the file.
        below: the folder that the user named, of which the file is a part; default: the one that holds it.
        largest: most bytes that the file may have; None: any number, for who reads little of it at a time.

    Raises:
        NotPlainFile: it is not opened, see above.
        NotReadable: this user may not.
        OSError: it is missing or cannot be read.
    """
    descriptor = _open(path, below or path.parent, os.O_RDONLY)
    try:
        if largest is not None and (size := os.fstat(descriptor).st_size) > largest:
            raise NotPlainFile(f"{path} has {size:,} bytes: of such a file at most {largest:,} are read")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_plain(path: Path, *, below: Path | None = None, largest: int = LARGEST) -> bytes:
    """Return what a file holds; see `open_plain`."""
    with open_plain(path, below=below, largest=largest) as file:
        content = file.read(largest + 1)
    if len(content) > largest:  # it has grown meanwhile
        raise NotPlainFile(f"{path} has more than {largest:,} bytes, which is all that is read of such a file")
    return content


def append_plain(path: Path, *, below: Path) -> FileIO:
    """Open a file for reading and appending; it is made if it is missing, as are its folders below `below`.

    Raises:
        NotPlainFile: it is a link or no regular file, or a folder on the way is a link.
        OSError: it cannot be written.
    """
    for folder in reversed(path.relative_to(below).parents[:-1]):
        (below / folder).mkdir(exist_ok=True)
    return FileIO(_open(path, below, os.O_RDWR | os.O_APPEND | os.O_CREAT), "a+")


def plain_names(folder: Path, *, below: Path | None = None) -> list[str]:
    """Return the names in a folder in alphabetical order; none if it is missing.

    Args:
        folder: the folder.
        below: the folder that the user named, of which it is a part; default: itself.

    Raises:
        NotPlainFile: it is a link, or no folder.
        NotReadable: this user may not.
        OSError: it cannot be read.
    """
    try:
        descriptor = _open_folder(folder, below or folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return []
    try:
        return sorted(os.listdir(descriptor))
    finally:
        os.close(descriptor)


def strange_entries(folder: Path, *, deep: bool = True, apart: Collection[str] = ()) -> Iterator[str]:
    """Yield a phrase ('PATH is a symbolic link') for whatever in a folder is neither a plain file nor a folder.

    Args:
        folder: the folder; links in its own name are followed.
        deep: whether the folders in it are looked into.
        apart: folders in it that are not looked into, such as 'trackers/wandb'.
    """
    pending = [folder]
    while pending:
        current = pending.pop()
        owner = current.stat().st_uid
        for path in sorted(current.iterdir()):
            try:
                found = path.lstat()
            except FileNotFoundError:
                continue  # a run that goes on replaces files
            if stat.S_ISDIR(found.st_mode):
                inner = deep and path.relative_to(folder).as_posix() not in apart
                if inner and os.access(path, os.X_OK):  # else whoever asks can open nothing in it: keys of another user
                    pending.append(path)
            elif why := _why_not(found, owner):
                yield f"{path} is {why}"


def check_plain(folder: Path, *, apart: Collection[str] = ()) -> None:
    """Look through a folder of which libraries will open files by themselves, or to which will be written.

    What changes after that is not noticed: nobody who is not trusted may be able to write to such a folder.

    Raises:
        NotPlainFile: something in it is neither a plain file nor a folder; the message names it.
        OSError: it cannot be read.
    """
    for phrase in strange_entries(folder, apart=apart):
        raise NotPlainFile(f"{phrase}: nothing in {folder} may lead elsewhere; put the file itself there, or delete it")


def _open(path: Path, below: Path, flags: int) -> int:
    """Return a descriptor of a regular file, opened with some flags."""
    flags |= os.O_NONBLOCK | os.O_CLOEXEC  # a file's owner can make those wait who open it (a lease)
    with contextlib.ExitStack() as stack:
        folder = _open_folder(path.parent, below, SEARCH)
        stack.callback(os.close, folder)
        try:
            try:
                entry = os.open(path.name, LOOK, dir_fd=folder)
            except FileNotFoundError:
                if not flags & os.O_CREAT:
                    raise
                return os.open(path.name, flags | os.O_EXCL, 0o666, dir_fd=folder)
            stack.callback(os.close, entry)
            if why := _why_not(os.fstat(entry), os.fstat(folder).st_uid):
                raise NotPlainFile(_refusal(path, why))
            return os.open(f"/proc/self/fd/{entry}", flags & ~os.O_CREAT)  # what was looked at, whatever is there now
        except NotPlainFile:
            raise
        except OSError as error:
            raise _named(error, path) from None


def _open_folder(folder: Path, below: Path, flags: int) -> int:
    """Return a descriptor of a folder, reached from another one without following a link."""
    parts = folder.relative_to(below).parts
    if os.pardir in parts:
        raise NotPlainFile(f"{folder} leads out of {below}: nothing outside of it is read")
    try:
        current = os.open(below, SEARCH if parts else flags)
    except OSError as error:
        raise _named(error, below) from None
    for number, part in enumerate(parts, 1):
        try:
            inner = os.open(part, (flags if number == len(parts) else SEARCH) | os.O_NOFOLLOW, dir_fd=current)
        except OSError as error:
            place = below.joinpath(*parts[:number])
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                there = os.stat(part, dir_fd=current, follow_symlinks=False)
                why = KINDS.get(stat.S_IFMT(there.st_mode), "no folder")
                raise NotPlainFile(_refusal(place, why)) from None
            raise _named(error, place) from None
        finally:
            os.close(current)
        current = inner
    return current


def _named(error: OSError, path: Path) -> OSError:
    """Return an error of the system with the name of what was to be opened."""
    if isinstance(error, PermissionError):
        return NotReadable(error.errno, error.strerror, str(path))
    error.filename = str(path)
    return error


def _why_not(found: os.stat_result, owner: int) -> str:
    """Return what an entry is if it is no plain file, else ''; `owner` is that of its folder."""
    if not stat.S_ISREG(found.st_mode):
        return KINDS.get(stat.S_IFMT(found.st_mode), "no regular file")
    if found.st_nlink > 1 and found.st_uid != owner:
        return "a file of another user under a further name (a hard link)"
    return ""


def _refusal(path: Path, why: str) -> str:
    return f"{path} is {why}: only plain files of the folder itself are read, and no link in it is followed"
