"""What a service refuses of its peers: hellos, heartbeats and ends of episodes without sense. Nothing is started."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import numpy as np
import pytest

from scheduler.cost.decode import StepCurve
from streamrl.controller.arrivals import read_sample
from streamrl.generation.site.instance_life import InstanceLife, Life
from streamrl.protocol.controller_site import IssuedEpisode
from streamrl.protocol.heartbeats import read_state
from streamrl.protocol.message import kind_of
from streamrl.protocol.samples import IncomingGroup
from streamrl.protocol.site_agents import EpisodeDone
from streamrl.rollouts.trajectory import RowExtent, Trajectory
from streamrl.rollouts.types import SampleRequest
from streamrl.transport.endpoint import Delivery, Speaker
from streamrl.transport.endpoint_base import take_state
from streamrl.transport.peer import Peer
from streamrl.transport.wire import MAX_STATE_BYTES, Arrays, MalformedMessage, Message, decode, encode
from tests.generation.test_service import PROMPT, service_in, tokens
from tests.transport.test_malformed import nested

CURVE = StepCurve((1, 8), (0.01, 0.02)).to_json()
HELLO = {"pool": "main", "slots": 8, "world_size": 1, "curve": CURVE, "doubts": "", "process": 1}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, None),
        ({"of a later version": [1]}, None),
        ({"slots": -3}, "slots"),
        ({"slots": 10**12}, "slots"),
        ({"slots": "many"}, "slots"),
        ({"world_size": 0}, "world_size"),
        ({"process": -1}, "process"),
        ({"curve": None}, "curve"),
        ({"curve": {"step_seconds": {"1": -0.01}}}, "times"),
        ({"curve": {"step_seconds": {"1": "soon"}}}, "numbers"),
        ({"curve": {"step_seconds": {float("inf"): 0.01}}}, "numbers"),
        ({"curve": {"step_seconds": {"1": 1e-300}}}, "step times"),
        ({"doubts": 7}, "doubts"),
    ],
)
def test_an_instance_that_says_nonsense_of_itself_is_not_let_in(
    changes: dict[str, Any], names: str | None, tmp_path: Path
) -> None:
    async def play() -> str | None:
        async with service_in(tmp_path) as service:
            admit = service.hub.admit_inside
            assert admit is not None
            assert "does not fit" in str(admit("far-regular-0", "instance", {}, "far-regular-0"))
            return admit("far-regular-0", "instance", HELLO | changes, "far-regular-0")

    refusal = asyncio.run(play())
    assert (refusal is None) if names is None else (refusal is not None and names in refusal)


@pytest.mark.parametrize(
    ("role", "state"),
    [
        ("instance", {"stalled_s": "long"}),
        ("instance", {"stalled_s": -1.0}),
        ("instance", {"running": 10**15}),
        ("instance", {"pace": 5}),
        ("instance", {"pace": [3, 1.0]}),
        ("instance", {"pace": [3, -1.0, 4.0, 10.0]}),
        ("instance", {"pace": [3, 1.0, 0.0, 10.0]}),
        ("instance", {"produced": ["a"]}),
        ("instance", {"produced": {"a": -4}}),
        ("instance", {"produced": {"a": "some"}}),
        ("instance", {"doubtful": "yes"}),
        ("instance", {"busy_since": "noon"}),
        ("agents", {"waits": [{"since": "now"}]}),
        ("agents", {"detail": 3}),
    ],
)
def test_a_heartbeat_of_nonsense_to_a_service_is_refused(role: str, state: dict[str, Any], tmp_path: Path) -> None:
    async def play() -> None:
        async with service_in(tmp_path) as service:
            read = service.hub.read_state
            assert read is not None
            speaker = Speaker("far-regular-0", role, None)
            sound = {"running": 3, "pace": [2, 1.1, 4.0, 900.0], "produced": {"a": 4, "of nobody": 7}, "curve": CURVE}
            assert read(speaker, sound) == sound
            with pytest.raises(MalformedMessage, match=f"state of {role}"):
                read(speaker, sound | state)

    asyncio.run(play())


def far_future(since: float) -> dict[str, Any]:
    return {"owner": "é" * 5_000, "waiting_for": "b" * 5_000, "since": since, "limit_s": 1.0, "x": nested(12)}


@pytest.mark.parametrize(
    "state",
    [
        {"x": nested(30)},
        {"x": [0] * 499_900},
        {"busy_since": 1e12},
        {"detail": "x" * 4_100_000},
        {"drafts": "é" * 2_000_000},
        {"waits": [far_future(1e12)] * 300},
        {"refused": {"malformed": {f"{number}" + "x" * 3_000: 1 for number in range(1_000)}}},
    ],
    ids=["deep", "many values", "future", "long", "long in bytes", "waits", "refused"],
)
def test_no_state_of_an_instance_or_of_agents_costs_its_site_the_heartbeat(
    state: dict[str, Any], tmp_path: Path
) -> None:
    async def play() -> dict[str, Any]:
        async with service_in(tmp_path) as service:
            read = service.hub.read_state
            assert read is not None
            others = {f"far-regular-{number}": {"detail": f"y{number} " * 30_000} for number in range(1, 60)}
            for name, told in ({"far-regular-0": state, "far-regular-60": {"running": 3}} | others).items():
                service.fleet.lives[name] = InstanceLife(name, "regular", 0, state=Life.READY)
                kept = read(Speaker(name, "instance", None), told)
                service.hub.peers[name] = cast(Peer, SimpleNamespace(state=kept, meta={"slots": 8}))
            agents = SimpleNamespace(state=state, name="agents-far", session="s", last_seen=0.0)
            service.hub.peers["agents-far"] = cast(Peer, agents)
            service.controller.clock.add(1.0, 6.0, 1.0)
            own = {"clock": {}, "waits": [], "refused": {}}
            frames = encode(Message("heartbeat", "s", 0, service.site_state.heartbeat() | own))
            service.hub.peers.clear()
            assert sum(map(len, frames)) <= MAX_STATE_BYTES
            told, _ = take_state(decode(frames))
            return read_state(Speaker("service-far", "service", "far"), told)

    seen = asyncio.run(play())
    assert seen["instances"]["far-regular-60"]["running"] == 3
    assert seen["instances"]["far-regular-1"]["detail"].startswith("y1 y1 ")


def test_an_end_of_an_episode_that_cannot_be_read_makes_it_void_and_ends_nothing_else(tmp_path: Path) -> None:
    told = Trajectory(rows=[RowExtent(tokens=4, prompt=2)], reward=1.0, messages=[], steps=[])
    versions = {"token_versions": np.array([-1, -1, 9, 9], np.int32)}
    sound = {**tokens(4), **versions}
    broken = [
        {},
        {**tokens(4), **versions, "logprobs": np.zeros(3, np.float32)},
        tokens(5),
        {**sound, "completion_tokens": np.zeros(4, np.int64)},
    ]
    put: list[dict[str, Any]] = []

    async def keep(body: dict[str, Any], arrays: Arrays, on_ack: Callable[[], None]) -> None:
        put.append(body)
        assert len(read_sample(body, arrays).completion_tokens) == 4 * (body["trajectory"]["reward"] is not None)

    async def play() -> None:
        async with service_in(tmp_path) as service:
            ids = [f"g.{number}" for number in range(5)]
            requests = [SampleRequest(one, "g", PROMPT, 1, 1.0) for one in ids]
            service.episodes.begin([IncomingGroup(requests, None, IssuedEpisode("t", {}))])
            fields = {"finish_reason": "stop", "t_started": 1.0, "t_first_token": 2.0, "t_finished": 3.0, "text": ""}
            ends = [EpisodeDone(sample_id=one, **fields, trajectory=told) for one in ids]
            received = [
                Delivery("agents-far", kind_of(one), one, arrays, lambda: None)
                for one, arrays in zip(ends, [*broken, sound], strict=True)
            ]
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(service.uplink, "put", keep)
                patched.setattr(service.hub, "receive", AsyncMock(side_effect=received))
                with pytest.raises(StopAsyncIteration):
                    await service._from_instances()
            assert service.hub.refused() == {"unreadable": {"agents-far": 4}}

    asyncio.run(play())
    assert [body["trajectory"]["void_cause"] for body in put] == [*["crash"] * 4, None]
    assert all("agents-far cannot be read" in body["trajectory"]["void_text"] for body in put[:4])


def test_step_times_of_nonsense_leave_those_that_are_known(tmp_path: Path) -> None:
    async def play() -> None:
        async with service_in(tmp_path) as service:
            known, fleet = StepCurve.from_json(CURVE), service.fleet
            for name, reported in (("i", {"step_seconds": {"1": "soon"}}), ("j", {"step_seconds": {"1": 1e200}})):
                fleet.lives[name] = InstanceLife(name, "regular", 0, state=Life.READY)
                service.hub.peers[name] = cast(Peer, SimpleNamespace(state={"curve": reported}, meta={"slots": 8}))
                await service.dispatcher.join(name, 8, known, "regular")
            fleet.curves.measured("regular", known)
            assert not fleet.weights._refine()
            assert fleet.simulated("i").curve == known
            assert service.hub.refused() == {"unreadable": {"i": 1, "j": 1}}

    asyncio.run(play())
