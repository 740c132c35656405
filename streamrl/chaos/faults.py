"""Choose which fault comes when. Pure: the same seed on the same run gives the same faults.

Faults come in rounds. A round has every possible kind once, in random order, so no kind is ever more than one ahead of
another. A kind's targets take turns, also in random order.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

LEAST_PAUSE_S, MOST_PAUSE_S = 1.0, 6.0
"""Range of the pause, in seconds, between a run's first step after a fault and the next fault.

It spans more than a heartbeat, so that a fault can hit the run at any point of a step.
"""


class FaultKind(StrEnum):
    """Kinds of faults, each with a description of what it does."""

    what: str

    def __new__(cls, name: str, what: str) -> Self:
        kind = str.__new__(cls, name)
        kind._value_, kind.what = name, what
        return kind

    INSTANCE_KILL = "instance-kill", "SIGKILL of a generation instance"
    INSTANCE_PAUSE = "instance-pause", "SIGSTOP of an instance, SIGCONT before it is taken for dead"
    INSTANCE_HANG = "instance-hang", "SIGSTOP of an instance until it is replaced"
    ENGINE_KILL = "engine-kill", "SIGKILL of the EngineCore process of an instance"
    ENGINE_HANG = "engine-hang", "SIGSTOP of the EngineCore process of an instance until that is replaced"
    SERVICE_KILL = "service-kill", "SIGKILL of a site's generation service"
    REWARDS_KILL = "rewards-kill", "SIGKILL of a rewards process"
    AGENTS_KILL = "agents-kill", "SIGKILL of an agents process, with the sessions of all its episodes"
    ENDPOINT_PAUSE = (
        "endpoint-pause",
        "SIGSTOP of an agents process, whose endpoint answers late, SIGCONT before it is taken for dead",
    )
    AGENT_WORKER_KILL = "agent-worker-kill", "SIGKILL of a worker process of agents"
    TOOL_HANG = "tool-hang", "SIGSTOP of a worker process of agents, as by a tool that blocks it, until it is replaced"
    ENVIRONMENT_KILL = "environment-kill", "SIGKILL of a process of an environment, with the episodes that it plays"
    CONTROLLER_KILL = "controller-kill", "SIGKILL of the controller"
    TRAINER_KILL = "trainer-kill", "SIGKILL of a trainer rank"
    SITE_KILL = "site-kill", "SIGKILL of all processes of a site that does not train"
    LINK_CUT = "link-cut", "nothing passes over a link"
    LINK_SLOW = "link-slow", "a link has a tenth of its bandwidth"
    LINK_LOSSY = "link-lossy", "a link loses 5 % of its segments"
    WEIGHTS_CORRUPT = (
        "weights-corrupt",
        "SIGKILL of an instance, and its site's stored weights overwritten until another runs",
    )
    JOURNAL_CORRUPT = (
        "journal-corrupt",
        "bytes of a service's journals overwritten, and the service killed, which must read them",
    )
    DISK_FULL = "disk-full", "no file of the controller may grow (RLIMIT_FSIZE), until the run has ended and is resumed"
    LAUNCHER_KILL = "launcher-kill", "SIGKILL of the launcher; the run is resumed once its processes have ended"


OF_INSTANCES = frozenset(
    {
        FaultKind.INSTANCE_KILL,
        FaultKind.INSTANCE_PAUSE,
        FaultKind.INSTANCE_HANG,
        FaultKind.ENGINE_KILL,
        FaultKind.ENGINE_HANG,
    }
)
OF_AGENT_WORKERS = frozenset({FaultKind.AGENT_WORKER_KILL, FaultKind.TOOL_HANG})
REPLACED_BY_OWNER = OF_AGENT_WORKERS | {FaultKind.ENVIRONMENT_KILL}
"""Kinds whose target, an agents process, replaces what they hit."""
OF_LINKS = frozenset({FaultKind.LINK_CUT, FaultKind.LINK_SLOW, FaultKind.LINK_LOSSY})
ENDS_RUN = frozenset({FaultKind.DISK_FULL, FaultKind.LAUNCHER_KILL})
"""Kinds that leave no process to restart the run."""


@dataclass(frozen=True)
class Fault:
    """One fault to be injected."""

    number: int
    """1, 2, ..."""
    kind: FaultKind
    target: str
    """Name of a process, a site or a link."""
    pause_s: float
    """Seconds to wait before it, once the run has recovered from the previous fault."""


@dataclass(frozen=True)
class Inventory:
    """The parts of a run that faults can be injected into."""

    instances: tuple[str, ...] = ()
    services: tuple[str, ...] = ()
    rewards: tuple[str, ...] = ()
    remote_sites: tuple[str, ...] = ()
    """Sites that do not train, with processes on this machine."""
    emulated_links: tuple[str, ...] = ()
    """Remote ends of links that can be changed."""
    trains_here: bool = True
    owns_launcher: bool = True
    """Whether the launcher is a child of this process, which can then restart it."""
    limits_files: bool = True
    """Whether another process's largest file can be limited (Linux)."""
    shares_weights: bool = True
    """Whether instances load weights from a store on this machine."""
    agents: tuple[str, ...] = ()
    """Agents processes."""
    agent_workers: tuple[str, ...] = ()
    """Those among them that have worker processes: agents that are programs need none."""
    environments: tuple[str, ...] = ()
    """Those among them that have processes of environments."""


def targets(found: Inventory) -> tuple[dict[FaultKind, tuple[str, ...]], dict[FaultKind, str]]:
    """Return the targets of each possible kind, and why the other kinds are left out."""
    home, here = ("controller",) if found.trains_here else (), "the site that trains is elsewhere"
    services = found.services, "there is no service"
    loading = found.instances if found.shares_weights else ()
    ended = "the launcher is not a child of this command, so nothing would restart the run"
    fills = "this system cannot limit another process's files" if found.owns_launcher else ended
    wanted: dict[FaultKind, tuple[tuple[str, ...], str]] = {
        **dict.fromkeys(OF_INSTANCES, (found.instances, "there is no instance")),
        FaultKind.SERVICE_KILL: services,
        FaultKind.REWARDS_KILL: (found.rewards, "there is no rewards process"),
        **dict.fromkeys((FaultKind.AGENTS_KILL, FaultKind.ENDPOINT_PAUSE), (found.agents, "the run has no agents")),
        **dict.fromkeys(OF_AGENT_WORKERS, (found.agent_workers, "the run has no worker process of agents")),
        FaultKind.ENVIRONMENT_KILL: (found.environments, "the run has no environment"),
        FaultKind.CONTROLLER_KILL: (home, here),
        FaultKind.TRAINER_KILL: (("trainer",) if home else (), here),
        FaultKind.SITE_KILL: (found.remote_sites, "the run has one site on this machine"),
        **dict.fromkeys(OF_LINKS, (found.emulated_links, "the run has no emulated link")),
        FaultKind.WEIGHTS_CORRUPT: (loading, "weights do not go through a store"),
        FaultKind.JOURNAL_CORRUPT: services,
        FaultKind.DISK_FULL: (home if found.owns_launcher and found.limits_files else (), fills),
        FaultKind.LAUNCHER_KILL: (("launcher",) if found.owns_launcher else (), ended),
    }
    possible = {kind: wanted[kind][0] for kind in FaultKind if wanted[kind][0]}
    return possible, {kind: wanted[kind][1] for kind in FaultKind if kind not in possible}


def schedule(
    seed: int, possible: Mapping[FaultKind, Sequence[str]], kinds: Collection[FaultKind] = ()
) -> Iterator[Fault]:
    """Yield faults without end.

    Args:
        kinds: the kinds to use; empty: all possible ones.

    Raises:
        ValueError: none of the kinds is possible.
    """
    chosen = [kind for kind in FaultKind if kind in possible and (not kinds or kind in kinds)]
    if not chosen:
        raise ValueError("no kind of fault is possible")
    return _faults(random.Random(seed), {kind: list(possible[kind]) for kind in chosen})


def _faults(draw: random.Random, possible: Mapping[FaultKind, list[str]]) -> Iterator[Fault]:
    left: dict[FaultKind, list[str]] = {kind: [] for kind in possible}
    number = 0
    while True:
        kinds = list(possible)
        draw.shuffle(kinds)
        for kind in kinds:
            if not left[kind]:
                left[kind] = draw.sample(possible[kind], len(possible[kind]))
            number += 1
            yield Fault(number, kind, left[kind].pop(), round(draw.uniform(LEAST_PAUSE_S, MOST_PAUSE_S), 1))
