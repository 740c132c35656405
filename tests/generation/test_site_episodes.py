"""A site's open episodes: whose turns may be generated, what ends one, and what a new agents process gets."""

from __future__ import annotations

import numpy as np
import pytest

from streamrl.generation.site.site_episodes import SiteEpisodes, is_turn
from streamrl.protocol.controller_site import IssuedEpisode
from streamrl.protocol.message import wire
from streamrl.protocol.samples import IncomingGroup, sample_from_wire, sample_to_wire
from streamrl.protocol.site_agents import EpisodeDone, OrderTurn
from streamrl.protocol.site_instance import FinishedSample
from streamrl.rollouts.trajectory import RowExtent, Trajectory
from streamrl.rollouts.types import Sample, SampleRequest
from streamrl.transport.wire import Arrays

PROMPT: Arrays = {"prompt_tokens": np.arange(5, dtype=np.int32)}


def site_with(*sample_ids: str) -> SiteEpisodes:
    site = SiteEpisodes("here", 100)
    requests = [SampleRequest(one, "g", np.arange(3, dtype=np.int32), 7, 1.5, 0.0) for one in sample_ids]
    orders = site.begin([IncomingGroup(requests, None, IssuedEpisode("task", {"prompt": "hi"}))])
    assert [order.sample_id for order in orders] == list(sample_ids)
    assert all((order.task, order.item, order.seed) == ("task", {"prompt": "hi"}, 7) for order in orders)
    return site


def turn(number: int, sample_id: str = "g.000", attempt: str = "aa") -> OrderTurn:
    return OrderTurn(turn_id=f"{sample_id}/{attempt}.{number}", sample_id=sample_id, seed=number)


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
    assert isinstance(found, IncomingGroup) and found.episode is None
    (request,) = found.requests
    assert (request.sample_id, request.group_id, request.seed) == ("g.000/aa.0", "g", 0)
    assert request.temperature == 0.0 and len(request.prompt_tokens) == 5
    answer = site.turn_done(finished("g.000/aa.0"))
    assert answer is not None and (answer.turn_id, answer.finish_reason, answer.text) == (
        "g.000/aa.0",
        "length",
        "four",
    )
    assert site.turn_done(finished("g.000/aa.0")) is None  # answered once


@pytest.mark.parametrize(
    ("message", "arrays", "why"),
    [
        (turn(0, "g.009"), PROMPT, "no open episode"),
        (turn(1), PROMPT, "known already"),
        (OrderTurn(turn_id="g.001/aa.5", sample_id="g.000", seed=0), PROMPT, "none of 'g.000'"),
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
        site.turn_done(finished(f"g.000/aa.{number}", instance))
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
    read = sample_from_wire(Sample, body, arrays)
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


def test_a_new_agents_process_begins_what_is_open_and_gets_no_turn_of_the_old_one() -> None:
    site = site_with("g.000", "g.001", "g.002")
    site.turn(turn(0), PROMPT)
    site.end(end("g.001"))  # on its way to the controller
    assert [order.sample_id for order in site.restart()] == ["g.000", "g.002"]
    assert site.turn_done(finished("g.000/aa.0")) is None
    again = site.turn(turn(0, attempt="bb"), PROMPT)
    assert isinstance(again, IncomingGroup)


def test_ids_of_turns_are_none_of_samples() -> None:
    assert is_turn("00000001.003/ab12.0") and not is_turn("00000001.003")
