"""What the controller makes of a process that has come back."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

from streamrl.controller.reconnect import Recovery


def test_hellos_of_lives_that_are_over_are_left_out() -> None:
    """A service that restarts twice before its hellos are read gets its work once."""
    hub: Any = SimpleNamespace(peers={"service-far": SimpleNamespace(session="first")})
    services: Any = SimpleNamespace(names=["service-far"])
    other: Any = None
    recovery = Recovery(hub, services, *[other] * 6, seed=0)
    recovery._replay_to_service = replayed = AsyncMock()  # type: ignore[method-assign]
    hub.peers["service-far"].session = "third"
    for session in ("second", "third", "third"):
        asyncio.run(recovery.hello("service-far", session))
    replayed.assert_awaited_once_with("service-far")
