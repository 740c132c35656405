"""Samples over a link: in order, each once, and with back-pressure that loses nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest

from streamrl.generation.site import uplink as uplink_module
from streamrl.generation.site.sample_batches import (
    CompressionChoice,
    Item,
    SampleBatcher,
    sample_bytes,
    unpack_samples,
)
from streamrl.generation.site.uplink import Uplink
from streamrl.transport import endpoint_base
from streamrl.transport.deadlines import DeadlineExpired, WaitRegistry
from streamrl.transport.endpoint import Delivery, Flow, Hub, Link
from tests.generation.samples import assert_same, items
from tests.ports import free_port
from tests.transport.sockets import bind_again
from tests.waiting import holds, scaled, until

# -- over a real link


class Controller:
    """A hub that can go away and come back, with what it has committed."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.committed: list[Item] = []
        self.batches: list[int] = []

    async def start(self) -> None:
        self.hub = await bind_again(lambda: Hub("hub", WaitRegistry("hub")).bind(self.address))

    async def receive(self) -> Delivery:
        delivery = await self.hub.receive()
        assert delivery.kind == "samples"
        return delivery

    def commit(self, delivery: Delivery) -> None:
        some = unpack_samples(delivery.body, delivery.arrays)
        self.committed += some
        self.batches.append(len(some))
        delivery.ack()

    async def commit_all(self) -> None:
        while True:
            self.commit(await self.receive())


Body = Callable[[Controller, Link, list[str]], Awaitable[None]]


def run(body: Body) -> None:
    """Runs a test with a controller, a link to it, and a list of the samples whose `on_ack` was called."""

    async def limited() -> None:
        async with asyncio.timeout(scaled(20)):
            controller = Controller(f"tcp://127.0.0.1:{free_port()}")
            await controller.start()
            link = await Link("service", "service", WaitRegistry("service")).connect(controller.address, scaled(10))
            await body(controller, link, [])
            await link.close()
            await controller.hub.close()

    asyncio.run(limited())


def uplink_of(
    link: Link, wait_s: float = 0.0, nbytes: int = 10**6, mark: int = 10**6, bytes_per_s: float | None = None
) -> tuple[Uplink, asyncio.Task[None]]:
    uplink = Uplink(link, SampleBatcher(wait_s, nbytes, 1000), CompressionChoice(bytes_per_s), mark, limit_s=scaled(10))
    return uplink, asyncio.create_task(uplink.run())


async def put_all(uplink: Uplink, some: list[Item], acknowledged: list[str]) -> None:
    for body, arrays in some:
        await uplink.put(body, arrays, lambda name=body["sample_id"]: acknowledged.append(name))


async def all_acknowledged(uplink: Uplink) -> None:
    await until(lambda: uplink.backlog_samples == 0)


@pytest.mark.parametrize("bytes_per_s", [None, 1e5], ids=["raw", "compressed"])
def test_samples_arrive_in_order_and_each_is_acknowledged_once_after_the_commit(bytes_per_s: float | None) -> None:
    async def body(controller: Controller, link: Link, acknowledged: list[str]) -> None:
        uplink, task = uplink_of(link, wait_s=0.02, nbytes=3000, bytes_per_s=bytes_per_s)
        some = items(50)
        await put_all(uplink, some, acknowledged)
        deliveries = [await controller.receive()]
        await holds(lambda: acknowledged == [] and uplink.backlog_samples == 50, 0.1)  # received is not committed
        assert uplink.backlog_bytes == sum(sample_bytes(*one) for one in some)
        controller.commit(deliveries[0])
        committing = asyncio.create_task(controller.commit_all())
        await all_acknowledged(uplink)
        assert_same(controller.committed, some)
        assert acknowledged == [one["sample_id"] for one, _ in some]
        state = uplink.state()
        assert state["backlog_samples"] == state["backlog_bytes"] == 0 and state["samples"] == 50
        assert state["batches"] == len(controller.batches) < 30
        assert state["raw_bytes"] == sum(sample_bytes(*one) for one in some)
        assert state["compressing"] == (bytes_per_s is not None)
        if bytes_per_s is None:
            assert 0 <= state["sent_bytes"] - state["raw_bytes"] <= 5 * state["batches"] and state["compress_s"] == 0
        else:
            assert state["sent_bytes"] < 0.8 * state["raw_bytes"] and state["compress_s"] > 0
        for one in (task, committing):
            one.cancel()

    run(body)


def test_a_fast_link_is_measured_and_still_gets_raw_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    packing = iter([0.0, 1.0, 1.0, 3.0])  # begin and end, raw and compressed: another process cannot come in between
    clock = SimpleNamespace(perf_counter=lambda: next(packing), monotonic=time.monotonic)
    monkeypatch.setattr(uplink_module, "time", clock)

    async def body(controller: Controller, link: Link, acknowledged: list[str]) -> None:
        uplink, task = uplink_of(link, bytes_per_s=1e15)
        await put_all(uplink, items(1), acknowledged)
        delivery = await controller.receive()
        assert delivery.body == {"packing": "raw"}
        controller.commit(delivery)
        await all_acknowledged(uplink)
        state = uplink.state()
        assert state["ratio"] > 0 and state["mb_per_s"] > 0 and not state["compressing"] and state["compress_s"] > 0
        task.cancel()

    run(body)


def test_inside_a_site_each_sample_goes_on_its_own_and_at_once() -> None:
    async def body(controller: Controller, link: Link, acknowledged: list[str]) -> None:
        uplink, task = uplink_of(link)
        for one in items(3):
            await put_all(uplink, [one], acknowledged)
            controller.commit(await controller.receive())
        assert controller.batches == [1, 1, 1]
        await all_acknowledged(uplink)
        task.cancel()

    run(body)


def test_a_batch_waits_for_more_samples_until_it_is_large() -> None:
    async def body(controller: Controller, link: Link, acknowledged: list[str]) -> None:
        some = items(5)
        uplink, task = uplink_of(link, wait_s=60.0, nbytes=sum(sample_bytes(*one) for one in some))
        await put_all(uplink, some[:4], acknowledged)
        await holds(lambda: uplink.batches == 0 and controller.hub.receive_now() is None, 0.2)
        committing = asyncio.create_task(controller.commit_all())
        await put_all(uplink, some[4:], acknowledged)
        await all_acknowledged(uplink)
        assert controller.batches == [5] and len(acknowledged) == 5
        for one in (task, committing):
            one.cancel()

    run(body)


def test_large_batches_are_packed_without_holding_up_the_loop_and_arrive_whole() -> None:
    async def body(controller: Controller, link: Link, acknowledged: list[str]) -> None:
        uplink, task = uplink_of(link, wait_s=0.05, nbytes=4 * 10**6, bytes_per_s=1e6)
        some = items(60, tokens=3000)
        committing = asyncio.create_task(controller.commit_all())
        await put_all(uplink, some, acknowledged)
        await all_acknowledged(uplink)
        assert_same(controller.committed, some)
        assert controller.batches == [60]
        for one in (task, committing):
            one.cancel()

    run(body)


def test_a_sample_that_cannot_be_packed_is_refused_when_it_is_put_and_spoils_no_batch() -> None:
    async def body(controller: Controller, link: Link, acknowledged: list[str]) -> None:
        uplink, task = uplink_of(link)
        with pytest.raises(ValueError, match="has the arrays"):
            await uplink.put({}, {}, lambda: acknowledged.append("never"))
        assert uplink.backlog_samples == 0
        await put_all(uplink, items(1), acknowledged)
        controller.commit(await controller.receive())
        await all_acknowledged(uplink)
        assert acknowledged == ["g.0"]
        task.cancel()

    run(body)


def test_withheld_acknowledgements_congest() -> None:
    async def body(controller: Controller, link: Link, acknowledged: list[str]) -> None:
        some = items(20)
        mark = sum(sample_bytes(*one) for one in some) // 2
        uplink, task = uplink_of(link, wait_s=0.01, nbytes=1000, mark=mark)
        await put_all(uplink, some[:8], acknowledged)
        await holds(lambda: acknowledged == [] and not uplink.congested, 0.2)
        change = asyncio.create_task(uplink.changed())
        await put_all(uplink, some[8:], acknowledged)
        assert await change is True and uplink.congested
        change = asyncio.create_task(uplink.changed())
        while uplink.backlog_bytes >= mark / 2:
            assert uplink.congested and not change.done()
            before = len(acknowledged)
            controller.commit(await controller.receive())
            await until(lambda before=before: len(acknowledged) > before)
        assert await change is False and not uplink.congested
        task.cancel()

    run(body)


def test_a_controller_that_is_away_for_a_while_congests_the_uplink_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint_base, "HEARTBEAT_S", 0.1)

    async def body(controller: Controller, link: Link, acknowledged: list[str]) -> None:
        some = items(200)
        nbytes = sum(sample_bytes(*one) for one in some)
        uplink, task = uplink_of(link, wait_s=0.01, nbytes=2000, mark=nbytes // 4)
        changes: list[bool] = []

        async def watch() -> None:
            while True:
                changes.append(await uplink.changed())

        watching = asyncio.create_task(watch())
        await put_all(uplink, some[:20], acknowledged)
        controller.commit(await controller.receive())
        await until(lambda: len(acknowledged) > 0)
        await controller.receive()  # received, not committed: it comes again
        await controller.hub.close()
        await put_all(uplink, some[20:], acknowledged)
        await until(lambda: changes == [True])
        committed = controller.batches[0]
        await holds(lambda: len(acknowledged) == committed == 200 - uplink.backlog_samples, 0.3)
        await controller.start()
        committing = asyncio.create_task(controller.commit_all())
        await all_acknowledged(uplink)
        assert sorted(acknowledged) == sorted(one["sample_id"] for one, _ in some)
        assert_same(sorted(controller.committed, key=sample_id), sorted(some, key=sample_id))
        await until(lambda: changes == [True, False])
        assert uplink.backlog_bytes == 0
        for one in (task, watching, committing):
            one.cancel()

    run(body)


def sample_id(one: Item) -> str:
    return str(one[0]["sample_id"])


def test_a_link_that_takes_nothing_for_too_long_ends_the_uplink() -> None:
    async def body(controller: Controller, link: Link, acknowledged: list[str]) -> None:
        narrow = await Link("narrow", "service", WaitRegistry("narrow"), flow=Flow(credits=1)).connect(
            controller.address, scaled(10)
        )
        uplink = Uplink(narrow, SampleBatcher(0.0, 100, 1), CompressionChoice(None), 10**6, limit_s=0.3)
        await put_all(uplink, items(3), acknowledged)
        with pytest.raises(DeadlineExpired, match="to acknowledge"):
            await uplink.run()
        assert uplink.backlog_samples == 3 and not acknowledged
        await narrow.close()

    run(body)
