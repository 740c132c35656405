"""Who is in the group in which weights are pushed, and what follows when a member is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from streamrl.protocol.controller_site import Member, WeightAnswer
from streamrl.weights.membership import TRIES, Push, PushedGroup, PushStep, first_ranks, world_size

A, B, C = Member("a", 1, 1), Member("b", 1, 2), Member("c", 1, 1)
B_AGAIN = Member("b", 2, 2)
SPAN = (1.0, 2.0)


def answer(*done: str, lost: str = "", failed: str = "") -> WeightAnswer:
    """What has become of a step, by names of one letter."""
    return WeightAnswer(
        call="x",
        done={name: (float(ord(name)), 2.0) for name in done},
        lost={name: f"{name} died" for name in lost},
        failed={name: f"{name} was cut off" for name in failed},
    )


def published(group: PushedGroup, *members: Member) -> Push:
    """A publish to these members in which nothing goes wrong."""
    push, names = Push(group), [one.name for one in members]
    push.present(members)
    if push.step is PushStep.FORM:
        push.formed(answer(*names))
    push.paused(answer(*names))
    push.sent(answer(*names))
    return push


def test_the_trainer_has_rank_0_and_every_worker_one_of_its_own() -> None:
    assert first_ranks([A, B, C]) == {"a": 1, "b": 2, "c": 4} and world_size([A, B, C]) == 5
    assert first_ranks([]) == {} and world_size([]) == 1


def test_a_group_is_formed_once_and_stands_as_long_as_its_members_are_the_same() -> None:
    group = PushedGroup()
    push = Push(group)
    push.present([B, A])
    assert (push.step, push.members, group.members) == (PushStep.FORM, (A, B), ())
    push.formed(answer("a", "b"))
    assert (push.step, group.members) == (PushStep.PAUSE, (A, B))
    push.paused(answer("a", "b"))
    assert push.step is PushStep.SEND
    push.sent(answer("a", "b"))
    assert push.step is PushStep.DONE and push.applied == {"a": (97.0, 2.0), "b": (98.0, 2.0)}
    assert (push.tries, push.why, group.members) == (0, "", (A, B))
    again = Push(group)
    again.present([B, A])
    assert again.step is PushStep.PAUSE  # not formed anew


@pytest.mark.parametrize("others", [[A], [A, B, C], [A, B_AGAIN], [B, C]])
def test_with_other_members_it_is_left_and_formed_anew(others: list[Member]) -> None:
    group = PushedGroup()
    published(group, A, B)
    push = Push(group)
    push.present(others)
    assert push.step is PushStep.FORM and group.members == ()
    push.formed(answer(*(one.name for one in others)))
    assert group.members == tuple(others)


def test_with_nobody_there_a_version_is_done_at_once_and_the_group_stays_for_who_is_in_it() -> None:
    group = PushedGroup()
    published(group, A)
    push = Push(group)
    push.present([])
    assert (push.step, push.applied, push.tries, group.members) == (PushStep.DONE, {}, 0, (A,))


GOES_WRONG: dict[str, tuple[PushStep, Callable[[Push], None], str]] = {
    "one dies as they meet": (PushStep.FORM, lambda push: push.formed(answer("a", lost="b")), "b: b died"),
    "the trainer cannot meet them": (PushStep.FORM, lambda push: push.formed(answer("a", "b"), "late"), "late"),
    "one dies as it pauses": (PushStep.PAUSE, lambda push: push.paused(answer("a", lost="b")), "b: b died"),
    "one dies in the broadcast": (PushStep.SEND, lambda push: push.sent(answer(lost="b"), "broken"), "b: b died"),
    "it dies and others are cut off": (
        PushStep.SEND,
        lambda push: push.sent(answer(lost="b", failed="a")),
        "b: b died",
    ),
    "all are cut off": (
        PushStep.SEND,
        lambda push: push.sent(answer(failed="ab"), "x"),
        "a: a was cut off; b: b was cut",
    ),
    "the trainer alone is": (PushStep.SEND, lambda push: push.sent(answer("a"), "no way"), "no way"),
    "one says nothing": (PushStep.SEND, lambda push: push.sent(answer("b")), "a did not answer"),
    "nobody says anything": (PushStep.SEND, lambda push: push.sent(answer()), "a did not answer"),
}


@pytest.mark.parametrize("case", GOES_WRONG)
def test_whatever_goes_wrong_the_group_is_left_and_the_site_is_asked_again(case: str) -> None:
    at, go_wrong, why = GOES_WRONG[case]
    group = PushedGroup()
    push = Push(group)
    push.present([A, B])
    if at is not PushStep.FORM:
        push.formed(answer("a", "b"))
    if at is PushStep.SEND:
        push.paused(answer("a", "b"))
    assert push.step is at
    go_wrong(push)
    assert (push.step, push.tries, group.members, push.applied) == (PushStep.ASK, 1, (), {})
    assert push.why.startswith(why)
    push.present([A])  # those that are left
    assert push.step is PushStep.FORM
    push.formed(answer("a"))
    push.paused(answer("a"))
    push.sent(answer("a"))
    assert (push.step, set(push.applied), push.tries) == (PushStep.DONE, {"a"}, 1)


def test_the_same_members_meet_anew_after_a_group_that_broke() -> None:
    group = PushedGroup()
    published(group, A, B)
    push = Push(group)
    push.present([A, B])
    push.paused(answer("a", "b"))
    push.sent(answer(failed="ab"), "broken")
    push.present([A, B])
    assert push.step is PushStep.FORM


@pytest.mark.parametrize("broken", ["", "the last one was gone as the trainer ended"])
def test_a_member_that_is_lost_when_all_others_have_the_version_costs_no_other_try(broken: str) -> None:
    group = PushedGroup()
    push = Push(group)
    push.present([A, B])
    push.formed(answer("a", "b"))
    push.paused(answer("a", "b"))
    push.sent(answer("a", lost="b"), broken)
    assert (push.step, set(push.applied), push.tries, group.members) == (PushStep.DONE, {"a"}, 0, ())
    assert push.why == "b: b died"  # for the log


def test_members_that_have_all_of_it_are_done_but_a_group_that_broke_does_not_stand() -> None:
    group = PushedGroup()
    push = Push(group)
    push.present([A])
    push.formed(answer("a"))
    push.paused(answer("a"))
    push.sent(answer("a"), "its end was not seen")
    assert push.step is PushStep.DONE and push.applied and group.members == ()


def test_after_some_tries_the_publish_fails_with_the_last_cause() -> None:
    push = Push(PushedGroup())
    for number in range(1, TRIES + 1):
        push.present([A, B])
        push.formed(answer("a", "b"), f"try {number}")
        assert push.step is (PushStep.FAILED if number == TRIES else PushStep.ASK)
    assert (push.why, push.tries) == (f"try {TRIES}", TRIES)
    assert TRIES == 3  # as docs/explanation/weights.md says


def test_steps_out_of_turn_are_errors() -> None:
    push = Push(PushedGroup())
    for early in (push.formed, push.paused, push.sent):
        with pytest.raises(ValueError, match="cannot go on"):
            early(answer("a"))
    push.present([A])
    with pytest.raises(ValueError, match="'form' cannot go on as at 'ask'"):
        push.present([A])
