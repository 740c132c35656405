"""Lines shown between the start of a run and its first sample. Pure: states in, lines out."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from streamrl.report.process_rows import MOST_ALONE, pool_of
from streamrl.report.summary import duration
from streamrl.run_dir.start_stages import READY, WAITING, Stage
from streamrl.run_dir.status import RunStatus

CHANGES_S = 2.0
"""Seconds within which changes share a line."""
SILENCE_S = 8.0
"""Most seconds between two lines while something starts; with the writer's delays, 10 s."""
IDLE_STATES = frozenset({"idle", "ready", "running"})
"""Heartbeat states in which a process has nothing left to start."""
PLAIN_STATES = {"stale": "waiting for the first weights", "updating": "loading weights"}
"""Plain words shown in place of a state's name."""


def with_stages(status: RunStatus, stages: Mapping[str, Stage]) -> RunStatus:
    """Return a status in which each process without a heartbeat yet shows its start-up stage."""
    roles = {
        name: role.model_copy(update={"detail": stage.text, "since": stage.since})
        if role.state == "starting" and (stage := stages.get(name)) is not None and not stage.ready
        else role
        for name, role in status.roles.items()
    }
    return status.model_copy(update={"roles": roles})


def present(status: RunStatus | None, stages: Mapping[str, Stage]) -> dict[str, Stage]:
    """Return what each process does before the first sample: its start-up stage, then its heartbeat's state."""
    found = dict(stages)
    for name, role in status.roles.items() if status is not None else ():
        stage = stages.get(name)
        if stage is not None and (not stage.ready or role.state == "starting"):
            continue  # no heartbeat has come yet
        text = READY if role.state in IDLE_STATES else PLAIN_STATES.get(role.state, role.state)
        if role.detail and text != READY:
            text = f"{text} ({role.detail})"
        found[name] = Stage(text, role.since, role.since if stage is None else stage.began)
    return found


def begun_at(stages: Mapping[str, Stage], otherwise: float) -> float:
    """Return when the first process was started; `otherwise` if there is none."""
    return min((stage.began for stage in stages.values()), default=otherwise)


class StartLines:
    """The choice of lines for a log from a run's start to its first sample.

    A line reports what has changed or, after some silence, what each process is still doing and for how long. States
    go in, lines come out; it has no clock and no I/O.
    """

    def __init__(self, waits_s: float = SILENCE_S) -> None:
        """Take the most seconds between two lines while all processes only wait, `waits_s`."""
        self._waits_s = waits_s
        self._said: dict[str, str] = {}
        self._at = float("-inf")

    @property
    def begun(self) -> bool:
        """Whether there was a line yet."""
        return bool(self._said)

    def lines(self, stages: Mapping[str, Stage], now: float) -> list[str]:
        """Return the line that is due now, if any.

        Args:
            stages: the stages of all known processes, see `present`.
            now: unix seconds.
        """
        if not stages:
            return []
        changed = {name: stage for name, stage in stages.items() if self._said.get(name) != stage.text}
        # A process that waited and now waits for fewer is no news by itself; it joins the next line.
        news = [
            name
            for name, stage in changed.items()
            if not (stage.waits and self._said.get(name, "").startswith(WAITING))
        ]
        if news and now - self._at >= CHANGES_S:
            text = joined({name: stage.text for name, stage in changed.items()})
        elif now - self._at >= (
            SILENCE_S if any(not s.ready and not s.waits for s in stages.values()) else self._waits_s
        ):
            text = _still(stages, now)
        else:
            return []
        self._said |= {name: stage.text for name, stage in changed.items()}
        self._at = now
        return [f"[{duration(now - begun_at(stages, now))}] {text}"]


def _still(stages: Mapping[str, Stage], now: float) -> str:
    """Describe which processes work and which wait, and for how long."""
    since: dict[str, float] = {}
    for stage in stages.values():
        since[stage.text] = min(stage.since, since.get(stage.text, stage.since))
    texts = {
        name: f"{stage.text} ({duration(now - since[stage.text])})"
        for name, stage in sorted(stages.items(), key=lambda item: item[1].waits)
        if not stage.ready
    }
    return joined(texts) if texts else "all processes are ready; the first sample is not finished yet"


def joined(texts: Mapping[str, str]) -> str:
    """Group names by text: 'a, b: doing this; c: doing that'; instead of many names of a pool, their number."""
    names: defaultdict[str, list[str]] = defaultdict(list)
    for name, text in texts.items():
        names[text].append(name)
    return "; ".join(f"{', '.join(_counted(some))}: {text}" for text, some in names.items())


def _counted(names: Sequence[str]) -> list[str]:
    """Return names, or, of a pool with more than `MOST_ALONE` of them, 'here-regular (987)'."""
    counts = Counter(map(pool_of, names))
    counts[""] = 0  # those without a number
    many = {pool for pool, count in counts.items() if count > MOST_ALONE}
    return list(
        dict.fromkeys(f"{pool} ({counts[pool]})" if (pool := pool_of(name)) in many else name for name in names)
    )
