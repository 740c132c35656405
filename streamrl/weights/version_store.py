"""Weight versions of one site on its host: verified files in shared memory that every instance maps.

A version is written as a draft: a file of a random name, whose space is allocated before anything is written through a
mapping (a page that a full file system cannot provide would be a SIGBUS). It is verified, written to disk, and only
then renamed, so a file with a version's name is complete. The memory of a version that is no longer needed is reused
for a later one, once no process has it open or maps it: allocating and clearing new pages took longer than everything
else between two versions.

The folder's name can be guessed, and anyone can make folders in shared memory. So writers and readers use it only if it
belongs to their own user and nobody else can write to it, and follow no symbolic links. A writer closes a folder to
others that they may enter.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import secrets
import shutil
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from streamrl.atomic_files import sync_folder
from streamrl.errors import FULL, ErrorCode, RunFailed, with_limit
from streamrl.weights.version import CorruptWeights, Manifest

log = logging.getLogger(__name__)


class NoRoom(RunFailed):
    """A store has no room for a version; the message says how much is missing."""

    def __init__(self, message: str, nbytes: int) -> None:
        super().__init__(message)
        self.nbytes = nbytes
        """Bytes that the version needs."""


@dataclass(eq=False)
class WeightDraft:
    """A version that is being received: a file of its own name, which only its maker knows."""

    manifest: Manifest
    base: int | None
    """Stored version that it is made from, which is kept meanwhile."""
    path: Path
    buffer: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint8))
    """The file's bytes, uint8 [nbytes], writable."""


class WeightStore:
    """Files of one run's versions; one writer (the relay), any number of readers."""

    def __init__(self, directory: Path, one_machine: bool = True) -> None:
        """Use a folder; `one_machine`: all its readers are on this machine, so the store can tell if there are any."""
        self.directory = directory
        self.one_machine = one_machine
        self._verified: set[int] = set()
        """Versions that this object has verified."""
        self._drafts: set[WeightDraft] = set()
        """Drafts begun, and neither committed nor abandoned."""

    @property
    def _spare(self) -> Path:
        """File that is kept only for its memory; no reader opens it by this name."""
        return self.directory / "spare.bin"

    def _path(self, number: int) -> Path:
        return self.directory / f"version_{number}.bin"

    def claim(self, keep_newest: bool) -> int | None:
        """Take the store over from an earlier process; return the newest whole version if it remains (no other does).

        That version may be of a time before the run went back to a checkpoint, when other weights had its number. So
        it is no more than a base for deltas: whoever makes them compares its hash.

        Raises:
            RunFailed: the folder belongs to another user, or others can write to it.
        """
        self._own_folder()
        kept = self.newest_verified() if keep_newest else None
        names = [] if kept is None else [self._path(kept).with_suffix(suffix).name for suffix in (".bin", ".json")]
        for path in self.directory.iterdir():  # the folder itself may be locked by whoever made it
            if path.name not in names:
                path.unlink()
        self._verified.intersection_update(() if kept is None else (kept,))
        return kept

    def begin(self, manifest: Manifest, base: int | None = None, file: str | None = None) -> WeightDraft:
        """Return a draft of a version that will be received.

        It starts with the bytes of a stored version (`base`), to which deltas are applied; with those of a file of this
        host (`file`); or with zeros. The base is kept until the draft is committed or abandoned.

        Raises:
            NoRoom: there is no room.
            RunFailed: the folder belongs to another user, or others can write to it.
            FileNotFoundError: the base, or the file, does not exist.
            PermissionError: the file belongs to another user, or is no regular file.
        """
        self._own_folder()
        draft = WeightDraft(manifest, base, self.directory / f"partial_{secrets.token_hex(8)}.bin")
        self._drafts.add(draft)
        try:
            self._write(draft, file if base is None else str(self._path(base)))
        except BaseException as error:
            self.abandon(draft)
            if isinstance(error, OSError) and error.errno in FULL:
                raise self._no_room(manifest.nbytes, error) from error
            raise
        return draft

    def room(self) -> int:
        """Return the bytes that a version may have: what is free, and the memory that it may reuse.

        A spare that a process still maps, or may map as far as known, is given up first: what is left can be reused.
        """
        reusable = 0
        with contextlib.suppress(FileNotFoundError):
            if _is_free(self._spare):
                reusable = self._spare.stat().st_blocks * 512
            else:
                self._spare.unlink()
        return shutil.disk_usage(self.directory).free + reusable

    def _take_spare(self, path: Path) -> bool:
        """Give the spare another name; return whether there is one that no process has open or maps."""
        try:
            self._spare.rename(path)
        except FileNotFoundError:
            return False
        if _is_free(path):  # looked at only now: `keep_only` may have put another file in the spare's place
            return True
        path.unlink()
        return False

    def _write(self, draft: WeightDraft, source: str | None) -> None:
        """Allocate a draft's file, fill it from `source` (None: with zeros), and map it."""
        nbytes = draft.manifest.nbytes
        # what is checked first leaves the room that others may need; what is allocated below is certain
        if self.room() < nbytes:
            raise self._no_room(nbytes)
        exclusive = 0 if self._take_spare(draft.path) else os.O_EXCL
        with _opened(draft.path, os.O_RDWR | os.O_CREAT | exclusive) as file:
            if source is None:
                file.truncate(0)
            else:
                _copy(source, file, nbytes)
            file.truncate(nbytes)
            if nbytes:
                os.posix_fallocate(file.fileno(), 0, nbytes)
            draft.buffer = np.memmap(file, dtype=np.uint8, mode="r+", shape=(nbytes,))

    def _no_room(
        self, nbytes: int, error: OSError | None = None, what: str = "weights", part: int | None = None
    ) -> NoRoom:
        """Return the error of a version that needs so many bytes.

        Args:
            nbytes: bytes of the version.
            error: what the system says; None: it was not asked.
            what: what there was no room for.
            part: bytes of that; None: it is the whole version.
        """
        needed, free = nbytes if part is None else part, self.room()
        text = f"no room for {what} in {self.directory}: {_size(needed)} needed, {_size(free)} free"
        if error is not None:
            text += f" ({with_limit(OSError(error.errno, os.strerror(error.errno or 0)))})"
        return NoRoom(ErrorCode.DISK.refer(text), nbytes)

    def commit(self, draft: WeightDraft) -> None:
        """Verify the received bytes and give their file its version's name.

        Raises:
            CorruptWeights: the bytes do not match. The draft stays, to be repaired and committed, or abandoned.
            FileNotFoundError: the draft was committed or abandoned before, or its file is gone.
            NoRoom: there is no room for the version's description. The draft stays, to be abandoned.
        """
        if draft not in self._drafts:
            raise FileNotFoundError(f"{draft.path} was committed or abandoned")
        draft.manifest.verify(draft.buffer)
        described = json.dumps(draft.manifest.to_dict()).encode()
        try:
            self._name(draft, described)
        except OSError as error:
            if error.errno in FULL:
                nbytes, part = draft.manifest.nbytes, len(described)
                raise self._no_room(nbytes + part, error, "the description of weights", part) from error
            raise
        self._drafts.discard(draft)
        self._verified.add(draft.manifest.version.number)

    def _name(self, draft: WeightDraft, described: bytes) -> None:
        """Write a draft to disk with its description, and give both their version's name."""
        number = draft.manifest.version.number
        with _opened(draft.path, os.O_RDWR) as file:
            os.fsync(file.fileno())  # on disk; nothing to do in shared memory
        path = draft.path.with_suffix(".json")
        with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
            file.write(described)
            file.flush()
            os.fsync(file.fileno())
        path.rename(self._path(number).with_suffix(".json"))
        draft.path.rename(self._path(number))
        sync_folder(self.directory)

    def abandon(self, draft: WeightDraft) -> None:
        """Delete a draft and let go of its memory; a no-op if it was committed. No thread may be working on it."""
        if draft in self._drafts:
            self._drafts.discard(draft)
            draft.buffer = np.empty(0, np.uint8)  # a file that is mapped keeps its memory without a name
            draft.path.unlink(missing_ok=True)
            draft.path.with_suffix(".json").unlink(missing_ok=True)

    def open(self, number: int) -> tuple[Manifest, np.ndarray]:
        """Open a committed version; the buffer is a private view (writes do not reach the file).

        The manifest is checked against its own hash, the bytes are not: whoever uses them compares them.

        Raises:
            FileNotFoundError: the version is not stored.
            RunFailed: the folder belongs to another user, or others can write to it.
            CorruptWeights: the manifest is damaged.
        """
        self._check_folder()
        with _opened(self._path(number).with_suffix(".json"), os.O_RDONLY) as file:
            manifest = Manifest.from_dict(json.loads(file.read()))
        with _opened(self._path(number), os.O_RDONLY) as file:
            return manifest, np.memmap(file, dtype=np.uint8, mode="c")

    def has(self, number: int) -> bool:
        """Return whether a version is stored."""
        return self._path(number).is_file()

    def newest_verified(self) -> int | None:
        """Return the newest stored version, or None.

        Versions left by an earlier process are verified first, and deleted if they are damaged. One that cannot be read
        at the moment is left out.
        """
        numbers = (int(path.stem.split("_")[1]) for path in self.directory.glob("version_*.bin"))
        for number in sorted(numbers, reverse=True):
            try:
                whole = number in self._verified or self.is_whole(number)
            except OSError as error:
                log.warning("version %d is not used: %s", number, error)
                continue
            if whole:
                self._verified.add(number)
                return number
        return None

    def is_whole(self, number: int) -> bool:
        """Return whether a version is stored and undamaged; delete it if not.

        Raises:
            OSError: it cannot be read at the moment, which says nothing about it (too many open files, for example).
        """
        try:
            manifest, buffer = self.open(number)
            manifest.verify(buffer)
        except (CorruptWeights, OSError, ValueError, RecursionError) as error:
            if isinstance(error, OSError) and not _is_missing(error):
                raise
            if self.has(number):
                log.warning("deleting version %d: %s", number, error)
            self._path(number).unlink(missing_ok=True)
            self._verified.discard(number)
            return False
        return True

    def distrust(self, number: int) -> None:
        """Verify a version again before its next use, because it turned out to be a bad base."""
        self._verified.discard(number)

    def keep_only(self, numbers: set[int]) -> None:
        """Delete all other versions, except those being written and their bases.

        A reader that still maps one keeps its memory until it lets go. On one machine the file of one of them is kept
        as a spare.
        """
        kept = numbers | {draft.base for draft in self._drafts}
        for path in self.directory.glob("version_*.*"):
            if (number := int(path.stem.split("_")[1])) not in kept:
                if path.suffix == ".bin" and self.one_machine:
                    path.replace(self._spare)
                else:
                    path.unlink(missing_ok=True)
                self._verified.discard(number)
        drafts = {draft.path.stem for draft in self._drafts}
        for path in self.directory.glob("partial_*.*"):
            if path.stem not in drafts:
                path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Delete the whole store."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self._verified.clear()

    def _own_folder(self) -> None:
        """Make the folder if there is none, and let nobody else enter it; raises like `_check_folder`."""
        self.directory.mkdir(mode=0o700, exist_ok=True)
        self._check_folder()
        if os.lstat(self.directory).st_mode & 0o077:
            descriptor = os.open(self.directory, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.fchmod(descriptor, 0o700)
            except PermissionError:  # of a file system that keeps no modes
                log.warning("others may enter %s, where the weights are", self.directory)
            finally:
                os.close(descriptor)

    def _check_folder(self) -> None:
        """Raise `RunFailed` unless the folder is this user's, and only this user can write to it."""
        found = os.lstat(self.directory)
        if not stat.S_ISDIR(found.st_mode):
            what = "is no folder"
        elif found.st_uid != os.geteuid():
            what = f"belongs to another user (uid {found.st_uid})"
        elif found.st_mode & 0o022:
            what = f"can be written to by others (mode {stat.S_IMODE(found.st_mode):o})"
        else:
            return
        raise RunFailed(
            f"{self.directory}, for this run's weights, {what}: remove it, or start the run in another folder"
        )


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:.0f} KiB"


def _opened(path: Path, flags: int) -> BinaryIO:
    """Open a file of this user, and no symbolic link.

    Raises:
        OSError: it cannot be opened, or is a link.
        PermissionError: it belongs to another user.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    if os.fstat(descriptor).st_uid != os.geteuid():
        os.close(descriptor)
        raise PermissionError(f"{path} belongs to another user")
    mode = {os.O_RDONLY: "rb", os.O_WRONLY: "wb"}.get(flags & os.O_ACCMODE, "r+b")
    return cast(BinaryIO, os.fdopen(descriptor, mode))


def _is_missing(error: OSError) -> bool:
    """Return whether `_opened` failed because no file of this user has the name, which will not change by itself."""
    return isinstance(error, FileNotFoundError | PermissionError) or error.errno == errno.ELOOP


def _is_free(path: Path) -> bool:
    """Return whether no process has a file open or maps it; only then is a write lease granted (fcntl(2))."""
    with path.open("r+b") as file:
        try:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError:  # or the file system has no leases
            return False
    return True


def _copy(source: str, other: BinaryIO, most: int) -> None:
    """Copy at most `most` bytes of a file over the beginning of another, which keeps its memory.

    Raises:
        PermissionError: the source is no regular file.
    """
    with open(os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as one:
        found = os.fstat(one.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise PermissionError(f"{source} is no regular file")
        size, at = min(found.st_size, most), 0
        while at < size and (sent := os.sendfile(other.fileno(), one.fileno(), at, size - at)):
            at += sent
