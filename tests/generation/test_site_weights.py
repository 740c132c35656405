"""The source of a site's weights when the relay of another site cannot be used."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from streamrl.errors import RestartNeeded, RunFailed
from streamrl.generation.site import site_weights
from streamrl.generation.site.site_weights import SiteWeights
from streamrl.runtime.site_connections import connect_relay
from streamrl.transport.curve import ClientSecurity, make_keys
from streamrl.transport.deadlines import WaitRegistry, never
from streamrl.transport.endpoint import Hub, Link
from streamrl.transport.endpoint_base import PeerLost
from streamrl.weights.site_relay import NotPublished
from streamrl.weights.version_store import NoRoom
from tests.ports import free_port
from tests.transport.sockets import bind_again
from tests.waiting import scaled, until
from tests.weights.world import Policy, RecordingPublisher, World, in_world

SOON_S = 0.05
"""Limit of a wait that never ends."""
Connect = Callable[[Any, Link, str], Awaitable[None]]


def unreachable(folder: Path) -> Connect:
    """Nobody listens, and the site does not wait as long as the connection would."""

    async def connect(_: Any, link: Link, site: str) -> None:
        await link.connect(f"tcp://127.0.0.1:{free_port()}", scaled(1000))

    return connect


def refused(folder: Path) -> Connect:
    """The relay does not admit this site."""

    async def connect(_: Any, link: Link, site: str) -> None:
        hub = Hub("relay-other", WaitRegistry("other"))
        hub.admit_inside = lambda *_: "other files"
        address = f"tcp://127.0.0.1:{free_port()}"
        hub.bind(address)
        try:
            await link.connect(address, scaled(10))
        finally:
            await hub.close()

    return connect


def without_key(folder: Path) -> Connect:
    """The relay's public key is not here."""

    async def connect(_: Any, link: Link, site: str) -> None:
        make_keys(folder, "here")
        context: Any = SimpleNamespace(client_security=lambda site: ClientSecurity.load(folder, "here", site))
        await connect_relay(context, link, site)

    return connect


@pytest.mark.parametrize("how", [unreachable, refused, without_key])
@pytest.mark.parametrize("left_out_s", [0.0, site_weights.LEFT_OUT_S])
def test_a_relay_that_cannot_be_used_is_left_out_for_a_while_and_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Callable[[Path], Connect], left_out_s: float
) -> None:
    async def body(world: World) -> None:
        links: list[Link] = []

        def to_relay(*_: object) -> Link:
            links.append(Link("site", "relay", WaitRegistry("service")))
            return links[-1]

        home = await world.relay("site", "raw")
        monkeypatch.setattr(site_weights, "make_relay", lambda *_: home)
        monkeypatch.setattr(site_weights, "to_home", lambda *_: None)
        monkeypatch.setattr(site_weights, "to_relay", to_relay)
        monkeypatch.setattr(site_weights, "connect_relay", how(tmp_path))
        monkeypatch.setattr(site_weights, "LEFT_OUT_S", left_out_s)
        monkeypatch.setattr(site_weights, "SOURCE_S", SOON_S if how is unreachable else scaled(60))
        context: Any = SimpleNamespace(addresses=SimpleNamespace(relay_outside=None))
        site, policy = SiteWeights(context, WaitRegistry("service")), Policy()
        for tried in (1, 1 if left_out_s else 2):
            manifest, buffer = policy.step()
            await world.publisher.publish(manifest, buffer)
            found = await site.fetch(manifest.version.number, manifest.version.content_hash, "other")
            assert found == (manifest.version, None)
            assert len(links) == tried
        assert all(link._socket.closed for link in links)

    in_world(tmp_path, body)


def test_a_relay_that_does_not_have_a_version_in_time_is_asked_for_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(world: World) -> None:
        asked: list[int] = []

        class Slow:
            link = Link("site", "relay", WaitRegistry("service"))
            since_progress = never()

            async def fetch(self, number: int, content_hash: str) -> None:
                asked.append(number)
                raise NotPublished("not yet", (number - 1,))

        home = await world.relay("site", "raw")
        monkeypatch.setattr(site_weights, "make_relay", lambda *_: home)
        monkeypatch.setattr(site_weights, "to_home", lambda *_: None)
        monkeypatch.setattr(site_weights, "SOURCE_S", SOON_S)
        context: Any = SimpleNamespace(addresses=SimpleNamespace(relay_outside=None))
        site, policy = SiteWeights(context, WaitRegistry("service")), Policy()
        site._others["other"] = Slow()  # type: ignore[assignment]
        for _ in range(2):
            manifest, buffer = policy.step()
            await world.publisher.publish(manifest, buffer)
            found = await site.fetch(manifest.version.number, manifest.version.content_hash, "other")
            assert found == (manifest.version, None)
        assert set(asked) == {1, 2}
        await Slow.link.close()

    in_world(tmp_path, body)


def test_a_relay_that_fails_to_send_a_version_that_it_has_is_not_asked_for_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(world: World) -> None:
        asked: list[int] = []

        class Failing:
            link = Link("site", "relay", WaitRegistry("service"))
            since_progress = never()

            async def fetch(self, number: int, content_hash: str) -> None:
                asked.append(number)
                raise NotPublished("sending it failed", (number,))

        home = await world.relay("site", "raw")
        monkeypatch.setattr(site_weights, "make_relay", lambda *_: home)
        monkeypatch.setattr(site_weights, "to_home", lambda *_: None)
        context: Any = SimpleNamespace(addresses=SimpleNamespace(relay_outside=None))
        site = SiteWeights(context, WaitRegistry("service"))
        site._others["other"] = Failing()  # type: ignore[assignment]
        manifest, buffer = Policy().step()
        await world.publisher.publish(manifest, buffer)
        found = await site.fetch(manifest.version.number, manifest.version.content_hash, "other")
        assert found == (manifest.version, None)
        assert asked == [1]
        await Failing.link.close()

    in_world(tmp_path, body)


async def restart(world: World) -> None:
    """Kill a world's publisher, and start one that has no versions yet."""
    world.serving.cancel()
    await world.hub._stop()  # without a goodbye
    for door in world.hub._doors:
        door.socket.close(0)
    world.hub = await bind_again(lambda: Hub("publisher", WaitRegistry("restarted")).bind(world.address))
    world.publisher = RecordingPublisher(world.hub, lambda peer: 3000)
    world.serving = asyncio.create_task(world.publisher.serve())


async def site_of(home: World, near: World, monkeypatch: pytest.MonkeyPatch) -> SiteWeights:
    """A site that can fetch from the trainer's site and from a nearer one, with links of their own."""
    relay = await home.relay("site", "raw")

    async def connect(_: Any, link: Link, source: str) -> None:
        await link.connect(near.address, scaled(10))
        near.links.append(link)

    monkeypatch.setattr(site_weights, "make_relay", lambda *_: relay)
    monkeypatch.setattr(site_weights, "to_home", lambda *_: None)
    monkeypatch.setattr(site_weights, "to_relay", lambda *_: Link("site", "relay", WaitRegistry("service")))
    monkeypatch.setattr(site_weights, "connect_relay", connect)
    context: Any = SimpleNamespace(addresses=SimpleNamespace(relay_outside=None))
    return SiteWeights(context, WaitRegistry("service"))


def in_two_worlds(folder: Path, body: Callable[[World, World], Awaitable[None]], **options: Any) -> None:
    """Run with the trainer's publisher and a nearer relay's, which has the options."""

    async def both(home: World) -> None:
        near = World(folder / "near", **options)
        try:
            await body(home, near)
        finally:
            await near.close()

    in_world(folder, both)


def test_a_relay_that_sends_for_longer_than_it_may_be_silent_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent_s, (manifest, buffer) = scaled(0.5), Policy().step()

    async def body(home: World, near: World) -> None:
        monkeypatch.setattr(site_weights, "SOURCE_S", silent_s)
        site = await site_of(home, near, monkeypatch)
        for world in (home, near):
            await world.publisher.publish(manifest, buffer)
        found = await site.fetch(manifest.version.number, manifest.version.content_hash, "near")
        assert (found, home.publisher.sent) == ((manifest.version, "near"), [])
        assert site.last_s > silent_s

    in_two_worlds(tmp_path, body, rate_of=lambda peer: manifest.nbytes / (1.5 * silent_s), chunk_of=lambda peer: 500)


class Begins(RecordingPublisher):
    """Sends a description, and no bytes after it."""

    async def _send_ranges(self, *args: Any) -> None:
        return


class Drips(RecordingPublisher):
    """Sends so slowly that the end never comes, but does not stop."""

    async def _send_ranges(self, peer: str, transfer: Any, request: int, ranges: list[tuple[int, int, int]]) -> None:
        await super()._send_ranges(peer, transfer, request, [(0, 0, 1)])


@pytest.mark.parametrize(("kind", "share"), [(Begins, site_weights.SOURCE_SHARE), (Drips, 0.005)])
def test_the_trainers_site_sends_what_a_relay_has_begun_and_does_not_end_and_it_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[RecordingPublisher], share: float
) -> None:
    async def body(home: World, near: World) -> None:
        # the relay has to be connected to, and to answer, within it
        monkeypatch.setattr(site_weights, "SOURCE_S", scaled(1.5) if kind is Begins else scaled(60))
        monkeypatch.setattr(site_weights, "SOURCE_SHARE", share)
        site, policy = await site_of(home, near, monkeypatch), Policy()
        for _ in range(2):
            manifest, buffer = policy.step()
            for world in (home, near):
                await world.publisher.publish(manifest, buffer)
            found = await site.fetch(manifest.version.number, manifest.version.content_hash, "near")
            assert found == (manifest.version, None)
            assert site._answered and not site._left_out

    in_two_worlds(tmp_path, body, kind=kind)


def test_a_link_to_a_relay_that_was_lost_once_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(home: World, near: World) -> None:
        monkeypatch.setattr(site_weights, "LEFT_OUT_S", 0.0)
        site, policy, sources, links = await site_of(home, near, monkeypatch), Policy(), [], []
        for _ in range(3):
            manifest, buffer = policy.step()
            for world in (home, near):
                await world.publisher.publish(manifest, buffer)
            received = site.bytes_received
            found, source = await site.fetch(manifest.version.number, manifest.version.content_hash, "near")
            assert found == manifest.version and site.bytes_received == received + manifest.nbytes
            sources.append(source)
            links.append(site._others["near"].link if source else None)
            if len(sources) == 1:
                links[0]._inbox.put_nowait(PeerLost("it has been silent for 60 s"))
        assert sources == ["near", None, "near"]
        assert links[0]._socket.closed and not links[2]._socket.closed

    in_two_worlds(tmp_path, body)


def test_a_relay_that_is_restarted_in_a_fetch_is_not_waited_for_and_is_asked_for_the_next_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(home: World, near: World) -> None:
        monkeypatch.setattr(site_weights, "SOURCE_S", scaled(1000))
        site, policy = await site_of(home, near, monkeypatch), Policy()
        site.home.limit_s = scaled(1000)
        for restarted, expected in (("in the fetch", None), ("never", "near"), ("before it", "near")):
            if restarted == "before it":
                old = near.hub.session
                await restart(near)
                await until(lambda old=old: site._others["near"].link._hub_session != old)
            manifest, buffer = policy.step()
            for world in (home, near):
                await world.publisher.publish(manifest, buffer)
            fetching = asyncio.create_task(site.fetch(manifest.version.number, manifest.version.content_hash, "near"))
            if restarted == "in the fetch":
                await until(lambda: bool(near.publisher._open))
                await restart(near)
            assert await fetching == (manifest.version, expected) and not site._left_out

    in_two_worlds(tmp_path, body, kind=Begins)


@pytest.mark.parametrize("error", [MemoryError("no room"), RunFailed("weight version 1 arrived corrupt 3 times")])
def test_a_relay_that_sends_something_else_is_left_out_although_it_has_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def body(home: World, near: World) -> None:
        site, (manifest, buffer) = await site_of(home, near, monkeypatch), Policy().step()
        link = Link("site", "relay", WaitRegistry("service"))
        site._others["near"] = Mock(
            link=link, since_progress=0.0, corrupt=0, bytes_received=0, fetch=Mock(side_effect=error)
        )
        await home.publisher.publish(manifest, buffer)
        found = await site.fetch(manifest.version.number, manifest.version.content_hash, "near")
        assert found == (manifest.version, None)
        assert site._answered and list(site._left_out) == ["near"]
        await link.close()

    in_two_worlds(tmp_path, body)


def test_a_store_without_room_is_not_put_down_to_the_relay_that_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(home: World, near: World) -> None:
        site, (manifest, _) = await site_of(home, near, monkeypatch), Policy().step()
        link, error = Link("site", "relay", WaitRegistry("service")), NoRoom("no room for weights", 1)
        site._others["near"] = Mock(link=link, since_progress=0.0, fetch=Mock(side_effect=error))
        with pytest.raises(NoRoom):
            await site.fetch(manifest.version.number, manifest.version.content_hash, "near")
        assert not site._left_out and list(site._others) == ["near"]
        await link.close()

    in_two_worlds(tmp_path, body)


def test_a_fetch_that_a_hung_trainer_did_not_take_is_not_answered_by_the_restarted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(home: World, near: World) -> None:
        site, version = await site_of(home, near, monkeypatch), Policy().version()[0].version
        home.serving.cancel()
        await until(home.serving.done)
        fetching = asyncio.create_task(site.fetch(8, version.content_hash, None))
        await until(lambda: not home.hub._inbox.empty())
        await restart(home)
        with pytest.raises(RestartNeeded, match="the trainer was restarted"):
            await fetching

    in_two_worlds(tmp_path, body)
