"""The watchdog: finds processes that are alive but hang, by the files in the run's folder.

The controller, and the service and the rewards process of a site that does not train, each rewrite a file all the time.
Before its first write, each stage of its start that a controller or a service records is a sign of life.
For the other processes of the trainer's site the controller records how long they have been silent, and for the agents
process of another site that site's service does. A service judges its instances itself.

A file counts as written when it is seen to have changed: times of files may come from a file server, whose clock may be
wrong. Silence is measured by `silence.Silences`, so that neither a machine that was suspended nor a clock that is set
makes a process seem dead.

What the controller records of a process may be the silence of the one before it: only the words of another session than
that one's are its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from streamrl.errors import UserError
from streamrl.launcher.silence import Silences
from streamrl.launcher.site_setup import Share
from streamrl.run_dir import layout, status
from streamrl.run_dir.site_status import read_site
from streamrl.runtime.device_turns import others_start_s

ENDS_WITHIN = 2.0
"""Multiple of `deadlines.heartbeat_s` within which the controller must have ended after its last status."""


@dataclass
class _Life:
    """A process of which the controller records the silence."""

    started: float
    """Seconds of the watchdog's clock at which it began."""
    earlier: str = ""
    """Session that was on record when it was first looked at: that of the process before it; '': none."""
    is_restart: bool = False
    session: str = ""
    """The newest session on record."""

    @property
    def is_silent_restart(self) -> bool:
        """Whether it was started in place of another process, and has not spoken yet."""
        return self.is_restart and self.session == self.earlier


class Watchdog:
    """Watches the processes of one launcher for silence.

    Args:
        share: what the launcher starts.
        clock: returns monotonic seconds.
    """

    def __init__(self, share: Share, clock: Callable[[], float] = time.monotonic) -> None:
        self.share, self._clock = share, clock
        self._files = {self._writer(site): self._file(site) for site in share.folders}
        """File that a process rewrites all the time, by its name."""
        for site, folder in share.folders.items():
            if site != share.cluster.trainer_site:
                self._files[f"rewards-{site}"] = folder / layout.REWARDS_SIGN
        self._stamps = {name: _stamp(file) for name, file in self._files.items()}
        """Stamp of each of these files when it was last looked at."""
        self._lives: dict[str, _Life] = {}
        self._stages = {
            self._writer(site): folder / layout.START_STAGES / f"{self._writer(site)}.jsonl"
            for site, folder in share.folders.items()
        }
        """File to which a process that starts adds its stages, by its name."""
        self._staged = {name: _stamp(file) for name, file in self._stages.items()}
        """Stamp of each of these files when it was last looked at."""
        self._silences = Silences()
        self._starts = Silences()
        """The silence of those that start, of which each stage is a sign of life."""
        self.limit_s = share.run.deadlines.heartbeat_s
        self.startup_s = share.run.deadlines.startup_s

    def hanging(self, started: Mapping[str, float]) -> dict[str, float]:
        """Find processes without a sign of life for longer than `deadlines.heartbeat_s`, with their seconds of silence.

        Args:
            started: start time of each living process, by the watchdog's clock; anything written earlier is not about
                it.
        """
        now = self._clock()
        if not self._silences.look(now, started):
            return {}
        self._starts.look(now, started)
        for name, file in self._stages.items():
            if (stamp := _stamp(file)) != self._staged[name]:
                self._staged[name] = stamp
                self._starts.sign(name)
        for name, file in self._files.items():
            if (stamp := _stamp(file)) != self._stamps[name]:
                self._stamps[name] = stamp
                self._silences.sign(name)
        found: dict[str, float] = {}
        for site, folder in self.share.folders.items():
            if site != self.share.cluster.trainer_site:
                found |= self._remote(site, folder, started)
            elif "controller" in started:
                found |= self._home(folder, started)
        return found

    def _remote(self, site: str, folder: Path, started: Mapping[str, float]) -> dict[str, float]:
        """Return the processes of a site that does not train that have been silent for too long."""
        service, agents, rewards = (f"{role}-{site}" for role in ("service", "agents", "rewards"))
        found = self._silent(service) if service in started else {}
        heard = service in started and not found and self._silences.has_spoken(service)
        if rewards in started and self._silences.has_spoken(rewards):
            found |= self._silent(rewards)
        if not heard or agents not in started:
            return found  # what the service, or an earlier one, wrote of the agents is old
        try:
            written = read_site(folder)
        except (OSError, UserError):
            return found
        if written is None or written.state in status.FINAL_STATES:  # it does not serve yet, or any more
            return found
        silent_s, session = written.agents_silent_s, written.agents_session
        role = status.RoleStatus(role="agents", state="", since=0.0, silent_s=silent_s, session=session)
        return found | self._others({agents: role}, started, starting=False)

    def _writer(self, site: str) -> str:
        """Return the process that rewrites the file of a site."""
        return "controller" if site == self.share.cluster.trainer_site else f"service-{site}"

    def _file(self, site: str) -> Path:
        """Return the file that a process of a site rewrites all the time."""
        name = layout.STATUS if site == self.share.cluster.trainer_site else layout.SITE_STATUS
        return self.share.folders[site] / name

    def _home(self, folder: Path, started: Mapping[str, float]) -> dict[str, float]:
        silent = self._silent("controller")
        try:
            written = status.read_status(folder)
        except (OSError, UserError):  # not written yet
            return silent
        if written.final:  # the others end now; it soon has nothing left to do, and says nothing any more
            silent_s = self._silences.silent_s("controller")
            return {"controller": silent_s} if silent_s > ENDS_WITHIN * self.limit_s else {}
        if silent or not self._silences.has_spoken("controller"):
            return silent  # what it, or an earlier one, wrote of the others is old
        roles = {name: role for name, role in written.roles.items() if name in started}
        return self._others(roles, started, written.state == "starting")

    def _others(
        self, roles: Mapping[str, status.RoleStatus], started: Mapping[str, float], starting: bool
    ) -> dict[str, float]:
        """Return the processes of which the controller has recorded a silence that is too long, or no sign at all.

        Args:
            roles: what it has recorded of living processes.
            started: as for `hanging`.
            starting: whether it still waits for all of them, by limits of its own.
        """
        found: dict[str, float] = {}
        for name, role in roles.items():
            if role.role not in ("trainer", "service", "rewards", "agents"):
                continue
            life = self._life(name, started[name])
            life.session = role.session or life.session
            if role.silent_s is not None and not (role.session and role.session == life.earlier):
                self._silences.sign(name, role.silent_s)
                hangs = self._silences.has_spoken(name) and self._silences.silent_s(name) > self.limit_s
            elif starting or role.role not in ("rewards", "agents") or not life.is_silent_restart:
                continue  # a service that starts again may wait for instances for as long as they are restarted
            else:  # its own limits, for its workers and for its connection, end it earlier unless it hangs
                starts_s = self.startup_s + others_start_s(self.share.cluster, self.share.run)
                hangs = self._silences.silent_s(name) > starts_s + self.limit_s
            if hangs:
                found[name] = self._silences.silent_s(name)
        return found

    def _life(self, name: str, started: float) -> _Life:
        """Return what is known of a process, a new one if it was started at another time than the one before."""
        known = self._lives.get(name)
        if known is None:
            self._lives[name] = _Life(started)
        elif known.started != started:
            self._lives[name] = _Life(started, known.session, is_restart=True, session=known.session)
        return self._lives[name]

    def _silent(self, writer: str) -> dict[str, float]:
        """Return a process that writes a file with its seconds of silence; empty: not too long.

        The first write may take longer: `deadlines.startup_s` from the newest stage of its start on.
        """
        has_spoken = self._silences.has_spoken(writer)
        silent_s = self._silences.silent_s(writer)
        if not has_spoken and writer in self._stages:
            silent_s = min(silent_s, self._starts.silent_s(writer))
        return {writer: silent_s} if silent_s > (self.limit_s if has_spoken else self.startup_s) else {}

    def limit_of(self, name: str) -> str:
        """Return the key that limits the silence of a living process."""
        return "deadlines.heartbeat_s" if self._silences.has_spoken(name) else "deadlines.startup_s"


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return what changes whenever a file is replaced; None: there is no such file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
