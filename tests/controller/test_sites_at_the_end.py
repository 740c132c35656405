"""All sites hear that the run is over, whatever one of them does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.controller import site_services
from streamrl.controller.site_services import Services
from streamrl.transport.deadlines import WaitRegistry
from tests.waiting import until


class Acknowledging:
    """What services need of a hub at the end: it keeps how to acknowledge what it has sent, by peer."""

    def __init__(self, *names: str) -> None:
        self.peers = {name: object() for name in names}
        self.acks: dict[str, Callable[[], None]] = {}

    async def send(self, peer: str, kind: str, body: dict[str, Any], on_ack: Callable[[], None]) -> None:
        assert (kind, body["state"]) == ("finish", "done")
        self.acks[peer] = on_ack


def three_sites() -> tuple[Acknowledging, Services]:
    sites = {"service-home": "home", "service-far": "far", "service-further": "further"}
    links = [
        {"between": ["home", other], "bandwidth_gbit_s": 1, "rtt_ms": 30, "price_per_gb": 0.05}
        for other in ("far", "further")
    ]
    cluster = {
        "hardware": "cpu",
        "sites": {
            "home": {"port": 5600, "trainer": {}, "generation": [{}]},
            "far": {"generation": [{}]},
            "further": {"generation": [{}]},
        },
        "links": links,
    }
    hub = Acknowledging(*sites)
    waits = WaitRegistry("test")
    return hub, Services(hub, waits, sites, ClusterConfig.model_validate(cluster), RunConfig())  # type: ignore[arg-type]


def test_all_sites_hear_of_the_end_at_once_and_none_waits_for_the_acknowledgement_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(site_services, "FINISH_S", 3600.0)

    async def play() -> None:
        hub, services = three_sites()
        ending = asyncio.ensure_future(services.finish("done", None))
        await until(lambda: hub.acks.keys() == {"service-far", "service-further"})
        assert not ending.done()
        for acknowledge in hub.acks.values():
            acknowledge()
        await ending

    asyncio.run(play())


def test_a_site_that_is_away_when_the_run_is_done_hears_it_when_it_comes_back() -> None:
    async def play() -> None:
        hub, services = three_sites()
        del hub.peers["service-far"]
        ending = asyncio.ensure_future(services.finish("done", None, patient=True))
        await until(lambda: hub.acks.keys() == {"service-further"})
        hub.acks["service-further"]()
        hub.peers["service-far"] = object()
        await until(lambda: "service-far" in hub.acks)
        del hub.acks["service-far"]
        hub.peers["service-far"] = object()  # it was restarted, and has not heard it
        await until(lambda: "service-far" in hub.acks)
        assert not ending.done()
        hub.acks["service-far"]()
        assert await ending == []
        assert await services.finish("done", None) == [], "as a stop asks for: all have heard it"

    asyncio.run(play())


@pytest.mark.parametrize(
    ("patient", "excluded", "limit_s"), [(False, "", 3600), (True, "it lies", 3600), (True, "", 0)]
)
def test_a_site_that_does_not_come_back_is_named(
    monkeypatch: pytest.MonkeyPatch, patient: bool, excluded: str, limit_s: float
) -> None:
    """Nobody waits for one that is away when a run fails or is stopped, nor for one that was excluded and left."""
    monkeypatch.setattr(site_services, "FAREWELL_S", limit_s)

    async def play() -> None:
        hub, services = three_sites()
        for name in ("service-far", "service-further"):
            del hub.peers[name]
            if excluded:
                services.excluded[name] = excluded
        assert await services.finish("done", None, patient) == ["far", "further"]

    asyncio.run(play())


def test_an_acknowledgement_of_the_end_that_comes_late_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site_services, "FINISH_S", 0.0)

    async def play() -> None:
        hub, services = three_sites()
        await services.finish("done", None)
        for acknowledge in hub.acks.values():
            acknowledge()
        assert hub.acks.keys() == {"service-far", "service-further"}

    asyncio.run(play())
