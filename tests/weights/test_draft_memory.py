"""The memory of a draft that comes to nothing is free for the next one, without waiting for a garbage collection."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.weights import site_relay
from streamrl.weights.site_relay import WeightRelay
from streamrl.weights.version_store import WeightStore
from tests.waiting import scaled, until
from tests.weights.world import Policy, World, fill, flip_a_bit, in_world


@pytest.fixture(autouse=True)
def no_collection(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leaves cycles of references alone; pytest, which keeps records of the log with their errors, gets none."""
    monkeypatch.setattr(site_relay.log, "disabled", True)
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def mapped_drafts() -> list[str]:
    """Returns the files of drafts that this process maps, deleted ones included."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "/partial_" in line and "(deleted)" in line]


def test_an_abandoned_draft_maps_nothing_and_is_not_committed(tmp_path: Path) -> None:
    store, version = WeightStore(tmp_path), Policy().version()
    draft = store.begin(version[0])
    mapped = weakref.ref(draft.buffer)
    store.abandon(draft)
    assert mapped() is None and not len(draft.buffer)
    with pytest.raises(FileNotFoundError):
        store.commit(draft)
    fill(store, *version)
    np.testing.assert_array_equal(store.open(0)[1], version[1])


@pytest.mark.parametrize("encoding", ["raw", "delta"])
def test_the_draft_of_a_failed_transfer_is_let_go_of_before_the_next_one_begins(tmp_path: Path, encoding: Any) -> None:
    async def body(world: World) -> None:
        policy = Policy()
        relay = await world.relay("site", encoding)
        await world.publisher.publish(*(first := policy.version()))
        await world.fetch(relay, first)
        begin, failing = relay.store.begin, True
        held: list[int] = []

        def noted(*args: Any) -> Any:
            held.append(len(mapped_drafts()))
            return begin(*args)

        async def damaged(self: WeightRelay, *args: Any) -> None:
            nonlocal failing
            await receive(*args)
            if encoding == "raw" and failing:
                failing = False
                raise site_relay.CorruptWeights("a chunk was not requested")

        receive, relay.store.begin = relay._receive, noted
        relay._receive = damaged.__get__(relay)
        if encoding == "delta":
            await world.anchored()
            flip_a_bit(relay.store.directory / "version_0.bin", 77)
        await world.publisher.publish(*(second := policy.step()))
        await world.fetch(relay, second)
        assert held == [0, 0] and relay.wrong_bases + relay.corrupt == 1

    in_world(tmp_path, body)


def test_the_draft_of_a_transfer_that_is_given_up_in_a_thread_is_let_go_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding, go_on = threading.Event(), threading.Event()
    decode = site_relay.decode_parts

    def slow(*args: Any) -> None:
        decoding.set()
        go_on.wait(scaled(30))
        decode(*args)

    async def body(world: World) -> None:
        policy = Policy()
        relay = await world.relay("site", "delta")
        await world.publisher.publish(*(first := policy.version()))
        await world.fetch(relay, first)
        await world.publisher.publish(*(second := policy.step()))
        monkeypatch.setattr(site_relay, "decode_parts", slow)
        transfer = asyncio.create_task(relay.fetch(1, second[0].version.content_hash))
        await until(decoding.is_set)
        transfer.cancel()
        go_on.set()
        await asyncio.wait([transfer])
        assert transfer.cancelled()
        del transfer
        await until(lambda: not mapped_drafts())  # the thread of the pool lets go of its arguments last

    in_world(tmp_path, body)
