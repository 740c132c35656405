"""What instances and agents processes say of themselves to their site's service: in their hello and in heartbeats.

The service works with it, and no process may end its service: a hello that does not fit is refused, and the process
learns why; a heartbeat that does not fit is refused and counted, and what the one before said still holds. Further
fields are allowed; the controller gets those that it knows (`heartbeats.passed_on`).
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from scheduler.cost.decode import StepCurve
from streamrl.protocol.heartbeats import MOST, Count, Duration, ProcessState, Tally
from streamrl.transport.endpoint import Speaker
from streamrl.transport.wire import MalformedMessage

MOST_SLOTS = 2**20
"""Number of requests that no instance has at once."""
MOST_WORKERS = 2**16
"""Most workers of an instance."""
MOST_BATCH = 2**31
"""Number that no batch size reaches."""
FASTEST_STEP_S, SLOWEST_STEP_S = 1e-9, 1e6
"""Seconds between which a decode step takes."""
MOST_RATIO = 1e6
"""Most by which a step time differs from that of its curve, up or down."""


class InstanceHello(msgspec.Struct, frozen=True):
    """The `meta` of an instance's hello."""

    slots: Annotated[int, Meta(ge=1, lt=MOST_SLOTS)]
    world_size: Annotated[int, Meta(ge=1, le=MOST_WORKERS)]
    curve: dict[str, Any]
    """Step times, in the form of `StepCurve.to_json`."""
    doubts: str
    process: Annotated[int, Meta(ge=1, le=MOST)]
    caches_prefixes: bool = False


class InstanceReport(ProcessState, frozen=True):
    """The state in an instance's heartbeat; `curve` is read where it is used (`curve_of`)."""

    pace: (
        tuple[
            Count,
            Annotated[float, Meta(ge=1 / MOST_RATIO, le=MOST_RATIO)],
            Annotated[float, Meta(gt=0, lt=MOST_BATCH)],
            Duration,
        ]
        | None
    ) = None
    """Fields of `generation.site.pace.Pace`."""
    doubtful: bool = False
    produced: dict[str, Tally] = msgspec.field(default_factory=dict)
    """Tokens of each request that runs."""


def curve_of(reported: object) -> StepCurve:
    """Return the step times that an instance has reported.

    Raises:
        ValueError: they are none, or no instance can have them.
    """
    curve = StepCurve.from_json(reported)
    if not can_work(curve):
        raise ValueError("step times that no instance can have")
    return curve


def can_work(curve: StepCurve) -> bool:
    """Return whether step times can be those of an instance."""
    return (
        all(batch < MOST_BATCH for batch in curve.batches)
        and all(FASTEST_STEP_S <= seconds < SLOWEST_STEP_S for seconds in curve.seconds)
        and max(curve.per_context_token, curve.per_prefill_token) < SLOWEST_STEP_S
    )


def wrong_with_hello(role: str, meta: dict[str, Any]) -> str | None:
    """Return why a process cannot be let in with what its hello says of it, or None; only instances say something."""
    if role != "instance":
        return None
    try:
        curve_of(msgspec.convert(meta, InstanceHello).curve)
    except ValueError as error:  # those of msgspec are, too
        return f"its hello does not fit: {error!s:.200}"
    return None


def read_report(speaker: Speaker, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state in a heartbeat to a site's service, as it is.

    Raises:
        MalformedMessage: a field has another type, or cannot be; the error names it.
    """
    try:
        msgspec.convert(state, InstanceReport if speaker.role == "instance" else ProcessState)
    except msgspec.ValidationError as error:
        raise MalformedMessage(f"state of {speaker.role}: {error}") from error
    return state
