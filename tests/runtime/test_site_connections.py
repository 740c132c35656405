"""What may be in flight to processes of the own site and of others."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from streamrl.config.cluster import ClusterConfig
from streamrl.runtime.site_connections import CONTROLLER, home_hub, to_home
from streamrl.training.trainer_process import TrainerProcess
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.delivery import Outbox
from streamrl.transport.flow import Flow
from tests.security.keyed_place import make_place

LARGEST_CHUNK = 256 * 2**20
"""Bytes of the largest chunk that `weights.chunk_mb` allows."""


def test_weights_for_the_own_sites_relay_take_little_memory_there_however_large_their_chunks_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait in the relay's memory while its store makes room."""
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    worker = TrainerProcess(make_place(tmp_path).context("trainer-0"))
    assert worker.hub.flows is not None
    flow = worker.hub.flows("service-here")
    most = {}
    for size in (1000, 2**24, LARGEST_CHUNK):
        outbox: Outbox[str] = Outbox(flow.credits, flow.window_bytes)
        while outbox.has_credit:
            outbox.send("chunk", 0.0, size)
        most[size] = len(outbox.pending)
    assert most == {1000: 16, 2**24: 16, LARGEST_CHUNK: 1}


@pytest.mark.parametrize(("mbit_s", "resend_s"), [(1, 402.7), (10, 40.3), (1000, 20.0)])
def test_the_controller_repeats_nothing_that_may_still_be_on_its_way_to_another_site(
    tmp_path: Path, mbit_s: float, resend_s: float
) -> None:
    context = make_place(tmp_path).context()
    values = context.cluster.model_dump()
    values["links"][0] |= {"bandwidth_gbit_s": mbit_s / 1000, "rtt_ms": 0}
    slow = ClusterConfig.model_validate(values)
    hub = home_hub(replace(context, cluster=slow), CONTROLLER, WaitRegistry(CONTROLLER), context.local_flow)
    assert hub.flows is not None
    flow = hub.flows("service-far")
    assert flow == Flow(resend_s=flow.resend_s, lost_after_s=slow.absence_s), "no window holds it up"
    assert flow.silence(301) == f"has been silent for 301 s, and absence_s is {slow.absence_s:g} s"
    assert flow.resend_s == pytest.approx(resend_s, rel=0.01)  # 48 MiB take as long, or 20 s
    assert hub.flows("service-here") == context.local_flow


@pytest.mark.parametrize(
    ("site", "outside", "mbit_s", "largest_s"),
    [("far", True, 1, 134.2), ("far", True, 1000, 0.134), ("here", False, 1, 0)],
)
def test_a_link_to_another_site_is_alive_for_as_long_as_its_largest_message_may_take(
    tmp_path: Path, site: str, outside: bool, mbit_s: float, largest_s: float
) -> None:
    async def body() -> None:
        name = f"service-{site}"
        context = make_place(tmp_path).context(name, site)
        values = context.cluster.model_dump()
        values["links"][0] |= {"bandwidth_gbit_s": mbit_s / 1000}
        link = to_home(replace(context, cluster=ClusterConfig.model_validate(values)), "service", WaitRegistry(name))
        assert (link._outside, link._largest_s) == (outside, pytest.approx(largest_s, rel=0.01))
        link._configure(None)
        assert link._socket.getsockopt(zmq.HEARTBEAT_TIMEOUT) == pytest.approx(max(30_000, 1000 * largest_s), rel=0.01)
        await link.close()

    asyncio.run(body())
