"""Exactly-once processing between living processes, whatever the link drops or repeats."""

from __future__ import annotations

import random

import pytest

from streamrl.transport.delivery import Inbox, Outbox


def test_credits_bound_what_is_under_way() -> None:
    outbox: Outbox[str] = Outbox(credits=2)
    assert [outbox.send("a", 0.0), outbox.send("b", 0.0)] == [1, 2]
    assert not outbox.has_credit
    with pytest.raises(RuntimeError, match="no credit"):
        outbox.send("c", 0.0)
    assert outbox.acknowledged(1) == "a"
    assert outbox.has_credit
    assert outbox.acknowledged(1) is None  # a repeated acknowledgement frees nothing


def test_only_what_is_old_enough_is_sent_again() -> None:
    outbox: Outbox[str] = Outbox(credits=9)
    outbox.send("old", 0.0)
    outbox.send("new", 9.0)
    assert outbox.to_resend(10.0, older_than=5.0) == [(1, "old")]
    assert outbox.to_resend(11.0, older_than=5.0) == []


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
                outbox.acknowledged(number)
        assert len(outbox.pending) <= 4
        if not to_send and not outbox.pending:
            break
    assert sorted(processed) == list(range(50))
    assert not outbox.pending
