"""Limits that Linux's control groups set to this process's memory, CPU time and threads.

They are those of containers, jobs and services. Both versions are read, as both may be mounted. A group's limit holds
for all groups below it, so the process's own group and those above it count, as far as they can be seen: a container
sees its own only. `memory_limits`, `core_limit` and `tasks_left` parse files of groups and are pure; `read_limits`
finds and reads the files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

FILES = (
    *("memory.max", "memory.current", "memory.stat", "cpu.max"),  # version 2
    *("memory.limit_in_bytes", "memory.usage_in_bytes", "cpu.cfs_quota_us", "cpu.cfs_period_us"),  # version 1
    *("pids.max", "pids.current"),  # both
)
"""Files of a group that are read; both versions have memory.stat."""
CONTROLLERS = frozenset({"memory", "cpu", "pids"})


@dataclass(frozen=True)
class GroupLimits:
    """Limits of a process by its groups; infinite where there is none."""

    memory: float = math.inf
    """Bytes that the processes of the most limited group may use together."""
    memory_left: float = math.inf
    """Bytes that they may still use, those included that the kernel would free for them."""
    cores: float = math.inf
    """Cores whose time they may use; may be a fraction."""
    tasks_left: float = math.inf
    """Threads, of all processes together, that they may still start."""


def read_limits(root: Path = Path("/")) -> GroupLimits:
    """Read the limits of this process; no limit where groups cannot be read, as on other systems than Linux.

    Args:
        root: folder that holds proc/ and the mounted groups.
    """
    own, mounts = (_text(root / "proc" / "self" / name) or "" for name in ("cgroup", "mountinfo"))
    return smallest(_files(root, folder) for folder in group_folders(own, mounts))


def smallest(groups: Iterable[Mapping[str, str]]) -> GroupLimits:
    """Return the smallest limits of several groups, each given by the texts of its files."""
    found = [(*memory_limits(files), core_limit(files), tasks_left(files)) for files in groups]
    return GroupLimits(*(min(values) for values in zip(*found, strict=True))) if found else GroupLimits()


def memory_limits(files: Mapping[str, str]) -> tuple[float, float]:
    """Return a group's (limit of its memory, what is left of it), in bytes.

    Cached file contents that nothing has used for a while count as left: the kernel drops them when memory is needed.

    Args:
        files: the texts of its files, as far as they exist.
    """
    limit = _number(files.get("memory.max", files.get("memory.limit_in_bytes")))
    used = _number(files.get("memory.current", files.get("memory.usage_in_bytes")))
    if limit is None:
        return math.inf, math.inf
    return limit, max(0.0, limit - max(0.0, (used or 0.0) - _droppable(files.get("memory.stat", ""))))


def core_limit(files: Mapping[str, str]) -> float:
    """Return how many cores' time a group may use; arguments as for `memory_limits`."""
    both = files.get("cpu.max", f"{files.get('cpu.cfs_quota_us', '')} {files.get('cpu.cfs_period_us', '')}").split()
    quota, period = (_number(text) for text in both) if len(both) == 2 else (None, None)
    return quota / period if quota and period else math.inf


def tasks_left(files: Mapping[str, str]) -> float:
    """Return how many threads a group may still start; arguments as for `memory_limits`."""
    limit, used = (_number(files.get(name)) for name in ("pids.max", "pids.current"))
    return math.inf if limit is None else max(0.0, limit - (used or 0.0))


def group_folders(own: str, mounts: str) -> list[PurePosixPath]:
    """Return the folders of a process's groups of memory, CPU time and threads, each followed by those above it.

    Args:
        own: text of /proc/self/cgroup.
        mounts: text of /proc/self/mountinfo.
    """
    paths: dict[str, str] = {}
    for line in own.splitlines():
        if line.count(":") < 2:
            continue
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)  # version 2 has no list of controllers: ''
    found: dict[PurePosixPath, None] = {}
    for mounted, top, folder in _group_mounts(mounts):
        for controller in mounted & paths.keys():
            found |= dict.fromkeys(_upwards(PurePosixPath(paths[controller]), top, folder))
    return list(found)


def _group_mounts(mounts: str) -> Iterator[tuple[set[str], PurePosixPath, PurePosixPath]]:
    """Iterate over (controllers, group at the top, folder) of what is mounted; ('',) are those of version 2."""
    for line in mounts.splitlines():
        place, _, rest = line.partition(" - ")
        fields, kind = place.split(), rest.split()
        if len(fields) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        controllers = {""} if kind[0] == "cgroup2" else CONTROLLERS & set(kind[2].split(","))
        top, folder = (PurePosixPath(_unescaped(text)) for text in fields[3:5])
        yield set(controllers), top, folder


def _upwards(path: PurePosixPath, top: PurePosixPath, folder: PurePosixPath) -> Iterator[PurePosixPath]:
    """Iterate over the folders of a group and those above it, where the group `top` is mounted at `folder`."""
    inside = path.relative_to(top) if path.is_relative_to(top) and ".." not in path.parts else PurePosixPath()
    for part in (inside, *inside.parents):
        yield folder / part


def _files(root: Path, folder: PurePosixPath) -> dict[str, str]:
    """Read the files of a group; those that cannot be read are left out."""
    texts = {name: _text(root / str(folder).lstrip("/") / name) for name in FILES}
    return {name: text for name, text in texts.items() if text is not None}


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _number(text: str | None) -> float | None:
    """Parse a number; None for "max", -1 (which is "max" in version 1), and what is no number."""
    text = (text or "").strip()
    return float(text) if text.isdecimal() else None


def _droppable(stat: str) -> float:
    """Return the bytes of inactive cached files; version 1 has them with (total_) and without the groups below."""
    values = dict(line.split() for line in stat.splitlines() if len(line.split()) == 2)
    return _number(values.get("total_inactive_file", values.get("inactive_file"))) or 0.0


def _unescaped(text: str) -> str:
    """Decode the octal escapes of mountinfo."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
