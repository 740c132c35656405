"""The processes of one launcher: those of the plan, and the instances that each site's service requests."""

from __future__ import annotations

import signal
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from streamrl.errors import FULL, ErrorCode, UserError
from streamrl.launcher.entry_point import AGAIN
from streamrl.launcher.local_backend import start
from streamrl.launcher.site_setup import Share
from streamrl.launcher.started_process import KILL_S, RunProcess
from streamrl.run_dir import layout
from streamrl.run_dir.instance_files import StartedProcess, WantedInstance, read_wanted, write_started
from streamrl.run_dir.site_status import read_site
from streamrl.run_dir.start_stages import say
from streamrl.run_dir.status import FINAL_STATES, read_status
from streamrl.runtime.process_plan import ON_RAY, ProcessSpec
from streamrl.runtime.processes import this_host
from streamrl.runtime.restart_budget import restart_time

HOME = ("controller", "trainer")
"""Roles whose death takes a run back to its newest checkpoint."""
STOP_S = 6.0
"""Seconds from SIGTERM to SIGKILL, so that Ctrl-C takes less than 10 s in all."""


class ProcessGroup:
    """The running processes of one launcher.

    Services and launchers communicate through the files of `run_dir/instance_files.py`.
    """

    def __init__(self, share: Share, resume: bool, check_stop: Callable[[], None] = lambda: None) -> None:
        """
        Args:
            share: what to start.
            resume: continue from the newest checkpoint.
            check_stop: called while Ray looks for the trainer's nodes, it raises if the user has asked to stop.
        """
        self.share, self._resume, self._check_stop = share, resume, check_stop
        self._processes: list[RunProcess] = []
        self._possible = {site: share.possible_instances(site) for site in share.folders}
        self._leaving: dict[str, float] = {}
        """Instances that should end, with the time at which each is killed if it has not (monotonic seconds)."""
        self._written: dict[str, list[StartedProcess]] = {}
        self._unwritten: dict[str, str] = {}
        """Line for the user about each site whose file cannot be written; '': it was told."""
        self._deaths: defaultdict[str, list[float]] = defaultdict(list)
        """Times of death of processes other than instances, by name (monotonic seconds)."""
        self._due: dict[str, float | None] = {}
        """Restart time of each dead process (monotonic seconds); None: never."""

    def start(self) -> None:
        """Start the processes of the plan.

        Raises:
            RunFailed: a process cannot be started.
        """
        self.share.place(self._check_stop)
        for spec in self.share.processes():
            self._processes.append(self._start(spec))
        self._write_started()

    def _start(self, spec: ProcessSpec, number: int = 1) -> RunProcess:
        logs, namespace = self.share.run_dir / layout.LOGS, self.share.namespace(spec.site)
        host = self.share.hosts.get(spec.site) if spec.role in ON_RAY else None
        if spec.role != "trainer" or spec.index == 0:  # the first of a trainer's nodes speaks for all
            text = "waiting for a node of the Ray cluster" if host is not None else "starting Python"
            say(self.share.folders[spec.site], spec.name, text)
        if host is not None:
            return host.start(spec, logs, self._resume, self.share.env, number)
        return start(spec, logs, self._resume, self.share.env, namespace, number)

    @property
    def first(self) -> RunProcess:
        """The process whose end ends the run here: the controller, or a site's service."""
        return self._processes[0]

    @property
    def dead(self) -> list[RunProcess]:
        """Processes that have died and are not restarted; without instances, about which their site's service
        decides."""
        return [p for p in self._processes if p.spec.role != "instance" and self._has_died(p) and self._is_final(p)]

    def _has_died(self, process: RunProcess) -> bool:
        """Whether a process has ended too early: all run until the first one's work is done.

        Once the run is done, no process is needed any more. If it failed, one that died may be why.
        """
        if process.exit_code is None or (process is self.first and self._has_stopped()):
            return False
        state = self.state
        return state != "done" and (process.exit_code != 0 or state not in FINAL_STATES)

    def _has_stopped(self) -> bool:
        """Whether a controller has ended well: when the run is over, or as it was told to.

        A service ends in the same way when a signal stops it, and the run then goes on without its site.
        """
        return self.first.exit_code == 0 and self.share.trains

    @property
    def state(self) -> str:
        """State of the run as last recorded here: by the controller, elsewhere by the site's service; '': none."""
        try:
            if self.share.trains:
                return read_status(self.share.run_dir).state
            return "" if (site := read_site(self.share.run_dir)) is None else site.state
        except (OSError, UserError):
            return ""

    def _is_over(self) -> bool:
        """Whether the controller has ended the run; services of other sites, which it tells, may end before it."""
        return self.state in FINAL_STATES

    def has_ended(self) -> bool:
        """Whether the first process has ended, well or after it had recorded how the run ended.

        Not if a process has died for good: that tells more.
        """
        if self.first.exit_code is None:
            return False
        return self._has_stopped() or (self._is_over() and not self.dead)

    def _is_final(self, process: RunProcess) -> bool:
        return process.is_final or self._due.get(process.spec.name, 0.0) is None

    def revive(self) -> list[str]:
        """Restart dead processes within their budget, unless the run is over; return lines for the user.

        A service or the reward workers restart alone: the controller resends their open work. After the death of the
        controller or the trainer everything but the instances restarts from the newest checkpoint; one that ends
        while another waits for that is not charged for it.

        Raises:
            RunFailed: a process cannot be started.
        """
        lines = []
        # a controller that gives up does so because another process died, which is charged
        for process in sorted(self._processes, key=lambda one: one.exit_code == AGAIN):
            name, role = process.spec.name, process.spec.role
            restartable = role != "instance" and self._has_died(process) and not self._is_final(process)
            # sites that have been told of the end do not come back
            if process not in self._processes or not restartable or self._is_over():
                continue
            if name not in self._due and role in HOME and (due := self._common_restart()) is not None:
                self._due[name] = due
            elif name not in self._due:
                now = time.monotonic()
                wanted = process.exit_code == AGAIN and role not in HOME
                self._due[name] = now if wanted else restart_time(self.share.run.recovery, self._deaths[name], now)
                lines.append(self._restart_message(process))
            due = self._due[name]
            if due is not None and time.monotonic() >= due:
                self._restart(process)
        if lines:
            self._write_started()
        return lines

    def _restart_message(self, process: RunProcess) -> str:
        name = process.spec.name
        if self._due[name] is None:
            code = ErrorCode.HANG if process.killed_for else ErrorCode.MEMORY
            return code.refer(f"{name} has died {len(self._deaths[name])} times; it is not started again")
        if process.spec.role not in HOME:
            return f"{process.short_words()}; it is started again"
        return f"{process.short_words()}; everything but the instances is started again"

    def _common_restart(self) -> float | None:
        """Return when everything but the instances restarts (monotonic seconds); None: no process waits for that."""
        due = (self._due.get(process.spec.name) for process in self._processes if process.spec.role in HOME)
        return next((moment for moment in due if moment is not None), None)

    def _restart(self, process: RunProcess) -> None:
        home = process.spec.role in HOME
        old = [p for p in self._processes if p.spec.role != "instance"] if home else [process]
        self._kill(old)
        if home and self._is_over():  # the controller has ended the run just before it was killed
            return
        for one in old:
            self._due.pop(one.spec.name, None)
        self._resume = self._resume or home
        if home:
            self.share.place(self._check_stop)
        specs = {spec.name: spec for spec in self.share.processes()}
        for one in old:
            self._processes[self._processes.index(one)] = self._start(specs[one.spec.name])

    @property
    def started(self) -> dict[str, float]:
        """Start time of each living process, monotonic seconds, by name."""
        return {process.spec.name: process.started for process in self._processes if process.exit_code is None}

    def kill(self, name: str, why: str) -> None:
        """Kill a process that hangs, as if it had died; its last words say `why` ('it ...')."""
        for process in self._processes:
            if process.spec.name == name:
                process.killed_for = why
                process.kill()

    def reconcile(self) -> None:
        """Start and end instances as the sites' services request.

        Raises:
            RunFailed: an instance cannot be started.
        """
        for site, folder in self.share.folders.items():
            if (wanted := read_wanted(folder)) is not None:
                self._reconcile(site, {one.name: one for one in wanted if not one.paused})
        self._write_started()

    def _reconcile(self, site: str, wanted: dict[str, WantedInstance]) -> None:
        of_site = {p.spec.name: p for p in self._processes if p.spec.role == "instance" and p.spec.site == site}
        for name, one in wanted.items():
            there = of_site.get(name)
            if there is not None and there.number < one.process:
                there.kill()
                self._processes.remove(there)
                there = None
            if there is None:
                self._leaving.pop(name, None)
                self._processes.append(self._start(self._possible[site][name], one.process))
            elif one.leaving:
                self._leaving.setdefault(name, float("inf"))  # its service sets the deadline
        for name in of_site.keys() - wanted.keys():
            process = of_site[name]
            if process.exit_code is not None:
                process.kill()  # its leftovers
                self._processes.remove(process)
                self._leaving.pop(name, None)
            elif self._leaving.get(name, float("inf")) == float("inf"):
                self._leaving[name] = time.monotonic() + STOP_S
                process.signal(signal.SIGTERM)
            elif time.monotonic() > self._leaving[name]:
                process.kill()

    def _write_started(self) -> None:
        """Write down for each site which processes were started and how those that ended did."""
        for site, folder in self.share.folders.items():
            started = [self._as_started(p) for p in self._processes if p.spec.site == site]
            if started != self._written.get(site):
                try:
                    write_started(folder, started)
                except OSError as error:  # a full disk does not end the run here: the next look tries again
                    text = (
                        f"cannot write {folder / layout.PROCESSES}: {error.strerror or error}; until it can be, site "
                    )
                    text += f"{site} hears of no process that has ended or was started"
                    self._unwritten.setdefault(site, ErrorCode.DISK.refer(text) if error.errno in FULL else text)
                else:
                    self._written[site] = started
                    self._unwritten.pop(site, None)

    def troubles(self) -> list[str]:
        """Return lines for the user about what cannot be written, each once until it is written again."""
        lines = [line for line in self._unwritten.values() if line]
        self._unwritten = dict.fromkeys(self._unwritten, "")
        return lines

    def _as_started(self, process: RunProcess) -> StartedProcess:
        spec, code = process.spec, process.exit_code
        words = "" if code is None else process.last_words()
        host = "" if process.node else this_host()
        return StartedProcess(spec.name, spec.role, process.pid, process.number, code, words, process.node, host)

    def stop(self) -> None:
        """Stop all processes, the first one first (a controller saves its state), and kill those that do not stop."""
        deadline = time.monotonic() + STOP_S
        for process in self._processes[:1]:
            process.signal(signal.SIGTERM)
            while process.exit_code is None and time.monotonic() < deadline - STOP_S / 2:
                time.sleep(0.05)
        for process in self._processes[1:]:
            process.signal(signal.SIGTERM)
        while any(p.exit_code is None for p in self._processes) and time.monotonic() < deadline:
            time.sleep(0.05)
        self._kill(self._processes)  # also the leftovers of finished processes

    def _kill(self, processes: Sequence[RunProcess]) -> None:
        """Kill processes at once, with one deadline: a node that does not answer holds up no other."""
        for process in processes:
            process.request_kill()
        deadline = time.monotonic() + KILL_S
        for process in processes:
            process.finish_kill(max(0.0, deadline - time.monotonic()))
