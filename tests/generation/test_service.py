"""What a service reports, keeps and gives up as messages come. Nothing is started."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import numpy as np
import pytest

from scheduler.cost.decode import StepCurve
from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.errors import RestartNeeded
from streamrl.generation.site import site_state
from streamrl.generation.site.instance_life import InstanceLife
from streamrl.generation.site.service import GenerationService
from streamrl.generation.site.site_episodes import is_turn
from streamrl.generation.site.token_journal import TokenJournal
from streamrl.protocol.controller_site import (
    CanaryMeasured,
    Finish,
    Generate,
    GivenBack,
    IssuedGroup,
    LoadWeights,
    Park,
    Parked,
    Resume,
    WeightsReady,
)
from streamrl.protocol.message import TypedMessage, kind_of
from streamrl.protocol.samples import TOKEN_ARRAYS
from streamrl.protocol.site_instance import FinishedSample, Progress, ReleasedSample
from streamrl.rollouts.types import PartialSample, SampleRequest
from streamrl.run_dir import layout, site_status
from streamrl.run_dir.site_status import read_site
from streamrl.runtime.process_context import Addresses, RoleContext
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Delivery, Hub, PeerLost
from streamrl.transport.wire import Arrays
from streamrl.weights.version import WeightVersion
from tests.tiny_model import save_tiny_model
from tests.transport.sockets import bind_again
from tests.waiting import scaled, until

CLUSTER = ClusterConfig.model_validate({"hardware": "cpu", "sites": {"here": {"trainer": {}, "generation": [{}]}}})
TWO_SITES = ClusterConfig.model_validate(
    {
        "hardware": "cpu",
        "security": {"encryption": "none"},
        "sites": {"home": {"trainer": {}, "address": "127.0.0.1"}, "far": {"generation": [{}]}},
        "links": [{"between": ["home", "far"], "bandwidth_gbit_s": 1, "rtt_ms": 10}],
    }
)


def weights(number: int) -> LoadWeights:
    return LoadWeights(number=number, content_hash="", source=None)


def group(newest: int, *names: str, budget: int | None = None, oldest: int = 0, t_queued: float = 1.0) -> Generate:
    issued = IssuedGroup(group_id="g", samples=[(name, 1, None) for name in names], forecast=None, oldest=oldest)
    return Generate(t_queued=t_queued, budget=budget, groups=[issued], newest=newest)


PROMPT = np.arange(4, dtype=np.int32)


def tokens(number: int) -> dict[str, np.ndarray]:
    """The arrays of a message with so many tokens."""
    return {name: np.arange(number).astype(dtype) for name, dtype in TOKEN_ARRAYS.items()}


def test_finished_samples_that_die_with_a_service_are_continued_and_not_begun_anew(tmp_path: Path) -> None:
    names = [f"of {number}" for number in range(3)]

    async def play(committed: list[str]) -> set[str]:
        async with service_in(tmp_path) as service:
            for name in names:
                few = np.arange(4, dtype=np.int32), np.zeros(4, np.float32), np.full(4, 9, np.int32)
                service.journal.add(0, PartialSample(name, *few, 1.0, 2.0))
            samples = [
                FinishedSample(name, "g", "stop", "far", "i", "main", "", 1.0, 1.0, 2.0, 3.0, "four") for name in names
            ]
            arrays = tokens(5)
            received = [
                SimpleNamespace(body=one, kind="sample", arrays=arrays, peer="i", ack=lambda: None) for one in samples
            ]
            waiting: dict[str, Callable[[], None]] = {}

            async def put(body: dict[str, Any], arrays: Arrays, on_ack: Callable[[], None]) -> None:
                waiting[body["sample_id"]] = on_ack

            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(service.uplink, "put", put)
                patched.setattr(service.hub, "receive", AsyncMock(side_effect=received))
                with pytest.raises(StopAsyncIteration):
                    await service._from_instances()
            for name in committed:
                waiting[name]()
        found = TokenJournal(tmp_path / layout.TOKEN_JOURNAL)
        return {name for name in names if found.kept(name) is not None}

    assert asyncio.run(play(["of 1"])) == {"of 0", "of 2"}


def test_a_request_that_is_given_back_is_reported_with_the_time_for_which_its_instance_had_it(tmp_path: Path) -> None:
    few = tokens(2)
    began = {"first": None, "moved": 20.0, "ahead": 30.5, "e/0.1": None, "of another": None}
    names = list(began)
    assert [is_turn(name) for name in names] == [False, False, False, True, False]

    async def play() -> list[TypedMessage]:
        async with service_in(tmp_path) as service:
            parts = [ReleasedSample(name, 10.0, 11.0, began[name]) for name in names]
            received = [
                SimpleNamespace(body=one, kind="released", arrays=few, peer="i", ack=lambda: None) for one in parts
            ]
            told: list[TypedMessage] = []
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(service.reports, "put", told.append)
                patched.setattr(service.controller.clock, "to_hub_time", lambda at: at + 100.0)
                patched.setattr(service.dispatcher, "has", lambda instance, name: name != "of another")
                patched.setattr(service.dispatcher, "may_return", lambda instance, partial: True)
                patched.setattr(service.dispatcher, "released", AsyncMock(return_value=False))
                patched.setattr(service.hub, "receive", AsyncMock(side_effect=received))
                patched.setattr(time, "time", lambda: 30.0)
                with pytest.raises(StopAsyncIteration):
                    await service._from_instances()
            return told

    reports = asyncio.run(play())
    found = TokenJournal(tmp_path / layout.TOKEN_JOURNAL)
    assert [name for name in names if found.kept(name) is not None] == [name for name in names if name != "of another"]
    assert reports == [
        GivenBack("first", "i", 110.0, 130.0),
        GivenBack("moved", "i", 120.0, 130.0),
        GivenBack("ahead", "i", 130.5, 130.5),  # the clock has been set back since
    ]


def test_a_clock_that_is_set_back_while_weights_are_fetched_makes_no_transfer_end_before_it_began(
    tmp_path: Path,
) -> None:
    version = WeightVersion(number=3, base=None, content_hash="h")

    async def play() -> WeightsReady:
        async with service_in(tmp_path) as service:
            told: list[WeightsReady] = []
            times = iter([5000.0])
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(service.weights, "fetch", AsyncMock(return_value=(version, None)))
                patched.setattr(service.weights.store, "keep_only", lambda numbers: None)
                patched.setattr(service.fleet.weights, "update", AsyncMock(return_value={}))
                patched.setattr(service.reports, "put", told.append)
                patched.setattr(time, "time", lambda: next(times, 1400.0))
                await service._update_weights(weights(3))
            return told[0]

    report = asyncio.run(play())
    assert report.fetched >= report.started == 5000.0


FINISHED = FinishedSample("a", "g", "stop", "far", "i", "main", "", 1.0, 1.0, 2.0, 3.0, "four")
TURN = FinishedSample("a/1.0", "g", "stop", "far", "i", "main", "", 1.0, 1.0, 2.0, 3.0, "four")
RELEASED = ReleasedSample("a", 1.0, 2.0)


def progress(start: int, *counts: int) -> Progress:
    return Progress([("a", start, count, 1.0, 2.0) for count in counts])


@pytest.mark.parametrize(
    ("message", "arrays"),
    [
        (FINISHED, {}),
        (FINISHED, {**tokens(4), "logprobs": np.zeros(3, np.float32)}),
        (FINISHED, {**tokens(4), "completion_tokens": np.zeros((4, 1), np.int32)}),
        (FINISHED, {**tokens(4), "completion_tokens": np.zeros(4, np.float32)}),
        (TURN, {}),
        (RELEASED, {}),
        (RELEASED, {**tokens(4), "logprobs": np.zeros(3, np.float32)}),
        (RELEASED, {**tokens(4), "token_versions": np.zeros(4, np.int64)}),
        (RELEASED, tokens(4)),  # nobody ordered it
        (progress(0, 4), {}),
        (progress(0, 4), tokens(5)),
        (progress(0, 99), tokens(4)),
        (progress(0, -3, 7), tokens(4)),
        (progress(-2, 4), tokens(4)),
        (progress(0, 4), {**tokens(4), "completion_tokens": np.zeros(4, np.float32)}),
    ],
)
def test_an_instance_whose_message_makes_no_sense_is_restarted_and_ends_nothing_else(
    message: TypedMessage, arrays: Arrays, tmp_path: Path
) -> None:
    acknowledged: list[bool] = []

    async def play() -> None:
        async with service_in(tmp_path) as service:
            delivery = Delivery("i", kind_of(message), message, arrays, lambda: acknowledged.append(True))
            service.fleet.lives["i"] = life = InstanceLife("i", "main", 0)
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(service.hub, "send", AsyncMock())
                patched.setattr(service.fleet, "died", died := AsyncMock())
                patched.setattr(service.hub, "receive", AsyncMock(side_effect=[delivery]))
                await service.dispatcher.join("i", 8, StepCurve((1, 8), (0.01, 0.02)), "main")
                await service.dispatcher.submit([([SampleRequest("a", "g", PROMPT, 1, 1.0)], None)])
                with pytest.raises(StopAsyncIteration):
                    await service._from_instances()
            assert service.dispatcher.has("i", "a") and service.journal.kept("a") is None
            assert acknowledged and service.uplink.backlog_samples == 0
            assert service.hub.refused() == {"unreadable": {"i": 1}}
            died.assert_awaited_once()
            assert died.call_args.args[0] is life and f"'{delivery.kind}'" in died.call_args.args[1]

    asyncio.run(play())


@contextlib.asynccontextmanager
async def service_in(folder: Path) -> AsyncIterator[GenerationService]:
    """A service whose link has no answer yet, and no credit once it has sent a few reports."""
    run = RunConfig.model_validate({"model": {"path": str(save_tiny_model(folder / "model"))}})
    context = RoleContext("service-far", "far", folder, TWO_SITES, run, Addresses("", "", {}), False)
    service = GenerationService(context)
    try:
        yield service
    finally:
        for part in (service.controller, service.weights, service.hub):
            await part.close()
        service.journal.close()


def test_a_site_that_loses_its_controller_says_what_waits_and_that_the_run_may_be_over(tmp_path: Path) -> None:
    async def play() -> None:
        async with service_in(tmp_path) as service:
            service.uplink.backlog_samples = 3
            service.controller._inbox.put_nowait(PeerLost("controller has been silent for 600 s"))
            with pytest.raises(PeerLost, match=r"silent for 600 s; 3 finished samples wait here .* the run is done"):
                await service._from_controller(cast(asyncio.TaskGroup, None))

    asyncio.run(play())


def test_a_request_whose_budget_is_used_up_is_reported_in_the_round_that_set_the_budget(tmp_path: Path) -> None:
    async def play() -> list[Parked]:
        async with service_in(tmp_path) as service:
            told: list[Parked] = []
            service.round = 1

            async def begin_the_next(_: PartialSample, instance: str) -> bool:
                service.round = 2
                return True

            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(service.reports, "put", told.append)
                patched.setattr(service.dispatcher, "released", begin_the_next)
                partial = PartialSample("a", *(tokens(4)[name] for name in TOKEN_ARRAYS), 1.0, 2.0)
                await service._released(partial, cast(Delivery, SimpleNamespace(peer="i", ack=lambda: None)))
            return told

    assert [(parked.sample_id, parked.round) for parked in asyncio.run(play())] == [("a", 1)]


def test_a_link_that_is_down_holds_up_neither_what_instances_say_nor_who_looks_after_them(tmp_path: Path) -> None:
    async def play() -> None:
        async with service_in(tmp_path) as service:
            credits = service.controller.flow.credits
            acknowledged: list[int] = []
            canaries = [
                SimpleNamespace(
                    body=CanaryMeasured(number=number, instance="i", dtype="float32"),
                    arrays={},
                    ack=lambda number=number: acknowledged.append(number),
                )
                for number in range(credits + 5)
            ]
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(service.hub, "receive", AsyncMock(side_effect=canaries))
                sending = asyncio.create_task(service.reports.run())
                with pytest.raises(StopAsyncIteration):
                    await service._from_instances()
            await service._fleet_changed()
            await until(lambda: acknowledged == list(range(credits)))  # in order, until no credit is left
            service.controller.forget_sent()
            await until(lambda: len(acknowledged) == credits + 5)
            sending.cancel()

    asyncio.run(play())


def test_a_new_controller_gets_nothing_of_what_was_meant_for_the_old_one(tmp_path: Path) -> None:
    """The work was the old one's: the new one would count its samples as foreign."""

    async def play() -> None:
        address = f"ipc://{tmp_path}/controller"
        hub = Hub("controller", WaitRegistry("old")).bind(address)
        async with service_in(tmp_path) as service:
            await service.controller.connect(address, scaled(10))
            sending = [
                asyncio.create_task(service.controller.send("sample", {"number": number}))
                for number in range(service.controller.flow.credits + 1)
            ]
            await until(lambda: service.waits.snapshot())  # the last one has no credit
            await hub.close()
            again = await bind_again(lambda: Hub("controller", WaitRegistry("new")).bind(address))
            with pytest.raises(RestartNeeded, match="the controller was restarted"):
                await asyncio.wait_for(service.controller.receive(), scaled(10))
            with pytest.raises(RestartNeeded, match="the controller was restarted"):
                await service._end_if_orphaned()
            sending[-1].cancel()
        assert (await again.receive()).kind == "bye"
        await again.close()

    asyncio.run(play())


def test_a_site_gives_signs_of_life_before_it_serves_and_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / layout.SITE_STATUS
    monkeypatch.setattr(site_state, "TELL_EVERY_S", 0.05)

    def stamp() -> int:
        return file.stat().st_mtime_ns if file.exists() else 0

    async def another_sign() -> None:
        before = stamp()
        await until(lambda: stamp() != before)

    async def play() -> None:
        async with service_in(tmp_path) as service:
            keeping = asyncio.create_task(service.site_state.keep_written())
            await another_sign()
            await another_sign()
            assert read_site(tmp_path) is None  # nothing is known of the site yet
            service.site_state.state = "serving"
            status = await until(lambda: read_site(tmp_path))
            assert status is not None and (status.site, status.state) == ("far", "serving")
            with monkeypatch.context() as on_a_full_disk:
                on_a_full_disk.setattr(site_status, "replace_json", full)
                await another_sign()
                await another_sign()
            (before,) = [read_site(tmp_path)]
            await until(lambda: read_site(tmp_path) != before)
            keeping.cancel()

    asyncio.run(play())


def test_the_heartbeat_says_which_agents_process_is_heard_and_when_it_was(tmp_path: Path) -> None:
    async def play() -> None:
        async with service_in(tmp_path) as service:
            assert service.site_state.heartbeat()["agents"] == {}
            hub: Any = service.hub
            hub.peers["agents-far"] = SimpleNamespace(name="agents-far", session="a1", state={"state": "idle"})
            hub.silent_for = lambda name: 2.0
            told = {"state": "idle", "silent_s": 2.0, "session": "a1"}
            assert service.site_state.heartbeat()["agents"] == {"agents-far": told}
            written = service.site_state.status()
            assert (written["agents_silent_s"], written["agents_session"]) == (2.0, "a1")
            hub.peers.clear()

    asyncio.run(play())


def test_the_silence_of_the_publisher_is_told_once_it_is_connected(tmp_path: Path) -> None:
    async def play() -> None:
        async with service_in(tmp_path) as service:
            state, weights = service.site_state, service.weights
            assert state.heartbeat()["publisher_silent_s"] is state.status()["publisher_silent_s"] is None
            weights._connected = True
            weights.home.link._last_seen -= 40.0
            told = state.heartbeat()["publisher_silent_s"], state.status()["publisher_silent_s"]
            assert min(told) >= 40.0

    asyncio.run(play())


def test_what_is_wrong_with_the_links_of_a_site_is_told(tmp_path: Path) -> None:
    async def play() -> None:
        async with service_in(tmp_path) as service:
            state, home, weights = service.site_state, service.uplink.link, service.weights.home.link
            assert state.status()["unresolved"] == ""
            home._last_seen -= 40.0
            weights._last_seen -= 40.0
            home.empty_connections, weights.empty_connections = 1, 4
            weights._names.trouble = "the name home.test cannot be resolved: no answer within 10 s"
            assert state.heartbeat()["controller_silent_s"] >= 40.0
            assert state.heartbeat()["empty_connections"] == state.status()["empty_connections"] == 4
            assert state.status()["unresolved"] == weights._names.trouble

    asyncio.run(play())


def full(path: Path, values: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_groups_that_come_in_several_messages_are_placed_together(tmp_path: Path) -> None:
    """A plan over the parts one after the other would be another one."""
    placed: list[list[str]] = []

    def named(name: str, more: bool) -> Generate:
        issued = IssuedGroup(group_id=name, samples=[(f"{name}.0", 1, None)], forecast=None)
        return Generate(t_queued=1.0, budget=None, groups=[issued], more=more)

    async def submit(groups: list[tuple[list[SampleRequest], object]]) -> None:
        placed.append([requests[0].group_id for requests, _ in groups])

    async def play() -> None:
        async with service_in(tmp_path) as service:
            orders = [named("a", True), named("b", True), named("c", False), named("d", False)]
            prompts = {"prompt_tokens": PROMPT, "prompt_lengths": np.full(1, 4, np.int32)}
            waiting = [*orders, Finish(state="done", error=None)]
            received = [SimpleNamespace(body=one, arrays=prompts, ack=lambda: None) for one in waiting]
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(service.dispatcher, "submit", submit)
                patched.setattr(service.controller, "receive", AsyncMock(side_effect=received))
                async with asyncio.TaskGroup() as tasks:
                    await service._from_controller(tasks)

    asyncio.run(play())
    assert placed == [["a", "b", "c"], ["d"]]


def test_samples_that_are_named_in_several_messages_are_parked_and_resumed_together(tmp_path: Path) -> None:
    """The places of those that are parked first would go to some that are parked next."""
    done: list[tuple[object, ...]] = []

    async def park(names: list[str]) -> None:
        done.append(("park", names))

    async def resume(names: list[str], budget: int | None) -> None:
        done.append(("resume", names, budget))

    async def play() -> None:
        async with service_in(tmp_path) as service:
            parking = [Park(sample_ids=["a", "b"], more=True), Park(sample_ids=["c"]), Park(sample_ids=["d"])]
            first = Resume(sample_ids=["a"], budget=8, round=2, more=True)
            waiting = [*parking, first, Resume(sample_ids=["c"], budget=8, round=2), Finish(state="done", error=None)]
            received = [SimpleNamespace(body=one, arrays={}, ack=lambda: None) for one in waiting]
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(service.dispatcher, "park", park)
                patched.setattr(service.dispatcher, "resume", resume)
                patched.setattr(service.controller, "receive", AsyncMock(side_effect=received))
                async with asyncio.TaskGroup() as tasks:
                    await service._from_controller(tasks)
            assert service.round == 2

    asyncio.run(play())
    assert done == [("park", ["a", "b", "c"]), ("park", ["d"]), ("resume", ["a", "c"], 8)]
