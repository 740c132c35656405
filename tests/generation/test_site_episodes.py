"""A site's open episodes: whose turns may be generated, what ends one, and what a new agents process gets."""

from __future__ import annotations

import numpy as np
import pytest

from streamrl.controller.arrivals import read_sample
from streamrl.generation.site.site_episodes import AnsweredTurn, PrefixCache, RequestedTurn, SiteEpisodes, is_turn
from streamrl.generation.site.turn_journal import turn_key
from streamrl.generation.site.turn_lengths import FEWEST
from streamrl.protocol.controller_site import IssuedEpisode
from streamrl.protocol.message import wire
from streamrl.protocol.samples import IncomingGroup, sample_to_wire
from streamrl.protocol.site_agents import EpisodeDone, OrderTurn
from streamrl.protocol.site_instance import FinishedSample
from streamrl.rollouts.trajectory import RowExtent, Trajectory
from streamrl.rollouts.types import SampleRequest
from streamrl.transport.wire import Arrays

PROMPT: Arrays = {"prompt_tokens": np.arange(5, dtype=np.int32)}


CACHES: dict[str, PrefixCache] = {}
"""The instances' prefix caches; a test that wants some has them."""


@pytest.fixture(autouse=True)
def _no_caches() -> None:
    CACHES.clear()


def site_with(*sample_ids: str, keeps_kv: bool = False) -> SiteEpisodes:
    site = SiteEpisodes("here", 100, 50, CACHES.get, keeps_kv)
    requests = [SampleRequest(one, "g", np.arange(3, dtype=np.int32), 7, 1.5, 0.0) for one in sample_ids]
    orders = site.begin([IncomingGroup(requests, None, IssuedEpisode("task", {"prompt": "hi"}))])
    assert [order.sample_id for order in orders] == list(sample_ids)
    assert all((order.task, order.item, order.seed) == ("task", {"prompt": "hi"}, 7) for order in orders)
    return site


def turn(
    number: int, sample_id: str = "g.000", attempt: str = "aa", extends: int | None = None, seed: int | None = None
) -> OrderTurn:
    seed = number if seed is None else seed
    before = None if extends is None else f"{sample_id}/{attempt}.{extends}"
    return OrderTurn(turn_id=f"{sample_id}/{attempt}.{number}", sample_id=sample_id, seed=seed, extends=before)


def prompt(length: int) -> Arrays:
    return {"prompt_tokens": np.arange(length, dtype=np.int32)}


def output(length: int, *versions: int) -> Arrays:
    return {"token_versions": np.resize(np.asarray(versions or (0,), np.int32), length)}


def finished(turn_id: str, instance: str = "here-regular-0") -> FinishedSample:
    return FinishedSample(
        **dict(sample_id=turn_id, group_id="g", finish_reason="length", site="here", instance=instance),
        **dict(pool="regular", route="tail", t_queued=1.0, t_dispatched=2.0, t_first_token=3.0),
        **dict(t_finished=4.0, text="four"),
    )


def end(sample_id: str = "g.000") -> EpisodeDone:
    told = Trajectory(rows=[RowExtent(tokens=7, prompt=5)], reward=0.5, messages=[], steps=[])
    return EpisodeDone(
        sample_id=sample_id,
        **dict(finish_reason="stop", t_started=2.0, t_first_token=3.0, t_finished=9.0, text="4", trajectory=told),
    )


def test_a_turn_goes_to_the_dispatcher_as_a_request_of_its_episodes_group() -> None:
    site = site_with("g.000", "g.001")
    found = site.turn(turn(0), PROMPT)
    assert isinstance(found, RequestedTurn) and (found.home, found.cached, found.forecast) == ("", 0, None)
    request = found.request
    assert (request.sample_id, request.group_id, request.seed) == ("g.000/aa.0", "g", 0)
    assert request.temperature == 0.0 and len(request.prompt_tokens) == 5
    answer = site.turn_done(finished("g.000/aa.0"), output(2))
    assert answer is not None and (answer.turn_id, answer.finish_reason, answer.text) == (
        "g.000/aa.0",
        "length",
        "four",
    )
    assert site.turn_done(finished("g.000/aa.0"), output(2)) is None  # answered once


@pytest.mark.parametrize(
    ("message", "arrays", "why"),
    [
        (turn(0, "g.009"), PROMPT, "no open episode"),
        (turn(1), PROMPT, "known already"),
        (OrderTurn(turn_id="g.001/aa.5", sample_id="g.000", seed=0), PROMPT, "none of 'g.000'"),
        (OrderTurn(turn_id="g.000/aa.x", sample_id="g.000", seed=0), PROMPT, "none of 'g.000'"),
        (OrderTurn(turn_id="g.000/aa." + "1" * 99, sample_id="g.000", seed=0), PROMPT, "none of 'g.000'"),
        (turn(2), {}, "without its prompt"),
        (turn(2), {"prompt_tokens": np.empty(0, np.int32)}, "without its prompt"),
        (turn(2), {"prompt_tokens": np.zeros(3, np.int64)}, "without its prompt"),
        (turn(2), {"prompt_tokens": np.zeros(100, np.int32)}, "no room for an answer"),
    ],
)
def test_turns_that_are_nobodys_are_refused(message: OrderTurn, arrays: Arrays, why: str) -> None:
    site = site_with("g.000", "g.001")
    site.turn(turn(1), PROMPT)
    refusal = site.turn(message, arrays)
    assert isinstance(refusal, str) and why in refusal
    assert list(site.turns) == ["g.000/aa.1"]


def test_an_ended_episode_is_a_sample_of_its_last_turns_instance() -> None:
    site = site_with("g.000")
    for number, instance in enumerate(["here-regular-0", "here-regular-1"]):
        site.turn(turn(number), PROMPT)
        site.turn_done(finished(f"g.000/aa.{number}", instance), output(2))
    sample = site.end(end())
    assert isinstance(sample, FinishedSample)
    assert (sample.sample_id, sample.group_id, sample.instance) == ("g.000", "g", "here-regular-1")
    assert (sample.t_queued, sample.t_dispatched, sample.route) == (1.5, 2.0, "tail")
    arrays = {
        "completion_tokens": np.arange(7, dtype=np.int32),
        "logprobs": np.zeros(7, np.float32),
        "token_versions": np.array([-1] * 5 + [0, 0], np.int32),
    }
    body = wire(sample)[1]  # as the controller gets it, with plain values only
    read = read_sample(body, arrays)
    assert read.trajectory is not None and read.trajectory.reward == 0.5 and read.output_length == 2
    assert FinishedSample(**sample_to_wire(read)[0]) == sample


def test_an_episode_ends_once_and_only_if_it_is_open() -> None:
    site = site_with("g.000")
    assert isinstance(site.end(end("g.001")), str)
    first = site.end(end())
    assert isinstance(first, FinishedSample) and first.instance == ""  # no turn, no instance
    assert isinstance(site.end(end()), str) and isinstance(site.turn(turn(0), PROMPT), str)
    site.committed("g.000")
    assert site.restart() == []


def test_a_new_agents_process_begins_what_is_open() -> None:
    site = site_with("g.000", "g.001", "g.002")
    site.turn(turn(0), PROMPT)
    site.end(end("g.001"))  # on its way to the controller
    assert [order.sample_id for order in site.restart()] == ["g.000", "g.002"]


def test_an_episode_that_is_run_again_gets_its_finished_turns_and_what_differs_is_generated() -> None:
    site = site_with("g.000", "g.001")
    site.turn(turn(0), PROMPT)
    before = output(2, 3)
    site.turn_done(finished("g.000/aa.0"), before)
    site.restart()
    again = site.turn(turn(0, attempt="bb"), PROMPT, 3)
    assert isinstance(again, AnsweredTurn) and again.arrays is before
    assert (again.answer.turn_id, again.answer.text, again.answer.from_before) == ("g.000/bb.0", "four", True)
    assert not site.turns and list(site.journal.find("g.000", turn_key(0, PROMPT["prompt_tokens"]), 3).arrays)  # type: ignore[union-attr]
    for other, arrays in (
        (turn(0, attempt="cc"), prompt(6)),  # another prompt
        (turn(1, attempt="cc"), PROMPT),  # another call, with a seed of its own
        (turn(0, "g.001", "cc"), PROMPT),  # of another episode
    ):
        assert isinstance(site.turn(other, arrays, 3), RequestedTurn)
    assert isinstance(site.turn(turn(0, attempt="dd"), PROMPT, 2), RequestedTurn)  # the run has gone back to version 2


def test_an_ended_episode_names_the_instance_of_turns_from_before() -> None:
    site = site_with("g.000")
    site.turn(turn(0), PROMPT)
    site.turn_done(finished("g.000/aa.0", "here-regular-1"), output(2))
    later = SiteEpisodes("here", 100, 50, CACHES.get, journal=site.journal)  # of another service
    later.begin([IncomingGroup([site.episodes["g.000"].request], None, IssuedEpisode("task", {}))])
    assert isinstance(later.turn(turn(0, attempt="bb"), PROMPT), AnsweredTurn)
    sample = later.end(end())
    assert isinstance(sample, FinishedSample) and sample.instance == "here-regular-1"
    key = turn_key(0, PROMPT["prompt_tokens"])
    assert later.journal.find("g.000", key, 0) is not None
    later.committed("g.000")
    assert later.journal.find("g.000", key, 0) is None


def test_a_turn_that_still_runs_answers_the_call_that_asks_for_it_now() -> None:
    site = site_with("g.000")
    site.turn(turn(0), PROMPT)
    site.restart()
    assert site.turn(turn(0, attempt="bb"), PROMPT) is None  # it is not ordered twice
    assert isinstance(site.turn(turn(1, attempt="bb"), PROMPT), RequestedTurn)
    answer = site.turn_done(finished("g.000/aa.0"), output(2))
    assert answer is not None and (answer.turn_id, answer.from_before) == ("g.000/bb.0", True)
    other = site.turn_done(finished("g.000/bb.1"), output(2))
    assert other is not None and (other.turn_id, other.from_before) == ("g.000/bb.1", False)


def test_turns_that_run_as_their_episode_ends_are_abandoned_and_no_others() -> None:
    site = site_with("g.000", "g.001")
    for one in (turn(0), turn(1), turn(0, "g.001")):
        site.turn(one, PROMPT)
    assert site.abandon("g.000") == ["g.000/aa.0", "g.000/aa.1"]
    assert site.turn_done(finished("g.000/aa.1"), output(2)) is None
    assert site.turn_done(finished("g.001/aa.0"), output(2)) is not None


def test_ids_of_turns_are_none_of_samples() -> None:
    assert is_turn("00000001.003/ab12.0") and not is_turn("00000001.003")


def test_a_turn_goes_where_the_tokens_of_the_turn_that_it_extends_are() -> None:
    CACHES["here-regular-0"], CACHES["here-regular-1"] = (1, 3), (1, 3)
    site = site_with("g.000")
    for number, instance in enumerate(CACHES):
        site.turn(turn(number), prompt(5 + number))
        site.turn_done(finished(f"g.000/aa.{number}", instance), output(2, 3))

    def where(number: int, extends: int | None, length: int = 20) -> tuple[str, int]:
        found = site.turn(turn(number, extends=extends), prompt(length))
        assert isinstance(found, RequestedTurn)
        return found.home, found.cached

    assert where(2, None) == ("", 0)
    assert where(3, 0) == ("here-regular-0", 7) and where(4, 1) == ("here-regular-1", 8)  # prompt and output
    assert where(5, 2) == ("", 0)  # still being generated
    assert where(6, 1, length=7) == ("", 0)  # shorter than what it is to extend
    CACHES["here-regular-0"] = (2, 3)  # another process of that name
    assert where(7, 0) == ("", 0)
    CACHES["here-regular-1"] = (1, 4)  # new weights
    assert where(8, 1) == ("", 0)
    del CACHES["here-regular-1"]  # gone
    assert where(9, 1) == ("", 0)


def test_where_requests_keep_their_cache_over_an_update_the_turns_of_an_episode_do_too() -> None:
    CACHES["here-regular-0"] = 1, 3
    site = site_with("g.000", keeps_kv=True)

    def ordered(number: int, length: int) -> tuple[str, int, int | None]:
        found = site.turn(turn(number, extends=number - 1 if number else None), prompt(length))
        assert isinstance(found, RequestedTurn)
        return found.home, found.cached, found.request.cache_version

    assert ordered(0, 5) == ("", 0, None)
    site.turn_done(finished("g.000/aa.0"), output(2, 3, 4))  # new weights came while it was generated
    CACHES["here-regular-0"] = 1, 4
    assert ordered(1, 9) == ("here-regular-0", 7, 3)
    site.turn_done(finished("g.000/aa.1"), output(2, 4))
    CACHES["here-regular-0"] = 1, 5
    assert ordered(2, 20) == ("here-regular-0", 11, 3)  # still as the first one
    site.turn_done(finished("g.000/aa.2"), output(2, 5))
    CACHES["here-regular-0"] = 2, 5  # restarted: its cache is empty
    assert ordered(3, 30) == ("", 0, None)


@pytest.mark.parametrize(("cache", "versions"), [(None, (3,)), ((1, 4), (3, 4)), ((1, 4), (3, 3))])
def test_a_turn_that_is_in_no_usable_cache_sends_nobody_to_its_instance(
    cache: PrefixCache | None, versions: tuple[int, ...]
) -> None:
    if cache is not None:
        CACHES["here-regular-0"] = cache
    site = site_with("g.000")
    site.turn(turn(0), PROMPT)
    site.turn_done(finished("g.000/aa.0"), output(2, *versions))
    CACHES["here-regular-0"] = (1, 4)
    found = site.turn(turn(1, extends=0), prompt(20))
    assert isinstance(found, RequestedTurn) and found.home == ""


def test_a_turn_is_forecast_from_ended_turns_at_its_place_and_has_room_for_it() -> None:
    site = site_with("g.000")
    for number in range(2 * FEWEST):  # half of them begin an episode
        one = turn(number % 2, attempt=f"a{number}", seed=100 + number)
        site.turn(one, PROMPT)
        site.turn_done(finished(one.turn_id), output(40 if number % 2 else 10))

    def expected(number: int, length: int) -> float:
        found = site.turn(turn(number, attempt=f"b{length}", seed=200 + number), prompt(length))
        assert isinstance(found, RequestedTurn) and found.forecast is not None
        return found.forecast.mean

    assert (expected(0, 5), expected(1, 5)) == (10, 40)
    assert expected(1, 70) == 30  # of a context of 100
    assert expected(2, 5) == pytest.approx(25, abs=2)  # no such turn has ended: as any of its task


def test_an_episode_that_is_run_again_returns_to_the_cache_of_its_turns() -> None:
    CACHES["here-regular-0"] = (1, 0)
    site = site_with("g.000")
    site.turn(turn(0), PROMPT)
    site.turn(turn(1), prompt(6))
    site.turn_done(finished("g.000/aa.0"), output(2))
    site.restart()
    site.turn(turn(0, attempt="bb"), PROMPT)  # finished before
    site.turn(turn(1, attempt="bb"), prompt(6))  # still running
    site.turn_done(finished("g.000/aa.1"), output(3))
    for number, cached in ((0, 7), (1, 9)):
        found = site.turn(turn(number + 2, attempt="bb", extends=number), prompt(20))
        assert isinstance(found, RequestedTurn) and (found.home, found.cached) == ("here-regular-0", cached)
