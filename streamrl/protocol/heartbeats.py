"""The state that processes report with their heartbeats: what the controller reads of it, and of which types.

Further fields are allowed and ignored. A heartbeat that does not fit is refused and counted, so that no process can
break what is shown of the run.
"""

from __future__ import annotations

from typing import Any

import msgspec

from streamrl.transport.endpoint import Speaker
from streamrl.transport.wire import MalformedMessage


class ReportedWait(msgspec.Struct, frozen=True):
    """A wait of the process (`transport/deadlines.py`); times in seconds."""

    owner: str
    waiting_for: str
    since: float
    limit_s: float


class ProcessState(msgspec.Struct, frozen=True):
    """The state of any process."""

    state: str = "starting"
    detail: str = ""
    running: int | None = None
    waiting: int | None = None
    tokens_per_s: float | None = None
    weight_version: int | None = None
    busy_since: float | None = None
    stalled_s: float = 0.0
    dtype: str = ""
    dtype_why: str = ""
    packing: str = ""
    packing_why: str = ""
    waits: list[ReportedWait] = []


class UplinkState(msgspec.Struct, frozen=True):
    """The samples of a site that are on their way."""

    backlog_samples: int = 0
    compressing: bool = False
    ratio: float | None = None


class ServiceState(ProcessState, frozen=True):
    """The state of a service and of its site's instances; any other process has none of these fields."""

    instances: dict[str, ProcessState] = {}
    uplink: UplinkState = UplinkState()
    congested: bool = False
    rtt_s: float | None = None
    clock_offset_s: float | None = None
    weights_refetched: int = 0


def check_state(speaker: Speaker, state: dict[str, Any]) -> None:
    """Check the state in a heartbeat to the controller.

    Raises:
        MalformedMessage: a field has another type; the error names it.
    """
    try:
        msgspec.convert(state, ServiceState)
    except msgspec.ValidationError as error:
        raise MalformedMessage(f"state of {speaker.role}: {error}") from error
