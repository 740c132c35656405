"""Which hello is read, and which connection may have which name: every rule by itself, without sockets."""

from __future__ import annotations

import math
from typing import Any

import pytest

from streamrl.transport import endpoint_base
from streamrl.transport.delivery import Outbox
from streamrl.transport.hello import Hello, is_late, read_hello, wrong_with_claim
from streamrl.transport.peer import Door, Peer, PeerRoute
from streamrl.transport.wire import MalformedMessage, Message

BODY = {"name": "service-east", "role": "service", "meta": {"site": "east"}}
KEYS: Any = object()
INSIDE, OUTSIDE, WITHOUT_KEYS = Door(KEYS, keys=KEYS), Door(KEYS, outside=True, keys=KEYS), Door(KEYS, outside=True)


def said(**changes: Any) -> Hello:
    return read_hello(Message("hello", "life", 0, BODY | changes), now=7.0)


def peer(name: str, site: str | None, begun: float = 0.0) -> Peer:
    return Peer(name, "service", {}, "earlier life", Outbox(1, 1), site=site, begun=begun)


def test_a_hello_that_leaves_out_its_first_message_and_its_beginning_begins_now() -> None:
    assert said() == Hello("service-east", "service", {"site": "east"}, "life", 1, 7.0)
    assert said(first=3, begun=2.0) == Hello("service-east", "service", {"site": "east"}, "life", 3, 2.0)


@pytest.mark.parametrize(
    "changes", [{"name": 1}, {"role": None}, {"meta": []}, {"first": -1}, {"first": 1.5}, {"begun": math.nan}], ids=repr
)
def test_what_is_no_hello_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(MalformedMessage):
        said(**changes)


@pytest.mark.parametrize(
    ("door", "owner", "meta", "spoken", "known", "wrong"),
    [
        (OUTSIDE, "east", {"site": "east"}, None, None, None),
        (OUTSIDE, "east", {"site": "east"}, "service-east", "east", None),
        (OUTSIDE, "east", {}, None, None, "must name its site"),
        (OUTSIDE, "west", {"site": "east"}, None, None, "the key is that of site 'west', the hello is of site 'east'"),
        (WITHOUT_KEYS, None, {"site": "east"}, None, None, None),
        (OUTSIDE, "east", {"site": "east"}, "trainer-0", None, "this connection is that of 'trainer-0'"),
        (OUTSIDE, "east", {"site": "east"}, None, "west", "belongs to a peer at site 'west'"),
        (OUTSIDE, "east", {"site": "east"}, None, "inside", "belongs to a peer inside this site"),
        (INSIDE, "service-east", {}, None, None, None),
        (INSIDE, "service-east", {"site": "east"}, None, "inside", None),
        (INSIDE, "service-east", {}, None, "east", "belongs to a peer at site 'east'"),
    ],
)
def test_a_connection_may_have_a_name_that_is_no_others(
    door: Door, owner: str | None, meta: dict[str, Any], spoken: str | None, known: str | None, wrong: str | None
) -> None:
    before = None if spoken is None else peer(spoken, "east")
    holder = None if known is None else peer("service-east", None if known == "inside" else known)
    found = wrong_with_claim(said(meta=meta), PeerRoute(door, b"1"), owner, before, holder)
    assert found is None if wrong is None else wrong in str(found)


def test_a_process_that_began_earlier_than_one_that_is_heard_is_late() -> None:
    heard_s = endpoint_base.HEARD_BEATS * endpoint_base.HEARTBEAT_S
    later = peer("service-east", "east", begun=8.0)
    assert is_late(said(), later, 0.0)
    assert not is_late(said(), later, heard_s), "it is silent"
    assert not is_late(said(begun=8.0), later, 0.0)
    assert not is_late(said(), None, 0.0)
    later.session = "life"
    assert not is_late(said(), later, 0.0), "it is the same process"
