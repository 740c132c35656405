"""The drafter by itself: whom it drafts for, when it does not, and what it learns from."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from scheduler.cost.decode import StepCurve
from streamrl.generation.drafts.draft_account import CREDIT, FEWEST
from streamrl.generation.drafts.drafter import FRUITLESS, OVERHEAD, REST, RolloutDrafter
from streamrl.generation.drafts.lessons import DrafterLessons
from streamrl.rollouts.types import SampleRequest

PROMPT = [1, 2, 3, 4]
SIBLING = [10, 11, 12, 13, 14, 15]
FLAT = StepCurve((1, 64), (0.01, 0.01))
STEEP = StepCurve((1, 2, 64), (0.01, 0.02, 0.64))


def raw(tokens: list[int]) -> bytes:
    return np.asarray(tokens, dtype=np.int32).tobytes()


class World:
    """A drafter with vLLM's batch around it; its clock stands still."""

    def __init__(self, curve: StepCurve | None = FLAT, slots: int = 8, longest: int = 64) -> None:
        self.now = 0.0
        self.drafter = RolloutDrafter(
            SimpleNamespace(
                speculative_config=SimpleNamespace(num_speculative_tokens=3),
                scheduler_config=SimpleNamespace(max_num_seqs=slots),
                model_config=SimpleNamespace(max_model_len=longest),
            ),
            clock=lambda: self.now,
        )
        self.teach(curve=curve)
        for batch in (1, 2, 4):
            for _ in range(FEWEST):
                self.drafter.accounts.plain(batch, 0.0, 0.0)

    def teach(
        self, *completions: list[int], version: int = 0, curve: StepCurve | None = None, **expected: float
    ) -> None:
        some = [(raw(PROMPT), raw(completion), version) for completion in completions]
        forecasts = [(raw(PROMPT), value) for value in expected.values()]
        self.counts = self.drafter.teach(version, curve and curve.to_json(), some, forecasts)

    def propose(self, *rows: tuple[list[int], int]) -> list[list[int]]:
        """Each row by its tokens, and the number of those that the step has sampled."""
        tokens = np.zeros((len(rows), 64), dtype=np.int32)
        for n, (row, _) in enumerate(rows):
            tokens[n, : len(row)] = row
        lengths = np.asarray([len(row) for row, _ in rows], dtype=np.int32)
        return self.drafter.propose([row[len(row) - new :] for row, new in rows], lengths, tokens)


def test_a_request_is_drafted_what_its_sibling_said() -> None:
    world = World()
    world.teach(SIBLING)
    assert world.propose(([*PROMPT, *SIBLING[:2]], 1)) == [SIBLING[2:5]]


def test_nothing_is_drafted_before_the_step_times_are_known() -> None:
    world = World(curve=None)
    world.teach(SIBLING)
    assert world.propose(([*PROMPT, *SIBLING[:2]], 1)) == [[]]
    world.teach(curve=FLAT)
    assert world.propose(([*PROMPT, *SIBLING[:2]], 1)) == [SIBLING[2:5]]


def test_nothing_is_drafted_where_a_row_costs_a_step() -> None:
    world = World(curve=STEEP)
    world.teach(SIBLING)
    assert world.propose(([*PROMPT, *SIBLING[:2]], 1)) == [[]]


def test_a_row_whose_prompt_is_not_read_yet_gets_no_draft() -> None:
    world = World()
    world.teach(SIBLING)
    assert world.propose(([*PROMPT[:3]], 0), ([*PROMPT, *SIBLING[:2]], 1)) == [[], SIBLING[2:5]]


def test_a_draft_leaves_room_for_the_token_after_it() -> None:
    world = World(longest=len(PROMPT) + 4)
    world.teach(SIBLING)
    assert world.propose(([*PROMPT, *SIBLING[:2]], 1)) == [SIBLING[2:3]]
    assert world.propose(([*PROMPT, *SIBLING[:3]], 1)) == [[]]


def test_accepted_and_rejected_tokens_are_counted_by_source_and_age() -> None:
    world = World()
    world.teach(SIBLING)
    row = [*PROMPT, *SIBLING[:2]]
    world.propose((row, 1))
    world.propose(([*row, SIBLING[2], 99], 2))  # the first of three was accepted
    world.teach(version=2)
    assert world.counts == {"sibling": {"drafted": 3, "accepted": 1}}
    world.propose((row, 1))
    world.propose(([*row, *SIBLING[2:5], 7], 4))
    world.teach(version=2)
    assert world.counts["earlier 2"] == {"drafted": 3, "accepted": 3}


def test_a_row_that_another_request_has_taken_is_not_judged() -> None:
    for other, new in (([50, 51, 52], 1), ([50, SIBLING[1], 52, 53], 1)):
        world = World()
        world.teach(SIBLING)
        world.propose(([*PROMPT, *SIBLING[:2]], 1))
        world.propose(([*PROMPT, *other], new))
        world.teach()
        assert world.counts == {}


def test_a_request_that_comes_with_tokens_is_known_by_its_prompt() -> None:
    world = World()
    world.teach(SIBLING)
    # moved: for vLLM all of this is its prompt, and one token is new
    assert world.propose(([*PROMPT, *SIBLING[:4]], 1)) == [SIBLING[4:6]]


def test_drafts_go_to_the_longest_request_if_lengths_are_forecast() -> None:
    # every row costs 0.001 s: of two requests, a token less of the longer saves 0.01, of the shorter 0.001
    world = World(curve=StepCurve((1, 101), (0.01, 0.11)))
    world.teach(SIBLING, forecast=20.0)
    short, long = [*PROMPT, *SIBLING[:4]], [*PROMPT, *SIBLING[:2]]
    assert world.propose((short, 1), (long, 1)) == [[], SIBLING[2:5]]


def test_where_every_slot_is_taken_others_wait_and_no_request_comes_first() -> None:
    world = World(curve=StepCurve((1, 101), (0.01, 0.11)), slots=2)
    world.teach(SIBLING, forecast=20.0)
    short, long = [*PROMPT, *SIBLING[:4]], [*PROMPT, *SIBLING[:2]]
    assert world.propose((short, 1), (long, 1)) == [SIBLING[4:6], SIBLING[2:5]]


def test_without_forecasts_both_get_drafts() -> None:
    world = World(curve=StepCurve((1, 101), (0.01, 0.11)))
    world.teach(SIBLING)
    short, long = [*PROMPT, *SIBLING[:4]], [*PROMPT, *SIBLING[:2]]
    assert world.propose((short, 1), (long, 1)) == [SIBLING[4:6], SIBLING[2:5]]


def test_the_drafter_rests_where_nothing_pays_until_the_batch_shrinks() -> None:
    world, stranger = World(), [*PROMPT, 60, 61, 62, 63]
    for _ in range(FRUITLESS):
        assert world.propose(*[(stranger, 1)] * 4) == [[]] * 4
    world.teach(SIBLING)
    known = [*PROMPT, *SIBLING[:2]]
    for _ in range(REST):
        assert world.propose(*[(known, 1)] * 4) == [[]] * 4
    assert any(world.propose(*[(known, 1)] * 4))
    for _ in range(FRUITLESS):
        world.propose(*[(stranger, 1)] * 4)
    assert world.propose((known, 1)) == [SIBLING[2:5]]


def test_what_verification_costs_is_measured_beside_plain_steps() -> None:
    world = World()
    assert world.drafter.overhead_s == pytest.approx(OVERHEAD * 0.01)
    stranger, known = [*PROMPT, 60, 61, 62, 63], [*PROMPT, *SIBLING[:2]]
    for _ in range(FEWEST):
        world.propose((stranger, 1))
        world.now += 0.012  # a plain step: 2 ms beside its rows
    world.teach(SIBLING)
    for took in (0.029, 0.017, 0.017):  # steps with drafts: 7 ms, after a first one that stalled
        assert world.drafter.overhead_s == pytest.approx(OVERHEAD * 0.01)
        assert any(world.propose((known, 1)))
        world.now += took
    world.propose(([*known, SIBLING[2]], 1))
    assert world.drafter.overhead_s == pytest.approx(0.005)
    world.now += 10.0  # it waited, or read a prompt: no measurement
    world.propose(([*known, *SIBLING[2:4]], 1))
    assert world.drafter.overhead_s == pytest.approx(0.005)


def draft_and_reject(world: World, steps: int, took_s: float) -> list[bool]:
    """Propose so many times for a request that says something else each time; return when it was drafted something."""
    world.teach(SIBLING)
    known, drafted = [*PROMPT, *SIBLING[:2]], []
    for _ in range(steps):
        drafted.append(any(world.propose((known, 1))))
        known = [*known[:-1], known[-1], 77, *SIBLING[:2]] if len(known) < 40 else [*PROMPT, *SIBLING[:2]]
        world.now += took_s if drafted[-1] else 0.01
    return drafted


def test_drafting_ends_when_it_has_lost_its_credit_and_is_tried_again_from_a_share_of_plain_steps() -> None:
    drafted = draft_and_reject(World(), 400, took_s=0.02)  # each drafted step loses one plain step
    assert 2 <= sum(drafted[:20]) <= CREDIT + 1
    assert 1 <= sum(drafted[100:]) <= 6  # a share of 300 plain steps pays for three


def test_drafting_that_saves_goes_on_but_for_the_plain_steps_it_is_measured_by() -> None:
    world = World()
    world.teach(SIBLING)
    row, drafted = [*PROMPT, *SIBLING[:2]], 0
    for _ in range(100):
        if any(world.propose((row, 1))):
            drafted += 1
            world.now += 0.012
            world.propose(([*row, *SIBLING[2:5], 7], 4))  # all three accepted: 0.03 s for 0.002
        world.now += 0.01
    assert drafted >= 40


def test_what_looking_for_drafts_costs_is_lost_although_nothing_is_found() -> None:
    world, stranger = World(), [*PROMPT, 60, 61, 62, 63]
    before = world.drafter.accounts.may_draft(1)
    for _ in range(FRUITLESS):
        world.propose((stranger, 1))
        world.now += 0.025
    world.propose((stranger, 1))
    assert before
    assert not world.drafter.accounts.may_draft(1)


def test_a_drafter_is_told_each_thing_once_and_nothing_when_nothing_is_new() -> None:
    lessons = DrafterLessons()
    request = SampleRequest("s", "g", np.asarray(PROMPT, dtype=np.int32), 0, 0.0, expected=7.0)
    assert lessons.take(0, None) == (0, None, [], [])  # the version is new
    assert lessons.take(0, None) is None
    lessons.begins(request)
    lessons.ends(request, np.asarray(SIBLING, dtype=np.int32), 3)
    assert lessons.take(0, None) == (0, None, [(raw(PROMPT), raw(SIBLING), 3)], [(raw(PROMPT), 7.0)])
    assert lessons.take(1, None) == (1, None, [], [])
    assert lessons.take(1, FLAT) == (1, FLAT.to_json(), [], [])
