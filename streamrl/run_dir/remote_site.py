"""A site behind a link in `status.json`: whether it is away, and what obstructs its link."""

from __future__ import annotations

from pydantic import Field

from streamrl.errors import ErrorCode
from streamrl.run_dir.status_model import StatusModel

ABSENT_AFTER_S = 10.0
"""Seconds of silence after which a site counts as away; it gets no new work while another site can take it."""


MANY_EMPTY = 3
"""Connections in a row without anything but a hello and its answer that count: a single one may have been cut."""


def obstacle(empty_connections: int) -> str:
    """Describe what lets small messages through a link, and no large ones; '': nothing does."""
    if empty_connections < MANY_EMPTY:
        return ""
    return ErrorCode.HANG.refer(
        f"{empty_connections} connections in a row broke after the hello: an MTU or a firewall on the way drops large "
        "packets, or the link is far slower than its bandwidth in the cluster file"
    )


class RemoteSite(StatusModel):
    """A generating site behind a link, as the controller sees it."""

    silent_s: float = Field(description="seconds since its service's last sign of life")
    rtt_ms: float | None = None
    clock_offset_s: float | None = Field(
        None, description="clock of the trainer's site minus that of the site, before correction"
    )
    samples_waiting: int = Field(0, description="samples finished there, but not yet committed here")
    compression: float | None = Field(None, description="raw bytes of samples per byte sent")
    congested: bool = False
    weights_refetched: int = Field(0, description="parts of weights that arrived damaged and were fetched again")
    controller_silent_s: float | None = Field(
        None,
        description="seconds for which it has heard nothing of the controller, as it said last; null: unknown",
    )
    publisher_silent_s: float | None = Field(
        None, description="seconds for which it has heard nothing over the link for weights (`port + 1`); null: unknown"
    )
    empty_connections: int = Field(
        0, description="connections in a row over which only the hello and its answer got through"
    )
    excluded: str = Field("", description="why it is not used any more; '': it is")
    left_s: float | None = Field(None, description="seconds since its service said goodbye; null: it is connected")
    absence_s: float | None = Field(
        None, description="seconds after its goodbye at which the run ends unless it is back; null: the run goes on"
    )

    @property
    def away(self) -> bool:
        """Whether the site is unreachable, or has said goodbye."""
        return self.left_s is not None or self.silent_s > ABSENT_AFTER_S

    @property
    def lacks_weights(self) -> bool:
        """Whether only the link for its weights is dead."""
        return not self.away and (self.publisher_silent_s or 0.0) > ABSENT_AFTER_S

    @property
    def is_deaf(self) -> bool:
        """Whether it is heard, and does not hear the controller."""
        return not self.away and (self.controller_silent_s or 0.0) > ABSENT_AFTER_S

    @property
    def absence(self) -> str:
        """How the site is away, for display; '': it is not."""
        if self.left_s is None:
            return f"no sign of it for {self.silent_s:.0f} s" if self.away else ""
        end = "" if self.absence_s is None else f"; the run ends if it is not back after {self.absence_s:.0f} s"
        return f"has said goodbye {self.left_s:.0f} s ago{end}"
