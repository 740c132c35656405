"""Versions of one site on its host: verified files in shared memory that every instance maps.

A version is written under a temporary name, verified, and only then renamed: a file with a version's name is whole.
The memory of a version that is not needed any more serves for a later one, once nobody has it open or maps it: making
and clearing its pages anew took longer than all else between two versions.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
from pathlib import Path

import numpy as np

from streamrl.errors import RunFailed
from streamrl.weights.version import CorruptWeights, Manifest

log = logging.getLogger(__name__)


class WeightStore:
    """Files of one run's versions; one writer (the relay), any number of readers."""

    def __init__(self, directory: Path, one_machine: bool = True) -> None:
        """
        Args:
            directory: of the store.
            one_machine: whether all its readers are on this one: then it is known whether there are any.
        """
        self.directory = directory
        self.one_machine = one_machine
        self._verified: set[int] = set()
        """Versions that this object has seen whole."""
        self._writing: dict[int, int | None] = {}
        """Begun and not committed: the version, and which one it is made from."""

    @property
    def _spare(self) -> Path:
        """A file of no use but for its memory, which no reader opens by this name."""
        return self.directory / "spare.bin"

    def _path(self, number: int) -> Path:
        return self.directory / f"version_{number}.bin"

    def begin(self, manifest: Manifest, base: int | None = None, file: str | None = None) -> np.ndarray:
        """A writable buffer (uint8 [nbytes]) for a version to be received: with the bytes of a version that is here
        (`base`), to which deltas are applied; with those of a file of this host; or with zeros. The base stays until
        the version is committed or abandoned.

        Raises:
            RunFailed: there is no room.
            FileNotFoundError: the base, or the file, is not here.
            PermissionError: the file is somebody else's.
        """
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        number = manifest.version.number
        partial = self._path(number).with_suffix(".partial")
        if self._spare.exists() and _is_free(self._spare):
            self._spare.rename(partial)
        self._spare.unlink(missing_ok=True)
        free = shutil.disk_usage(self.directory).free + (partial.stat().st_blocks * 512 if partial.exists() else 0)
        if free < manifest.nbytes:
            raise RunFailed(
                f"no room for weights in {self.directory}: {manifest.nbytes / 2**20:.0f} MiB needed, "
                f"{free / 2**20:.0f} MiB free"
            )
        self._writing[number] = base
        source = file if base is None else self._path(base)
        if source is None:
            partial.write_bytes(b"")
        else:
            _copy(source, partial)
        os.truncate(partial, manifest.nbytes)
        return np.memmap(partial, dtype=np.uint8, mode="r+", shape=(manifest.nbytes,))

    def commit(self, manifest: Manifest, buffer: np.ndarray) -> None:
        """Verifies what was received and gives it its name.

        Raises:
            CorruptWeights: the bytes do not match. The partial file stays, to be mended and committed, or abandoned.
        """
        manifest.verify(buffer)
        number = manifest.version.number
        self._path(number).with_suffix(".json").write_text(json.dumps(manifest.to_dict()))
        self._path(number).with_suffix(".partial").rename(self._path(number))
        self._writing.pop(number, None)
        self._verified.add(number)

    def abandon(self, number: int) -> None:
        """Deletes what was begun of a version."""
        self._path(number).with_suffix(".partial").unlink(missing_ok=True)
        self._writing.pop(number, None)

    def open(self, number: int) -> tuple[Manifest, np.ndarray]:
        """A committed version; the buffer is a private view (writes do not reach the file).

        Raises:
            FileNotFoundError: it is not there.
        """
        manifest = Manifest.from_dict(json.loads(self._path(number).with_suffix(".json").read_text()))
        return manifest, np.memmap(self._path(number), dtype=np.uint8, mode="c")

    def has(self, number: int) -> bool:
        """Whether a version is here."""
        return self._path(number).is_file()

    def newest_verified(self) -> int | None:
        """The newest version here, or None. What an earlier process left is verified first, and deleted if it is not
        whole."""
        numbers = (int(path.stem.split("_")[1]) for path in self.directory.glob("version_*.bin"))
        for number in sorted(numbers, reverse=True):
            if number in self._verified:
                return number
            try:
                manifest, buffer = self.open(number)
                manifest.verify(buffer)
            except (CorruptWeights, OSError, ValueError, RecursionError) as error:
                log.warning("deleting version %d of an earlier process: %s", number, error)
                self._path(number).unlink(missing_ok=True)
                continue
            self._verified.add(number)
            return number
        return None

    def is_whole(self, number: int) -> bool:
        """Whether a version is here and its bytes are what they were; one that is not is deleted."""
        try:
            manifest, buffer = self.open(number)
            manifest.verify(buffer)
        except (CorruptWeights, OSError, ValueError):
            self._path(number).unlink(missing_ok=True)
            self._verified.discard(number)
            return False
        return True

    def distrust(self, number: int) -> None:
        """A version turned out to be no good base: it is verified again before it is used as one."""
        self._verified.discard(number)

    def keep_only(self, numbers: set[int]) -> None:
        """Deletes other versions (a reader that still maps one keeps its memory until it lets go), except what is
        being written and what it is made from. On one machine the file of one of them stays as a spare one."""
        kept = numbers | self._writing.keys() | set(self._writing.values())
        for path in self.directory.glob("version_*.*"):
            if (number := int(path.stem.split("_")[1])) not in kept:
                if path.suffix == ".bin" and self.one_machine:
                    path.replace(self._spare)
                else:
                    path.unlink(missing_ok=True)
                self._verified.discard(number)

    def clear(self) -> None:
        """Deletes the whole store."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self._verified.clear()


def _is_free(path: Path) -> bool:
    """Whether no process has a file open or maps it (a write lease is given only then: fcntl(2))."""
    with path.open("r+b") as file:
        try:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError:  # or the file system has no leases
            return False
    return True


def _copy(source: str | Path, target: Path) -> None:
    """Copies a file into one that may be there already, whose memory is kept."""
    with open(source, "rb") as one, open(os.open(target, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as other:
        size, at = os.fstat(one.fileno()).st_size, 0
        while at < size and (sent := os.sendfile(other.fileno(), one.fileno(), at, size - at)):
            at += sent
