"""The watchdog: finds processes that are alive but hang, by the files in the run's folder.

The controller, and the service of a site that does not train, each rewrite a file all the time. For the other processes
of the trainer's site the controller records how long they have been silent. A service judges its instances itself.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from streamrl.errors import UserError
from streamrl.launcher.site_setup import Share
from streamrl.run_dir import layout, status

LOOK_EVERY_S = 1.0


class Watchdog:
    """Watches the processes of one launcher for silence."""

    def __init__(self, share: Share) -> None:
        self.share, self.limit_s = share, share.run.deadlines.heartbeat_s
        self.startup_s = share.run.deadlines.startup_s
        self._looked = 0.0

    def hanging(self, started: Mapping[str, float]) -> dict[str, float]:
        """Find processes without a sign of life for longer than `deadlines.heartbeat_s`, with their seconds of silence.

        Args:
            started: start time of each living process, unix seconds; anything written earlier is not about it.
        """
        now = time.time()
        if now - self._looked < LOOK_EVERY_S:
            return {}
        self._looked = now
        found: dict[str, float] = {}
        for name, folder in self.share.folders.items():
            if name == self.share.cluster.trainer_site:
                found |= self._home(folder, started, now)
            elif (service := f"service-{name}") in started:
                found |= self._silent(service, folder / layout.SITE_STATUS, started[service], now)
        return found

    def _home(self, folder: Path, started: Mapping[str, float], now: float) -> dict[str, float]:
        if "controller" not in started:
            return {}
        silent = self._silent("controller", folder / layout.STATUS, started["controller"], now)
        try:
            written = status.read_status(folder)
        except (OSError, UserError):  # not written yet
            return silent
        if written.final:
            return {}
        if silent:
            return silent
        if (folder / layout.STATUS).stat().st_mtime < started["controller"]:
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

    def _silent(self, name: str, path: Path, started: float, now: float) -> dict[str, float]:
        """Return a process with the seconds since it wrote its file or, if later, since its start; empty: not too long.

        The first write may take longer: `deadlines.startup_s`.
        """
        try:
            written = path.stat().st_mtime
        except OSError:
            written = 0.0
        limit_s, silent = self.limit_s if written > started else self.startup_s, now - max(written, started)
        return {name: silent} if silent > limit_s else {}
