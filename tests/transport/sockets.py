"""What the tests with real sockets share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import zmq

from streamrl.errors import RunFailed
from streamrl.transport.curve import ClientSecurity, KeyPair, ServerSecurity
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Hub, Link
from tests.ports import free_port
from tests.waiting import scaled
from tests.waiting import until as until


def run(body: Callable[[], Awaitable[Any]]) -> Any:
    """Runs a test's body, for half a minute at most on an idle machine."""

    async def limited() -> Any:
        async with asyncio.timeout(scaled(30)):
            return await body()

    return asyncio.run(limited())


async def bind_again(hub: Callable[[], Hub]) -> Hub:
    """Return a hub at the address of one that was closed: libzmq gives the address back a moment later."""

    def again() -> Hub | None:
        with contextlib.suppress(RunFailed):
            return hub()
        return None

    bound = await until(again)
    assert isinstance(bound, Hub)
    return bound


def new_key() -> KeyPair:
    return KeyPair(*zmq.curve_keypair())


class Sites:
    """Keys of a home site with a hub, and of two others."""

    def __init__(self) -> None:
        self.home, self.east, self.west = new_key(), new_key(), new_key()
        self.port = free_port()
        self.address = f"tcp://127.0.0.1:{self.port}"

    def hub(self, **options: Any) -> Hub:
        security = ServerSecurity(self.home, {self.east.public: "east", self.west.public: "west"})
        return Hub("home-hub", WaitRegistry("hub"), **options).bind_outside(self.address, security)

    def as_client(self, own: KeyPair) -> ClientSecurity:
        return ClientSecurity(own, self.home.public)


def link(name: str, site: str | None = None, **options: Any) -> Link:
    return Link(name, "test", WaitRegistry(name), {"site": site} if site else {}, **options)
