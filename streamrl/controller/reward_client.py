"""The client of the rewards processes: assigns samples to them and keeps track of open requests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

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


class Rewarders:
    """The rewards processes of all sites."""

    def __init__(self, hub: Hub, names: Sequence[str]) -> None:
        self.names = list(names)
        self._hub = hub
        self._open: defaultdict[str, dict[str, ScoreRequest]] = defaultdict(dict)
        """Open requests, by process and sample."""

    async def ask(self, group: Group, sample_id: str, text: str) -> None:
        """Request the score of a sample; samples of one group go to the same process."""
        name = self.names[hash(group.group_id) % len(self.names)]
        order = ScoreRequest(sample_id=sample_id, task=group.task, completion=text, reward_input=group.reward_input)
        self._open[name][sample_id] = order
        await self._send(name, order)

    def answered(self, name: str, sample_id: str) -> bool:
        """Record that a process has answered the request for a sample; return False if it had none."""
        return name in self._open and self._open[name].pop(sample_id, None) is not None

    async def returned(self, name: str) -> None:
        """Send a restarted process its open requests again."""
        for order in list(self._open[name].values()):
            await self._send(name, order)

    async def _send(self, name: str, order: ScoreRequest) -> None:
        if name in self._hub.peers:  # otherwise it gets the request when it reconnects
            await self._hub.send(name, *wire(order))
