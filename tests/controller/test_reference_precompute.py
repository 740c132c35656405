"""What an idle trainer precomputes: groups that wait, each sample once, and nothing where there is no reference."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from streamrl.controller.group_pool import GroupPool
from streamrl.controller.reference_precompute import ReferencePrecompute
from streamrl.controller.step_batch import StepBatch
from streamrl.controller.trainer_client import Trainers
from streamrl.protocol.controller_trainer import Publish, SaveCheckpoint
from streamrl.protocol.message import kind_of
from streamrl.rollouts.micro_batch_wire import from_wire
from streamrl.rollouts.rank_shares import deal
from streamrl.rollouts.train_groups import TrainGroup
from streamrl.rollouts.types import FloatArray, Group
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Delivery
from tests.controller.test_pool_and_batch import config, empty_group, finish, pool_of
from tests.training.conftest import random_groups

KL = {"kl": {"coef": 0.1}}
ROOM = 1000
"""Tokens, more than all groups of a test have."""


def names(shares: Sequence[list[TrainGroup]] | None) -> list[list[str]]:
    return [[group.group_id for group in share] for share in shares or []]


def reference_of(tokens: np.ndarray) -> FloatArray:
    """What the trainer of these tests answers for a completion."""
    return (-1.0 - tokens).astype(np.float32)


def answers(shares: Sequence[list[TrainGroup]]) -> list[FloatArray]:
    """Each rank's."""
    empty = np.zeros(0, dtype=np.float32)
    return [
        np.concatenate([empty, *(reference_of(s.completion_tokens) for group in share for s in group.sequences)])
        for share in shares
    ]


def work_ahead(
    precompute: ReferencePrecompute, batch: StepBatch, pool: GroupPool, room: int, ranks: int
) -> list[list[list[str]]]:
    """All that is precomputed until nothing is left: by request and rank, the groups."""
    asked = []
    while (shares := precompute.next(batch, pool, room, ranks)) is not None:
        assert len(shares) == ranks and len(asked) < 99
        asked.append(names(shares))
        precompute.done(answers(shares))
    return asked


def test_complete_groups_of_the_pool_are_precomputed_once_in_the_order_in_which_they_are_due() -> None:
    pool, batch, precompute = pool_of("abcd"), StepBatch(config(4, **KL), 1), ReferencePrecompute()
    pool.issue([empty_group("e")], 1)
    assert precompute.next(batch, pool, ROOM, 1) is None  # nothing is complete
    for name in "ecb":
        finish(pool, name, [0.0, 1.0])
    assert work_ahead(precompute, batch, pool, ROOM, 1) == [[["c", "b", "e"]]]
    finish(pool, "a", [1.0, 1.0])  # no signal, but a KL term has a gradient
    assert work_ahead(precompute, batch, pool, ROOM, 1) == [[["a"]]]


def test_groups_that_wait_for_the_rewards_of_the_whole_batch_come_first() -> None:
    pool, batch, precompute = pool_of("abc"), StepBatch(config(2, advantage="batch", **KL), 1), ReferencePrecompute()
    finish(pool, "a", [0.0, 1.0])
    batch.take(pool.take())
    finish(pool, "b", [0.0, 1.0])
    assert work_ahead(precompute, batch, pool, ROOM, 1) == [[["a", "b"]]]
    batch.take(pool.take())
    assert batch.full and not batch.held_back
    shares, _ = batch.next_micro_batch(ROOM, 1) or ([], False)
    assert [group.has_reference for group in shares[0]] == [True, True]


def test_what_is_being_trained_is_not_precomputed() -> None:
    pool, batch, precompute = pool_of("ab"), StepBatch(config(2, **KL), 1), ReferencePrecompute()
    finish(pool, "a", [0.0, 1.0])
    batch.take(pool.take())
    assert batch.next_micro_batch(ROOM, 1) is not None
    assert precompute.next(batch, pool, ROOM, 1) is None


@pytest.mark.parametrize("algorithm", [{}, {"advantage": "batch"}, {"kl": {"coef": 0.0}}])
def test_nothing_is_precomputed_without_a_reference(algorithm: dict[str, Any]) -> None:
    pool, batch = pool_of("ab"), StepBatch(config(2, **algorithm), 1)
    finish(pool, "a", [0.0, 1.0])
    batch.take(pool.take())
    finish(pool, "b", [0.0, 1.0])
    assert ReferencePrecompute().next(batch, pool, ROOM, 1) is None


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("room", [9, 14, 40, ROOM])  # the least cuts groups: prompt 3, completions 2 .. 5
def test_each_sample_is_precomputed_once_and_its_values_travel_with_it(ranks: int, room: int) -> None:
    pool, batch, precompute = pool_of("abcde", 4), StepBatch(config(5, 4, **KL), 1), ReferencePrecompute()
    for name in "dbeca":
        finish(pool, name, [0.0, 1.0, 0.5, 0.25])
    groups = pool.waiting
    precomputed = 0
    while (asked := precompute.next(batch, pool, room, ranks)) is not None:
        precomputed += sum(len(group.sequences) for share in asked for group in share)
        precompute.done(answers(asked))
    assert precomputed == 5 * 4
    for group in groups:
        assert sorted(group.reference_logprobs) == sorted(group.scored)
        for sample_id, values in group.reference_logprobs.items():
            np.testing.assert_array_equal(values, reference_of(group.scored[sample_id].sample.completion_tokens))
    while pool.first():
        batch.take(pool.take())
    shares, _ = batch.next_micro_batch(room, ranks) or ([], False)
    for sequence in (s for share in shares for group in share for s in group.sequences):
        np.testing.assert_array_equal(sequence.reference_logprobs, reference_of(sequence.completion_tokens))


def test_a_request_is_no_larger_than_a_micro_batch() -> None:
    pool, batch = pool_of("abcde", 4), StepBatch(config(5, 4, **KL), 1)
    for name in "abcde":
        finish(pool, name, [0.0] * 4)
    precompute = ReferencePrecompute()
    shares = precompute.next(batch, pool, 40, 2)
    assert names(shares) == [["a", "b"], ["c", "d"]]
    assert [sum(group.tokens for group in share) for share in shares or []] == [34, 34]


def test_samples_without_a_loss_are_not_precomputed_and_hold_nothing_up() -> None:
    pool, batch, precompute = pool_of("ab"), StepBatch(config(2, mask_truncated=True, **KL), 1), ReferencePrecompute()
    finish(pool, "a", [0.0, 1.0], reason="length")
    assert precompute.next(batch, pool, ROOM, 1) is None
    finish(pool, "b", [0.0, 1.0])
    assert work_ahead(precompute, batch, pool, ROOM, 1) == [[["b"]]]


def test_an_answer_of_another_length_is_refused() -> None:
    pool, batch, precompute = pool_of("a"), StepBatch(config(1, **KL), 1), ReferencePrecompute()
    finish(pool, "a", [0.0, 1.0])
    assert precompute.next(batch, pool, ROOM, 1)
    with pytest.raises(ValueError, match="4 reference log-probabilities for 5 tokens"):
        precompute.done([np.zeros(4, dtype=np.float32)])


def test_shares_are_equal_or_full_and_never_larger() -> None:
    groups = random_groups(1, samples=12)
    room = groups[0].tokens // 2
    shares, rest = deal(groups, room, ranks=5)  # one group, larger than a rank may get, and more ranks than pieces
    assert len(shares) == 5 and not rest
    assert sum(len(group.sequences) for share in shares for group in share) == 12
    assert all(sum(group.tokens for group in share) <= room for share in shares)
    assert deal([], 10, ranks=2) == ([[], []], [])


class _Hub:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str, dict[str, Any], dict[str, np.ndarray]]] = []

    async def send(self, *message: Any) -> None:
        self.sent.append(message)


def test_ranks_that_share_layers_get_the_same_groups_and_answer_once() -> None:
    hub = _Hub()
    trainers = Trainers(hub, WaitRegistry("test"), ranks=4, limit_s=60.0, sharing=2)  # type: ignore[arg-type]
    first, second = random_groups(2)

    async def play() -> None:
        await trainers.train([[first], [second]], is_last=True)
        for rank, name in enumerate(trainers.names):
            assert trainers.busy
            answer = trainers.answered(Delivery(name, "train_done", rank, {}, lambda: None))
        assert answer is not None and [one.body for one in answer] == [0, 2]
        with pytest.raises(ValueError, match="4 shares for 2 workers"):
            await trainers.train([[], [], [], []], is_last=True)

    asyncio.run(play())
    assert [(name, body["groups"][0][0]) for name, _, body, _ in hub.sent] == [
        ("trainer-0", first.group_id),
        ("trainer-1", first.group_id),
        ("trainer-2", second.group_id),
        ("trainer-3", second.group_id),
    ]


def test_a_micro_batch_may_follow_another_and_each_is_answered_in_its_turn() -> None:
    hub = _Hub()
    waits = WaitRegistry("test")
    trainers = Trainers(hub, waits, ranks=2, limit_s=60.0)  # type: ignore[arg-type]

    def answer(rank: int, kind: str, body: int) -> list[int] | None:
        delivery = Delivery(f"trainer-{rank}", f"{kind}_done", body, {}, lambda: None)
        assert trainers.awaits(delivery)
        found = trainers.answered(delivery)
        return None if found is None else [one.body for one in found]

    async def play() -> None:
        await trainers.train([[], []], is_last=False)
        assert trainers.busy and trainers.takes_micro_batch
        await trainers.train([[], []], is_last=True)
        assert not trainers.takes_micro_batch
        assert answer(0, "train", 1) is None and answer(0, "train", 2) is None  # rank 0 is ahead of rank 1
        assert not trainers.awaits(Delivery("trainer-0", "train_done", 3, {}, lambda: None))
        assert answer(1, "train", 1) == [1, 1]
        assert waits.begun == {"trainer"} and trainers.takes_micro_batch
        assert answer(1, "train", 2) == [2, 2]
        assert not trainers.busy and not waits.begun
        await trainers.ask(Publish())
        assert not trainers.takes_micro_batch  # all else goes alone
        assert not trainers.awaits(Delivery("trainer-0", "train_done", 3, {}, lambda: None))

    asyncio.run(play())


def test_a_command_of_a_kind_with_a_limit_of_its_own_has_that_limit() -> None:
    waits = WaitRegistry("test")
    limits = {"checkpoint": 3000.0}
    trainers = Trainers(_Hub(), waits, ranks=1, limit_s=60.0, limits_s=limits)  # type: ignore[arg-type]

    async def play() -> list[float]:
        found = []
        for command in (SaveCheckpoint(step=1, state={}, pending=[]), Publish()):
            await trainers.ask(command)
            found.append(waits.snapshot()[0]["limit_s"])
            trainers.answered(Delivery("trainer-0", f"{kind_of(command)}_done", {}, {}, lambda: None))
        return found

    assert asyncio.run(play()) == [3000.0, 60.0]


def test_only_a_micro_batch_that_waiting_would_not_make_larger_is_sent_ahead() -> None:
    pool, batch = pool_of("abcd"), StepBatch(config(4), 1)
    for name in "abc":
        finish(pool, name, [0.0, 1.0])
        batch.take(pool.take())
    first, second, third = batch.queue
    assert batch.next_micro_batch(first.tokens, 1) == ([[first]], False)
    assert batch.next_micro_batch(second.tokens, 1) == ([[second]], False)  # full
    assert batch.next_micro_batch(2 * third.tokens, 1) is None  # more may come
    finish(pool, "d", [0.0, 1.0])
    batch.take(pool.take())
    assert batch.samples_trained == 0
    batch.micro_batch_done([{}])
    assert (batch.samples_trained, batch.in_flight) == (2, True)
    shares, is_last = batch.next_micro_batch(1000, 1) or ([], False)  # the step has all its groups
    assert is_last and [one.group_id for one in shares[0]] == [third.group_id, "d"]
    batch.micro_batch_done([{}])
    assert not batch.trained
    batch.micro_batch_done([{}])
    assert batch.trained


def test_all_ranks_compute_the_reference_or_none_does() -> None:
    hub = _Hub()
    trainers = Trainers(hub, WaitRegistry("test"), ranks=2, limit_s=60.0)  # type: ignore[arg-type]
    pool, batch, precompute = pool_of("abc"), StepBatch(config(3, **KL), 1), ReferencePrecompute()

    async def play() -> None:
        for name in "ab":
            finish(pool, name, [0.0, 1.0])
        shares = precompute.next(batch, pool, ROOM, 2)
        assert shares is not None
        await trainers.precompute_reference(shares)
        assert trainers.busy
        for name, values in zip(reversed(trainers.names), reversed(answers(shares)), strict=True):
            arrays = {"reference_logprobs": values}
            answer = trainers.answered(Delivery(name, "precompute_done", {}, arrays, lambda: None))
        assert answer is not None and not trainers.busy
        precompute.done([one.arrays["reference_logprobs"] for one in answer])
        finish(pool, "c", [0.0, 1.0])
        groups: list[Group] = [pool.take() for _ in range(3)]
        for group in groups:
            batch.take(group)
        a, b, c = batch.queue
        await trainers.train([[a], [b]], is_last=False)
        await trainers.train([[a, b], []], is_last=False)
        await trainers.train([[a, b], [c]], is_last=True)

    asyncio.run(play())
    assert [(name, kind) for name, kind, *_ in hub.sent] == [
        (name, kind) for kind in ("precompute", "train", "train", "train") for name in trainers.names
    ]
    assert [body["reference_given"] for _, kind, body, _ in hub.sent if kind == "train"] == [True] * 4 + [False] * 2
    _, _, body, arrays = hub.sent[2]
    assert from_wire(body, arrays)[0].has_reference
