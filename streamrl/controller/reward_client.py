"""The client of the rewards processes: assigns samples to them and keeps track of open requests."""

from __future__ import annotations

import asyncio
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
class SampleReward:
    """A sample's reward, as a verifier or an agent gave it."""

    sample_id: str
    reward: float | None
    """Finite number; None: void."""
    void: Void | None
    """Why the reward is void; None: it is not."""
    traceback: str = ""
    """End of the traceback of what the reward function, or the agent, raised; '': it raised nothing."""


class Rewarders:
    """The rewards processes of the sites that are used.

    Each has a queue of its own: while its site is away, or it has no credit, the others go on, and so does the run.
    """

    def __init__(self, hub: Hub, sites: Mapping[str, str]) -> None:
        """Begin without any request; `sites` has the site of each process, by the process's name."""
        self.names = list(sites)
        """Processes that are asked."""
        self.excluded: set[str] = set()
        """Processes of sites that are not used any more."""
        self._sites, self._hub = dict(sites), hub
        self._open: defaultdict[str, dict[str, ScoreRequest]] = defaultdict(dict)
        """Open requests, by process and sample."""
        self._waiting: dict[str, asyncio.Queue[ScoreRequest]] = {name: asyncio.Queue() for name in sites}
        """Requests to be sent, by process."""
        self._sending: dict[str, asyncio.Task[None]] = {}
        """Tasks that send them, by process."""

    def start(self) -> None:
        """Begin to send, until the hub is closed; what fails in that is raised by the hub's `receive`."""
        for name in self.names:
            self._sending[name] = self._hub.beside(self._send(name))

    def ask(self, group: Group, sample_id: str, text: str) -> None:
        """Request the score of a sample; samples of one group go to the same process."""
        order = ScoreRequest(sample_id=sample_id, task=group.task, completion=text, reward_input=group.reward_input)
        self._ask(group.group_id, order)

    def exclude(self, site: str) -> None:
        """Ask no process of a site any more, and others for what it has been asked; there must be others."""
        gone = {name for name in self.names if self._sites[name] == site}
        self.names = [name for name in self.names if name not in gone]
        self.excluded |= gone
        for name in gone:
            del self._waiting[name]
            if (sending := self._sending.pop(name, None)) is not None:
                sending.cancel()  # it may wait for a credit, and that nobody gives one must not end the run any more
        for order in [order for name in gone for order in self._open.pop(name, {}).values()]:
            self._ask(group_of(order.sample_id), order)

    def _ask(self, group_id: str, order: ScoreRequest) -> None:
        name = self.names[hash(group_id) % len(self.names)]
        self._open[name][order.sample_id] = order
        self._waiting[name].put_nowait(order)

    def answered(self, name: str, sample_id: str) -> bool:
        """Record that a process has answered the request for a sample; return False if it had none."""
        return name in self._open and self._open[name].pop(sample_id, None) is not None

    def returned(self, name: str) -> None:
        """Send a restarted process its open requests again."""
        waiting = self._waiting[name]
        while not waiting.empty():  # those are open, too
            waiting.get_nowait()
        for order in self._open[name].values():
            waiting.put_nowait(order)

    async def _send(self, name: str) -> None:
        """Send a process its requests, one after the other.

        Raises:
            DeadlineExpired: see `Hub.send`.
        """
        waiting = self._waiting[name]
        while True:
            order = await waiting.get()
            if order.sample_id in self._open[name]:  # an earlier life of the process may have answered it
                with contextlib.suppress(KeyError):  # it is away, or leaves meanwhile: it gets it when it reconnects
                    await self._hub.send(name, *wire(order))
