"""Whether the disk of a run's folder has room for the run's last step, as far as the newest steps say.

Only what the run itself writes counts: another program may stop at any time. Checkpoints are left out, whose number has
a limit; the bytes of those to come are not free. The smaller growth of two periods counts, so that a burst says
nothing, and the room must be clearly too small: it is judged again and again, and the end is still far.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from streamrl.config.run import RunConfig
from streamrl.errors import ErrorCode
from streamrl.run_dir import layout
from streamrl.run_dir.checkpoints import CheckpointFolder

log = logging.getLogger(__name__)

COUNT = 11
"""Number of newest measurements that count, of as many steps."""
CLEARLY = 1.25
"""Least ratio of the bytes needed to those free at which room is missing."""
EVERY_S, SHARE = 60.0, 0.01
"""Least seconds between two measurements, and most of the time that they take."""
GIB = 2**30


@dataclass(frozen=True)
class FolderSize:
    """The bytes that a run's folder took on disk after a number of steps."""

    step: int
    nbytes: int


def room_warning(sizes: Sequence[FolderSize], free: int, steps: int) -> str:
    """Return a warning if the disk will be full before a run's last step; '': there is room, or it is too early to say.

    Args:
        sizes: sizes of the folder, oldest first, each after another step; the newest `COUNT` count.
        free: free bytes of its disk, without those that checkpoints will take.
        steps: the run's last step.
    """
    if len(sizes) < COUNT:
        return ""
    first, middle, last = sizes[-COUNT], sizes[-COUNT // 2], sizes[-1]
    of_step = min((b.nbytes - a.nbytes) / (b.step - a.step) for a, b in ((first, middle), (middle, last)))
    if of_step * (steps - last.step) <= CLEARLY * free:
        return ""
    full = last.step + int(free / of_step)
    return ErrorCode.DISK.refer(
        f"the disk will be full after about step {full} of {steps}: the run's folder grows by {of_step / GIB:.3g} GiB "
        f"a step without its checkpoints, and {free / GIB:.3g} GiB are free for that; make room there"
    )


class DiskRoom:
    """The room on the disk of a run's folder; `warning` is its newest state."""

    def __init__(self, folder: Path, run: RunConfig) -> None:
        """Take the run's folder, and the run."""
        self.folder, self.run = folder, run
        self._checkpoints = CheckpointFolder(folder / layout.CHECKPOINTS)
        self.warning = ""
        self._sizes: deque[FolderSize] = deque(maxlen=COUNT)

    def look(self, step: int) -> None:
        """Measure after `step` steps: the folder only if one was done since the last time.

        Raises:
            OSError: the disk cannot be asked.
        """
        if not self._sizes or step > self._sizes[-1].step:
            self._sizes.append(FolderSize(step, _bytes_on_disk(self.folder)))
        to_come = self._checkpoints.bytes_to_come(self.run.checkpoint.keep, self._checkpoints_after(step))
        free = max(0, shutil.disk_usage(self.folder).free - to_come)
        before, self.warning = self.warning, room_warning(self._sizes, free, self.run.steps)
        if self.warning and not before:
            log.warning("%s", self.warning)

    def _checkpoints_after(self, step: int) -> int:
        """Return how many checkpoints will be written at most, the present step's and the last one's included."""
        evaluation = self.run.evaluation
        every = [self.run.checkpoint.every, *([evaluation.every] if evaluation else [])]
        return 2 + sum((self.run.steps - step) // steps for steps in every)

    async def keep_looking(self, step: Callable[[], int]) -> None:
        """Measure periodically until cancelled.

        Args:
            step: returns the number of steps done.
        """
        while True:
            began = time.monotonic()
            with contextlib.suppress(OSError):  # a folder that is not there for a moment, as on a network's disk
                await asyncio.to_thread(self.look, step())
            await asyncio.sleep(max(EVERY_S, (time.monotonic() - began) / SHARE))


def _bytes_on_disk(folder: Path) -> int:
    """Return the bytes that the files of a run's folder take on its disk, without checkpoints."""
    total = 0
    for path, folders, names in os.walk(folder):
        if Path(path) == folder and layout.CHECKPOINTS in folders:
            folders.remove(layout.CHECKPOINTS)
        for name in names:
            with contextlib.suppress(OSError):  # it has been removed since
                total += os.lstat(os.path.join(path, name)).st_blocks * 512
    return total
