"""The state that processes report with their heartbeats: what the controller reads of it, and of which types.

Further fields are allowed and ignored. A heartbeat that does not fit is refused and counted, so that no process can
break what is shown of the run.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from streamrl.transport.endpoint import Speaker
from streamrl.transport.refusals import RefusalCause
from streamrl.transport.wire import MalformedMessage

MOST = 10**12
"""Largest number that is read: no count, rate, time or duration in seconds comes near, and sums of many stay finite."""
MOST_TEXT = 20_000
"""Most characters of a text."""
MOST_ENTRIES = 10_000
"""Most instances of a site, and most waits of a process."""
MOST_REFUSED = 1_000
"""Most peers for each cause of its refusals."""

Count = Annotated[int, Meta(ge=-MOST, le=MOST)]
Number = Annotated[float, Meta(ge=-MOST, le=MOST)]
"""A finite number: neither bound lets NaN through."""
Duration = Annotated[float, Meta(ge=0, le=MOST)]
Tally = Annotated[int, Meta(ge=0, le=MOST)]
Text = Annotated[str, Meta(max_length=MOST_TEXT)]


class ReportedWait(msgspec.Struct, frozen=True):
    """A wait of the process (`transport/deadlines.py`); times in seconds."""

    owner: Text
    waiting_for: Text
    since: Number
    limit_s: Number


class ProcessState(msgspec.Struct, frozen=True):
    """The state of any process."""

    state: Text = "starting"
    detail: Text = ""
    running: Count | None = None
    waiting: Count | None = None
    tokens_per_s: Number | None = None
    weight_version: Count | None = None
    busy_since: Number | None = None
    stalled_s: Duration = 0.0
    dtype: Text = ""
    dtype_why: Text = ""
    packing: Text = ""
    packing_why: Text = ""
    waits: Annotated[list[ReportedWait], Meta(max_length=MOST_ENTRIES)] = []
    refused: dict[RefusalCause, Annotated[dict[Text, Tally], Meta(max_length=MOST_REFUSED)]] = {}
    """What its hubs and links have refused, by cause and peer."""


class UplinkState(msgspec.Struct, frozen=True):
    """The samples of a site that are on their way."""

    backlog_samples: Count = 0
    compressing: bool = False
    ratio: Duration | None = None


class ServiceState(ProcessState, frozen=True):
    """The state of a service and of its site's instances; any other process has none of these fields."""

    instances: Annotated[dict[str, ProcessState], Meta(max_length=MOST_ENTRIES)] = {}
    agents: Annotated[dict[str, ProcessState], Meta(max_length=1)] = {}
    """The site's agents process; {}: the run has no agents, or it is away."""
    uplink: UplinkState = UplinkState()
    congested: bool = False
    rtt_s: Number | None = None
    clock_offset_s: Number | None = None
    weights_refetched: Count = 0
    publisher_silent_s: Duration | None = None
    """Seconds since it has heard the trainer's publisher; None: it is at the trainer's site, or not connected yet."""


def check_state(speaker: Speaker, state: dict[str, Any]) -> None:
    """Check the state in a heartbeat to the controller.

    Raises:
        MalformedMessage: a field has another type, or is too large; the error names it.
    """
    try:
        msgspec.convert(state, ServiceState)
    except msgspec.ValidationError as error:
        raise MalformedMessage(f"state of {speaker.role}: {error}") from error
