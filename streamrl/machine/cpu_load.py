"""The load of this machine while something is measured: what other processes computed, and what the host took."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from typing import Self

import psutil

BUSY_SHARE = 0.1
"""Share of the machine's cores that other processes, or the host, may take before a measurement mentions it."""


@dataclass(frozen=True)
class CpuSeconds:
    """CPU time used so far."""

    clock: float
    """Monotonic seconds of this reading."""
    busy: float
    """CPU seconds used by all processes of the machine, time taken by the host left out."""
    stolen: float
    """Time that this (virtual) machine wanted and its host gave to others (`steal` of /proc/stat; 0 elsewhere)."""
    own: float
    """CPU seconds used by this process and its descendants."""

    @classmethod
    def read(cls) -> Self:
        """Read the counters now."""
        times = psutil.cpu_times()
        busy = times.user + times.system + getattr(times, "nice", 0.0)
        own = 0.0
        me = psutil.Process()
        for process in (me, *me.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                used = process.cpu_times()
                own += used.user + used.system
        return cls(time.monotonic(), busy, getattr(times, "steal", 0.0), own)


@dataclass(frozen=True)
class MachineLoad:
    """Mean load over a stretch of time."""

    cores: int
    others: float
    """Cores that other processes kept busy."""
    stolen: float
    """Cores that the host gave to others."""

    @classmethod
    def between(cls, before: CpuSeconds, after: CpuSeconds, cores: int | None = None) -> Self:
        """Compute the load between two readings; `cores` None: those of this machine."""
        seconds = max(after.clock - before.clock, 1e-9)
        others = (after.busy - before.busy) - (after.own - before.own)
        return cls(
            cores or os.cpu_count() or 1, max(0.0, others) / seconds, max(0.0, after.stolen - before.stolen) / seconds
        )

    @property
    def disturbed(self) -> bool:
        """Whether others took more than `BUSY_SHARE` of the machine."""
        return self.others + self.stolen > BUSY_SHARE * self.cores

    def __str__(self) -> str:
        stolen = f", and its host withheld {self.stolen:.1f}" if self.stolen > BUSY_SHARE else ""
        return f"other processes kept {self.others:.1f} of {self.cores} cores busy{stolen}"
