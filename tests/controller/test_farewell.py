"""All sites hear that the run is over, whatever one of them does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from streamrl.config.cluster import ClusterConfig
from streamrl.controller import farewell as module
from streamrl.controller.farewell import Farewell
from streamrl.run_dir import layout
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


class LastStatus:
    """What a farewell needs of telemetry: the state that is written last."""

    def __init__(self) -> None:
        self.state, self.error = "running", None

    def close(self, state: str, error: str | None) -> None:
        self.state = state


def three_sites(run_dir: Path = Path(), excluded: tuple[str, ...] = ()) -> tuple[Acknowledging, Farewell]:
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
    hub: Any = Acknowledging(*sites)
    status: Any = LastStatus()
    config = ClusterConfig.model_validate(cluster)
    return hub, Farewell(hub, WaitRegistry("test"), sites, config, excluded, status, run_dir)


def test_all_sites_hear_of_the_end_at_once_and_none_waits_for_the_acknowledgement_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "FINISH_S", 3600.0)

    async def play() -> None:
        hub, farewell = three_sites()
        ending = asyncio.ensure_future(farewell.tell("done", None))
        await until(lambda: hub.acks.keys() == {"service-far", "service-further"})
        assert not ending.done()
        for acknowledge in hub.acks.values():
            acknowledge()
        await ending

    asyncio.run(play())


def test_a_site_that_is_away_when_the_run_is_done_hears_it_when_it_comes_back() -> None:
    async def play() -> None:
        hub, farewell = three_sites()
        del hub.peers["service-far"]
        ending = asyncio.ensure_future(farewell.tell("done", None, patient=True))
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
        assert await farewell.tell("done", None) == [], "as a stop asks for: all have heard it"

    asyncio.run(play())


@pytest.mark.parametrize(
    ("patient", "excluded", "limit_s"), [(False, False, 3600), (True, True, 3600), (True, False, 0)]
)
def test_a_site_that_does_not_come_back_is_named(
    monkeypatch: pytest.MonkeyPatch, patient: bool, excluded: bool, limit_s: float
) -> None:
    """Nobody waits for one that is away when a run fails or is stopped, nor for one that was excluded and left."""
    monkeypatch.setattr(module, "FAREWELL_S", limit_s)

    async def play() -> None:
        away = "service-far", "service-further"
        hub, farewell = three_sites(excluded=away if excluded else ())
        for name in away:
            del hub.peers[name]
        assert await farewell.tell("done", None, patient) == ["far", "further"]

    asyncio.run(play())


def test_an_acknowledgement_of_the_end_that_comes_late_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FINISH_S", 0.0)

    async def play() -> None:
        hub, farewell = three_sites()
        await farewell.tell("done", None)
        for acknowledge in hub.acks.values():
            acknowledge()
        assert hub.acks.keys() == {"service-far", "service-further"}

    asyncio.run(play())


@pytest.mark.parametrize(
    ("state", "emulated", "patient"), [("done", False, True), ("done", True, False), ("failed", False, False)]
)
def test_sites_with_launchers_of_their_own_have_time_to_come_back_when_the_run_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, state: str, emulated: bool, patient: bool
) -> None:
    if emulated:
        (tmp_path / layout.NETWORK).mkdir()
    _, farewell = three_sites(tmp_path)
    tell = AsyncMock(return_value=[])
    monkeypatch.setattr(farewell, "tell", tell)
    asyncio.run(farewell.close(state))
    tell.assert_awaited_once_with(state, None, patient)
