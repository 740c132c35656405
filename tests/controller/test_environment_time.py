"""The time of environments, and how much of it is hidden behind generation."""

from __future__ import annotations

import pytest

from streamrl.controller.environment_time import environment_time, without
from streamrl.rollouts.trajectory import EpisodeStep


def step(kind: str, started: float, finished: float) -> EpisodeStep:
    return EpisodeStep(kind, "x", started, finished)  # type: ignore[arg-type]


def test_time_counts_once_however_many_episodes_share_it() -> None:
    turns = [step("generate", 0, 4), step("generate", 1, 2), step("generate", 3, 5), step("generate", 8, 9)]
    stepped = [step("environment", 4, 7), step("environment", 6, 8.5), step("environment", 4.5, 5)]
    found = environment_time([[stepped[1], step("tool", 0, 100)], turns, stepped[::2]])
    assert found is not None
    assert found.stepped_s == 3 + 2.5 + 0.5
    assert (found.busy_s, found.generated_s) == (4.5, 6.0)  # 4 to 8.5; 0 to 5 and 8 to 9
    assert found.hidden_s == pytest.approx(1.0 + 0.5)
    assert found.hidden_fraction == pytest.approx(1.5 / 4.5)


def test_one_step_may_be_hidden_by_several_turns() -> None:
    turns = [[step("generate", n, n + 1)] for n in (-1, 2, 5, 9, 12)]
    found = environment_time([[step("environment", 0, 10)], *turns])
    assert found is not None and (found.hidden_s, found.generated_s) == (3.0, 5.0)


def test_without_an_environment_there_is_nothing_to_report() -> None:
    assert environment_time([[step("generate", 0, 1), step("tool", 0, 1)]]) is None
    alone = environment_time([[step("environment", 1, 1)]])
    assert alone is not None and alone.hidden_fraction is None


def test_an_environment_that_plays_the_episode_itself_does_not_step_while_its_turns_are_generated() -> None:
    played = [step("environment", 0, 10), step("generate", 1, 3), step("generate", 2, 5), step("generate", 9, 12)]
    other = [step("generate", 5, 6)]
    found = environment_time([played, other])
    assert found is not None
    assert found.stepped_s == found.busy_s == 1 + 4  # 0 to 1, 5 to 9
    assert found.hidden_s == 1
    assert found.generated_s == 2 + 2 + 1 + 3


@pytest.mark.parametrize(
    ("others", "left"),
    [
        ([], [(2, 8)]),
        ([(0, 2), (8, 9)], [(2, 8)]),
        ([(0, 3), (7, 9)], [(3, 7)]),
        ([(4, 5), (3, 6)], [(2, 3), (6, 8)]),
        ([(0, 9)], []),
        ([(2, 4), (4, 8)], []),
    ],
)
def test_what_others_cover_is_taken_out(others: list[tuple[float, float]], left: list[tuple[float, float]]) -> None:
    assert without((2, 8), others) == left


def test_an_empty_interval_stays_wherever_it_is() -> None:
    assert without((5, 5), [(4, 6)]) == without((5, 5), []) == without((5, 5), [(5, 7), (3, 5)]) == [(5, 5)]
