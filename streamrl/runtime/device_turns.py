"""GPUs that trainer and instances use in turns (schedule `colocated`): who may allocate on them, and when.

    trainer    holds its GPU while it loads, and from its first work of a step until its weights are published; then its
               state is in host memory (`training/host_offload.py`)
    instance   holds its GPUs while vLLM starts, then sleeps; holds them again from each new version until the service
               has it sleep for training, or is restarted, maybe together with the trainer

So an instance that starts, or starts again, waits until the trainer has left, and the trainer waits for one that starts
or has not fallen asleep yet. Locks belong to open files: the system frees those of a process that dies. Each file has
the name of the process that holds its GPU, for those that wait for it.

A process that needs several GPUs holds none while one of them is taken. The trainer's ranks hold one each and then wait
for each other in collectives, so an instance that kept GPU 0 while it waits for a rank on GPU 1 would keep that rank
waiting for rank 0, which waits for GPU 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.run_dir import layout
from streamrl.transport.deadlines import WaitRegistry

ASK_AGAIN_S = 0.1
"""Seconds between two attempts to lock a GPU that another process holds; it is held for seconds to minutes."""
MOST_NAME = 300
"""Most bytes of a process's name that are read."""


def takes_turns(cuda: bool, run: RunConfig) -> bool:
    """Return whether trainer and instances of a run use the same GPUs."""
    return cuda and run.schedule.exclusive


def instance_start_s(cuda: bool, run: RunConfig) -> float:
    """Return the seconds in which an instance starts, which may first wait until the trainer leaves its GPU."""
    limits = run.deadlines
    return limits.startup_s + (limits.training_s if takes_turns(cuda, run) else 0.0)


def others_start_s(cluster: ClusterConfig, run: RunConfig) -> float:
    """Return the seconds that a process waits for others to start; with several sites at least `absence_s`."""
    limit_s = instance_start_s(cluster.hardware == "cuda", run)
    return max(limit_s, cluster.absence_s) if cluster.remote_sites else limit_s


class DeviceTurns:
    """Locks on the GPUs of one process."""

    def __init__(self, run_dir: Path, devices: Sequence[str], waits: WaitRegistry) -> None:
        """
        Args:
            run_dir: folder of the site's run.
            devices: the GPUs, as CUDA_VISIBLE_DEVICES names them.
            waits: waits of this process.
        """
        folder, host = run_dir / layout.DEVICES, socket.gethostname()
        self._paths = [folder / f"{host}-{device}.lock" for device in sorted(devices)]
        self._waits = waits
        self._open: list[int] = []
        self._holder = ""
        """Who holds the GPU that is waited for; '': it is not known."""

    @property
    def held(self) -> bool:
        """Whether this process holds its GPUs."""
        return bool(self._open)

    async def take(self, limit_s: float) -> None:
        """Wait until no other process holds the GPUs, and hold them; a no-op if they are held.

        Raises:
            DeadlineExpired: there has been no moment within `limit_s` seconds at which no other process held one.
        """
        if self._open:
            return
        files: list[int] = []
        try:
            for path in self._paths:
                path.parent.mkdir(exist_ok=True)
                files.append(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            async with self._waits.deadline(self._waited_for, limit_s):
                while (taken := _lock_all(files)) is not None:
                    self._holder = _name_in(taken)
                    await asyncio.sleep(ASK_AGAIN_S)
            for file in files:
                _write_name(file, f"{self._waits.owner} (pid {os.getpid()})")
        except BaseException:
            _close(files)
            raise
        self._open = files

    def give_back(self) -> None:
        """Let others use the GPUs."""
        files, self._open = self._open, []
        for file in files:
            _write_name(file, "")
        _close(files)

    def _waited_for(self) -> str:
        devices = ", ".join(path.stem for path in self._paths)
        return f"its turn on GPU {devices}" + (f", which {self._holder} has" if self._holder else "")


def _close(files: Sequence[int]) -> None:
    """Unlock and close files; those that are not locked, too."""
    for file in files:
        fcntl.flock(file, fcntl.LOCK_UN)  # a process forked meanwhile has the file open, too
        os.close(file)


def _write_name(file: int, name: str) -> None:
    """Write the name of the process that holds a GPU; its lock counts without it, too, as on a full disk."""
    with contextlib.suppress(OSError):
        os.ftruncate(file, 0)
        os.pwrite(file, name.encode(), 0)


def _name_in(file: int) -> str:
    """Return the name of the process that holds a GPU; '': it is not known."""
    try:
        return os.pread(file, MOST_NAME, 0).decode(errors="replace")
    except OSError:
        return ""


def _lock_all(files: Sequence[int]) -> int | None:
    """Lock all of the files, or none if another process has one locked; return that one, or None: they are locked."""
    for number, file in enumerate(files):
        if not _locked(file):
            for other in files[:number]:
                fcntl.flock(other, fcntl.LOCK_UN)
            return file
    return None


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
