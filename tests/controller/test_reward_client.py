"""Requests to rewards processes, which come and go."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from streamrl.controller.reward_client import Rewarders
from streamrl.rollouts.types import Group

GROUP = Group("g", 1, 0, "p", "t", 0, "", np.arange(3, dtype=np.int32), 2)


class Leaving:
    """A hub whose peer says goodbye while the request for a sample waits for its credit."""

    def __init__(self, at: str) -> None:
        self.peers: dict[str, object] = {"rewards-home": None}
        self.at = at
        self.sent: list[str] = []

    async def send(self, peer: str, kind: str, body: dict[str, Any]) -> None:
        if body["sample_id"] == self.at:
            self.peers.pop(peer, None)
        if peer not in self.peers:
            raise KeyError(peer)
        self.sent.append(body["sample_id"])


def test_a_process_that_leaves_before_it_takes_a_request_gets_it_when_it_is_back() -> None:
    hub = Leaving("g.001")
    rewarders = Rewarders(hub, {"rewards-home": "home"})  # type: ignore[arg-type]

    async def ask() -> None:
        for number in range(3):
            await rewarders.ask(GROUP, f"g.00{number}", "4")
        assert hub.sent == ["g.000"]
        assert rewarders.answered("rewards-home", "g.000")
        hub.peers["rewards-home"], hub.at = None, ""
        await rewarders.returned("rewards-home")

    asyncio.run(ask())
    assert hub.sent == ["g.000", "g.001", "g.002"]
