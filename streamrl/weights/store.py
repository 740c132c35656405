"""Versions of one site on its host: verified files in shared memory that every instance maps.

A version is written under a temporary name, verified, and only then renamed: a file with a version's name is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np

from streamrl.errors import RunFailed
from streamrl.weights.version import CorruptWeights, Manifest

SHARED_MEMORY = Path("/dev/shm")


def store_directory(run_dir: Path) -> Path:
    """Where a run keeps its versions: shared memory if the machine has it, else the run's folder."""
    token = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:12]
    if SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK):
        return SHARED_MEMORY / f"streamrl-{token}"
    return run_dir / "weights"


class WeightStore:
    """Files of one run's versions; one writer (the relay), any number of readers."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def _path(self, number: int) -> Path:
        return self.directory / f"version_{number}.bin"

    def begin(self, manifest: Manifest) -> np.ndarray:
        """A writable buffer (uint8 [nbytes]) for a version to be received.

        Raises:
            RunFailed: there is no room.
        """
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        free = shutil.disk_usage(self.directory).free
        if free < manifest.nbytes:
            raise RunFailed(
                f"no room for weights in {self.directory}: {manifest.nbytes / 2**20:.0f} MiB needed, "
                f"{free / 2**20:.0f} MiB free"
            )
        partial = self._path(manifest.version.number).with_suffix(".partial")
        return np.memmap(partial, dtype=np.uint8, mode="w+", shape=(manifest.nbytes,))

    def commit(self, manifest: Manifest, buffer: np.ndarray) -> None:
        """Verifies what was received and gives it its name.

        Raises:
            CorruptWeights: the bytes do not match; the partial file is deleted.
        """
        number = manifest.version.number
        partial = self._path(number).with_suffix(".partial")
        try:
            manifest.verify(buffer)
        except CorruptWeights:
            partial.unlink(missing_ok=True)
            raise
        self._path(number).with_suffix(".json").write_text(json.dumps(manifest.to_dict()))
        partial.rename(self._path(number))

    def open(self, number: int) -> tuple[Manifest, np.ndarray]:
        """A committed version; the buffer is a private view (writes do not reach the file).

        Raises:
            FileNotFoundError: it is not there.
        """
        manifest = Manifest.from_dict(json.loads(self._path(number).with_suffix(".json").read_text()))
        return manifest, np.memmap(self._path(number), dtype=np.uint8, mode="c")

    def keep_only(self, numbers: set[int]) -> None:
        """Deletes other versions (a reader that still maps one keeps its memory until it lets go)."""
        for path in self.directory.glob("version_*.*"):
            if int(path.stem.split("_")[1]) not in numbers:
                path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Deletes the whole store."""
        shutil.rmtree(self.directory, ignore_errors=True)
