"""Exactly-once processing between living processes, whatever the link drops or repeats."""

from __future__ import annotations

import random

import pytest

from streamrl.transport.delivery import MOST_AHEAD, Inbox, Outbox
from streamrl.transport.flow import SEND_LIMIT_S


def test_credits_bound_what_is_under_way() -> None:
    outbox: Outbox[str] = Outbox(credits=2)
    assert [outbox.send("a", 0.0), outbox.send("b", 0.0)] == [1, 2]
    assert not outbox.has_credit
    with pytest.raises(RuntimeError, match="no credit"):
        outbox.send("c", 0.0)
    assert outbox.acknowledged(1, 0.0) == "a"
    assert outbox.has_credit
    assert outbox.acknowledged(1, 0.0) is None  # a repeated acknowledgement frees nothing


def test_only_what_is_old_enough_is_sent_again() -> None:
    outbox: Outbox[str] = Outbox(credits=9)
    outbox.send("old", 0.0)
    outbox.send("new", 9.0)
    assert outbox.to_resend(10.0, older_than=5.0) == [(1, "old")]
    assert outbox.to_resend(11.0, older_than=5.0) == []


def test_messages_are_due_again_after_their_time_and_then_not_until_twice_as_long_after() -> None:
    outbox: Outbox[str] = Outbox(credits=9)
    outbox.send("a", 1.0)
    outbox.send("b", 2.0)
    assert outbox.to_resend(5.5, older_than=5.0) == []
    assert outbox.to_resend(7.0, older_than=5.0) == [(1, "a"), (2, "b")]
    assert outbox.to_resend(16.9, older_than=5.0) == []
    assert outbox.to_resend(17.0, older_than=5.0) == [(1, "a"), (2, "b")]
    assert outbox.to_resend(36.9, older_than=5.0) == []
    assert outbox.to_resend(18.0, older_than=0.0) == [(1, "a"), (2, "b")]  # a new connection waits for nothing
    for power in range(12):  # what is lost is repeated at least so often
        outbox.to_resend(1000.0 * (power + 1), older_than=5.0)
    assert outbox.to_resend(12000.0 + SEND_LIMIT_S / 2, older_than=5.0) == [(1, "a"), (2, "b")]


def test_nothing_is_due_while_acknowledgements_come_but_what_was_passed_over() -> None:
    outbox: Outbox[str] = Outbox(credits=9)
    for message in "abcd":
        outbox.send(message, 0.0)
    outbox.acknowledged(1, 4.0)
    outbox.acknowledged(1, 6.0)  # a repeated one comes over the link as well
    assert outbox.to_resend(10.0, older_than=5.0) == []
    outbox.acknowledged(7, 12.0)  # of no message
    assert outbox.to_resend(13.9, older_than=5.0) == []
    assert outbox.to_resend(14.0, older_than=5.0) == [(2, "b"), (3, "c"), (4, "d")]  # twice the 4 s of the first one
    outbox.acknowledged(4, 15.0)  # maybe its first copy, after 15 s
    assert outbox.to_resend(28.0, older_than=5.0) == []
    outbox.send("e", 28.0)
    outbox.acknowledged(5, 29.0)  # sent once, and quickly there: the link is fast
    assert outbox.to_resend(29.0, older_than=5.0) == [(2, "b"), (3, "c")]


@pytest.mark.parametrize("message_s", [6.0, 25.0, 60.0])
def test_a_link_slower_than_declared_carries_hardly_a_copy(message_s: float) -> None:
    outbox: Outbox[int] = Outbox(credits=5)
    inbox = Inbox()
    queue: list[int] = []
    carried = 0
    for step in range(int(200 * message_s)):
        now = float(step)
        while outbox.has_credit:
            queue.append(outbox.send(0, now))
        queue += [number for number, _ in outbox.to_resend(now, older_than=20.0)]
        if now >= (carried + 1) * message_s:
            carried += 1
            number = queue.pop(0)
            if inbox.receive("s", number) == "new":
                inbox.commit("s", number)
            outbox.acknowledged(number, now)
    assert inbox.committed_to >= 0.85 * carried and len(queue) <= 6


def test_the_window_counts_the_bytes_of_what_is_not_acknowledged() -> None:
    outbox: Outbox[str] = Outbox(credits=9, window_bytes=100)
    outbox.send("a", 0.0, 60)
    assert outbox.has_credit and outbox.in_flight_bytes == 60
    outbox.send("b", 0.0, 40)  # the window is full with its last byte
    assert not outbox.has_credit and outbox.in_flight_bytes == 100
    assert outbox.acknowledged(2, 0.0) == "b" and outbox.acknowledged(2, 0.0) is None
    assert outbox.has_credit and outbox.in_flight_bytes == 60
    outbox.send("c", 0.0, 500)  # a message may exceed the window
    outbox.acknowledged(1, 0.0)
    assert not outbox.has_credit and outbox.in_flight_bytes == 500
    outbox = Outbox(credits=2, window_bytes=1)
    assert outbox.send("without a size", 0.0) == 1 and outbox.in_flight_bytes == 0
    assert outbox.send("larger than the window, alone", 0.0, 2) == 2


def test_giving_up_frees_everything_and_uses_no_number_again() -> None:
    outbox: Outbox[str] = Outbox(credits=2, window_bytes=100)
    outbox.send("a", 0.0, 60)
    outbox.send("b", 0.0, 60)
    outbox.forget()
    assert outbox.has_credit and outbox.in_flight_bytes == 0
    assert (outbox.pending, outbox.sent_at, outbox.sizes) == ({}, {}, {})
    assert outbox.to_resend(99.0, older_than=1.0) == [] and outbox.acknowledged(1, 0.0) is None
    assert outbox.in_flight_bytes == 0 and outbox.send("c", 0.0) == 3


def test_a_receiver_takes_only_so_many_messages_and_bytes_at_once() -> None:
    inbox = Inbox(most_open=2)
    assert [inbox.receive("s", number) for number in (1, 2, 3, 2)] == ["new", "new", "full", "open"]
    assert inbox.commit("s", 1) and inbox.receive("s", 3) == "new"
    inbox = Inbox(most_bytes=100)
    assert [inbox.receive("s", 1, 60), inbox.receive("s", 2, 41), inbox.receive("s", 2, 40)] == ["new", "full", "new"]
    assert inbox.open_bytes == 100 and inbox.receive("s", 3, 1) == "full"
    assert inbox.commit("s", 1) and inbox.open_bytes == 40 and inbox.receive("s", 3, 60) == "new"
    assert inbox.commit("s", 2) and inbox.commit("s", 3) and inbox.open_bytes == 0
    assert inbox.receive("s", 4, 1000) == "new"  # larger than the bound, alone
    assert inbox.receive("s", 5, 0) == "full"
    assert inbox.commit("s", 4) and inbox.receive("s", 5) == "new" and inbox.open_bytes == 0  # without a size


def test_a_number_too_far_ahead_is_not_remembered() -> None:
    inbox = Inbox()
    assert MOST_AHEAD == 1_000_000
    assert inbox.receive("s", MOST_AHEAD + 1) == "full" and not inbox.open
    assert inbox.receive("s", MOST_AHEAD) == "new"
    assert inbox.receive("s", 1) == "new" and inbox.commit("s", 1)
    assert inbox.receive("s", MOST_AHEAD + 1) == "new"


def test_what_is_committed_out_of_order_is_remembered_until_the_gap_closes() -> None:
    inbox = Inbox()
    assert [inbox.receive("s", number) for number in (1, 2, 3)] == ["new"] * 3
    assert inbox.commit("s", 3) and inbox.commit("s", 2)
    assert (inbox.committed_to, inbox.committed) == (0, {2, 3})
    assert inbox.receive("s", 3) == "committed" and inbox.receive("s", 1) == "open"
    assert not inbox.commit("s", 3) and not inbox.commit("s", 4)  # committed already, never received
    assert inbox.commit("s", 1) and (inbox.committed_to, inbox.committed, inbox.open) == (3, set(), {})
    assert inbox.receive("s", 1) == inbox.receive("s", 3) == "committed"


def test_a_new_session_forgets_what_the_old_one_had_open() -> None:
    inbox = Inbox(most_bytes=100)
    for number in (1, 2, 3):
        inbox.receive("a", number, 30)
    inbox.commit("a", 1)
    inbox.commit("a", 3)
    assert inbox.receive("b", 2, 80) == "new"
    assert (inbox.session, inbox.committed_to, inbox.committed) == ("b", 0, set())
    assert (inbox.open, inbox.open_bytes) == ({2: 80}, 80)
    assert inbox.receive("b", 3, 20) == "new"


def test_a_receiver_that_begins_later_waits_for_no_message_that_has_been_acknowledged() -> None:
    outbox: Outbox[str] = Outbox(credits=4)
    assert outbox.first == 1
    for _ in range(4):
        outbox.send("", 0.0)
    outbox.acknowledged(1, 0.0)
    outbox.acknowledged(3, 0.0)
    assert outbox.first == 2
    inbox = Inbox()
    inbox.begin_at("s", outbox.first)
    assert [inbox.receive("s", number) for number in (1, 2, 4)] == ["committed", "new", "new"]
    assert inbox.commit("s", 4) and inbox.commit("s", 2) and (inbox.committed_to, inbox.committed) == (2, {4})
    outbox.acknowledged(2, 0.0)
    inbox.begin_at("s", outbox.first)  # 3 will not come again
    assert (outbox.first, inbox.committed_to, inbox.committed) == (4, 4, set())
    inbox.begin_at("s", 1)  # a word that comes late
    assert inbox.committed_to == 4
    outbox.forget()
    assert outbox.first == 5


def test_what_is_open_where_a_sender_says_that_it_is_acknowledged_stays_open() -> None:
    inbox = Inbox()
    assert inbox.receive("s", 2) == "new"
    inbox.begin_at("s", 10)  # of a sender that does not keep to the protocol
    assert inbox.commit("s", 2) and (inbox.committed_to, inbox.committed) == (9, set())


def test_a_new_session_starts_anew() -> None:
    inbox = Inbox()
    assert inbox.receive("life-1", 1) == "new"
    assert inbox.commit("life-1", 1)
    assert inbox.receive("life-1", 1) == "committed"
    assert inbox.receive("life-2", 1) == "new"
    assert not inbox.commit("life-1", 1)  # the old life's work must not acknowledge the new life's message


@pytest.mark.parametrize("seed", range(20))
def test_every_message_is_processed_once_over_a_lossy_link(seed: int) -> None:
    rng = random.Random(seed)
    outbox: Outbox[int] = Outbox(credits=4)
    inbox = Inbox()
    to_send, processed, open_work = list(range(50)), [], []
    wire: list[tuple[int, int]] = []
    acks: list[int] = []
    for now in range(5000):
        if to_send and outbox.has_credit and rng.random() < 0.5:
            item = to_send.pop(0)
            wire.append((outbox.send(item, now), item))
        wire += outbox.to_resend(now, older_than=7)
        rng.shuffle(wire)
        if wire and rng.random() < 0.7:
            number, item = wire.pop()
            if rng.random() < 0.6:  # else lost
                verdict = inbox.receive("s", number)
                if verdict == "new":
                    open_work.append((number, item))
                elif verdict == "committed":
                    acks.append(number)
                if rng.random() < 0.2:
                    wire.append((number, item))  # duplicated
        if open_work and rng.random() < 0.5:
            number, item = open_work.pop(rng.randrange(len(open_work)))
            processed.append(item)
            assert inbox.commit("s", number)
            acks.append(number)
        if acks and rng.random() < 0.6:
            number = acks.pop()
            if rng.random() < 0.7:
                outbox.acknowledged(number, now)
        assert len(outbox.pending) <= 4
        if not to_send and not outbox.pending:
            break
    assert sorted(processed) == list(range(50))
    assert not outbox.pending
