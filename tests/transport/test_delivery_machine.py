"""Outbox and inbox against a channel that loses, repeats and reorders, with either end started anew at any moment.

The machine is what hub and link are around them: a receiver takes messages of the session that has said hello to it, a
sender takes acknowledgements of its own session, and both ends of a new connection begin with a resend.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, defaultdict
from typing import Any, NamedTuple

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.delivery import Inbox, Outbox
from streamrl.transport.endpoint import Delivery, Flow, Hub, Link
from streamrl.transport.peer import Door, Peer, PeerRoute

RESEND_S = 5
which = st.integers(0, 10**6)
"""One of those there are."""
DOOR = Door(None)  # type: ignore[arg-type]


class Sent(NamedTuple):
    """A message on the channel; `item` is what it carries, and no other message does."""

    session: str
    number: int
    item: int


class Ack(NamedTuple):
    """An acknowledgement on the channel."""

    session: str
    number: int


class DeliveryMachine(RuleBasedStateMachine):
    @initialize(credits=st.integers(1, 5), window=st.sampled_from([1, 60, 200, math.inf]))
    def begin(self, credits: int, window: float) -> None:
        self.credits, self.window = credits, window
        self.now, self.items, self.sessions, self.life = 0.0, 0, 0, 0
        self.messages: list[Sent] = []
        self.acks: list[Ack] = []
        self.work: list[Sent] = []
        """Handed to the receiver's owner, who has not committed it."""
        self.sizes: dict[int, int] = {}
        """Bytes of the sender's messages that no acknowledgement has come for, by number."""
        self.handed: dict[int, list[int]] = defaultdict(list)
        self.committed: dict[int, list[int]] = defaultdict(list)
        """Items, by life of the receiver."""
        self.acknowledged: set[int] = set()
        self.inbox, self.met = Inbox(), ""
        self.start_the_sender_anew()

    # -- the two ends

    @rule()
    def start_the_sender_anew(self) -> None:
        self.sessions += 1
        self.session = f"session {self.sessions}"
        self.outbox: Outbox[int] = Outbox(self.credits, self.window)
        self.sizes.clear()

    @rule()
    def start_the_receiver_anew(self) -> None:
        self.life += 1
        self.inbox, self.met = Inbox(), ""
        self.work.clear()

    @rule()
    def connect(self) -> None:
        self.met = self.session
        self.tell_first()
        self._transmit(self.outbox.to_resend(self.now, 0.0))

    @precondition(lambda self: self.met == self.session)
    @rule()
    def tell_first(self) -> None:
        before = set(self.inbox.open) if self.inbox.session == self.session else set()
        self.inbox.begin_at(self.session, self.outbox.first)
        assert self.inbox.committed_to >= self.outbox.first - 1 and min(self.inbox.committed, default=math.inf) > (
            self.inbox.committed_to
        )
        assert set(self.inbox.open) == before

    @rule(size=st.integers(0, 100))
    def send(self, size: int) -> None:
        full = len(self.sizes) == self.credits or sum(self.sizes.values()) >= self.window
        assert self.outbox.has_credit == (not full)
        if full:
            with pytest.raises(RuntimeError, match="no credit"):
                self.outbox.send(-1, self.now, size)
            return
        self.items += 1
        number = self.outbox.send(self.items, self.now, size)
        assert number not in self.sizes
        self.sizes[number] = size
        self._transmit([(number, self.items)])

    def _transmit(self, sent: list[tuple[int, int]]) -> None:
        self.messages += [Sent(self.session, number, item) for number, item in sent]

    @rule(seconds=st.integers(0, 2 * RESEND_S))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        patience = max(RESEND_S, self.outbox.patience_s)
        due = self.outbox.to_resend(self.now, RESEND_S)
        assert [number for number, _ in due] == sorted({number for number, _ in due} & self.sizes.keys())
        assert seconds < patience or [number for number, _ in due] == list(self.sizes)
        assert self.outbox.to_resend(self.now, RESEND_S) == []
        self._transmit(due)

    @precondition(lambda self: self.work)
    @rule(at=which, again=st.booleans())
    def commit(self, at: int, again: bool) -> None:
        done = self.work.pop(at % len(self.work))
        self.committed[self.life].append(done.item)
        counts = self.inbox.commit(done.session, done.number)
        assert counts == (done.session == self.inbox.session)  # else nobody waits for it any more
        if counts:
            self.acks.append(Ack(done.session, done.number))
        if again:
            assert not self.inbox.commit(done.session, done.number)

    # -- the channel

    @precondition(lambda self: self.messages)
    @rule(at=which, repeat=st.booleans())
    def deliver(self, at: int, repeat: bool) -> None:
        message = self.messages[at % len(self.messages)] if repeat else self.messages.pop(at % len(self.messages))
        if message.session != self.met:
            return  # of nobody who has said hello
        verdict = self.inbox.receive(message.session, message.number)
        if verdict == "new":
            self.handed[self.life].append(message.item)
            self.work.append(message)
        elif verdict == "committed":
            assert any(message.item in items for items in self.committed.values())  # a later receiver is told of it
            self.acks.append(Ack(message.session, message.number))
        else:
            assert verdict == "open" and message in self.work

    @precondition(lambda self: self.messages)
    @rule(at=which)
    def lose(self, at: int) -> None:
        del self.messages[at % len(self.messages)]

    @precondition(lambda self: self.acks)
    @rule(at=which)
    def lose_an_acknowledgement(self, at: int) -> None:
        del self.acks[at % len(self.acks)]

    @precondition(lambda self: self.acks)
    @rule(at=which, repeat=st.booleans())
    def acknowledge(self, at: int, repeat: bool) -> None:
        ack = self.acks[at % len(self.acks)] if repeat else self.acks.pop(at % len(self.acks))
        if ack.session != self.session:
            return  # `take_ack`
        item = self.outbox.acknowledged(ack.number, self.now)
        assert (item is not None) == (ack.number in self.sizes)
        self.sizes.pop(ack.number, None)
        if item is not None:
            self.acknowledged.add(item)

    @rule(number=st.integers(-2, 10**6))
    def acknowledge_nonsense(self, number: int) -> None:
        if number not in self.sizes:
            assert self.outbox.acknowledged(number, self.now) is None

    # -- what always holds

    @invariant()
    def nothing_is_handed_over_or_committed_twice_in_a_life(self) -> None:
        for life, items in self.handed.items():
            assert max(Counter(items).values(), default=0) <= 1
            assert max(Counter(self.committed[life]).values(), default=0) <= 1
            assert set(self.committed[life]) <= set(items)

    @invariant()
    def what_is_acknowledged_is_committed(self) -> None:
        assert self.acknowledged <= {item for items in self.committed.values() for item in items}

    @invariant()
    def credits_and_bytes_are_those_of_what_is_under_way(self) -> None:
        outbox, sizes = self.outbox, list(self.sizes.values())
        assert list(outbox.pending) == list(outbox.sizes) == list(outbox.sent_at) == list(self.sizes)
        assert 0 <= outbox.in_flight_bytes == sum(sizes)
        assert len(sizes) <= self.credits
        assert not sizes or sum(sizes[:-1]) < self.window  # the last one may be larger than what was left

    @invariant()
    def the_inbox_knows_what_is_open_and_what_is_committed(self) -> None:
        if self.inbox.session:
            assert self.inbox.open.keys() == {m.number for m in self.work if m.session == self.inbox.session}
            assert not self.inbox.open.keys() & self.inbox.committed
            assert min(self.inbox.open.keys() | self.inbox.committed, default=1) > 0
            assert self.inbox.committed_to + 1 not in self.inbox.committed

    def teardown(self) -> None:
        """The channel gets well: all that is still waited for arrives, is committed once, and is acknowledged."""
        if not hasattr(self, "outbox"):
            return
        waited_for = set(self.outbox.pending.values())
        before = set(self.acknowledged)
        self.connect()
        while self.messages:
            self.deliver(0, False)
        while self.work:
            self.commit(len(self.work) - 1, False)
        while self.acks:
            self.acknowledge(0, False)
        assert self.acknowledged == before | waited_for
        assert not self.outbox.pending and self.outbox.in_flight_bytes == 0 and self.outbox.has_credit
        self.nothing_is_handed_over_or_committed_twice_in_a_life()
        self.what_is_acknowledged_is_committed()


def test_each_message_is_committed_once_in_a_life_whatever_is_lost_repeated_reordered_or_restarted() -> None:
    limits = settings(derandomize=True, max_examples=80, stateful_step_count=50)
    run_state_machine_as_test(DeliveryMachine, settings=limits)


class EndsMachine(RuleBasedStateMachine):
    """A hub and a link themselves, without sockets: frames go over lists that break as connections do.

    A connection keeps its order, as TCP does; what was under way on a broken one may still reach the hub.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.items, self.connection = 0, 0
        self.to_hub: list[tuple[PeerRoute, Any]] = []
        self.to_link: list[Any] = []
        self.work: list[tuple[str, Delivery]] = []
        """Handed over, not yet committed: (to whom, what)."""
        self.committed: set[int] = set()
        self.handed: dict[str, list[int]] = defaultdict(list)
        """By the life that it was handed to."""
        self.told: set[int] = set()
        """Items of which the sender has heard that they are committed."""
        self.unheard: dict[int, Peer | Link] = {}
        """Items that are still waited for, by the outbox's owner."""
        self.lives = {"hub": 0, "link": 0}
        self._begin_hub()
        self._begin_link()

    def _begin_hub(self) -> None:
        self.hub = Hub("hub", WaitRegistry("hub"), flow=Flow(credits=3))
        self.hub._answer = self._answer  # type: ignore[method-assign]

    def _begin_link(self) -> None:
        async def made() -> Link:
            return Link("service-west", "service", WaitRegistry("link"), {"site": "west"}, flow=Flow(credits=3))

        self.link = self.loop.run_until_complete(made())
        self.link._put = self._put  # type: ignore[method-assign]
        self.break_connection(False)

    def _route(self) -> PeerRoute:
        return PeerRoute(DOOR, str(self.connection).encode())

    def _put(self, frames: Any) -> None:
        self.to_hub.append((self._route(), [bytes(frame) for frame in frames]))

    def _answer(self, route: PeerRoute, frames: Any) -> bool:
        if route == self._route():
            self.to_link.append([bytes(frame) for frame in frames])
        return route == self._route()

    # -- what the two processes do

    @rule(hub=st.booleans())
    def send(self, hub: bool) -> None:
        owner = self.hub.peers.get("service-west") if hub else self.link
        outbox = owner.outbox if isinstance(owner, Peer) else self.link._outbox
        if owner is None or not outbox.has_credit:
            return
        self.items += 1
        item = self.items
        self.unheard[item] = owner
        told: dict[str, Any] = {"body": {"i": item}, "on_ack": lambda: self._heard(item)}
        sending = self.hub.send("service-west", "item", **told) if hub else self.link.send("item", **told)
        self.loop.run_until_complete(sending)

    def _heard(self, item: int) -> None:
        assert item in self.committed and item not in self.told
        self.told.add(item)
        del self.unheard[item]

    @precondition(lambda self: self.work)
    @rule(at=which)
    def commit(self, at: int) -> None:
        _, delivery = self.work.pop(at % len(self.work))
        self.committed.add(delivery.body["i"])
        delivery.ack()

    @rule()
    def say_hello(self) -> None:
        self.link._put(self.link._hello())

    @rule()
    def beat(self) -> None:
        for peer in self.hub.peers.values():
            for _, message in peer.outbox.to_resend(time.monotonic(), 0.0):
                self.hub._to(peer, message.frames)
        for _, message in self.link._outbox.to_resend(time.monotonic(), 0.0):
            self.link._transmit(message)

    # -- what happens to them

    @rule(what=st.sampled_from(["nothing", "nothing", "connection", "connection, late", "hub", "link"]))
    def breaks(self, what: str) -> None:
        if what == "hub":
            self.start_the_hub_anew()
        elif what == "link":
            self.start_the_link_anew()
        elif what != "nothing":
            self.break_connection(what == "connection, late")

    def break_connection(self, arrives: bool) -> None:
        self.connection += 1
        self.to_link.clear()
        if not arrives:
            self.to_hub.clear()

    def start_the_hub_anew(self) -> None:
        self.lives["hub"] += 1
        self.work = [(to, delivery) for to, delivery in self.work if to != "hub"]
        self._begin_hub()
        self.break_connection(False)

    def start_the_link_anew(self) -> None:
        self.lives["link"] += 1
        self.work = [(to, delivery) for to, delivery in self.work if to != "link"]
        self.link._socket.close(0)
        self._begin_link()

    @precondition(lambda self: self.to_hub)
    @rule(count=st.integers(1, 5))
    def reach_the_hub(self, count: int) -> None:
        for _ in range(min(count, len(self.to_hub))):
            route, frames = self.to_hub.pop(0)
            self.hub._arrived(route, frames, None)
        self._take("hub", self.hub)

    @precondition(lambda self: self.to_link)
    @rule(count=st.integers(1, 5))
    def reach_the_link(self, count: int) -> None:
        for _ in range(min(count, len(self.to_link))):
            self.link._arrived(self.to_link.pop(0))
        self._take("link", self.link)

    def _take(self, to: str, end: Hub | Link) -> None:
        while (delivery := end.receive_now()) is not None:
            self.handed[f"{to} {self.lives[to]}"].append(delivery.body["i"])
            self.work.append((to, delivery))
        waits = {id(self.link), *(id(peer) for peer in self.hub.peers.values())}
        self.unheard = {item: owner for item, owner in self.unheard.items() if id(owner) in waits}

    # -- what always holds

    @invariant()
    def nothing_is_handed_over_twice_in_a_life(self) -> None:
        for items in self.handed.values():
            assert len(items) == len(set(items))

    @invariant()
    def nothing_was_taken_for_malformed(self) -> None:
        assert self.hub.malformed == self.link.malformed == 0

    def teardown(self) -> None:
        """The connection holds: whatever a living end waits for is committed and heard of."""
        self.break_connection(False)
        self.say_hello()
        for _ in range(1000):
            if self.to_hub:
                self.reach_the_hub(5)
            elif self.to_link:
                self.reach_the_link(5)
            elif self.work:
                self.commit(0)
            else:
                break
        assert not self.unheard and not self.link._outbox.pending
        assert not any(peer.outbox.pending for peer in self.hub.peers.values())
        self.nothing_is_handed_over_twice_in_a_life()
        self.link._socket.close(0)
        self.loop.close()


def test_a_hub_and_a_link_lose_and_repeat_nothing_whichever_of_them_or_their_connection_breaks() -> None:
    limits = settings(derandomize=True, max_examples=150, stateful_step_count=60)
    limits = settings(limits, phases=[Phase.generate])  # a failure is not made smaller: that would take minutes
    run_state_machine_as_test(EndsMachine, settings=limits)
