"""Take one measurement of `data_plane.py`: start the processes of `data_plane_roles.py`, watch and end them."""

from __future__ import annotations

import multiprocessing
import queue
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from data_plane_roles import (
    LIMIT_S,
    LINK_BYTES_PER_S,
    LINK_RTT_S,
    TICK_S,
    Work,
    controller,
    instance,
    run_role,
    service,
    trainer,
)
from running import RESULTS

from streamrl.generation.site.uplink import Uplink
from streamrl.runtime.interfaces import free_ports

OUT = RESULTS
RATE = 50_000 / 60
"""Samples per second that are asked of it."""
WARM_S = 3.0
SLOW = 0.1
PHASES = ("free", "trainer at a tenth", "free again", "commits at a tenth", "free at last")

Row = tuple[str, float, dict[str, Any]]


def free_address() -> str:
    """A port of loopback that is free just now."""
    return f"tcp://127.0.0.1:{free_ports(1, '127.0.0.1')[0]}"


@dataclass
class Series:
    """What one measurement has seen, after the warm-up; times in seconds of it."""

    told: dict[str, list[tuple[float, dict[str, Any]]]]
    """By process."""
    used: dict[str, list[tuple[float, float, float]]]
    """By process: time, CPU seconds so far, resident MB."""

    def between(self, name: str, start: float, end: float) -> list[dict[str, Any]]:
        """What a process told in a part of the time."""
        return [told for at, told in self.told[name] if start <= at <= end]

    def rate(self, count: str, start: float, end: float) -> float:
        """Increase of one of the controller's counts, per second."""
        some = [(at, told[count]) for at, told in self.told["controller"] if start <= at <= end]
        return (some[-1][1] - some[0][1]) / (some[-1][0] - some[0][0]) if len(some) > 1 else 0.0

    def figures(self, start: float, end: float) -> dict[str, Any]:
        """Of a part of the time, as plain values."""
        up = self.between("service", start, end)
        latencies = [1e3 * s for told in self.between("controller", start, end) for s in told["latencies"]]
        instances = [
            told for name in self.told if name.startswith("instance") for told in self.between(name, start, end)
        ]
        ahead = [told["issued"] - told["trained"] for told in self.between("controller", start, end)]
        return {
            "issued_per_s": self.rate("issued", start, end),
            "samples_per_s": self.rate("committed", start, end),
            "trained_per_s": self.rate("trained", start, end),
            "mb_per_s": self.rate("nbytes", start, end) / 1e6,
            "latency_ms": [float(np.percentile(latencies, q)) for q in (50, 99)] if latencies else None,
            "commit_ms": 1e3 * self.rate("commit_s", start, end) / max(1e-9, self.rate("commits", start, end)),
            "ahead_most": max(ahead),
            "backlog_most": max(told["backlog_samples"] for told in up),
            "backlog_mb_most": max(told["backlog_bytes"] for told in up) / 1e6,
            "running_most": max(told["running"] for told in up),
            "under_way_most": max(told["under_way"] for told in instances),
            "congested": float(np.mean([told["congested"] for told in up])),
            "uplink_held": float(np.mean([told["held"] for told in up])),
            "instances_held": float(np.mean([told["held"] for told in instances])),
            "processes": {name: _process(rows, start, end) for name, rows in self.used.items()},
        }

    def lines(self) -> dict[str, list[float]]:
        """For the plot."""
        up, control = self.told["service"], self.told["controller"]
        memory = np.sum([[mb for _, _, mb in rows] for rows in self.used.values()], axis=0)
        return {
            "at_service": [at for at, _ in up],
            "backlog_mb": [told["backlog_bytes"] / 1e6 for _, told in up],
            "congested": [float(told["congested"]) for _, told in up],
            "at": [at for at, _ in control],
            "ahead": [told["issued"] - told["trained"] for _, told in control],
            "committed": [told["committed"] for _, told in control],
            "trained": [told["trained"] for _, told in control],
            "at_memory": [at for at, _, _ in next(iter(self.used.values()))],
            "memory_mb": memory.tolist(),
        }


def _process(rows: Sequence[tuple[float, float, float]], start: float, end: float) -> dict[str, float]:
    """Share of a core, resident MB at the start and end, and the slope over the second half in MB/min."""
    at, cpu, mb = np.array([row for row in rows if start <= row[0] <= end]).T
    late = at >= (start + end) / 2
    slope = 60 * float(np.polyfit(at[late], mb[late], 1)[0])
    return {"cpu": (cpu[-1] - cpu[0]) / (at[-1] - at[0]), "first_mb": mb[0], "last_mb": mb[-1], "mb_per_min": slope}


def measure(
    seconds: float,
    instances: int,
    rate: float,
    far: bool,
    ledger: bool,
    phased: bool = False,
    near_mark: int | None = None,
) -> Series:
    """Start the processes, watch them for so long after the warm-up, and end them.

    Raises:
        RuntimeError: one of them has failed, or did not end.
    """
    context = multiprocessing.get_context("spawn")
    bandwidth = (LINK_BYTES_PER_S, LINK_RTT_S) if far else (None, 0.0)
    mark = Uplink.marks(*bandwidth) if near_mark is None else near_mark
    stop, rows = context.Event(), context.Queue()
    paces = [context.Value("d", 0.0), context.Value("d", 0.0)]
    with tempfile.TemporaryDirectory(prefix="streamrl-data-plane-", dir=OUT if OUT.is_dir() else None) as folder:
        addresses = free_address(), free_address()
        limit_s = seconds + WARM_S + 2 * LIMIT_S
        work = Work(instances, rate, far, ledger, mark, *addresses, Path(folder), limit_s, rows, stop, *paces)
        roles: dict[str, tuple[Any, ...]] = {"controller": (controller, work), "service": (service, work)}
        roles |= {"trainer": (trainer, work)} | {f"instance-{n}": (instance, work, n) for n in range(instances)}
        started = {name: context.Process(target=run_role, args=args, daemon=True) for name, args in roles.items()}
        for process in started.values():
            process.start()
        try:
            return _watch(started, rows, seconds, paces if phased else [])
        finally:
            stop.set()
            until = time.monotonic() + 20
            while any(process.is_alive() for process in started.values()) and time.monotonic() < until:
                _drained(rows, TICK_S)  # a process ends only once what it has reported is taken
            for process in started.values():
                process.kill()
                process.join(5)


def _drained(rows: Any, seconds: float) -> list[Row]:
    """What comes within so long."""
    found: list[Row] = []
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        try:
            found.append(rows.get(timeout=left))
        except queue.Empty:
            break
    return found


def _watch(started: dict[str, Any], rows: Any, seconds: float, paces: Sequence[Any]) -> Series:
    series = Series({name: [] for name in started}, {name: [] for name in started})
    watched = {name: psutil.Process(process.pid) for name, process in started.items()}
    began, until = None, time.time() + LIMIT_S
    while began is None or time.time() < began + seconds:
        found = _drained(rows, TICK_S)
        if dead := [name for name, process in started.items() if not process.is_alive()]:
            raise RuntimeError(f"{', '.join(dead)} ended early; see above")
        if began is None:
            if time.time() > until:
                raise RuntimeError(f"no sample was committed within {LIMIT_S:.0f} s")
            if any(name == "controller" and told["committed"] for name, _, told in found):
                began = time.time() + WARM_S
            continue
        now = time.time() - began
        for name, at, told in found:
            if at >= began:
                series.told[name].append((at - began, told))
        if now < 0:
            continue
        for name, process in watched.items():
            times = process.cpu_times()
            series.used[name].append((now, times.user + times.system, process.memory_info().rss / 1e6))
        for number, pace in enumerate(paces):  # the trainer's in the second part, the commits' in the fourth
            pace.value = RATE * SLOW if int(now / seconds * len(PHASES)) == 1 + 2 * number else 0.0
    return series
