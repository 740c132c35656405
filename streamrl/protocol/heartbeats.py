"""The state that processes report with their heartbeats: what the controller reads of it, and of which types.

Further fields are allowed and left out. A heartbeat that does not fit is refused and counted, so that no process can
break what is shown of the run. Texts that are only shown are cut instead: a long one of one instance must not cost its
whole site the heartbeat. They are made fit to be shown as it arrives, since the status is written twice a second.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from streamrl.rollouts.plain_text import shown
from streamrl.transport.endpoint import Speaker
from streamrl.transport.refusals import RefusalCause
from streamrl.transport.wire import MAX_NAME, MalformedMessage

MOST = 10**12
"""Largest number that is read: no count, rate, time or duration in seconds comes near, and sums of many stay finite."""
MOST_TEXT = 20_000
"""Characters that are kept of a text."""
MOST_ENTRIES = 10_000
"""Most instances of a site, and most waits of a process."""
MOST_WAITS, MOST_OF_A_WAIT = 1_000, 1_000
"""Waits that are kept of a heartbeat, and characters of each of their texts; the rest is left out."""
MOST_REFUSED = 1_000
"""Most peers for each cause of its refusals."""
MOST_PASSED_ON = 2**21
"""Bytes of all texts that a site's service passes on: half of what a heartbeat may have."""

Count = Annotated[int, Meta(ge=-MOST, le=MOST)]
Number = Annotated[float, Meta(ge=-MOST, le=MOST)]
"""A finite number: neither bound lets NaN through."""
Duration = Annotated[float, Meta(ge=0, le=MOST)]
Tally = Annotated[int, Meta(ge=0, le=MOST)]


class ReportedWait(msgspec.Struct, frozen=True):
    """A wait of the process (`transport/deadlines.py`); times in seconds."""

    owner: str
    waiting_for: str
    since: Number
    limit_s: Number


class ProcessState(msgspec.Struct, frozen=True):
    """The state of any process."""

    state: str = "starting"
    detail: str = ""
    running: Count | None = None
    waiting: Count | None = None
    tokens_per_s: Number | None = None
    weight_version: Count | None = None
    busy_since: Number | None = None
    stalled_s: Duration = 0.0
    dtype: str = ""
    dtype_why: str = ""
    packing: str = ""
    packing_why: str = ""
    drafts: str = ""
    """Accepted and drafted tokens by kind of drafts, of an instance that speculates."""
    waits: Annotated[list[ReportedWait], Meta(max_length=MOST_ENTRIES)] = []
    refused: dict[RefusalCause, Annotated[dict[str, Tally], Meta(max_length=MOST_REFUSED)]] = {}
    """What its hubs and links have refused, by cause and peer."""
    silent_s: Duration | None = None
    """Seconds since its service has heard an agents process; None: it has not, or this is another process."""
    session: Annotated[str, Meta(max_length=MAX_NAME)] = ""
    """Session of an agents process."""


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
    controller_silent_s: Duration | None = None
    """Seconds since it has heard the controller, as it is heard itself; None: it is at the trainer's site."""
    publisher_silent_s: Duration | None = None
    """Seconds since it has heard the trainer's publisher; None: it is at the trainer's site, or not connected yet."""
    empty_connections: Count = 0
    """Its connections to the controller or the publisher, in a row, over which only its hello was answered."""


FIELDS = frozenset(one.name for one in msgspec.structs.fields(ProcessState))
TEXTS = tuple(one.name for one in msgspec.structs.fields(ProcessState) if isinstance(one.default, str))


def read_state(speaker: Speaker, state: dict[str, Any]) -> dict[str, Any]:
    """Return what is kept of the state in a heartbeat to the controller: all fields of `ServiceState`, fit to show.

    Raises:
        MalformedMessage: a field has another type, or is too large; the error names it.
    """
    try:
        found: dict[str, Any] = msgspec.to_builtins(msgspec.convert(state, ServiceState))
    except msgspec.ValidationError as error:
        raise MalformedMessage(f"state of {speaker.role}: {error}") from error
    room = MOST_WAITS
    for process in (found, *found["instances"].values(), *found["agents"].values()):
        process |= {name: shown(process[name][:MOST_TEXT]) for name in TEXTS}
        process["waits"] = [_shown_wait(wait) for wait in process["waits"][:room]]
        room -= len(process["waits"])
        process["refused"] = {
            cause: {shown(peer[:MAX_NAME]): count for peer, count in counts.items()}
            for cause, counts in process["refused"].items()
        }
    return found


def passed_on(states: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what a site's service tells the controller of its processes, by their names.

    No state that the service takes can make the controller refuse the whole site's heartbeat: fields that the
    controller doesn't know are left out, and texts are cut to a length at which all of them fit in together.

    Args:
        states: their own states, each of which is a `ProcessState`.
    """
    told = {name: {key: state[key] for key in FIELDS & state.keys()} for name, state in states.items()}
    waits_left, refused_left = MOST_WAITS, MOST_REFUSED
    for process in told.values():
        if waits := process.get("waits"):
            process["waits"] = [
                {key: wait[key] for key in ReportedWait.__struct_fields__} for wait in waits[:waits_left]
            ]
            waits_left -= len(process["waits"])
        if refused := process.get("refused"):
            process["refused"] = kept = {}
            for cause, counts in refused.items():
                kept[cause] = {peer[:MAX_NAME]: count for peer, count in itertools.islice(counts.items(), refused_left)}
                refused_left -= len(kept[cause])
    for most in (MOST_TEXT, MOST_OF_A_WAIT, 100, 10):
        for process in told.values():
            process |= {key: process[key][:most] for key in process.keys() & TEXTS}
            for wait in process.get("waits", ()):
                wait |= {key: wait[key][:most] for key in ("owner", "waiting_for")}
        if sum(map(_text_bytes, told.values())) <= MOST_PASSED_ON:
            break
    return told


def _text_bytes(process: dict[str, Any]) -> int:
    waits = (wait[key] for wait in process.get("waits", ()) for key in ("owner", "waiting_for"))
    return sum(len(text.encode()) for text in (*(process[key] for key in process.keys() & TEXTS), *waits))


def _shown_wait(wait: dict[str, Any]) -> dict[str, Any]:
    return wait | {name: shown(wait[name][:MOST_OF_A_WAIT]) for name in ("owner", "waiting_for")}
