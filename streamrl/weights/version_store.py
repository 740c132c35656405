"""Weight versions of one site on its host: verified files in shared memory that every instance maps.

A version is written under a temporary name, verified, and only then renamed, so a file with a version's name is
complete. The memory of a version that is no longer needed is reused for a later one, once no process has it open or
maps it: allocating and clearing new pages took longer than everything else between two versions.
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
        """Use a folder; `one_machine`: all its readers are on this machine, so the store can tell if there are any."""
        self.directory = directory
        self.one_machine = one_machine
        self._verified: set[int] = set()
        """Versions that this object has verified."""
        self._writing: dict[int, int | None] = {}
        """Versions begun and not committed, each with the version it is made from."""

    @property
    def _spare(self) -> Path:
        """File that is kept only for its memory; no reader opens it by this name."""
        return self.directory / "spare.bin"

    def _path(self, number: int) -> Path:
        return self.directory / f"version_{number}.bin"

    def begin(self, manifest: Manifest, base: int | None = None, file: str | None = None) -> np.ndarray:
        """Return a writable buffer (uint8 [nbytes]) for a version that will be received.

        It starts with the bytes of a stored version (`base`), to which deltas are applied; with those of a file of this
        host (`file`); or with zeros. The base is kept until the version is committed or abandoned.

        Raises:
            RunFailed: there is no room.
            FileNotFoundError: the base, or the file, does not exist.
            PermissionError: the file belongs to another user.
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
        """Verify the received bytes and give the file its version's name.

        Raises:
            CorruptWeights: the bytes do not match. The partial file stays, to be repaired and committed, or abandoned.
        """
        manifest.verify(buffer)
        number = manifest.version.number
        self._path(number).with_suffix(".json").write_text(json.dumps(manifest.to_dict()))
        self._path(number).with_suffix(".partial").rename(self._path(number))
        self._writing.pop(number, None)
        self._verified.add(number)

    def abandon(self, number: int) -> None:
        """Delete the partial file of a version."""
        self._path(number).with_suffix(".partial").unlink(missing_ok=True)
        self._writing.pop(number, None)

    def open(self, number: int) -> tuple[Manifest, np.ndarray]:
        """Open a committed version; the buffer is a private view (writes do not reach the file).

        Raises:
            FileNotFoundError: the version is not stored.
        """
        manifest = Manifest.from_dict(json.loads(self._path(number).with_suffix(".json").read_text()))
        return manifest, np.memmap(self._path(number), dtype=np.uint8, mode="c")

    def has(self, number: int) -> bool:
        """Return whether a version is stored."""
        return self._path(number).is_file()

    def newest_verified(self) -> int | None:
        """Return the newest stored version, or None.

        Versions left by an earlier process are verified first, and deleted if they are damaged.
        """
        numbers = (int(path.stem.split("_")[1]) for path in self.directory.glob("version_*.bin"))
        for number in sorted(numbers, reverse=True):
            if number in self._verified or self.is_whole(number):
                self._verified.add(number)
                return number
        return None

    def is_whole(self, number: int) -> bool:
        """Return whether a version is stored and undamaged; delete it if not."""
        try:
            manifest, buffer = self.open(number)
            manifest.verify(buffer)
        except (CorruptWeights, OSError, ValueError, RecursionError) as error:
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
        kept = numbers | self._writing.keys() | set(self._writing.values())
        for path in self.directory.glob("version_*.*"):
            if (number := int(path.stem.split("_")[1])) not in kept:
                if path.suffix == ".bin" and self.one_machine:
                    path.replace(self._spare)
                else:
                    path.unlink(missing_ok=True)
                self._verified.discard(number)

    def clear(self) -> None:
        """Delete the whole store."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self._verified.clear()


def _is_free(path: Path) -> bool:
    """Return whether no process has a file open or maps it; only then is a write lease granted (fcntl(2))."""
    with path.open("r+b") as file:
        try:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError:  # or the file system has no leases
            return False
    return True


def _copy(source: str | Path, target: Path) -> None:
    """Copy a file into another that may already exist and then keeps its memory."""
    with open(source, "rb") as one, open(os.open(target, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as other:
        size, at = os.fstat(one.fileno()).st_size, 0
        while at < size and (sent := os.sendfile(other.fileno(), one.fileno(), at, size - at)):
            at += sent
