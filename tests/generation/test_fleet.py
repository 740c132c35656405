"""How many instances of a pool there are, while some of them pause before they are restarted. No process is started."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Literal, cast
from unittest.mock import AsyncMock, create_autospec

import pytest

from scheduler.cost.decode import StepCurve
from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.errors import RunFailed
from streamrl.generation.site.dispatcher import Dispatcher
from streamrl.generation.site.fleet import SiteFleet
from streamrl.generation.site.instance_life import Life
from streamrl.generation.site.token_journal import TokenJournal
from streamrl.run_dir import layout
from streamrl.run_dir.instance_files import StartedProcess, WantedInstance, read_wanted, write_started, write_wanted
from streamrl.runtime.process_context import Addresses, RoleContext
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Hub, Link
from tests.waiting import scaled, until

POOL = {"name": "one", "replicas": 2, "max_replicas": 3}
CLUSTER = ClusterConfig.model_validate({"hardware": "cpu", "sites": {"here": {"trainer": {}, "generation": [POOL]}}})


def with_fleet(
    folder: Path,
    work: Callable[[SiteFleet], Awaitable[None]],
    pause_s: float = 0.0,
    cluster: ClusterConfig = CLUSTER,
    **options: object,
) -> None:
    """Does something with a fleet of two instances that are ready; a dead one is restarted after a pause."""
    run = RunConfig.model_validate({"recovery": {"pause_s": pause_s, "longest_pause_s": pause_s}} | options)
    context = RoleContext("service-here", "here", folder, cluster, run, Addresses("", "", {}), False)

    async def play() -> None:
        waits, dispatcher = WaitRegistry("service-here"), create_autospec(Dispatcher, instance=True)
        dispatcher.works_on.return_value, dispatcher.lost.return_value = [], []
        hub = Hub("service-here", waits)
        journal = TokenJournal(folder / "journal.sqlite")
        fleet = SiteFleet(context, hub, dispatcher, waits, journal, *[AsyncMock()] * 3)
        fleet._reconcile(bring_in=False)
        for life in fleet.lives.values():
            life.state = Life.READY
        try:
            await work(fleet)
        finally:
            if begun := list(fleet._tasks):
                await asyncio.wait(begun, timeout=0)  # they have all begun to wait
            for task in begun:
                task.cancel()
            await asyncio.gather(*begun, return_exceptions=True)
            journal.close()
            await hub.close()

    asyncio.run(play())


def states(fleet: SiteFleet) -> dict[str, Life]:
    return {name: life.state for name, life in sorted(fleet.lives.items())}


def test_no_instance_takes_the_place_of_one_that_is_about_to_be_restarted(tmp_path: Path) -> None:
    async def work(fleet: SiteFleet) -> None:
        await fleet.died(fleet.lives["here-one-0"], "killed")
        await fleet.scale({"one": 2})
        assert states(fleet) == {"here-one-0": Life.DEAD, "here-one-1": Life.READY}
        await fleet.scale({"one": 3})
        assert states(fleet)["here-one-2"] is Life.STARTING and len(fleet.lives) == 3

    with_fleet(tmp_path, work, pause_s=1000.0)


def test_one_that_is_about_to_be_restarted_stays_away_when_there_is_no_place_for_it(tmp_path: Path) -> None:
    async def work(fleet: SiteFleet) -> None:
        await fleet.died(fleet.lives["here-one-1"], "killed")
        (restart,) = fleet._tasks
        await fleet.scale({"one": 1})
        await until(lambda: "here-one-1" not in fleet.lives)
        assert states(fleet) == {"here-one-0": Life.READY}
        await restart
        assert states(fleet) == {"here-one-0": Life.READY}
        assert [one.name for one in read_wanted(tmp_path)] == ["here-one-0"]
        await fleet.scale({"one": 2})
        assert states(fleet) == {"here-one-0": Life.READY, "here-one-1": Life.STARTING}
        assert fleet.lives["here-one-1"].process == 2

    with_fleet(tmp_path, work)


def test_one_that_is_restarted_is_there_once(tmp_path: Path) -> None:
    async def work(fleet: SiteFleet) -> None:
        await fleet.died(fleet.lives["here-one-0"], "killed")
        await until(lambda: fleet.lives["here-one-0"].state is not Life.DEAD)
        await fleet.scale({"one": 2})
        assert states(fleet) == {"here-one-0": Life.STARTING, "here-one-1": Life.READY}
        assert fleet.lives["here-one-0"].process == 2
        await fleet.scale({"one": 1})
        assert states(fleet)["here-one-1"] is Life.DRAINING

    with_fleet(tmp_path, work)


@pytest.mark.parametrize("other", list(Life))
def test_what_a_silent_instance_had_goes_on_elsewhere_only_if_another_one_is_ready(other: Life, tmp_path: Path) -> None:
    async def work(fleet: SiteFleet) -> None:
        silent, fleet.lives["here-one-1"].state = fleet.lives["here-one-0"], other
        dispatcher = cast(Any, fleet.dispatcher)
        await fleet.give_up(silent)
        assert not dispatcher.hand_over.await_count, "it works on nothing"
        dispatcher.works_on.return_value, dispatcher.hand_over.return_value = ["g.0"], []
        await fleet.give_up(silent)
        assert silent.state is Life.SUSPECT and dispatcher.hold.await_count == 1
        assert dispatcher.hand_over.await_count == (other is Life.READY)

    with_fleet(tmp_path, work)


def test_an_instance_without_a_connection_is_not_present(tmp_path: Path) -> None:
    async def work(fleet: SiteFleet) -> None:
        assert fleet.present == [] and fleet.instances() == [], "its goodbye comes before its end"

    with_fleet(tmp_path, work)


def test_what_a_full_disk_does_not_take_is_written_when_it_has_room_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(fleet: SiteFleet) -> None:
        in_the_way = tmp_path / layout.WANTED_INSTANCES
        in_the_way.unlink()
        in_the_way.mkdir()
        await fleet.died(fleet.lives["here-one-0"], "killed")
        await fleet.scale({"one": 3})
        again = [message for message in caplog.messages if "will try again" in message]
        assert again == ["cannot write which instances should run, and will try again: Is a directory"]
        in_the_way.rmdir()
        await until(in_the_way.is_file)
        wanted = {one.name: one.paused for one in read_wanted(tmp_path) or []}
        assert wanted == {"here-one-0": True, "here-one-1": False, "here-one-2": False}
        assert fleet._errors.empty()

    with_fleet(tmp_path, work, pause_s=1000.0)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_pool_has_the_number_that_was_asked_for(count: int, tmp_path: Path) -> None:
    async def work(fleet: SiteFleet) -> None:
        await fleet.scale({"one": count, "unknown": 7})
        there = [life for life in fleet.lives.values() if life.state in (Life.READY, Life.STARTING)]
        assert len(there) == count

    with_fleet(tmp_path, work)


def test_the_death_of_one_that_is_leaving_is_handled_once(tmp_path: Path) -> None:
    async def work(fleet: SiteFleet) -> None:
        lost = cast(AsyncMock, fleet.dispatcher.lost)
        async with fleet.weights.lock:  # it cannot leave yet
            await fleet.scale({"one": 1})
            leaving = fleet.lives["here-one-1"]
            for _ in range(3):
                await fleet.died(leaving, "killed")
            assert leaving.state is Life.DRAINING and lost.await_count == 1
        await until(lambda: "here-one-1" not in fleet.lives)
        await fleet.scale({"one": 2})
        await fleet.died(fleet.lives["here-one-1"], "killed again")
        assert lost.await_count == 2, "this is another process"

    with_fleet(tmp_path, work, pause_s=1000.0)


@pytest.mark.parametrize("hardware", ["cuda", "cpu"])
@pytest.mark.parametrize("schedule", ["colocated", "async"])
def test_an_instance_that_shares_the_trainer_s_gpu_has_the_time_of_a_step_more_to_start(
    schedule: str, hardware: Literal["cuda", "cpu"], tmp_path: Path
) -> None:
    async def work(fleet: SiteFleet) -> None:
        async def limits(wait: Coroutine[Any, Any, None]) -> set[float]:
            waiting = asyncio.create_task(wait)
            await until(fleet.waits.snapshot)
            found = {one["limit_s"] for one in fleet.waits.snapshot()}
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            return found

        shared = schedule == "colocated" and hardware == "cuda"
        expected = {10.0 + (500.0 if shared else 0.0)}
        assert await limits(fleet._await_hello(fleet.lives["here-one-0"])) == expected
        assert await limits(fleet.open()) == expected

    deadlines = {"startup_s": 10.0, "training_s": 500.0}
    cluster = CLUSTER.model_copy(update={"hardware": hardware})
    with_fleet(tmp_path, work, cluster=cluster, schedule={"name": schedule}, deadlines=deadlines)


@pytest.mark.parametrize(("words", "end"), [("killed", "killed (see docs: E1010)"), ("ended:\n    a log", "a log")])
def test_the_death_of_an_instance_in_the_start_names_its_entry(words: str, end: str, tmp_path: Path) -> None:
    async def work(fleet: SiteFleet) -> None:
        fleet.lives.clear()  # else they are an earlier service's
        write_wanted(tmp_path, [])
        write_started(tmp_path, [StartedProcess("here-one-0", "instance", 1, 2, 1, words)])
        with pytest.raises(RunFailed, match=re.escape(end) + "$"):
            await asyncio.wait_for(fleet.open(), scaled(20.0))

    with_fleet(tmp_path, work)


def test_only_one_that_is_not_restarted_is_said_to_be_dead_for_good(tmp_path: Path) -> None:
    async def work(fleet: SiteFleet) -> None:
        assert not any(state["for_good"] for state in fleet.states().values())
        fleet.lives["here-one-1"].deaths += [time.monotonic()] * 5
        for name in ("here-one-1", "here-one-0"):  # the second one is restarted after a pause
            await fleet.died(fleet.lives[name], "killed")
        assert [name for name, state in fleet.states().items() if state["for_good"]] == ["here-one-1"]

    with_fleet(tmp_path, work, pause_s=1000.0)


FULL = ClusterConfig.model_validate(
    {"hardware": "cpu", "sites": {"here": {"trainer": {}, "generation": [{"name": "one", "replicas": 2}]}}}
)
"""A pool without room for more."""


def test_one_that_is_dead_for_good_leaves_when_the_operator_scales_its_pool(tmp_path: Path) -> None:
    async def work(fleet: SiteFleet) -> None:
        await fleet.died(fleet.lives["here-one-1"], "killed")
        await fleet.scale({"one": 1})
        for _ in range(5):
            await asyncio.sleep(0)
        assert states(fleet) == {"here-one-0": Life.READY, "here-one-1": Life.DEAD}
        for _ in range(2):  # the second one comes before the first is done
            await fleet.scale({"one": 1}, replace_dead=True)
        await until(lambda: "here-one-1" not in fleet.lives)
        assert list(fleet.states()) == ["here-one-0"]
        assert read_wanted(tmp_path) == [WantedInstance("here-one-0")]
        await fleet.scale({"one": 2})
        assert read_wanted(tmp_path) == [WantedInstance("here-one-0"), WantedInstance("here-one-1", 2)]

    with_fleet(tmp_path, work, cluster=FULL, recovery={"restarts": 0})


def test_a_new_one_may_have_the_number_of_one_that_is_dead_for_good(tmp_path: Path) -> None:
    async def work(fleet: SiteFleet) -> None:
        await fleet.died(fleet.lives["here-one-1"], "killed")
        await fleet.scale({"one": 2})  # by the run itself
        for _ in range(5):
            await asyncio.sleep(0)
        assert states(fleet)["here-one-1"] is Life.DEAD
        await fleet.scale({"one": 2}, replace_dead=True)
        await until(lambda: states(fleet).get("here-one-1") is Life.STARTING)
        assert fleet.lives["here-one-1"].process == 2 and not fleet.lives["here-one-1"].deaths
        assert fleet.states()["here-one-1"]["detail"] == ""
        assert read_wanted(tmp_path) == [WantedInstance("here-one-0"), WantedInstance("here-one-1", 2)]

    with_fleet(tmp_path, work, cluster=FULL, recovery={"restarts": 0})


@pytest.mark.parametrize("leaving", [False, True])
def test_a_new_one_is_not_said_to_have_died_of_what_ended_the_one_that_had_its_number(
    leaving: bool, tmp_path: Path
) -> None:
    async def work(fleet: SiteFleet) -> None:
        name = "here-one-1"
        async with fleet.weights.lock:  # it cannot leave yet
            if leaving:
                await fleet.scale({"one": 1})
            await fleet.died(fleet.lives[name], "killed")
            await fleet.scale({"one": 1})
            assert fleet.states()[name]["detail"] == "killed"
        await until(lambda: name not in fleet.lives)
        await fleet.scale({"one": 2})
        assert (fleet.states()[name]["life"], fleet.states()[name]["detail"]) == (Life.STARTING, "")

    with_fleet(tmp_path, work, pause_s=1000.0)


def test_one_that_pauses_keeps_its_place_when_the_operator_scales_its_pool(tmp_path: Path) -> None:
    async def work(fleet: SiteFleet) -> None:
        await fleet.died(fleet.lives["here-one-1"], "killed")
        await fleet.scale({"one": 2}, replace_dead=True)
        for _ in range(5):
            await asyncio.sleep(0)
        assert states(fleet) == {"here-one-0": Life.READY, "here-one-1": Life.DEAD}
        assert not fleet.states()["here-one-1"]["for_good"]

    with_fleet(tmp_path, work, cluster=FULL, pause_s=1000.0)


def test_one_that_pauses_before_its_restart_is_started_by_the_next_service(tmp_path: Path) -> None:
    async def work(fleet: SiteFleet) -> None:
        await fleet.died(fleet.lives["here-one-0"], "killed")
        paused = [WantedInstance("here-one-0", 1, paused=True), WantedInstance("here-one-1")]
        assert read_wanted(tmp_path) == paused
        fleet.lives.clear()  # as in a service that knows nothing yet
        fleet._pausing.clear()
        assert fleet._adopt()
        fleet._reconcile(bring_in=False)
        assert states(fleet) == {"here-one-0": Life.STARTING, "here-one-1": Life.STARTING}
        assert read_wanted(tmp_path) == [WantedInstance("here-one-0", 2), WantedInstance("here-one-1")]

    with_fleet(tmp_path, work, pause_s=1000.0)


def test_a_run_does_not_end_while_an_instance_pauses_before_its_restart(tmp_path: Path) -> None:
    async def work(fleet: SiteFleet) -> None:
        await fleet.died(fleet.lives["here-one-0"], "killed")
        fleet.lives["here-one-1"].deaths += [time.monotonic()] * 5
        await fleet.died(fleet.lives["here-one-1"], "killed")
        assert [name for name, state in fleet.states().items() if state["for_good"]] == ["here-one-1"]

    with_fleet(tmp_path, work, pause_s=1000.0)


def meta(process: int) -> dict[str, Any]:
    curve = StepCurve((1, 8), (0.01, 0.02), 0.0, 1e-5).to_json()
    return {"pool": "one", "slots": 4, "world_size": 1, "curve": curve, "doubts": "", "process": process}


@contextlib.asynccontextmanager
async def adopting(fleet: SiteFleet, first: int = 1) -> AsyncIterator[tuple[asyncio.Task[None], Callable[..., Link]]]:
    """A fleet that opens after an earlier service; `first` is the wanted process of its first instance.

    Yields:
        Its opening, and what makes a process of an instance, to be connected to `address_of`.
    """
    folder = fleet.context.run_dir
    fleet.lives.clear()
    write_wanted(folder, [WantedInstance("here-one-0", first), WantedInstance("here-one-1")])
    fleet.hub.bind(address_of(fleet))
    links: list[Link] = []

    def instance(name: str, process: int) -> Link:
        links.append(Link(name, "instance", WaitRegistry(name), meta(process)))
        return links[-1]

    opening = asyncio.create_task(fleet.open())
    try:
        yield opening, instance
    finally:
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        for link in links:
            await link.close()


def address_of(fleet: SiteFleet) -> str:
    return f"ipc://{fleet.context.run_dir}/s"


def ended(fleet: SiteFleet, process: int) -> None:
    """The launcher notes that a process of the first instance has been killed; that of the second one runs."""
    dead = StartedProcess("here-one-0", "instance", 1, process, -9, "killed")
    write_started(fleet.context.run_dir, [dead, StartedProcess("here-one-1", "instance", 2)])


def test_a_new_service_does_not_take_the_connection_of_a_dead_process_for_its_successor_s(tmp_path: Path) -> None:
    async def work(fleet: SiteFleet) -> None:
        async with adopting(fleet) as (opening, instance):
            await instance("here-one-0", 1).connect(address_of(fleet))
            await until(lambda: fleet.lives["here-one-0"].state is Life.STALE or "here-one-0" in fleet.hub.peers)
            ended(fleet, 1)
            await until(lambda: fleet.lives["here-one-0"].process == 2)
            assert "here-one-0" not in fleet.hub.peers
            await instance("here-one-1", 1).connect(address_of(fleet))
            await until(lambda: fleet.present == ["here-one-1"])
            assert not opening.done() and fleet.lives["here-one-0"].state is Life.STARTING
            await instance("here-one-0", 2).connect(address_of(fleet))
            await opening
            assert states(fleet) == {"here-one-0": Life.STALE, "here-one-1": Life.STALE}
            assert fleet.hub.peers["here-one-0"].meta["process"] == fleet.lives["here-one-0"].process == 2
            assert len(fleet.instances()) == 2

    with_fleet(tmp_path, work)


def test_a_new_service_does_not_take_a_process_that_was_replaced_for_the_wanted_one(tmp_path: Path) -> None:
    async def work(fleet: SiteFleet) -> None:
        async with adopting(fleet, first=2) as (opening, instance):
            await instance("here-one-1", 1).connect(address_of(fleet))
            old = asyncio.create_task(instance("here-one-0", 1).connect(address_of(fleet)))
            try:
                await asyncio.wait([old])
                await until(lambda: opening.done() or "here-one-0" not in fleet.hub.peers)
                assert not opening.done() and fleet.lives["here-one-0"].state is Life.STARTING
                await instance("here-one-0", 2).connect(address_of(fleet))
                await opening
            finally:
                old.cancel()
            assert fleet.hub.peers["here-one-0"].meta["process"] == 2

    with_fleet(tmp_path, work)


def test_a_new_service_goes_on_without_an_instance_that_dies_and_restarts_it_after_a_pause(tmp_path: Path) -> None:
    async def work(fleet: SiteFleet) -> None:
        ended(fleet, 1)
        async with adopting(fleet) as (opening, instance):
            await until(lambda: fleet.lives and fleet.lives["here-one-0"].state is Life.DEAD)
            await instance("here-one-1", 1).connect(address_of(fleet))
            await opening
            assert states(fleet) == {"here-one-0": Life.DEAD, "here-one-1": Life.STALE}
            assert len(fleet.lives["here-one-0"].deaths) == 1 and fleet.lives["here-one-0"].process == 1
            assert not fleet.states()["here-one-0"]["for_good"]

    with_fleet(tmp_path, work, pause_s=1000.0)


def test_a_new_service_that_waits_for_an_instance_that_dies_says_why(tmp_path: Path) -> None:
    def stages() -> list[str]:
        lines = (tmp_path / layout.START_STAGES / "service-here.jsonl").read_text().splitlines()
        return [json.loads(line)["stage"] for line in lines]

    async def work(fleet: SiteFleet) -> None:
        async with adopting(fleet) as (opening, _):
            await until(lambda: fleet.lives and (tmp_path / layout.START_STAGES).exists())
            for process in (1, 2):
                ended(fleet, process)
                await until(lambda number=process: fleet.lives["here-one-0"].process == number + 1)
            await until(lambda: len(stages()) > 1)
            waits = "waiting for here-one-0, here-one-1"
            assert stages() == [waits, f"{waits} (killed)"] and not opening.done()

    with_fleet(tmp_path, work)


def test_a_new_service_restarts_an_instance_within_its_budget_and_ends_with_the_last_one(tmp_path: Path) -> None:
    async def work(fleet: SiteFleet) -> None:
        async with adopting(fleet) as (opening, _):
            for process in (1, 2, 3):
                await until(lambda number=process: fleet.lives and fleet.lives["here-one-0"].process == number)
                ended(fleet, process)
            await until(lambda: fleet.states()["here-one-0"]["for_good"])
            assert not opening.done(), "the other one may come"
            other = StartedProcess("here-one-1", "instance", 2, 1, -9, "killed")
            fleet.lives["here-one-1"].deaths += [time.monotonic()] * 2
            write_started(tmp_path, [other])
            with pytest.raises(RunFailed, match="no instance is left"):
                await opening

    with_fleet(tmp_path, work, recovery={"restarts": 2, "pause_s": 0.0})
