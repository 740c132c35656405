"""Inject a fault into a run, by process id, and undo it.

Only processes recorded by the run's launchers, and their children, are touched, and only if the pid is still theirs.
Kills are SIGKILL, so a process cannot react.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from streamrl.chaos.faults import Fault, FaultKind, Inventory
from streamrl.chaos.follow import Observation
from streamrl.chaos.observation import processes_of
from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.emulation.network import set_link_in
from streamrl.environments.in_venv import environment_main
from streamrl.errors import RunFailed
from streamrl.run_dir import layout
from streamrl.runtime.process_context import Addresses
from streamrl.runtime.processes import is_alive

ROLE_MODULE = "streamrl.launcher.entry_point"
ENGINE = "EngineCore"
AGENT_WORKER = "streamrl.agents.worker "
ENVIRONMENT = environment_main.__file__
"""Parts of the command lines of a worker process of agents, and of a process of an environment."""
LINK_S = 15.0
"""Seconds for which a link is cut, slow or lossy: more than `ABSENT_AFTER_S`, so that a cut is reported, and less than
any sensible `absence_s`."""
SLOWER, LOSS = 10.0, 0.05
"""Divisor of a slow link's bandwidth, and share of segments that a lossy link loses."""
PAUSE_MORE_S, PAUSE_SHARE = 4.0, 0.5
"""A pause takes `PAUSE_MORE_S` seconds more than `suspect_s`, and at most `PAUSE_SHARE` of `heartbeat_s`."""
DAMAGED_PLACES, DAMAGED_BYTES = 64, 64
"""Number of places overwritten in a damaged file, and bytes at each."""
LOADED_S = 2.0
"""Age in seconds at which the existing instances have loaded a version."""
DIES_S = 5.0
"""Seconds to wait for a killed process to be gone."""
POLL_S = 0.01
ROOM_BYTES = 32 * 1024
"""Bytes left to the controller's log, for its last words."""


class NotPossible(Exception):
    """Raised when a fault cannot be injected at present; the message says why."""


@dataclass
class Injected:
    """An injected fault, and how to undo it."""

    replaced: frozenset[str]
    """Names of the processes that must be restarted."""
    lasts_s: float = 0.0
    """Seconds after which it should be undone; 0: it was momentary."""
    undo: Callable[[], None] = field(default=lambda: None)
    """Undoes the fault; may be called more than once."""
    note: str = ""
    keep_on: Callable[[], None] = field(default=lambda: None)
    """Continues the fault; to be called repeatedly until it is noticed or the run has recovered."""
    damaged: dict[int, float] = field(default_factory=dict)
    """Weight versions that were damaged, and when (unix seconds)."""


class Injector:
    """Injects faults into one run."""

    def __init__(
        self, run_dir: Path, cluster: ClusterConfig, run: RunConfig, seed: int, kill_launcher: Callable[[], None] | None
    ) -> None:
        """Prepare for one run.

        Args:
            seed: seed for the choice of ranks and of places in files.
            kill_launcher: kills the launcher; None: the launcher was started elsewhere.
        """
        self.run_dir, self.cluster, self.run = run_dir, cluster, run
        self._draw = random.Random(seed)
        self._kill_launcher = kill_launcher

    def inventory(self) -> Inventory:
        """Return the parts of the run on this machine."""
        of: defaultdict[str, tuple[str, ...]] = defaultdict(tuple)
        for name, one in sorted(processes_of(self.run_dir).items()):
            of[one.role] += (name,)
        remote = tuple(site for site in layout.site_folders(self.run_dir) if site)
        return Inventory(
            instances=of["instance"],
            services=of["service"],
            rewards=of["rewards"],
            agents=of["agents"],
            agent_workers=of["agents"] if any(task.run is not None for task in self.run.agent_tasks) else (),
            environments=of["agents"] if any(task.environment is not None for task in self.run.agent_tasks) else (),
            remote_sites=remote,
            emulated_links=remote if (self.run_dir / layout.NETWORK).is_dir() else (),
            trains_here="controller" in of,
            owns_launcher=self._kill_launcher is not None,
            limits_files=hasattr(resource, "prlimit"),
            shares_weights=self.run.weights.path.fetched,
        )

    def inject(self, fault: Fault, seen: Observation) -> Injected:
        """Inject a fault and return at once.

        Raises:
            NotPossible: the fault has no target at present.
        """
        target = fault.target
        match fault.kind:
            case (
                FaultKind.INSTANCE_KILL
                | FaultKind.SERVICE_KILL
                | FaultKind.REWARDS_KILL
                | FaultKind.AGENTS_KILL
                | FaultKind.CONTROLLER_KILL
            ):
                _kill([self._process(target, seen)])
                return Injected(frozenset({target}))
            case FaultKind.INSTANCE_PAUSE:
                return self._pause(self._stop(target, seen))
            case FaultKind.ENDPOINT_PAUSE:
                return self._pause(_stopped([self._process(target, seen)]))
            case FaultKind.AGENT_WORKER_KILL | FaultKind.ENVIRONMENT_KILL:
                kills_worker = fault.kind is FaultKind.AGENT_WORKER_KILL
                what, part = ("worker", AGENT_WORKER) if kills_worker else ("environment", ENVIRONMENT)
                child = self._child(target, seen, what, part)
                _kill([child])
                return Injected(frozenset(), note=f"{what} with pid {child.pid}")
            case FaultKind.TOOL_HANG:
                worker = self._child(target, seen, "worker", AGENT_WORKER)
                return Injected(frozenset(), 0.0, _stopped([worker]), f"worker with pid {worker.pid}")
            case FaultKind.INSTANCE_HANG:
                return Injected(frozenset({target}), 0.0, self._stop(target, seen))
            case FaultKind.ENGINE_KILL:
                _kill(self._engines(target, seen))
                return Injected(frozenset({target}))
            case FaultKind.ENGINE_HANG:
                return Injected(frozenset({target}), 0.0, _stopped(self._engines(target, seen)))
            case FaultKind.TRAINER_KILL:
                children = self._process(target, seen).children(recursive=True)
                ranks = [one for one in children if f"{ROLE_MODULE} trainer" in _command(one)]
                rank = self._draw.choice(ranks or _nothing("the trainer has no ranks"))
                _kill([rank])
                return Injected(frozenset({target}), note=f"rank with pid {rank.pid}")
            case FaultKind.SITE_KILL:
                names = frozenset(name for name, one in seen.processes.items() if one.site == target)
                _kill([self._process(name, seen) for name in sorted(names)] or _nothing(f"{target} has no process"))
                return Injected(names)
            case FaultKind.LINK_CUT | FaultKind.LINK_SLOW | FaultKind.LINK_LOSSY:
                return self._link(fault.kind, target)
            case FaultKind.WEIGHTS_CORRUPT:
                return self._damage_weights(target, seen)
            case FaultKind.JOURNAL_CORRUPT:
                return self._damage_journal(target, seen)
            case FaultKind.DISK_FULL:
                return self._fill(target, seen)
            case FaultKind.LAUNCHER_KILL:
                if self._kill_launcher is None:
                    raise NotPossible("the launcher was not started by this command")
                self._kill_launcher()
                return Injected(frozenset({"controller"}))

    def _process(self, name: str, seen: Observation) -> psutil.Process:
        """Return a process of the run, as its launcher has recorded it.

        Raises:
            NotPossible: it has ended, or its pid is now another process's.
        """
        started = seen.processes.get(name)
        if started is None or started.exit_code is not None:
            raise NotPossible(f"{name} is not running")
        try:
            process = psutil.Process(started.pid)
            if ROLE_MODULE not in _command(process):
                raise NotPossible(f"process {started.pid} is not {name} any more")
        except psutil.Error as error:
            raise NotPossible(f"{name}: {error}") from error
        return process

    def _stop(self, name: str, seen: Observation) -> Callable[[], None]:
        """Stop a process and its children; return a function that continues them."""
        process = self._process(name, seen)
        return _stopped([process, *process.children(recursive=True)])

    def _pause(self, undo: Callable[[], None]) -> Injected:
        """Return a stop that is undone before its process is taken for dead."""
        limits = self.run.deadlines.heartbeat_s * PAUSE_SHARE
        lasts_s = min(self.run.recovery.suspect_s + PAUSE_MORE_S, limits)
        return Injected(frozenset(), lasts_s, undo, f"for {lasts_s:.1f} s")

    def _child(self, name: str, seen: Observation, what: str, part: str) -> psutil.Process:
        """Return a process that an agents process has started, drawn by chance.

        Args:
            what: kind of process, for the message if there is none.
            part: part of its command line.
        """
        children = self._process(name, seen).children(recursive=True)
        found = [one for one in children if part in _command(one)]
        return self._draw.choice(found or _nothing(f"{name} has no {what} process"))

    def _engines(self, instance: str, seen: Observation) -> list[psutil.Process]:
        children = self._process(instance, seen).children(recursive=True)
        return [one for one in children if ENGINE in _command(one)] or _nothing(f"{instance} has no process {ENGINE}")

    def _link(self, kind: FaultKind, site: str) -> Injected:
        link = self.cluster.link(site)
        if link is None:
            raise NotPossible(f"no link to {site}")
        folder, whole = self.run_dir / layout.NETWORK, link.bytes_per_s

        def undo() -> None:
            set_link_in(folder, site, down=False, bandwidth_bytes_per_s=whole, loss=link.loss)

        try:
            if kind is FaultKind.LINK_CUT:
                set_link_in(folder, site, down=True)
            elif kind is FaultKind.LINK_SLOW:
                set_link_in(folder, site, bandwidth_bytes_per_s=whole / SLOWER)
            else:
                set_link_in(folder, site, loss=LOSS)
        except RunFailed as error:
            raise NotPossible(str(error)) from error
        return Injected(frozenset(), LINK_S, undo, f"for {LINK_S:.0f} s")

    def _site_folder(self, name: str, seen: Observation) -> Path:
        return layout.site_folders(self.run_dir)[seen.processes[name].site]

    def _damage_weights(self, instance: str, seen: Observation) -> Injected:
        """Kill an instance, and damage its site's stored versions until another process takes its place.

        A version is damaged once it is some seconds old. The new process has to load one of them.
        """
        process = self._process(instance, seen)
        folder = self._site_folder(instance, seen)
        store = Addresses.load(folder).weights_folder(folder)
        done = Injected(frozenset({instance}))

        def damage() -> None:
            for path in store.glob("version_*.bin"):
                number = int(path.stem.split("_")[1])
                with contextlib.suppress(OSError):  # a newer version has replaced it
                    if number not in done.damaged and time.time() - path.stat().st_mtime > LOADED_S:
                        _damage(path, self._draw)
                        done.damaged[number] = time.time()

        if not any(store.glob("version_*.bin")):
            raise NotPossible(f"{store} holds no version")
        done.keep_on = damage
        _kill([process])
        return done

    def _damage_journal(self, service: str, seen: Observation) -> Injected:
        """Kill a service, and damage its journals before its successor reads them."""
        process, folder = self._process(service, seen), self._site_folder(service, seen)
        _kill([process])
        journals = [path for name in (layout.TOKEN_JOURNAL, layout.TURN_JOURNAL) for path in folder.glob(f"{name}*")]
        files = [path for path in sorted(journals) if not path.name.endswith("-shm")]
        damaged = [path.name for path in files if path.stat().st_size]
        for path in files:
            _damage(path, self._draw)
        return Injected(frozenset({service}), note=", ".join(damaged) or "an empty journal")

    def _fill(self, name: str, seen: Observation) -> Injected:
        """Let no file of a process grow beyond what its log may need.

        Writing then fails with EFBIG, on a full disk with ENOSPC; both raise OSError.
        """
        process = self._process(name, seen)
        log = self.run_dir / layout.LOGS / f"{name}.log"
        before = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (log.stat().st_size + ROOM_BYTES, before[1]))

        def undo() -> None:
            with contextlib.suppress(psutil.Error, OSError):
                if process.is_running():
                    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, before)

        return Injected(frozenset({name}), undo=undo)


def _nothing(why: str) -> list[psutil.Process]:
    raise NotPossible(why)


def _command(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join([process.name(), *process.cmdline()])
    return ""


def _stopped(processes: Sequence[psutil.Process]) -> Callable[[], None]:
    """Stop processes; return a function that continues them."""

    def go_on() -> None:
        for one in processes:
            with contextlib.suppress(psutil.Error):  # psutil checks that the pid is still the same process's
                one.send_signal(signal.SIGCONT)

    for one in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.send_signal(signal.SIGSTOP)
    return go_on


def _kill(processes: Iterable[psutil.Process]) -> None:
    """Kill processes, and wait until they are gone or zombies that their parent has to reap."""
    killed = list(processes)
    for one in killed:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    end = time.monotonic() + DIES_S
    while any(is_alive(one.pid) for one in killed) and time.monotonic() < end:
        time.sleep(POLL_S)


def _damage(path: Path, draw: random.Random) -> None:
    """Overwrite some places of a file with random bytes."""
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        for _ in range(DAMAGED_PLACES if size else 0):
            file.seek(draw.randrange(max(1, size - DAMAGED_BYTES)))
            file.write(draw.randbytes(min(DAMAGED_BYTES, size)))
