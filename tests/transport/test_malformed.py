"""100,000 messages that are none, or make no sense: each is counted, and a hub goes on."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq
import zmq.asyncio

from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Hub, Refused, Speaker
from streamrl.transport.peer import PeerRoute
from streamrl.transport.wire import (
    MAX_STATE_BYTES,
    PROTOCOL_VERSION,
    MalformedMessage,
    Message,
    decode,
    encode,
    is_plain,
)
from tests.ports import free_port
from tests.transport.sockets import Sites, link, run
from tests.waiting import scaled

NONSENSE: list[Any] = [
    *(None, True, -1, 0, 2**63, 2**64 - 1, float("nan"), float("inf")),
    *("", "x" * 300, "\n", b"\xff", [], [[]], [1] * 50, {}, {"n": 1}, {b"n": 1}),
    *(msgpack.ExtType(5, b"x"), msgpack.Timestamp(1, 2)),
]


def nested(depth: int) -> Any:
    value: Any = 0
    for level in range(depth):
        value = [value] if level % 2 else {"x": value}
    return value


def envelope(**fields: Any) -> bytes:
    packed: bytes = msgpack.packb({"v": PROTOCOL_VERSION, "k": "item", "s": "s", "n": 1, "b": {}, "a": []} | fields)
    return packed


def raw_nesting(depth: int) -> bytes:
    """Deeper than msgpack would pack."""
    return b"\x91" * depth + b"\xc0"


@functools.cache
def sensible(session: str) -> tuple[bytes, ...]:
    """Frames of a message with an array, in which something may be damaged."""
    return tuple(map(bytes, encode(Message("item", session, 1, {"i": 1}, {"x": np.arange(6, dtype=np.int32)}))))


def nonsense(rng: random.Random, session: str) -> list[bytes]:
    """One message that is no message, or one without sense, of a connection whose session is `session`."""
    pick, array = rng.choice, sensible(session)
    case = rng.randrange(12)
    if case == 0:
        return [rng.randbytes(rng.randrange(80)) for _ in range(rng.randrange(1, 5))]
    if case == 1:
        return [array[0][: rng.randrange(len(array[0]))], *array[1:]]
    if case == 2:
        return [array[0], array[1][: rng.randrange(24)]]
    if case == 3:
        mutated = bytearray(array[0])
        for _ in range(rng.randrange(1, 4)):
            mutated[rng.randrange(len(mutated))] = rng.randrange(256)
        return [bytes(mutated), *array[1:]]
    if case == 4:
        return [envelope(**{pick("vksnba"): pick(NONSENSE)})]
    if case == 5:
        shape = [pick([0, 1, 2**31, 2**62, 2**63, 2**64 - 1]) for _ in range(rng.randrange(12))]
        return [envelope(s=session, a=[["x", pick(["int32", "bool"]), shape]]), b"" if rng.random() < 0.8 else b"1234"]
    if case == 6:
        return [envelope(s=session, a=[pick(NONSENSE), pick(NONSENSE)]), b"", b""]
    if case == 7:
        return [raw_nesting(pick([10, 500, 1100, 50_000]))]
    if case == 8:
        body = {"name": "other", "role": "test", "meta": {}} | {pick(["name", "role", "meta"]): pick(NONSENSE)}
        return [envelope(k="hello", s="other", n=0, b=body)]
    if case == 9:
        return [envelope(k="ack", s=session, n=0, b={pick(["n", "s", "x"]): pick(NONSENSE), "s": pick([session, 1])})]
    if case == 10:
        body = {pick(["clock", "state"]): pick([*NONSENSE, {"sent": pick(NONSENSE)}, nested(40), nested(300)])}
        return [envelope(k="heartbeat", s=session, n=0, b=body)]
    return [envelope(k=pick(["hello", "welcome", "unknown", "refused", "bye?", ""]), s=pick(["", session, "x"]), n=0)]


def messages(seed: int, count: int, session: str) -> Iterator[list[bytes]]:
    rng = random.Random(seed)
    return (nonsense(rng, session) for _ in range(count))


def counted(hub: Hub) -> int:
    """Messages that a hub has answered for, in whatever way."""
    return hub.malformed + hub.unknown + hub.refused_peers


def hello(name: str, session: str, **meta: str) -> list[Any]:
    return encode(Message("hello", session, 0, {"name": name, "role": "test", "meta": meta}))


@pytest.mark.parametrize("seed", range(7))
def test_nothing_of_a_hundred_thousand_ends_a_hub_and_each_is_counted(seed: int) -> None:
    async def body() -> None:
        hub = Hub("hub", WaitRegistry("hub")).bind(f"tcp://127.0.0.1:{free_port()}")
        known, strange = PeerRoute(hub._doors[0], b"known"), PeerRoute(hub._doors[0], b"strange")
        hub._arrived(known, hello("peer", "life"), None)
        hellos = 0
        for frames in messages(seed, 13_000, "life"):
            before = counted(hub)
            hub._arrived(strange, frames, None)
            if (other := hub._routes.get(strange)) is not None:  # a hello that makes sense after all
                hub._forget(other)
                hellos += 1
                before -= 1
            assert counted(hub) == before + 1
        assert hellos < 1000
        assert hub._inbox.empty()
        for frames in messages(seed + 100, 2_000, "life"):
            hub._arrived(known, frames, None)
            assert is_plain(hub.peers["peer"].state)
        assert set(hub.peers) == {"peer"}
        assert hub.malformed > 6_000
        assert not any(task.done() for task in hub._tasks)
        await hub.close()

    run(body)


def test_nothing_that_a_site_with_a_key_sends_ends_a_hub_or_hurts_another_site() -> None:
    async def body() -> None:
        sites = Sites()
        hub = sites.hub()
        west = await link("service-west", "west").connect(sites.address, scaled(10), sites.as_client(sites.west))
        raw = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        raw.curve_serverkey, raw.curve_publickey = sites.home.public, sites.east.public
        raw.curve_secretkey = sites.east.secret
        raw.connect(sites.address)
        for frames in messages(1, 1_500, "life"):
            await raw.send_multipart(frames)
        await raw.send_multipart(hello("service-east", "life", site="east"))
        for frames in messages(2, 1_500, "life"):
            await raw.send_multipart(frames)
        await west.send("item", {"of": "west"})
        await raw.send_multipart(encode(Message("item", "life", 7, {"of": "east"})))
        got: dict[str, Any] = {}
        while not {"service-west", "service-east"} <= got.keys():
            delivery = await hub.receive()
            if "of" in delivery.body:
                got[delivery.peer] = delivery.body["of"]
        assert got == {"service-west": "west", "service-east": "east"}
        assert counted(hub) > 1_500
        raw.close(0)
        await west.close()
        await hub.close()

    run(body)


def test_a_link_survives_the_same() -> None:
    async def body() -> None:
        sites = Sites()
        hub = sites.hub()
        east = await link("service-east", "east").connect(sites.address, scaled(10), sites.as_client(sites.east))
        refusals = 0
        for frames in messages(3, 5_000, hub.session):
            try:
                east._arrived(frames)
            except Refused:
                refusals += 1
        assert refusals < 100  # the hub's word counts, so a hub can end its links
        assert east.malformed + east.unknown > 2_500
        await east.close()
        await hub.close()

    run(body)


def test_an_acknowledgement_of_nonsense_or_of_an_earlier_life_frees_nothing() -> None:
    async def body() -> None:
        hub = Hub("hub", WaitRegistry("hub")).bind(f"tcp://127.0.0.1:{free_port()}")
        route = PeerRoute(hub._doors[0], b"known")
        hub._arrived(route, hello("peer", "life"), None)
        await hub.send("peer", "item", {"i": 1})
        for ack in ({"n": True, "s": hub.session}, {"n": 1.0, "s": hub.session}, {"n": 1}, {"n": 1, "s": [1]}):
            hub._arrived(route, encode(Message("ack", "life", 0, ack)), None)
        assert hub.malformed == 4
        hub._arrived(route, encode(Message("ack", "life", 0, {"n": 1, "s": "the hub's life before"})), None)
        assert list(hub.peers["peer"].outbox.pending) == [1]
        hub._arrived(route, encode(Message("ack", "life", 0, {"n": 1, "s": hub.session})), None)
        assert not hub.peers["peer"].outbox.pending
        await hub.close()

    run(body)


def test_repeats_are_dropped_also_after_messages_of_another_session() -> None:
    async def body() -> None:
        hub = Hub("hub", WaitRegistry("hub")).bind(f"tcp://127.0.0.1:{free_port()}")
        route = PeerRoute(hub._doors[0], b"known")
        hub._arrived(route, hello("peer", "life"), None)
        for session in ("life", "another", "life"):
            hub._arrived(route, encode(Message("item", session, 1, {"of": session})), None)
        assert (await hub.receive()).body == {"of": "life"}
        assert hub.receive_now() is None
        assert hub.unknown == 1
        await hub.close()

    run(body)


def test_a_huge_or_odd_heartbeat_leaves_the_state_as_it_was() -> None:
    async def body() -> None:
        hub = Hub("hub", WaitRegistry("hub")).bind(f"tcp://127.0.0.1:{free_port()}")
        route = PeerRoute(hub._doors[0], b"known")
        hub._arrived(route, hello("peer", "life"), None)
        odd = ({"x": "y" * MAX_STATE_BYTES}, {"x": b"bytes"}, {"x": {b"key": 1}}, {"x": nested(40)}, {"clock": 3})
        for state in ({"x": 1}, *odd):
            hub._arrived(route, encode(Message("heartbeat", "life", 0, state)), None)
        assert hub.peers["peer"].state == {"x": 1}
        assert hub.malformed == len(odd)
        hub._arrived(route, encode(Message("heartbeat", "life", 0, {"x": 2, "clock": {"sent": float("nan")}})), None)
        assert hub.peers["peer"].state == {"x": 2}  # a time that is none is not echoed, the rest holds
        await hub.close()

    run(body)


def test_a_heartbeat_that_is_refused_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sender would take the hub for dead, and its clock and messages would not go on."""

    def refuse(speaker: Speaker, state: dict[str, Any]) -> dict[str, Any]:
        raise MalformedMessage("no such state")

    async def body() -> None:
        hub = Hub("hub", WaitRegistry("hub")).bind(f"tcp://127.0.0.1:{free_port()}")
        hub.read_state = refuse
        answered: list[Message] = []
        monkeypatch.setattr(hub, "_answer", lambda route, frames: answered.append(decode(frames)))
        route = PeerRoute(hub._doors[0], b"known")
        hub._arrived(route, hello("peer", "life"), None)
        for number, state in enumerate(({"x": 1}, {"x": "y" * MAX_STATE_BYTES}, {"x": b"bytes"}), start=1):
            body = {"clock": {"sent": float(number)}, "first": number}
            hub._arrived(route, encode(Message("heartbeat", "life", 0, state | body)), None)
        assert [one.body["clock"]["sent"] for one in answered[1:]] == [1.0, 2.0, 3.0]
        assert hub.malformed == 3 and hub.peers["peer"].inbox.committed_to == 2
        await hub.close()

    run(body)


def test_a_shape_of_no_bytes_that_no_array_can_have_is_refused() -> None:
    for shape in ([0, 2**62], [0, 2**40, 2**40], [2**63, 0]):
        with pytest.raises(MalformedMessage, match="no array has the shape"):
            decode([envelope(a=[["x", "int32", shape]]), b""])
