"""What a site's service does all the time must not look through every request or instance for each instance."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from scheduler.dispatch.baselines import LeastLoaded
from scheduler.dispatch.policy import REGULAR
from streamrl.generation.site.fleet import SiteFleet
from streamrl.generation.site.instance_life import Life
from streamrl.generation.site.site_state import SiteState
from tests.generation.dispatching import dispatcher, requests
from tests.generation.test_fleet import with_fleet


class CountedName(str):
    """The name of an instance that counts how often it is compared."""

    __slots__ = ("comparisons",)
    comparisons: int

    def __eq__(self, other: object) -> bool:
        self.comparisons += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def test_an_instances_requests_are_found_without_looking_at_those_of_others() -> None:
    work, sent = dispatcher(LeastLoaded())
    name = CountedName("a")
    name.comparisons = 0

    async def body() -> None:
        for instance in ("a", "b"):
            await work.join(instance, 500, None, REGULAR)
        await work.submit([(requests(*(f"g.{number}" for number in range(1000))), None)])
        own = [body["sample_id"] for instance, _, body, _ in sent if instance == "a"]
        assert len(own) == 500 and work.works_on(name) == own and name.comparisons <= 1
        await work.finished(own[2], 1, "a")
        await work.abandon([own[3]])
        assert work.works_on("a") == own[:2] + own[4:]

    asyncio.run(body())


def test_a_heartbeat_asks_the_fleet_once_for_the_states_of_all_instances(tmp_path: Path) -> None:
    async def work(fleet: SiteFleet) -> None:
        known, _ = dispatcher(LeastLoaded())
        fleet.lives["here-one-0"].state = Life.STARTING
        fleet.lives["here-one-1"].state = Life.SUSPECT
        fleet._causes["here-one-0"] = "killed"
        asked: list[dict[str, Any]] = []
        states = fleet.states
        fleet.states = lambda: asked.append(states()) or asked[-1]  # type: ignore[method-assign, func-returns-value]
        weights, uplink = MagicMock(), MagicMock()
        uplink.link.empty_connections = weights.home.link.empty_connections = 0
        state = SiteState(fleet.context, fleet.hub, known, fleet, weights, uplink, "agents-here")
        told = state.heartbeat()["instances"]
        assert [told[name]["detail"] for name in sorted(told)] == ["killed", ""]
        assert len(asked) == 1

    with_fleet(tmp_path, work)


def test_other_work_goes_on_while_a_steps_requests_are_sent() -> None:
    work, sent = dispatcher(LeastLoaded())
    seen: list[int] = []

    async def looks_on() -> None:
        while not seen or seen[-1] < 1000:
            seen.append(len(sent))
            await asyncio.sleep(0)

    async def body() -> None:
        for instance in ("a", "b"):
            await work.join(instance, 500, None, REGULAR)
        step = [(requests(*(f"g.{number}" for number in range(1000))), None)]
        await asyncio.gather(work.submit(step), looks_on())
        assert seen == [256, 512, 768, 1000]
        seen.clear()
        sent.clear()
        await asyncio.gather(work.park(list(work.requests)), looks_on())
        assert seen == [24, 280, 536, 792, 1000]

    asyncio.run(body())
