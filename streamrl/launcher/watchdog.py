"""The watchdog: finds processes that are alive but hang, by the files in the run's folder.

The controller, and the service of a site that does not train, each rewrite a file all the time. For the other processes
of the trainer's site the controller records how long they have been silent. A service judges its instances itself.

A file counts as written when it is seen to have changed, by the launcher's clock: times of files may come from a file
server, whose clock may be wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from streamrl.errors import UserError
from streamrl.launcher.site_setup import Share
from streamrl.run_dir import layout, status

LOOK_EVERY_S = 1.0


class Watchdog:
    """Watches the processes of one launcher for silence.

    Args:
        share: what the launcher starts.
        clock: returns unix seconds.
    """

    def __init__(self, share: Share, clock: Callable[[], float] = time.time) -> None:
        self.share, self._clock = share, clock
        self._written = {path: (_stamp(path), 0.0) for path in map(self._file, share.folders)}
        """Stamp of each file that is watched, and when it was seen to change (unix seconds; 0: never)."""
        self.limit_s = share.run.deadlines.heartbeat_s
        self.startup_s = share.run.deadlines.startup_s
        self._looked = 0.0

    def hanging(self, started: Mapping[str, float]) -> dict[str, float]:
        """Find processes without a sign of life for longer than `deadlines.heartbeat_s`, with their seconds of silence.

        Args:
            started: start time of each living process, unix seconds; anything written earlier is not about it.
        """
        now = self._clock()
        if now - self._looked < LOOK_EVERY_S:
            return {}
        self._looked = now
        for path, (before, _) in self._written.items():
            if (stamp := _stamp(path)) != before:
                self._written[path] = stamp, now
        found: dict[str, float] = {}
        for name, folder in self.share.folders.items():
            if name == self.share.cluster.trainer_site:
                found |= self._home(folder, started, now)
            elif (service := f"service-{name}") in started:
                found |= self._silent(service, self._written[self._file(name)][1], started[service], now)
        return found

    def _file(self, site: str) -> Path:
        """Return the file that a process of a site rewrites all the time."""
        name = layout.STATUS if site == self.share.cluster.trainer_site else layout.SITE_STATUS
        return self.share.folders[site] / name

    def _home(self, folder: Path, started: Mapping[str, float], now: float) -> dict[str, float]:
        if "controller" not in started:
            return {}
        seen = self._written[folder / layout.STATUS][1]
        silent = self._silent("controller", seen, started["controller"], now)
        try:
            written = status.read_status(folder)
        except (OSError, UserError):  # not written yet
            return silent
        if written.final:
            return {}
        if silent:
            return silent
        if seen < started["controller"]:
            return {}  # written by an earlier controller
        return {
            name: role.silent_s
            for name, role in written.roles.items()
            if name in started
            and role.silent_s is not None
            and role.silent_s > self.limit_s
            and role.role in ("trainer", "service", "rewards", "agents")
            and now - role.silent_s > started[name]  # else it has not spoken yet
        }

    def _silent(self, name: str, written: float, started: float, now: float) -> dict[str, float]:
        """Return a process with the seconds since it wrote its file or, if later, since its start; empty: not too long.

        The first write may take longer: `deadlines.startup_s`.
        """
        limit_s, silent = self.limit_s if written > started else self.startup_s, now - max(written, started)
        return {name: silent} if silent > limit_s else {}


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return what changes whenever a file is replaced; None: there is no such file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
