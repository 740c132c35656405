"""Formulas of flow and clocks, and the same over sockets."""

from __future__ import annotations

import asyncio
import math
import random
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.transport import endpoint_base
from streamrl.transport.clock import KEPT, ClockSync
from streamrl.transport.deadlines import DeadlineExpired
from streamrl.transport.delivery import Outbox
from streamrl.transport.endpoint import Flow, Hub
from tests.transport.sockets import Sites, link, run, until
from tests.waiting import holds, scaled


def test_the_window_is_twice_bandwidth_times_delay() -> None:
    flow = Flow.over(bytes_per_s=125e6, rtt_s=0.08, absence_s=600, message_bytes=1e6)
    assert flow.window_bytes == 20e6
    assert flow.credits == 256
    assert (flow.resend_s, flow.lost_after_s) == (20.0, 600)


def test_the_window_holds_two_messages_on_a_short_link() -> None:
    flow = Flow.over(bytes_per_s=125e6, rtt_s=0.0, absence_s=60, message_bytes=16e6)
    assert (flow.window_bytes, flow.credits) == (32e6, 256)


@given(bandwidth=st.floats(1e3, 1e11), rtt=st.floats(0, 2), message=st.floats(1, 1e9), absence=st.floats(1, 1e5))
def test_a_full_window_passes_several_times_before_anything_is_sent_again(
    bandwidth: float, rtt: float, message: float, absence: float
) -> None:
    flow = Flow.over(bandwidth, rtt, absence, message)
    assert flow.resend_s >= 3 * (flow.window_bytes / bandwidth + rtt)
    assert flow.credits >= Flow().credits  # nor do they throttle small messages
    assert flow.credits * message >= flow.window_bytes  # credits do not close the window
    assert flow.window_bytes >= bandwidth * rtt
    assert flow.lost_after_s == absence


@pytest.mark.parametrize("wrong", [{"credits": 0}, {"window_bytes": 0}, {"resend_s": -1}, {"lost_after_s": math.nan}])
def test_a_flow_under_which_nothing_moves_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="above zero"):
        Flow(**wrong)  # type: ignore[arg-type]


def test_a_link_without_bandwidth_is_refused() -> None:
    with pytest.raises(ValueError, match="no link"):
        Flow.over(0.0, 0.1, 60, 1e6)


def test_bytes_under_way_close_the_window_and_acknowledgements_open_it() -> None:
    outbox: Outbox[str] = Outbox(credits=9, window_bytes=100)
    first = outbox.send("larger than the window, alone", 0.0, 500)
    assert not outbox.has_credit
    outbox.acknowledged(first, 0.0)
    assert outbox.has_credit
    numbers = [outbox.send("half", 0.0, 50), outbox.send("half", 0.0, 50)]
    assert not outbox.has_credit
    outbox.acknowledged(numbers[0], 0.0)
    outbox.acknowledged(numbers[0], 0.0)  # a repeated acknowledgement frees nothing
    assert outbox.in_flight_bytes == 50
    assert outbox.has_credit


def test_a_full_byte_window_makes_the_sender_wait_until_something_is_acknowledged() -> None:
    async def body() -> None:
        sites = Sites()
        hub = sites.hub(flows=lambda name: Flow(window_bytes=1000) if name == "far" else Flow())
        far = await link("far", "east", flow=Flow(window_bytes=1000)).connect(
            sites.address, scaled(10), sites.as_client(sites.east)
        )
        large = {"x": np.zeros(2000, np.uint8)}
        await hub.send("far", "item", {}, large)
        with pytest.raises(DeadlineExpired, match="far to acknowledge"):
            await hub.send("far", "item", {}, large, limit_s=0.2)
        await far.send("item", {}, large)
        with pytest.raises(DeadlineExpired, match="the hub at"):
            await far.send("item", {}, large, limit_s=0.2)
        waiting = asyncio.gather(hub.send("far", "item", {"second": 1}), far.send("item", {"second": 1}))
        await holds(lambda: not waiting.done(), 0.1)
        (await far.receive()).ack()
        (await hub.receive()).ack()
        await waiting
        assert (await far.receive()).body == (await hub.receive()).body == {"second": 1}
        assert hub.peers["far"].bytes_out > 2000 < far.bytes_out
        await far.close()
        await hub.close()

    run(body)


def test_a_send_waits_for_as_long_as_the_peer_may_be_away() -> None:
    async def body() -> None:
        sites = Sites()
        hub = sites.hub(flow=Flow(lost_after_s=900.0, credits=1))
        far = await link("far", "east", flow=Flow(credits=1)).connect(
            sites.address, scaled(10), sites.as_client(sites.east)
        )
        await hub.send("far", "item")
        await far.send("item")
        waiting = [asyncio.create_task(hub.send("far", "item")), asyncio.create_task(far.send("item"))]
        await until(lambda: hub.waits.snapshot() and far.waits.snapshot())
        limits = [wait["limit_s"] for registry in (hub.waits, far.waits) for wait in registry.snapshot()]
        assert limits == [900.0, 300.0]
        for task in waiting:
            task.cancel()
        await far.close()
        await hub.close()

    run(body)


def test_who_waits_for_a_peer_that_starts_anew_sends_to_its_new_life() -> None:
    async def body() -> None:
        sites = Sites()
        hub = sites.hub(flow=Flow(credits=1))
        first = await link("far", "east").connect(sites.address, scaled(10), sites.as_client(sites.east))
        await hub.send("far", "item", {"i": 1})
        waiting = asyncio.create_task(hub.send("far", "item", {"i": 2}))
        await until(lambda: hub.waits.snapshot())
        used = hub.peers["far"].bytes_in
        second = await link("far", "east").connect(sites.address, scaled(10), sites.as_client(sites.east))
        await waiting
        assert (await second.receive()).body == {"i": 2}
        assert hub.peers["far"].bytes_in > used > 0  # what the first life sent was sent
        for end in (first, second, hub):
            await end.close()

    run(body)


def test_nothing_is_repeated_into_silence_and_the_rest_is_after_resend_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_base, "HEARTBEAT_S", 0.05)

    async def body() -> None:
        sites = Sites()
        hub = sites.hub(flow=Flow(resend_s=0.4))
        far = await link("far", "east").connect(sites.address, scaled(10), sites.as_client(sites.east))
        await hub.send("far", "item", {}, {"x": np.zeros(100_000, np.uint8)})
        await until(lambda: hub.peers["far"].bytes_out > 200_000)  # heard, not acknowledged: once more
        for task in far._tasks:
            task.cancel()
        await until(lambda: hub.silent_for("far") > 0.4)
        sent = hub.peers["far"].bytes_out
        await holds(lambda: hub.peers["far"].bytes_out < sent + 100_000, 1.0)
        await far.close()
        await hub.close()

    run(body)


def test_a_hub_that_stood_still_does_not_take_that_for_silence_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint_base, "HEARTBEAT_S", 0.05)

    async def body() -> None:
        sites = Sites()
        hub = sites.hub()
        far = await link("far", "east").connect(sites.address, scaled(10), sites.as_client(sites.east))
        await until(lambda: hub.silent_for("far") < 0.1)
        time.sleep(1.0)  # sleeps: the hub stands still
        assert hub.silent_for("far") < 0.5  # before it has looked at anything
        await asyncio.sleep(0)
        assert hub.silent_for("far") < 0.5
        for task in far._tasks:
            task.cancel()
        await until(lambda: hub.silent_for("far") > 0.5)
        await far.close()
        await hub.close()

    run(body)


def test_the_offset_is_wrong_by_at_most_half_a_round_trip() -> None:
    rng = random.Random(3)
    sync = ClockSync()
    assert (sync.offset_s, sync.rtt_s, sync.to_hub_time(5.0)) == (None, None, 5.0)
    for second in range(200):
        there, back = 0.02 + rng.expovariate(20), 0.02 + rng.expovariate(20)
        sent = 1000.0 + second  # by a clock that is 90 s behind the hub's
        assert sync.add(sent, sent + 90 + there, sent + there + back)
        assert sync.offset_s is not None
        assert sync.rtt_s is not None
        assert abs(sync.offset_s - 90) <= sync.rtt_s / 2
    assert sync.rtt_s < 0.08  # the shortest of the last minute, not the mean of 0.14
    assert abs(sync.to_hub_time(2000.0) - 2090) <= sync.rtt_s / 2


def test_samples_older_than_a_minute_no_longer_count() -> None:
    sync = ClockSync()
    sync.add(0.0, 90.0, 0.0)
    for second in range(1, KEPT):
        sync.add(second, second + 90.375, second + 0.5)
    assert sync.offset_s == 90.0
    sync.add(KEPT, KEPT + 90.375, KEPT + 0.5)
    assert sync.offset_s == 90.125


@pytest.mark.parametrize("step", [-172_800.0, 1.0, 172_800.0])
def test_the_first_sample_after_a_clock_was_set_counts_at_once(step: float) -> None:
    sync = ClockSync()
    for second in range(30):
        sync.add(second, second + 90.125, second + 0.25)  # the offset is 90 s
    slow = 0.5  # a round trip that is longer than all before
    sync.add(30.0, 30.0 + 90.0 + step + slow / 2, 30.0 + slow)
    assert (sync.offset_s, sync.rtt_s) == (90.0 + step, slow)
    sync.add(31.0, 31.0 + 90.0 + step + 0.25, 31.0 + 0.25)  # as wrong as it can be: nothing contradicts the other
    assert (sync.offset_s, sync.rtt_s) == (90.0 + step + 0.125, 0.25)
    sync.add(32.0, 32.0 + 90.0 + step + 1.0, 32.0 + 1.0)
    assert sync.rtt_s == 0.25


@pytest.mark.parametrize("sample", [(math.nan, 0.0, 1.0), (0.0, math.inf, 1.0), (5.0, 5.0, 4.0)])
def test_a_sample_that_cannot_be_is_left_out(sample: tuple[float, float, float]) -> None:
    sync = ClockSync()
    assert not sync.add(*sample)
    assert sync.offset_s is None


def test_a_peer_whose_clock_is_90_s_wrong_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_base, "HEARTBEAT_S", 0.05)

    async def body() -> None:
        loop = asyncio.get_running_loop()
        sites = Sites()
        hub: Hub = sites.hub(clock=lambda: loop.time() + 1000.0)
        far = link("far", "east", clock=lambda: loop.time() + 910.0)
        far.state = lambda: {"own": 1}
        await far.connect(sites.address, scaled(10), sites.as_client(sites.east))
        await until(lambda: hub.peers["far"].state.get("rtt_s") is not None)
        state = hub.peers["far"].state
        assert far.clock.offset_s is not None
        assert far.clock.rtt_s is not None
        assert abs(far.clock.offset_s - 90) <= far.clock.rtt_s / 2 + 1e-6
        assert abs(state["clock_offset_s"] - 90) <= state["rtt_s"] / 2 + 1e-6
        assert state["own"] == 1
        assert "clock" not in state | far.hub_state
        await far.close()
        await hub.close()

    run(body)
