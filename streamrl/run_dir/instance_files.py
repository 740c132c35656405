"""Two files in a site's folder through which its service and its launcher communicate.

    instances.json   written by the service: the instances that should run now
    processes.json   written by the launcher: the processes it has started, and how those that ended did

Both are replaced atomically, so a reader never sees half of one. They outlive both processes: a restarted one finds
what the other has written. Processes of an instance are numbered; a higher number requests a new process in place of
the previous one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from streamrl.atomic_files import replace_json
from streamrl.plain_files import read_plain
from streamrl.run_dir import layout


@dataclass(frozen=True)
class WantedInstance:
    """An instance that should run."""

    name: str
    process: int = 1
    """Number of its process."""
    leaving: bool = False
    """Whether it is leaving: it returns its requests, then ends by itself."""
    paused: bool = False
    """Whether this process is dead, and the next one is to be started after a pause."""


@dataclass(frozen=True)
class StartedProcess:
    """A process as the launcher sees it."""

    name: str
    role: str
    pid: int
    process: int = 1
    """Number of an instance's process (see `WantedInstance`)."""
    exit_code: int | None = None
    """Exit code; None while it lives; negative: ended by that signal."""
    last_words: str = ""
    """Last words of a process that has ended."""
    node: str = ""
    """Address of its node; '': the launcher's machine."""
    host: str = ""
    """Host or container in which its pid counts (`this_host` of `runtime/processes.py`); '': unknown."""


def write_wanted(folder: Path, instances: Iterable[WantedInstance]) -> None:
    """Replace the service's file.

    Raises:
        OSError: it cannot be written.
    """
    replace_json(folder / layout.WANTED_INSTANCES, [asdict(one) for one in instances])


def read_wanted(folder: Path) -> list[WantedInstance] | None:
    """Read the instances that the service requests; None: it has not written them yet."""
    try:
        return [WantedInstance(**one) for one in json.loads((folder / layout.WANTED_INSTANCES).read_bytes())]
    except FileNotFoundError:
        return None


def write_started(folder: Path, processes: Iterable[StartedProcess]) -> None:
    """Replace the launcher's file.

    Raises:
        OSError: it cannot be written.
    """
    replace_json(folder / layout.PROCESSES, [asdict(one) for one in processes])


def read_started(folder: Path) -> list[StartedProcess]:
    """Read the processes that the launcher has started; empty before it has written them.

    Raises:
        NotPlainFile: the file is a link or no regular file.
        ValueError: it does not hold such processes.
    """
    try:
        content = read_plain(folder / layout.PROCESSES, below=layout.whole_folder(folder))
        return msgspec.json.decode(content, type=list[StartedProcess])
    except FileNotFoundError:
        return []
    except RecursionError as error:
        raise ValueError(f"{folder / layout.PROCESSES} is nested too deeply") from error


def forget(folder: Path) -> None:
    """Delete the files of an earlier launch."""
    for name in (layout.WANTED_INSTANCES, layout.PROCESSES):
        (folder / name).unlink(missing_ok=True)
