"""The tables of a run's processes, in which the many instances of a large pool share rows. No I/O."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from streamrl.report.summary import NONE, duration, fixed
from streamrl.report.terminal import plain_table
from streamrl.run_dir.start_stages import Stage
from streamrl.run_dir.status import RoleStatus, RunStatus

BAD_STATES = frozenset({"failed", "dead", "exited"})
"""States of a process that are shown at once, in red."""
WARNING = "bold red"
"""Style of what is shown in every window."""
MOST_ALONE = 20
"""Instances of a run above which those that are alike share a row; also the most in a bad state that have their own."""
FEW_ALIKE = 3
"""Instances of a pool in one state that still have rows of their own: their names are what one looks for."""
MOST_DETAILS = 3
"""Different details that a row of several processes shows."""
N = TypeVar("N", int, float)


@dataclass(frozen=True)
class ProcessRow:
    """A row: one process, or several instances of a pool in one state."""

    name: str
    role: RoleStatus
    """Figures of several processes: their longest time in the state, and their sums."""
    count: int
    versions: str
    """Weight version, or the oldest and the newest of several; '': none is known."""


def colour_of(state: str) -> str:
    """Return the style of a state's name."""
    if state in BAD_STATES:
        return WARNING
    match state:
        case "ready" | "running" | "done":
            return "green"
        case "starting" | "loading" | "stopping" | "interrupted":
            return "yellow"
    return "cyan"


def process_rows(status: RunStatus) -> list[ProcessRow]:
    """Return the rows of a run's processes, in their order; several alike are where the first of them is."""
    instances = {name for name, role in status.roles.items() if role.role == "instance"}
    shared = alike(
        instances,
        lambda name: status.roles[name].state,
        lambda state: MOST_ALONE if state in BAD_STATES else FEW_ALIKE,
    )
    rows = []
    for names in in_order(status.roles, shared):
        roles = [status.roles[name] for name in names]
        rows.append(
            ProcessRow(
                label_of(names), _together(names, roles), len(roles), versions_of(role.weight_version for role in roles)
            )
        )
    return rows


def roles_rows(status: RunStatus, now: float, lines: int) -> RenderableType:
    """Return the table of processes in so many lines below its heading; in the last one, those without a row.

    Dead processes come first, and instances last, of which there may be many. One line has no heading.
    """
    rows = process_rows(status)
    if lines >= len(rows):
        return roles_table(status, rows, now)
    ranked = sorted(rows, key=lambda one: (one.role.state not in BAD_STATES, one.role.role == "instance"))
    own = {one.name for one in ranked[: lines - 1]}
    counts: Counter[str] = Counter()
    for one in rows:
        if one.name not in own:
            counts[one.role.state] += one.count
    rest = _folded(counts, len(own))
    return Group(roles_table(status, [one for one in rows if one.name in own], now), rest) if own else rest


def roles_table(status: RunStatus, rows: Sequence[ProcessRow], now: float) -> Table:
    """Return a table of these rows; it fits 76 columns when no process reports what it is doing.

    What was last known of the processes is called that; those of a run that has ended have no rates.
    """
    live, rates = status.is_live(now), not status.final
    columns = ["process", "state" if live else "last state", "for", "ver"]
    if rates:
        columns[3:] = ["run+wait", "tokens/s", "ver", "GiB"]
    table = plain_table(*columns, text_columns=2)
    table.expand = True
    table.add_column("doing" if live else "last doing", overflow="ellipsis", no_wrap=True, ratio=1)
    for row in rows:
        role = row.role
        cells = [row.versions or NONE]
        if rates:
            running = NONE if role.running is None else f"{role.running}+{role.waiting or 0}"
            speed = NONE if role.tokens_per_s is None else f"{role.tokens_per_s:.0f}"
            cells = [running, speed, *cells, fixed(role.memory_gb, 1)]
        state = Text(role.state, style=colour_of(role.state) if live or role.state in BAD_STATES else "dim")
        table.add_row(row.name, state, duration(status.as_of(now) - role.since), *cells, Text(role.detail))
    return table


def stage_rows(stages: Mapping[str, Stage]) -> list[tuple[str, Stage, int]]:
    """Return (name, stage, number of processes) of each row of a start; see `process_rows`."""
    shared = alike(stages, lambda name: stages[name].text, lambda text: FEW_ALIKE)
    rows = []
    for names in in_order(stages, shared):
        some = [stages[name] for name in names]
        rows.append((label_of(names), min(some, key=lambda stage: stage.since), len(names)))
    return rows


def start_rows(stages: Mapping[str, Stage], now: float, lines: int) -> RenderableType:
    """Return the table of starting processes in so many lines below its heading, as `roles_rows`.

    Those that work come first, those that are ready last.
    """
    rows = stage_rows(stages)
    if lines >= len(rows):
        return _start_table(rows, now)
    ranked = sorted(rows, key=lambda row: (row[1].ready, row[1].waits))
    own = {name for name, _, _ in ranked[: lines - 1]}
    counts: Counter[str] = Counter()
    for name, stage, count in rows:
        if name not in own:
            counts[stage.text] += count
    rest = _folded(counts, len(own))
    return Group(_start_table([row for row in rows if row[0] in own], now), rest) if own else rest


def _start_table(rows: Sequence[tuple[str, Stage, int]], now: float) -> Table:
    table = plain_table("process", "for", text_columns=1)
    table.add_column("doing")
    for name, stage, _ in rows:
        colour = "green" if stage.ready else "yellow"
        table.add_row(name, duration(now - stage.since), Text(stage.text, style="dim" if stage.waits else colour))
    return table


def _folded(counts: Counter[str], own: int) -> Text:
    """Return processes without a row, beside `own` rows, in one line: '29 more: 27 running, 2 idle'."""
    text = Text(f"{counts.total()} {'more' if own else 'processes'}: ", no_wrap=True, overflow="ellipsis")
    for index, (state, count) in enumerate(counts.most_common()):
        text.append(", " if index else "").append(f"{count} {state}", style=colour_of(state))
    return text


def pool_of(name: str) -> str:
    """Return what the names of a pool's instances have in common; '': the name has no number."""
    pool, _, index = name.rpartition("-")
    return pool if index.isdecimal() else ""


def alike(
    names: Iterable[str], state_of: Callable[[str], str], most_alone: Callable[[str], int]
) -> dict[str, Hashable]:
    """Return which numbered processes share a row, each with a key that those of its row have in common.

    Args:
        names: the processes.
        state_of: returns what they must have in common beside their pool.
        most_alone: returns how many of a pool that have this in common still have rows of their own.
    """
    pools: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for name in names:
        if pool := pool_of(name):
            pools[pool, state_of(name)].append(name)
    if sum(map(len, pools.values())) <= MOST_ALONE:
        return {}
    return {name: key for key, some in pools.items() if len(some) > most_alone(key[1]) for name in some}


def in_order(names: Iterable[str], shared: Mapping[str, Hashable]) -> Iterable[list[str]]:
    """Return the names of each row's processes."""
    rows: dict[Hashable, list[str]] = {}
    for name in names:
        rows.setdefault(shared.get(name, name), []).append(name)
    return rows.values()


def label_of(names: Sequence[str]) -> str:
    """Return the name of a row of processes: that of its only one, or their pool and number."""
    return names[0] if len(names) == 1 else f"{pool_of(names[0])}: {len(names)}"


def _together(names: Sequence[str], roles: Sequence[RoleStatus]) -> RoleStatus:
    """Return one status for processes in one state."""
    if len(roles) == 1:
        return roles[0]
    return roles[0].model_copy(
        update={
            "detail": details_of({name: role.detail for name, role in zip(names, roles, strict=True)}),
            "since": min(role.since for role in roles),
            "running": sum_of(role.running for role in roles),
            "waiting": sum_of(role.waiting for role in roles),
            "tokens_per_s": sum_of(role.tokens_per_s for role in roles),
            "memory_gb": sum_of(role.memory_gb for role in roles),
        }
    )


def details_of(details: Mapping[str, str]) -> str:
    """Return the most frequent details of processes, and of how many each is, unless all have it.

    Those of few name them: which process is slow or has crashed is what one looks for.

    Args:
        details: by the names of the processes; '': one has none.
    """
    names = defaultdict(list)
    for name, text in details.items():
        if text:
            names[text].append(name)
    shown = sorted(names, key=lambda text: -len(names[text]))[:MOST_DETAILS]
    told = []
    for text in shown:
        some = names[text]
        if len(some) == len(details):
            told.append(text)
        else:
            told.append(f"{', '.join(some)}: {text}" if len(some) <= FEW_ALIKE else f"{len(some)} {text}")
    left = sum(map(len, names.values())) - sum(len(names[text]) for text in shown)
    return "; ".join([*told, f"and {left} more"] if left else told)


def versions_of(versions: Iterable[int | None]) -> str:
    """Return the oldest and the newest of some weight versions; '': none is known."""
    known = {version for version in versions if version is not None}
    return "-".join(map(str, dict.fromkeys([min(known), max(known)]))) if known else ""


def sum_of(values: Iterable[N | None]) -> N | None:
    """Return the sum of the known values; None: none is known."""
    known = [value for value in values if value is not None]
    return sum(known[1:], known[0]) if known else None
