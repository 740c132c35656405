"""Outbox and inbox against a channel that loses, repeats and reorders, with either end started anew at any moment.

The machine is what hub and link are around them: a receiver takes messages of the session that has said hello to it, a
sender takes acknowledgements of its own session, and both ends of a new connection begin with a resend.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from streamrl.transport.delivery import Inbox, Outbox

RESEND_S = 5.0
which = st.integers(0, 10**6)
"""One of those there are."""


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
        self._transmit(self.outbox.to_resend(self.now, 0.0))

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

    @rule(seconds=st.floats(0, 2 * RESEND_S))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        due = self.outbox.to_resend(self.now, RESEND_S)
        assert [number for number, _ in due] == sorted({number for number, _ in due} & self.sizes.keys())
        assert seconds < RESEND_S or [number for number, _ in due] == list(self.sizes)
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
            assert message.item in self.committed[self.life]
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
        item = self.outbox.acknowledged(ack.number)
        assert (item is not None) == (ack.number in self.sizes)
        self.sizes.pop(ack.number, None)
        if item is not None:
            self.acknowledged.add(item)

    @rule(number=st.integers(-2, 10**6))
    def acknowledge_nonsense(self, number: int) -> None:
        if number not in self.sizes:
            assert self.outbox.acknowledged(number) is None

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
        assert 0 <= outbox.under_way_bytes == sum(sizes)
        assert len(sizes) <= self.credits
        assert not sizes or sum(sizes[:-1]) < self.window  # the last one may be larger than what was left

    @invariant()
    def the_inbox_knows_what_is_open_and_what_is_committed(self) -> None:
        if self.inbox.session:
            assert self.inbox.open == {m.number for m in self.work if m.session == self.inbox.session}
            assert not self.inbox.open & self.inbox.committed
            assert min(self.inbox.open | self.inbox.committed, default=1) > 0
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
        assert not self.outbox.pending and self.outbox.under_way_bytes == 0 and self.outbox.has_credit
        self.nothing_is_handed_over_or_committed_twice_in_a_life()
        self.what_is_acknowledged_is_committed()


def test_each_message_is_committed_once_in_a_life_whatever_is_lost_repeated_reordered_or_restarted() -> None:
    limits = settings(derandomize=True, deadline=None, max_examples=100, stateful_step_count=50)
    run_state_machine_as_test(DeliveryMachine, settings=limits)
