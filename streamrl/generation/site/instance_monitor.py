"""Who of a site's instances has died, who is silent, who is back, and who is slow."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from scheduler.dispatch.straggler import SlowWatch
from streamrl.generation.site.instance_life import InstanceLife, Life

if TYPE_CHECKING:
    from streamrl.generation.site.fleet import SiteFleet

log = logging.getLogger(__name__)

WATCH_S = 0.2
"""Between two looks at what the launcher says of processes, and at who is silent."""
HEARD = (Life.STALE, Life.READY, Life.SUSPECT, Life.DRAINING)
"""These have said hello, and tell every second that they are there."""


class InstanceWatch:
    """Looks, and has the fleet do what follows."""

    def __init__(self, fleet: SiteFleet) -> None:
        self.fleet = fleet
        self.slow = SlowWatch()
        self._paces: dict[str, tuple[int, float]] = {}
        """(Number, ratio) that each instance has told last."""
        self._heard_at: dict[str, float] = {}
        """When silent ones that have requests to give up were heard again, monotonic seconds."""

    async def run(self) -> None:
        """Until cancelled.

        Raises:
            RunFailed: no instance is left, and none can be started again.
        """
        fleet = self.fleet
        while True:
            await asyncio.sleep(WATCH_S)
            ended = fleet.ended()
            for life in list(fleet.lives.values()):
                if life.name in ended and life.state not in (Life.DEAD, Life.GONE):
                    await fleet.died(life, ended[life.name])
                elif life.state in HEARD and life.name in fleet.hub.peers:
                    await self._listen(life, fleet.hub.silent_for(life.name), time.monotonic())
            await self._compare()

    def forget(self, name: str) -> None:
        """An instance is another process, or begins anew."""
        self.slow.forget(name)
        self._heard_at.pop(name, None)

    async def _listen(self, life: InstanceLife, silent_s: float, now: float) -> None:
        """One that has been silent for a moment has nothing any more: others have; if it goes on, it is taken for
        dead. Once it is heard, and has given up what it had, it is taken back. One that speaks while its engine makes
        nothing of what it has is taken for dead, too."""
        fleet, name = self.fleet, life.name
        stalled_s = float(fleet.hub.peers[name].state.get("stalled_s", 0.0))
        if silent_s > fleet.limits.heartbeat_s:
            await fleet.died(life, f"{name} was silent for {silent_s:.0f} s")
        elif stalled_s > fleet.limits.heartbeat_s and life.state is Life.READY:
            await fleet.died(life, f"{name} has made no token for {stalled_s:.0f} s of the requests that it runs")
        elif silent_s > fleet.recovery.suspect_s:
            self._heard_at.pop(name, None)
            await fleet.give_up(life)
        elif life.can("heard"):
            if not fleet.dispatcher.owes(name):
                self._heard_at.pop(name, None)
                await fleet.take_back(life)
            elif now - self._heard_at.setdefault(name, now) > fleet.limits.heartbeat_s:
                await fleet.died(life, f"{name} was silent, and does not give up what others go on with")

    async def _compare(self) -> None:
        """Those whose steps take longer than their curves say, by more than those of others, get less."""
        fleet = self.fleet
        for name in fleet.ready:
            told = fleet.hub.peers[name].state.get("pace") if name in fleet.hub.peers else None
            if told and self._paces.get(name) != tuple(told):
                self._paces[name] = number, ratio = int(told[0]), float(told[1])
                if number > 1:  # the first one has the first prompts in it
                    self.slow.heard(name, ratio)
        for name, factor in self.slow.changed(fleet.ready).items():
            log.warning("%s is %.1f times as slow as the others", name, factor)
            await fleet.dispatcher.slow(name, factor)
