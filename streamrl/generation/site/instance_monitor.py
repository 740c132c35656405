"""Monitoring of a site's instances: finds those that have died, are silent, are heard again, or are slow."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque

from scheduler.cost.decode import StepCurve
from scheduler.dispatch.straggler import STRETCHES, SlowWatch
from streamrl.generation.site.fleet_view import FleetView
from streamrl.generation.site.instance_life import InstanceLife, Life
from streamrl.generation.site.pace import Pace

log = logging.getLogger(__name__)

WATCH_S = 0.2
"""Seconds between two checks of the launcher's process list and of the instances' heartbeats."""
HEARD = (Life.STALE, Life.READY, Life.SUSPECT, Life.DRAINING)
"""States in which an instance has connected and sends a heartbeat every second."""


class InstanceWatch:
    """Periodic check of all instances; the fleet acts on what it finds."""

    def __init__(self, fleet: FleetView) -> None:
        self.fleet = fleet
        self.slow = SlowWatch()
        self._newest: dict[str, Pace] = {}
        """The newest pace that each instance has reported."""
        self._stretches: dict[str, deque[Pace]] = {}
        """The newest of them, since it joined."""
        self._heard_at: dict[str, float] = {}
        """When a silent instance that still has requests to release was heard again, monotonic seconds, by name."""

    async def run(self) -> None:
        """Watch the instances until cancelled.

        Raises:
            RunFailed: no instance is left, and none may be restarted.
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
        """Forget an instance's pace and silence, because it is another process or has just joined."""
        self.slow.forget(name)
        self._stretches.pop(name, None)
        self._heard_at.pop(name, None)

    async def _listen(self, life: InstanceLife, silent_s: float, now: float) -> None:
        """Give up a silent instance, readmit one that is heard again, and declare one dead.

        A short silence hands an instance's requests to others; a long one counts as death. An instance that is heard
        again is readmitted once it has released what it had. One that sends heartbeats while its engine produces no
        token of its running requests counts as dead, too.
        """
        fleet, name = self.fleet, life.name
        stalled_s = float(fleet.hub.peers[name].state.get("stalled_s", 0.0))
        if silent_s > fleet.limits.heartbeat_s:
            await fleet.died(life, f"{name} was silent for {silent_s:.0f} s")
        elif stalled_s > fleet.limits.heartbeat_s and life.state is Life.READY:
            await fleet.died(life, f"{name} is running requests but has produced no token for {stalled_s:.0f} s")
        elif silent_s > fleet.recovery.suspect_s:
            self._heard_at.pop(name, None)
            await fleet.give_up(life)
        elif life.can("heard"):
            if not fleet.dispatcher.owes(name):
                self._heard_at.pop(name, None)
                await fleet.take_back(life)
            elif now - self._heard_at.setdefault(name, now) > fleet.limits.heartbeat_s:
                why = f"{name} was heard again after a silence, but did not release the requests that others continue"
                await fleet.died(life, why)

    async def _compare(self) -> None:
        """Give less work to instances whose steps exceed what plans expect by more than those of the others do.

        Plans use the curve of an instance's kind (`step_curves.FleetCurves`); it compares its steps with its own. The
        plans' curves change, and then all stretches are compared with the new ones.
        """
        fleet = self.fleet
        for name in fleet.ready:
            peer = fleet.hub.peers.get(name)
            reported = peer.state.get("pace") if peer is not None else None
            if peer is None or not reported:
                continue
            stretches, newest = self._stretches.setdefault(name, deque(maxlen=STRETCHES)), Pace(*reported)
            # the first stretch includes the prefill of the first prompts
            if newest.number > 1 and self._newest.get(name) != newest:
                stretches.append(newest)
            self._newest[name] = newest
            if len(stretches) == STRETCHES:
                own, planned = StepCurve.from_json(peer.meta["curve"]), fleet.dispatcher.curve_of(name)
                for stretch in stretches:
                    self.slow.heard(name, stretch.on(own, planned or own))
        for name, factor in self.slow.changed(fleet.ready).items():
            log.warning("%s is %.1f times as slow as the others", name, factor)
            await fleet.dispatcher.slow(name, factor)
