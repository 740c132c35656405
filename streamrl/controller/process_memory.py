"""The memory of a run's processes on the controller's machine; pages that several of them share count once (PSS)."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from streamrl.run_dir import layout
from streamrl.run_dir.instance_files import StartedProcess, read_started

GIB = 2**30


@dataclass(frozen=True)
class FamilyMemory:
    """The memory of a launcher and its descendants, GiB."""

    total_gb: float | None = None
    """Memory of all; None: not measured."""
    of_process: Mapping[str, float] = field(default_factory=dict)
    """Memory of each process that the launcher has started, with the processes below it."""


def run_memory(run_dir: Path) -> FamilyMemory:
    """Measure the memory of this process's launcher and its descendants; emulated sites are among them."""
    names = {one.pid: one.name for one in _started(run_dir) if one.exit_code is None and not one.node}
    return family_memory(os.getppid(), names)


def family_memory(launcher: int, names: Mapping[int, str]) -> FamilyMemory:
    """Measure the memory of a process and its descendants in one walk over them.

    Args:
        launcher: id of the process.
        names: names of processes that it has started, by id; other ids are ignored.
    """
    total, of_process, owners = 0, defaultdict[str, float](float), dict[int, str | None]()
    try:
        top = psutil.Process(launcher)
        family = [top, *top.children(recursive=True)]  # a parent comes before its children
    except psutil.Error:
        return FamilyMemory()
    for process in family:
        try:
            owner = owners[process.pid] = names.get(process.pid) or owners.get(process.ppid())
            info = process.memory_full_info()
        except psutil.Error:
            continue
        used = getattr(info, "pss", info.uss)
        total += used
        if owner is not None:
            of_process[owner] += used / GIB
    return FamilyMemory(total / GIB, dict(of_process))


def _started(run_dir: Path) -> Iterator[StartedProcess]:
    """Yield the processes that the launcher has written down; a file that cannot be read is left out."""
    try:
        folders = list(layout.site_folders(run_dir).values())
    except OSError:
        return
    for folder in folders:
        try:
            yield from read_started(folder)
        except (OSError, ValueError):
            continue
