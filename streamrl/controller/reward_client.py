"""The client of the rewards processes: assigns samples to them and keeps track of open requests."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from streamrl.controller.group_source import group_of
from streamrl.protocol.controller_rewards import ScoreRequest
from streamrl.protocol.message import wire
from streamrl.rollouts.types import Group
from streamrl.rollouts.void import Void
from streamrl.transport.endpoint import Hub


@dataclass(frozen=True)
class JudgedSample:
    """A sample's reward, as a verifier or an agent gave it."""

    sample_id: str
    reward: float | None
    """Finite number; None: void."""
    void: Void | None
    """Why the reward is void; None: it is not."""
    traceback: str = ""
    """End of the traceback of what the reward function, or the agent, raised; '': it raised nothing."""


class Rewarders:
    """The rewards processes of the sites that are used."""

    def __init__(self, hub: Hub, sites: Mapping[str, str]) -> None:
        """Begin without any request; `sites` has the site of each process, by the process's name."""
        self.names = list(sites)
        """Processes that are asked."""
        self.excluded: set[str] = set()
        """Processes of sites that are not used any more."""
        self._sites, self._hub = dict(sites), hub
        self._open: defaultdict[str, dict[str, ScoreRequest]] = defaultdict(dict)
        """Open requests, by process and sample."""

    async def ask(self, group: Group, sample_id: str, text: str) -> None:
        """Request the score of a sample; samples of one group go to the same process."""
        order = ScoreRequest(sample_id=sample_id, task=group.task, completion=text, reward_input=group.reward_input)
        await self._ask(group.group_id, order)

    async def exclude(self, site: str) -> None:
        """Ask no process of a site any more, and others for what it has been asked; there must be others."""
        gone = {name for name in self.names if self._sites[name] == site}
        self.names = [name for name in self.names if name not in gone]
        self.excluded |= gone
        for order in [order for name in gone for order in self._open.pop(name, {}).values()]:
            await self._ask(group_of(order.sample_id), order)

    async def _ask(self, group_id: str, order: ScoreRequest) -> None:
        name = self.names[hash(group_id) % len(self.names)]
        self._open[name][order.sample_id] = order
        await self._send(name, order)

    def answered(self, name: str, sample_id: str) -> bool:
        """Record that a process has answered the request for a sample; return False if it had none."""
        return name in self._open and self._open[name].pop(sample_id, None) is not None

    async def returned(self, name: str) -> None:
        """Send a restarted process its open requests again."""
        for order in list(self._open[name].values()):
            await self._send(name, order)

    async def _send(self, name: str, order: ScoreRequest) -> None:
        with contextlib.suppress(KeyError):  # it is away, or leaves meanwhile: it gets the request when it reconnects
            await self._hub.send(name, *wire(order))
