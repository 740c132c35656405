"""Collect what the processes of a run are doing right now, from the run's folder, this machine and their answers.

This module finds the processes and reads the folder; `diagnose/stacks.py` asks a process for its stacks.
"""

from __future__ import annotations

import contextlib
import functools
import json
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import psutil

from streamrl.diagnose.facts import Alive, ChildFacts, Facts, ProcessFacts, RunFacts, SiteFacts
from streamrl.diagnose.stacks import CLOCK_S, ObservedProcesses
from streamrl.plain_files import read_plain
from streamrl.run_dir import layout
from streamrl.run_dir.instance_files import StartedProcess, read_started
from streamrl.run_dir.jsonl import last_lines
from streamrl.run_dir.launcher_lock import has_launcher, owner
from streamrl.run_dir.site_status import STARTING, started_again
from streamrl.run_dir.start_stages import read_stages
from streamrl.run_dir.status import step_began
from streamrl.runtime.processes import this_host

Of = TypeVar("Of")

CPU_WINDOW_S = 0.3
"""Seconds over which CPU use is measured. CPU time is counted in hundredths of a second, so this resolves 3 %."""
TASKS_S = 0.5
"""Seconds after which a silent event loop counts as blocked; it has heartbeats to answer, too."""
THREADS_S = 0.3
"""Seconds to wait for thread stacks. A process that is not stopped answers in a millisecond, under load in tens."""
POLL_S = 0.02
"""Seconds between two looks for answers."""
REPLACES_CHILDREN = ("rewards", "agents")
"""Roles that end and replace their workers themselves, below which the programs of users and models run as well."""


def collect(run_dir: Path, threads: bool = False, ask: bool = True) -> Facts:
    """Collect everything visible of a run in its folder and on this machine; takes a second at most.

    Args:
        run_dir: the run's folder, or that of a site with its own launcher.
        threads: ask every process for its threads' stacks, not only those whose event loop is blocked.
        ask: ask the processes what they do, by signals; otherwise they are only looked at, and whether their event
            loops run stays unknown.

    Raises:
        OSError: the folder cannot be read.
        ValueError: status.json has the wrong form.
    """
    status = _read_json(run_dir / layout.STATUS)
    there = _owner_there(run_dir)
    launcher_gone = there is False
    seen = _find(run_dir, status or {}, launcher_gone)
    for one in seen if ask else ():
        if threads:
            one.ask_threads()  # first, so that the stacks do not show the answer to the other question
        one.ask_tasks()
    begun, first = time.monotonic(), [_cpu_s(one.tree) for one in seen]
    time.sleep(CPU_WINDOW_S if any(one.tree for one in seen) else 0)
    for one, before in zip(seen, first, strict=True):
        used = max(0.0, _cpu_s(one.tree) - before) / (time.monotonic() - begun) if one.tree else None
        one.facts = replace(
            one.facts, cpu=used, alive=_state_after_window(one), children=tuple(_unable_after_window(one))
        )
    _until(lambda: all(one.loop != "blocked" for one in seen), begun + TASKS_S)
    for one in seen:
        if one.loop == "blocked":
            one.ask_threads()
    asked = [one for one in seen if one.threads_from is not None]
    _until(lambda: all(one.threads_told for one in asked), time.monotonic() + THREADS_S)
    processes = tuple(replace(one.facts, loop=one.loop, tasks=one.tasks, threads=one.threads) for one in seen)
    steps, last = _steps(run_dir)
    site = _read_json(run_dir / layout.SITE_STATUS) if status is None else None
    if site is not None and site.get("state") == STARTING:
        site = None  # a sign of life, which says nothing of the site
    return Facts(
        now=time.time(),
        run=_run(status) if status is not None else None,
        processes=processes,
        step_times=steps,
        step_began=_step_began(status, last),
        addresses=_addresses(run_dir),
        site=_site(run_dir, site) if site is not None else None,
        launcher_gone=launcher_gone,
        launcher_lives=there is True,
        disk_free_gb=psutil.disk_usage(str(run_dir)).free / 1e9,
    )


def _until(done: Callable[[], bool], end: float) -> None:
    """Wait until `done` returns true, or until `end` (monotonic seconds)."""
    while not done() and time.monotonic() < end:
        time.sleep(POLL_S)


def _find(run_dir: Path, status: Mapping[str, Any], launcher_gone: bool) -> list[ObservedProcesses]:
    """Find the run's processes: those the launchers have recorded, torch's ranks, and those only in status.json.

    The last have no pid.

    Args:
        launcher_gone: whether the launcher has ended; processes that cannot be seen from here have ended with it.
    """
    roles, family = status.get("roles") or {}, _Family()
    found: list[ObservedProcesses] = []
    for site, folder in layout.site_folders(run_dir).items():
        written = _written_at(folder)
        for started in _started(folder):
            role = "rank launcher" if started.role == "trainer" else started.role
            told = {key: getattr(started, key) for key in ("name", "pid", "exit_code", "last_words")}
            facts = ProcessFacts(role=role, site=site, **told)
            if not _is_seen(started):
                gone = launcher_gone and not started.node
                facts = replace(facts, alive="gone") if gone else replace(facts, pid=None)
                found.append(ObservedProcesses(facts, folder / layout.STACKS))
                continue
            ranks = family.ranks(started.pid) if role == "rank launcher" and started.exit_code is None else {}
            found.append(family.look(facts, folder, written, set(ranks.values())))
            for rank, pid in ranks.items():
                own = ProcessFacts(name=f"trainer-{rank}", role="trainer", pid=pid, site=site)
                found.append(family.look(own, folder, time.time(), set()))
    found += family.others(found, run_dir)
    known = {one.facts.name for one in found}
    for name, state in roles.items():
        if name not in known:
            found.append(ObservedProcesses(ProcessFacts(name, str(state.get("role", ""))), run_dir))
    stages, now = {name: one for name, one in read_stages(run_dir).items() if not one.ready}, time.time()
    if "trainer-0" in known and "trainer" in stages:  # the first rank reports it, their launcher nothing
        stages["trainer-0"] = stages.pop("trainer")
    sites = sorted(status.get("sites") or {}, key=len, reverse=True)
    for one in found:
        state = roles.get("trainer" if one.facts.role == "trainer" else one.facts.name, {})
        site = one.facts.site or next((s for s in sites if _is_of(one.facts.name, s)), "")
        one.facts = replace(
            one.facts, site=site, doing=str(state.get("state", "")), running=int(state.get("running") or 0)
        )
        if (stage := stages.get(one.facts.name)) is not None:
            one.facts = replace(one.facts, stage=stage.text, stage_s=max(0.0, now - stage.since))
    return found


def _is_seen(started: StartedProcess) -> bool:
    """Return whether a recorded pid counts here: not on another machine, nor in another container."""
    return not started.node and (not started.host or started.host == (this_host() or started.host))


def _is_of(name: str, site: str) -> bool:
    """Return whether a process belongs to a site, by its name."""
    return name in (f"service-{site}", f"rewards-{site}") or name.startswith(f"{site}-")


class _Family:
    """All processes of the machine by parent, at the moment when those of a living one are looked for."""

    @functools.cached_property
    def _children(self) -> dict[int, list[psutil.Process]]:
        found: dict[int, list[psutil.Process]] = {}
        for one in psutil.process_iter(["ppid"]):
            found.setdefault(one.info["ppid"] or 0, []).append(one)
        return found

    def ranks(self, pid: int) -> dict[int, int]:
        """Return the pids of the ranks that the rank launcher `pid` has started, by rank."""
        found = {}
        for one in self._children.get(pid, []):
            with contextlib.suppress(psutil.Error, ValueError, OSError):
                if (rank := one.environ().get("RANK")) is not None:
                    found[int(rank)] = one.pid
        return dict(sorted(found.items()))

    def look(self, facts: ProcessFacts, folder: Path, written: float, apart: set[int]) -> ObservedProcesses:
        """Find a process and its descendants, unless its pid now belongs to a younger process."""
        seen = ObservedProcesses(facts, folder / layout.STACKS)
        if facts.pid is None or facts.exit_code is not None:
            return seen
        try:
            root = psutil.Process(facts.pid)
            if root.create_time() > written + CLOCK_S:
                raise psutil.NoSuchProcess(facts.pid)
        except psutil.Error:
            seen.facts = replace(facts, alive="gone")
            return seen
        seen.tree = [root]
        for one in seen.tree:  # grows during the loop
            seen.tree += [child for child in self._children.get(one.pid, []) if child.pid not in apart]
        needed = [] if facts.role in REPLACES_CHILDREN else seen.tree[1:]
        seen.facts = replace(facts, alive=_alive(root), children=tuple(_unable(needed)))
        return seen

    def others(self, found: Iterable[ObservedProcesses], run_dir: Path) -> list[ObservedProcesses]:
        """Return the launcher, if it still has children here, and the proxy of an emulated network."""
        listed = {one.facts.pid for one in found}
        roots = [one.tree[0] for one in found if one.tree and one.facts.role != "trainer"]
        others: list[ObservedProcesses] = []
        with contextlib.suppress(psutil.Error, IndexError):
            launcher = psutil.Process(roots[0].ppid())
            if (locked_by := owner(run_dir)) is None or launcher.pid != locked_by[0]:
                return []
            own = ProcessFacts(name="launcher", role="launcher", pid=launcher.pid, alive=_alive(launcher))
            others.append(ObservedProcesses(own, run_dir / layout.STACKS, [launcher]))
            for child in self._children.get(launcher.pid, []):
                with contextlib.suppress(psutil.Error):  # it has ended, and has no command line any more
                    if child.pid not in listed and "streamrl.emulation.proxy" in child.cmdline():
                        proxy = ProcessFacts(name="proxy", role="proxy", pid=child.pid, alive=_alive(child))
                        others.append(ObservedProcesses(proxy, run_dir / layout.STACKS, [child]))
        return others


def _alive(process: psutil.Process) -> Alive:
    try:
        status = str(process.status())
    except psutil.Error:
        return "gone"
    renamed = {"tracing-stop": "traced", "dead": "gone"}
    plain = status if status in ("running", "stopped", "zombie", "disk-sleep") else "sleeping"
    return cast(Alive, renamed.get(status, plain))


def _state_after_window(one: ObservedProcesses) -> Alive:
    """Return a process's state after the CPU window; a disk wait counts only if seen before and after it."""
    if not one.tree:
        return one.facts.alive
    now = _alive(one.tree[0])
    if "disk-sleep" in (now, one.facts.alive) and now != one.facts.alive:
        return "running"
    return "running" if "running" in (now, one.facts.alive) and now == "sleeping" else now


def _unable(children: Iterable[psutil.Process]) -> Iterable[ChildFacts]:
    for child in children:
        if (state := _alive(child)) in ("stopped", "traced", "zombie"):
            with contextlib.suppress(psutil.Error):
                yield ChildFacts(child.name(), child.pid, state)


def _unable_after_window(one: ObservedProcesses) -> Iterable[ChildFacts]:
    """Yield the children that still are in their state: one that has just ended is a zombie for a moment."""
    now = {child.pid: child for child in one.tree}
    return (child for child in one.facts.children if _alive(now[child.pid]) == child.alive)


def _cpu_s(tree: Iterable[psutil.Process]) -> float:
    """Return the CPU seconds that the processes have used so far."""
    total = 0.0
    for one in tree:
        with contextlib.suppress(psutil.Error):
            times = one.cpu_times()
            total += times.user + times.system
    return total


# -- reading (status.json is read unchecked: loading the models that validate it takes longer than everything else)


def _read_json(path: Path) -> dict[str, Any] | None:
    """Return a file's JSON object; None if the file does not exist.

    Raises:
        ValueError: the file holds something else.
    """
    try:
        found = json.loads(read_plain(path, below=layout.whole_folder(path.parent)))
    except FileNotFoundError:
        return None
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return found


def _started(folder: Path) -> list[StartedProcess]:
    with contextlib.suppress(ValueError, TypeError):
        return read_started(folder)
    return []


def _written_at(folder: Path) -> float:
    try:
        return (folder / layout.PROCESSES).lstat().st_mtime
    except OSError:
        return 0.0


def _owner_there(run_dir: Path) -> bool | None:
    """Return whether the launcher that had the run's lock last lives; None: unknown, or it was on another machine.

    One in a container has another pid here, so what counts is the lock. That it is free tells nothing while there is a
    process of that pid: a launcher may be about to take it.
    """
    if (found := owner(run_dir)) is None or found[1] != socket.gethostname():
        return None
    there = False
    with contextlib.suppress(OverflowError):  # no process has such a pid
        there = psutil.pid_exists(found[0])
    return has_launcher(run_dir) or (None if there else False)


def _run(status: Mapping[str, Any]) -> RunFacts:
    try:
        sites = status.get("sites") or {}
        silent = {name: site["silent_s"] for name, site in sites.items()}
        left = [name for name, site in sites.items() if site.get("left_s") is not None]
        silences = {
            key: {name: site[key] for name, site in sites.items() if site.get(key) is not None}
            for key in ("publisher_silent_s", "controller_silent_s", "empty_connections")
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"status.json: {error}") from error
    own = {"cuda": status.get("hardware") == "cuda", "silent_s": silent, "left": left}
    found = {**status, **own, **silences, "waits": status.get("waits") or []}
    return _checked(layout.STATUS, found, RunFacts)


def _site(run_dir: Path, values: Mapping[str, Any]) -> SiteFacts:
    found = _checked(layout.SITE_STATUS, {**values, "later": ""}, SiteFacts)
    later = started_again(run_dir, found.site)
    return found if later is None else replace(found, later=later.name)


def _checked(file: str, values: Mapping[str, Any], kind: type[Of]) -> Of:
    """Return a file's values as facts; further keys are ignored.

    Raises:
        ValueError: a key is missing, or a value has the wrong type.
    """
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{file}: {error}") from error


def _steps(run_dir: Path) -> tuple[tuple[float, ...], float | None]:
    """Return the durations of the newest steps, in seconds, and when the last one ended."""
    times, ended = [], None
    for line in last_lines(run_dir / layout.METRICS):
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):  # the first line may be cut off
            row = json.loads(line)
            ended = float(row["time"])
            if row.get("step_time_s") is not None:
                times.append(float(row["step_time_s"]))
    return tuple(times), ended


def _step_began(status: Mapping[str, Any] | None, last_ended: float | None) -> float | None:
    """Return when the present step began, as `step_began`; None also without a status."""
    if status is None:
        return None
    running = ((status.get("roles") or {}).get("controller") or {}).get("since")
    return step_began(str(status.get("state")), None if running is None else float(running), last_ended)


def _addresses(run_dir: Path) -> dict[str, str]:
    """Return which process listens at each address, as the processes of each site know it."""
    found: dict[str, str] = {}
    for folder in layout.site_folders(run_dir).values():
        with contextlib.suppress(ValueError):
            addresses = _read_json(folder / layout.ADDRESSES) or {}
            of = {"controller": "controller", "controller_outside": "controller"}
            of |= {"publisher": "trainer-0", "publisher_outside": "trainer-0"}
            found |= {addresses[key]: name for key, name in of.items() if addresses.get(key)}
            for key in ("services", "relays"):
                found |= {address: f"service-{site}" for site, address in (addresses.get(key) or {}).items()}
    return found
