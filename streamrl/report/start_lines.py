"""What is shown between the start of a run and its first sample. Pure: states in, lines out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from streamrl.report.summary import duration
from streamrl.run_dir.start_stages import READY, WAITING, Stage
from streamrl.run_dir.status import RunStatus

CHANGES_S = 2.0
"""Changes that come closer together share a line."""
SILENCE_S = 8.0
"""A line comes at least this often: with what delays its writer, every 10 s."""
IDLE_STATES = frozenset({"idle", "ready", "running"})
"""States of a heartbeat that say of nothing that it is being done."""
PLAIN_STATES = {"stale": "waiting for the first weights", "updating": "loading weights"}
"""What a reader is told in place of a state's own word."""


def with_stages(status: RunStatus, stages: Mapping[str, Stage]) -> RunStatus:
    """A status in which each process that has not reported by heartbeat yet says its stage."""
    roles = {
        name: role.model_copy(update={"detail": stage.text, "since": stage.since})
        if role.state == "starting" and (stage := stages.get(name)) is not None and not stage.ready
        else role
        for name, role in status.roles.items()
    }
    return status.model_copy(update={"roles": roles})


def present(status: RunStatus | None, stages: Mapping[str, Stage]) -> dict[str, Stage]:
    """What every process does before the first sample: its stage, or, once it has started, what its heartbeat says."""
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
    """When the first process was started; `otherwise` if there is none."""
    return min((stage.began for stage in stages.values()), default=otherwise)


class StartLines:
    """Decide which lines a log gets from a run's start to its first sample: what has changed, and after some silence
    who is still at what, and for how long. States in, lines out; no clock and no I/O of its own."""

    def __init__(self, waits_s: float = SILENCE_S) -> None:
        """`waits_s`: a line comes at least this often when everybody only waits."""
        self._waits_s = waits_s
        self._said: dict[str, str] = {}
        self._at = float("-inf")

    @property
    def begun(self) -> bool:
        """Whether anything was said."""
        return bool(self._said)

    def lines(self, stages: Mapping[str, Stage], now: float) -> list[str]:
        """The line that is due at `now` (unix seconds), if one is.

        Args:
            stages: of all processes that are known, see `present`.
            now: unix seconds.
        """
        if not stages:
            return []
        changed = {name: stage for name, stage in stages.items() if self._said.get(name) != stage.text}
        # one who waited and now waits for fewer is no news by itself: it goes with the next line
        news = [
            name
            for name, stage in changed.items()
            if not (stage.waits and self._said.get(name, "").startswith(WAITING))
        ]
        if news and now - self._at >= CHANGES_S:
            told = joined({name: stage.text for name, stage in changed.items()})
        elif now - self._at >= (
            SILENCE_S if any(not s.ready and not s.waits for s in stages.values()) else self._waits_s
        ):
            told = _still(stages, now)
        else:
            return []
        self._said |= {name: stage.text for name, stage in changed.items()}
        self._at = now
        return [f"[{duration(now - begun_at(stages, now))}] {told}"]


def _still(stages: Mapping[str, Stage], now: float) -> str:
    """Who is at work and who waits, each with its time."""
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
    """'a, b: doing this; c: doing that'."""
    names: defaultdict[str, list[str]] = defaultdict(list)
    for name, text in texts.items():
        names[text].append(name)
    return "; ".join(f"{', '.join(some)}: {text}" for text, some in names.items())
