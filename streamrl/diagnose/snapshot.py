"""What the processes of a run do right now: what the run's folder and this machine tell, and what they answer.

Finding the processes and reading the folder is here; how a process is asked is `diagnose/stacks.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import psutil

from streamrl.diagnose.facts import Alive, ChildFacts, Facts, ProcessFacts, RunFacts, SiteFacts, WaitFacts
from streamrl.diagnose.stacks import CLOCK_S, ObservedProcesses
from streamrl.run_dir import layout
from streamrl.run_dir.instance_files import StartedProcess, read_started, site_folders
from streamrl.run_dir.start_stages import read_stages

CPU_WINDOW_S = 0.3
"""CPU time is counted in hundredths of a second, so this tells 3 %."""
TASKS_S = 0.5
"""An event loop that does not turn within this is blocked: it also has to answer heartbeats."""
THREADS_S = 0.3
"""The answer of a process that is not stopped takes a millisecond, on a machine under load some tens."""
POLL_S = 0.02
TAIL_BYTES = 256 * 1024
"""Of metrics.jsonl: a row takes a few kilobytes."""


def collect(run_dir: Path, threads: bool = False) -> Facts:
    """All that can be seen of a run from its folder and on this machine; takes about a second at most.

    Args:
        run_dir: the run's folder, or the one of a site that has a launcher of its own.
        threads: ask every process for the stacks of its threads, not only one whose event loop is blocked.

    Raises:
        OSError: the folder cannot be read.
        ValueError: status.json is none.
    """
    told = _read_json(run_dir / layout.STATUS)
    seen = _find(run_dir, told or {})
    for one in seen:
        if threads:
            one.ask_threads()  # first: it is not to show how the other question is answered
        one.ask_tasks()
    begun, first = time.monotonic(), [_cpu_s(one.tree) for one in seen]
    time.sleep(CPU_WINDOW_S if any(one.tree for one in seen) else 0)
    for one, before in zip(seen, first, strict=True):
        used = max(0.0, _cpu_s(one.tree) - before) / (time.monotonic() - begun) if one.tree else None
        one.facts = replace(one.facts, cpu=used, alive=_twice(one))
    _until(lambda: all(one.loop != "blocked" for one in seen), begun + TASKS_S)
    silent = [one for one in seen if one.loop == "blocked"]
    for one in silent:
        one.ask_threads()
    asked = [one for one in seen if one.threads_from is not None]
    _until(lambda: all(one.threads_told for one in asked), time.monotonic() + THREADS_S)
    processes = tuple(replace(one.facts, loop=one.loop, tasks=one.tasks, threads=one.threads) for one in seen)
    steps, last = _steps(run_dir)
    site = _read_json(run_dir / layout.SITE_STATUS) if told is None else None
    return Facts(
        now=time.time(),
        run=_run(told) if told is not None else None,
        processes=processes,
        step_times=steps,
        step_began=_step_began(told, last),
        addresses=_addresses(run_dir),
        site=_site(site) if site is not None else None,
        disk_free_gb=psutil.disk_usage(str(run_dir)).free / 1e9,
    )


def _until(done: Callable[[], bool], end: float) -> None:
    """Until something is the case, at the longest until `end` (monotonic seconds)."""
    while not done() and time.monotonic() < end:
        time.sleep(POLL_S)


def _find(run_dir: Path, told: Mapping[str, Any]) -> list[ObservedProcesses]:
    """The run's processes: those that launchers have written down, torch's ranks, and, without a pid, those that only
    status.json knows."""
    roles, family = told.get("roles") or {}, _Family()
    found: list[ObservedProcesses] = []
    for site, folder in site_folders(run_dir).items():
        written = _written_at(folder)
        for started in _started(folder):
            role = "elastic" if started.role == "trainer" else started.role
            facts = ProcessFacts(
                name=started.name,
                role=role,
                pid=started.pid,
                site=site,
                exit_code=started.exit_code,
                last_words=started.last_words,
            )
            here = role == "elastic" and started.exit_code is None and not started.node
            ranks = family.ranks(started.pid) if here else {}
            found.append(family.look(facts, folder, written, set(ranks.values()), started.node))
            for rank, pid in ranks.items():
                own = ProcessFacts(name=f"trainer-{rank}", role="trainer", pid=pid, site=site)
                found.append(family.look(own, folder, time.time(), set()))
    found += family.others(found, run_dir)
    known = {one.facts.name for one in found}
    for name, state in roles.items():
        if name not in known:
            found.append(
                ObservedProcesses(ProcessFacts(name=name, role=str(state.get("role", "")), alive="unknown"), run_dir)
            )
    stages, now = {name: one for name, one in read_stages(run_dir).items() if not one.ready}, time.time()
    if "trainer-0" in known and "trainer" in stages:  # what the first rank says; torch's launcher says nothing
        stages["trainer-0"] = stages.pop("trainer")
    sites = sorted(told.get("sites") or {}, key=len, reverse=True)
    for one in found:
        state = roles.get("trainer" if one.facts.role == "trainer" else one.facts.name, {})
        site = one.facts.site or next((s for s in sites if _is_of(one.facts.name, s)), "")
        one.facts = replace(
            one.facts, site=site, doing=str(state.get("state", "")), running=int(state.get("running") or 0)
        )
        if (stage := stages.get(one.facts.name)) is not None:
            one.facts = replace(one.facts, stage=stage.text, stage_s=max(0.0, now - stage.since))
    return found


def _is_of(name: str, site: str) -> bool:
    """Whether a process is of a site, by its name."""
    return name in (f"service-{site}", f"rewards-{site}") or name.startswith(f"{site}-")


class _Family:
    """All processes of the machine by their parents, at one moment."""

    def __init__(self) -> None:
        self._children: dict[int, list[psutil.Process]] = {}
        for one in psutil.process_iter(["ppid"]):
            self._children.setdefault(one.info["ppid"] or 0, []).append(one)

    def ranks(self, pid: int) -> dict[int, int]:
        """Pids of the ranks that torch's launcher has started, by rank."""
        found = {}
        for one in self._children.get(pid, []):
            with contextlib.suppress(psutil.Error, ValueError, OSError):
                if (rank := one.environ().get("RANK")) is not None:
                    found[int(rank)] = one.pid
        return dict(sorted(found.items()))

    def look(
        self, facts: ProcessFacts, folder: Path, written: float, apart: set[int], node: str = ""
    ) -> ObservedProcesses:
        """Finds a process, if it is the one that was there when its pid was written down, and all that it started.
        Nothing can be seen of one on another node."""
        seen = ObservedProcesses(facts, folder / layout.STACKS)
        if node:
            seen.facts = replace(facts, alive="unknown", pid=None)
            return seen
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
        for one in seen.tree:  # grows meanwhile
            seen.tree += [child for child in self._children.get(one.pid, []) if child.pid not in apart]
        seen.facts = replace(facts, alive=_alive(root), children=tuple(_unable(seen.tree[1:])))
        return seen

    def others(self, found: Iterable[ObservedProcesses], run_dir: Path) -> list[ObservedProcesses]:
        """The launcher, if it still has children here, and the proxy of an emulated network."""
        listed = {one.facts.pid for one in found}
        roots = [one.tree[0] for one in found if one.tree and one.facts.role != "trainer"]
        with contextlib.suppress(psutil.Error, IndexError):
            launcher = psutil.Process(roots[0].ppid())
            if "launch" not in launcher.cmdline():
                return []
            own = ProcessFacts(name="launcher", role="launcher", pid=launcher.pid, alive=_alive(launcher))
            others = [ObservedProcesses(own, run_dir / layout.STACKS, [launcher])]
            for child in self._children.get(launcher.pid, []):
                if child.pid not in listed and "streamrl.emulation.proxy" in child.cmdline():
                    proxy = ProcessFacts(name="proxy", role="proxy", pid=child.pid, alive=_alive(child))
                    others.append(ObservedProcesses(proxy, run_dir / layout.STACKS, [child]))
            return others
        return []


def _alive(process: psutil.Process) -> Alive:
    try:
        status = str(process.status())
    except psutil.Error:
        return "gone"
    names = {"tracing-stop": "traced", "dead": "gone", "disk-sleep": "disk-sleep"}
    plain = status if status in ("running", "stopped", "zombie") else "sleeping"
    return cast(Alive, names.get(status, plain))


def _twice(one: ObservedProcesses) -> Alive:
    """Its state, also after the window: only who waits for a disk both times does so for long."""
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


def _cpu_s(tree: Iterable[psutil.Process]) -> float:
    """Seconds that the processes have computed so far."""
    total = 0.0
    for one in tree:
        with contextlib.suppress(psutil.Error):
            times = one.cpu_times()
            total += times.user + times.system
    return total


# -- reading (status.json is read as it is: to load the models that check it takes longer than all the rest)


def _read_json(path: Path) -> dict[str, Any] | None:
    """A file's object; None if there is none.

    Raises:
        ValueError: it holds something else.
    """
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no object")
    return found


def _started(folder: Path) -> list[StartedProcess]:
    with contextlib.suppress(ValueError, TypeError):
        return read_started(folder)
    return []


def _written_at(folder: Path) -> float:
    try:
        return (folder / layout.PROCESSES).stat().st_mtime
    except OSError:
        return 0.0


def _run(told: Mapping[str, Any]) -> RunFacts:
    try:
        return RunFacts(
            state=str(told["state"]),
            step=int(told["step"]),
            steps=int(told["steps"]),
            started_at=float(told["started_at"]),
            updated_at=float(told["updated_at"]),
            error=told.get("error"),
            cuda=told.get("hardware") == "cuda",
            waits=tuple(
                WaitFacts(str(w["owner"]), str(w["waiting_for"]), float(w["since"]), float(w["limit_s"]))
                for w in told.get("waits") or []
            ),
            silent_s={name: float(site["silent_s"]) for name, site in (told.get("sites") or {}).items()},
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"status.json: {error}") from error


def _site(told: Mapping[str, Any]) -> SiteFacts:
    try:
        keys = ("site", "state", "updated_at", "trainer_silent_s", "samples_waiting")
        return SiteFacts(**{key: told[key] for key in keys})
    except KeyError as error:
        raise ValueError(f"site.json has no {error}") from error


def _steps(run_dir: Path) -> tuple[tuple[float, ...], float | None]:
    """Times of the newest steps, and when the last one ended."""
    times, ended = [], None
    with contextlib.suppress(FileNotFoundError), (run_dir / layout.METRICS).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        for line in file.read().splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a line that is cut
                row = json.loads(line)
                ended = float(row["time"])
                if row.get("step_time_s") is not None:
                    times.append(float(row["step_time_s"]))
    return tuple(times), ended


def _step_began(told: Mapping[str, Any] | None, last_ended: float | None) -> float | None:
    """When the last step ended; for the first step since the start, when the controller began to run."""
    if told is None or told.get("state") == "starting":
        return None
    running = ((told.get("roles") or {}).get("controller") or {}).get("since")
    began = [float(value) for value in (running, last_ended) if value is not None]
    return max(began, default=None)


def _addresses(run_dir: Path) -> dict[str, str]:
    """Who listens where, as the processes of each site know it."""
    found: dict[str, str] = {}
    for folder in site_folders(run_dir).values():
        with contextlib.suppress(ValueError):
            told = _read_json(folder / layout.ADDRESSES) or {}
            of = {"controller": "controller", "controller_outside": "controller"}
            of |= {"publisher": "trainer-0", "publisher_outside": "trainer-0"}
            found |= {told[key]: name for key, name in of.items() if told.get(key)}
            for key in ("services", "relays"):
                found |= {address: f"service-{site}" for site, address in (told.get(key) or {}).items()}
    return found
