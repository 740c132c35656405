"""Choose which fault comes when. Pure: the same seed on the same run gives the same faults.

Faults come in rounds. A round has every possible kind once, in random order, so no kind is ever more than one ahead of
another. A kind's targets take turns, also in random order.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

LEAST_PAUSE_S, MOST_PAUSE_S = 1.0, 6.0
"""Range of the pause, in seconds, between a run's first step after a fault and the next fault.

It spans more than a heartbeat, so that a fault can hit the run at any point of a step.
"""


class FaultKind(StrEnum):
    """Kinds of faults."""

    INSTANCE_KILL = "instance-kill"
    INSTANCE_PAUSE = "instance-pause"
    INSTANCE_HANG = "instance-hang"
    ENGINE_KILL = "engine-kill"
    ENGINE_HANG = "engine-hang"
    SERVICE_KILL = "service-kill"
    REWARDS_KILL = "rewards-kill"
    CONTROLLER_KILL = "controller-kill"
    TRAINER_KILL = "trainer-kill"
    SITE_KILL = "site-kill"
    LINK_CUT = "link-cut"
    LINK_SLOW = "link-slow"
    LINK_LOSSY = "link-lossy"
    WEIGHTS_CORRUPT = "weights-corrupt"
    JOURNAL_CORRUPT = "journal-corrupt"
    DISK_FULL = "disk-full"
    LAUNCHER_KILL = "launcher-kill"


WHAT = {
    FaultKind.INSTANCE_KILL: "SIGKILL of a generation instance",
    FaultKind.INSTANCE_PAUSE: "SIGSTOP of an instance, SIGCONT before it is taken for dead",
    FaultKind.INSTANCE_HANG: "SIGSTOP of an instance until it is replaced",
    FaultKind.ENGINE_KILL: "SIGKILL of the EngineCore process of an instance",
    FaultKind.ENGINE_HANG: "SIGSTOP of the EngineCore process of an instance until that is replaced",
    FaultKind.SERVICE_KILL: "SIGKILL of a site's generation service",
    FaultKind.REWARDS_KILL: "SIGKILL of a rewards process",
    FaultKind.CONTROLLER_KILL: "SIGKILL of the controller",
    FaultKind.TRAINER_KILL: "SIGKILL of a trainer rank",
    FaultKind.SITE_KILL: "SIGKILL of all processes of a site that does not train",
    FaultKind.LINK_CUT: "nothing passes over a link",
    FaultKind.LINK_SLOW: "a link has a tenth of its bandwidth",
    FaultKind.LINK_LOSSY: "a link loses 5 % of its segments",
    FaultKind.WEIGHTS_CORRUPT: "SIGKILL of an instance, and its site's stored weights overwritten until another runs",
    FaultKind.JOURNAL_CORRUPT: "bytes of a token journal overwritten, and its service killed, which must read it",
    FaultKind.DISK_FULL: "no file of the controller may grow (RLIMIT_FSIZE), until the run has ended and is resumed",
    FaultKind.LAUNCHER_KILL: "SIGKILL of the launcher; the run is resumed once its processes have ended",
}
"""Description of what each kind does."""

OF_INSTANCES = frozenset(
    {
        FaultKind.INSTANCE_KILL,
        FaultKind.INSTANCE_PAUSE,
        FaultKind.INSTANCE_HANG,
        FaultKind.ENGINE_KILL,
        FaultKind.ENGINE_HANG,
    }
)
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

    home: str
    """The site that trains."""
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


def targets(found: Inventory) -> tuple[dict[FaultKind, tuple[str, ...]], dict[FaultKind, str]]:
    """Return the targets of each possible kind, and why the other kinds are left out."""
    home = ("controller",) if found.trains_here else ()
    ended = "the launcher is not a child of this command, so nothing would restart the run"
    remote = "the run has one site on this machine"
    links = "the run has no emulated link"
    here = "the site that trains is elsewhere"
    wanted: dict[FaultKind, tuple[tuple[str, ...], str]] = {
        FaultKind.INSTANCE_KILL: (found.instances, "there is no instance"),
        FaultKind.INSTANCE_PAUSE: (found.instances, "there is no instance"),
        FaultKind.INSTANCE_HANG: (found.instances, "there is no instance"),
        FaultKind.ENGINE_KILL: (found.instances, "there is no instance"),
        FaultKind.ENGINE_HANG: (found.instances, "there is no instance"),
        FaultKind.SERVICE_KILL: (found.services, "there is no service"),
        FaultKind.REWARDS_KILL: (found.rewards, "there is no rewards process"),
        FaultKind.CONTROLLER_KILL: (home, here),
        FaultKind.TRAINER_KILL: (("trainer",) if home else (), here),
        FaultKind.SITE_KILL: (found.remote_sites, remote),
        FaultKind.LINK_CUT: (found.emulated_links, links),
        FaultKind.LINK_SLOW: (found.emulated_links, links),
        FaultKind.LINK_LOSSY: (found.emulated_links, links),
        FaultKind.WEIGHTS_CORRUPT: (
            found.instances if found.shares_weights else (),
            "weights do not go through a store",
        ),
        FaultKind.JOURNAL_CORRUPT: (found.services, "there is no service"),
        FaultKind.DISK_FULL: (
            home if found.owns_launcher and found.limits_files else (),
            ended if not found.owns_launcher else "this system cannot limit another process's files",
        ),
        FaultKind.LAUNCHER_KILL: (("launcher",) if found.owns_launcher else (), ended),
    }
    possible = {kind: names for kind, (names, _) in wanted.items() if names}
    return possible, {kind: why for kind, (names, why) in wanted.items() if not names}


def schedule(
    seed: int, possible: Mapping[FaultKind, Sequence[str]], kinds: Collection[FaultKind] = ()
) -> Iterator[Fault]:
    """Yield faults without end.

    Args:
        seed: seed of order, targets and pauses.
        possible: targets of each kind, from `targets`.
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
