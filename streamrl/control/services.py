"""The generation services of all sites as one: groups go out, weights spread, devices change hands."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from scheduler.simulator import SimulatedInstance
from streamrl.config.run import RunConfig
from streamrl.control.prompts import SampleDraw
from streamrl.generation.messages import fleet_from_wire, groups_to_wire
from streamrl.rollouts.types import Group
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Hub

WEIGHTS, SLEEP = "weights", "sleep"
"""Names of what is waited for."""


class Services:
    """See the module's text."""

    def __init__(self, hub: Hub, waits: WaitRegistry, names: Sequence[str], run: RunConfig) -> None:
        self.names = list(names)
        self.version = -1
        """Newest weights that every instance serves."""
        self.coming: int | None = None
        """Version that is on its way to the instances."""
        self._hub, self._waits = hub, waits
        self._weights_s = run.deadlines.weights_s
        self._update_s = self._weights_s
        if run.schedule.on_update == "wait":
            self._update_s += run.deadlines.generation_s
        self._ready: set[str] = set()
        """Those whose instances serve the coming version."""
        self._asleep: set[str] = set()
        """Those whose instances have left their devices to the trainer."""
        self._sent = 0

    async def tell(self, kind: str, body: dict[str, Any]) -> None:
        """Sends all of them the same."""
        for name in self.names:
            await self._hub.send(name, kind, body)

    async def generate(
        self, groups: Sequence[Group], samples: Sequence[Sequence[SampleDraw]], budget: int | None = None
    ) -> None:
        """Deals groups out.

        Args:
            groups: any number.
            samples: the completions wanted of each.
            budget: tokens after which a sample is parked; None: it runs to its end.
        """
        now = time.time()
        for number, name in enumerate(self.names):
            mine = slice(number, None, len(self.names))
            await self._hub.send(name, "generate", *groups_to_wire(groups[mine], samples[mine], now, budget))

    async def spread(self, made: dict[str, Any]) -> bool:
        """A version is made: it goes to every instance, while everything else goes on.

        Args:
            made: the trainer's `number`, `content_hash` and `bytes`.

        Returns:
            Whether it is there already: the trainer itself has brought it (NCCL).
        """
        self.coming, self._ready = int(made["number"]), set()
        self._sent += int(made["bytes"]) * len(self.names)
        if not made["content_hash"]:
            self._served()
            return True
        self._waits.begin(WEIGHTS, f"weights {self.coming} to reach {', '.join(self.names)}", self._update_s)
        await self.tell("weights", {key: made[key] for key in ("number", "content_hash")})
        return False

    def ready(self, name: str) -> bool:
        """A service's instances serve the coming version; whether now all do."""
        self._ready.add(name)
        if self._ready != set(self.names):
            return False
        self._served()
        return True

    def _served(self) -> None:
        assert self.coming is not None
        self._waits.end(WEIGHTS)
        self.version, self.coming = self.coming, None
        self._asleep.clear()  # new weights wake instances up

    def bytes_sent(self) -> int:
        """Of weights, since the last call."""
        sent, self._sent = self._sent, 0
        return sent

    async def leave_devices(self) -> bool:
        """Whether all instances have left their devices to the trainer; asks them to. Nothing may be running."""
        if self._asleep == set(self.names):
            return True
        if SLEEP not in self._waits.begun:
            self._waits.begin(SLEEP, f"{', '.join(self.names)} to leave their devices", self._weights_s)
            await self.tell("sleep", {})
        return False

    def asleep(self, name: str) -> None:
        """A service's instances have left their devices."""
        self._asleep.add(name)
        if self._asleep == set(self.names):
            self._waits.end(SLEEP)

    def fleet(self) -> list[SimulatedInstance]:
        """All instances, as their services have told."""
        return [i for name in self.names for i in fleet_from_wire(self._hub.peers[name].meta["fleet"])]

    def busy_since(self) -> dict[str, float]:
        """Since when each busy instance has had something to do, as the last heartbeats told (unix seconds)."""
        states = [self._hub.peers[name].state.get("instances", {}) for name in self.names]
        return {name: s["busy_since"] for some in states for name, s in some.items() if s.get("busy_since")}
