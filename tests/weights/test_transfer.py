"""Weights reach every site bit-equal, whatever is skipped, restarted or damaged, and cost no more than they must."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from streamrl.errors import RunFailed
from streamrl.protocol.message import wire
from streamrl.protocol.weights import Fetch, Have
from streamrl.runtime.processes import this_host
from streamrl.transport.endpoint import Delivery, Link
from streamrl.weights import publisher as publisher_module
from streamrl.weights.publisher import code
from streamrl.weights.site_relay import Encoding, NotPublished
from streamrl.weights.version import Manifest, Stream
from streamrl.weights.version_store import WeightStore
from tests.waiting import scaled, until
from tests.weights.world import DamagingLink, Policy, RecordingPublisher, World, fill, flip_a_bit, in_world


def test_fifty_versions_with_skips_restarts_damaged_chunks_and_a_damaged_base(tmp_path: Path) -> None:
    class Damaging(DamagingLink):
        share = 0.15

    async def body(world: World) -> None:
        policy, dice = Policy(), random.Random(5)
        names = ("a", "b", "c")
        relays = {name: await world.relay(name, link=Damaging) for name in names}
        lives = list(relays.values())
        restarted_on = {"same": 0, "empty": 0}
        version = policy.version()
        kinds: list[str] = []
        for round_ in range(50):
            await world.publisher.publish(*version)
            for name in names:
                event, last = dice.random(), round_ == 49
                relay = relays[name]
                if event < 0.1:
                    await (relay.link.close() if event < 0.05 else relay.link.crash())
                    if empty := dice.random() < 0.4:
                        relay.store.clear()
                    restarted_on["empty" if empty else "same"] += 1
                    relay = relays[name] = await world.relay(name, link=Damaging)
                    lives.append(relay)
                elif event < 0.2 and (base := relay.store.newest_verified()) is not None:
                    flip_a_bit(relay.store.directory / f"version_{base}.bin", dice.randrange(20_000))
                if event < 0.7 or last:
                    await world.fetch(relay, version, newest=True)
                    relay.store.keep_only({version[0].version.number})
                    kinds.append(relay.last.kind)
            if round_ < 49:
                version = policy.step(share=0.6 if round_ == 30 else 0.02, skip=dice.randrange(2))
        for relay in lives:
            assert relay.corrupt == len(relay.link.injected)
        assert sum(len(relay.link.injected) for relay in lives) > 20
        assert sum(relay.wrong_bases for relay in lives) > 3
        assert min(restarted_on.values()) > 1
        assert {"delta", "packed+delta"} <= set(kinds)

    in_world(tmp_path, body)


def test_a_publisher_names_what_it_keeps_older_versions_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def slow(manifest: Manifest, buffer: np.ndarray, old: tuple[int, np.ndarray] | None) -> Stream:
        assert go_on.wait(scaled(60))
        return code(manifest, buffer, old)

    async def body(world: World) -> None:
        policy, publisher, store = Policy(), world.publisher, WeightStore(tmp_path / "store")

        async def publish(version: tuple[Manifest, np.ndarray]) -> None:
            fill(store, *version)
            await publisher.publish(*store.open(version[0].version.number))

        monkeypatch.setattr(publisher_module, "code", slow)
        assert publisher.holders() == []
        await publish(policy.version())
        assert publisher.holders() == []  # the newest one is kept anyway
        await publish(policy.step())
        assert publisher.holders() == ["the delta of the served weights to be made", "weights 0 to be compressed"]
        go_on.set()
        await until(lambda: publisher.holders() == [])
        monkeypatch.setattr(publisher, "_send_ranges", lambda *_: asyncio.Event().wait())
        relay = await world.relay("far", "raw")
        relay.host = ""
        fetching = asyncio.create_task(relay.fetch(1, policy.version()[0].version.content_hash))
        await until(lambda: "far" in publisher._open)
        assert publisher.holders() == []
        await publish(policy.step())
        await until(lambda: publisher.holders() == ["far to receive weights 1"])
        fetching.cancel()

    in_world(tmp_path, body, eager=True)


def test_a_tampered_base_is_noticed_before_the_version_gets_its_name_and_complete_weights_come(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        policy = Policy()
        relay = await world.relay("site")
        await world.publisher.publish(*(first := policy.version()))
        await world.fetch(relay, first)
        await world.anchored()
        flip_a_bit(relay.store.directory / "version_0.bin", 77)
        await world.publisher.publish(*(second := policy.step()))
        await world.fetch(relay, second)
        assert (relay.wrong_bases, relay.corrupt, relay.last.kind) == (1, 0, "packed+delta")
        await world.publisher.publish(*(third := policy.step()))
        await world.fetch(relay, third)
        assert (relay.wrong_bases, relay.last.kind) == (1, "delta")

    in_world(tmp_path, body)


@pytest.mark.parametrize("encoding", ["raw", "delta"])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_damaged_payload_is_fetched_again_and_alone_and_the_third_time_ends_the_run(
    tmp_path: Path, encoding: Encoding, times: int
) -> None:
    class Damaging(DamagingLink):
        share, most_per_payload = 1.0, times

    async def body(world: World) -> None:
        version = Policy().version()
        await world.publisher.publish(*version)
        relay = await world.relay("site", encoding, Damaging)
        if times == 3:
            with pytest.raises(RunFailed, match="version 0 arrived corrupt 3 times"):
                await world.fetch(relay, version)
            assert relay.store.newest_verified() is None
            assert not list(relay.store.directory.glob("partial_*"))
        else:
            await world.fetch(relay, version)
            sent = list(world.publisher.sent)
            assert [s.kind == "again" for s in sent] == [False] + [True] * times
            assert all(s.nbytes <= sent[0].nbytes for s in sent)
            assert sum(s.nbytes for s in sent) == relay.bytes_received
        assert relay.corrupt == len(relay.link.injected)

    in_world(tmp_path, body)


def test_only_the_damaged_payload_is_sent_again(tmp_path: Path) -> None:
    class DamagingOnce(DamagingLink):
        async def receive(self) -> Delivery:
            self.share = 0.0 if self.injected else 1.0
            return await super().receive()

    async def body(world: World) -> None:
        policy = Policy()
        relay = await world.relay("site")
        await world.publisher.publish(*(version := policy.version()))
        await world.fetch(relay, version)
        await relay.link.close()
        relay = await world.relay("site", link=DamagingOnce)
        await world.publisher.publish(*(version := policy.step()))
        await world.fetch(relay, version)
        ((_, part, tensor),) = relay.link.injected
        assert world.publisher.sent[-1].kind == "again"
        assert world.publisher.sent[-1].nbytes == relay.link.parts[part].payloads[tensor].nbytes
        assert (relay.corrupt, relay.last.kind) == (1, "delta")

    in_world(tmp_path, body)


def test_chunks_may_come_in_any_order_and_before_their_manifest(tmp_path: Path) -> None:
    class Reordering(Link):
        async def receive(self) -> Delivery:
            held = getattr(self, "held", [])
            while len(held) < 3:
                try:
                    held.append(await asyncio.wait_for(super().receive(), 0.1 if held else None))
                except TimeoutError:
                    break
            self.held = held
            return held.pop()

    async def body(world: World) -> None:
        policy = Policy()
        relay = await world.relay("site", link=Reordering)
        for _ in range(3):
            await world.publisher.publish(*(version := policy.step()))
            await world.fetch(relay, version)
        assert relay.corrupt == 0

    in_world(tmp_path, body)


def test_raw_mode_makes_no_delta_and_holds_one_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object) -> None:
        raise AssertionError("nothing is to be coded")

    monkeypatch.setattr(publisher_module, "code", never)

    async def body(world: World) -> None:
        policy = Policy()
        relay = await world.relay("site", "raw")
        buffers = []
        for _ in range(4):
            manifest, buffer = policy.step()
            buffers.append(weakref.ref(buffer))
            await world.publisher.publish(manifest, buffer)
            await world.fetch(relay, (manifest, buffer))
            assert world.publisher.held_bytes == manifest.nbytes
            assert relay.last.kind == "complete"
        del buffer
        gc.collect()
        assert [ref() is not None for ref in buffers] == [False, False, False, True]

    in_world(tmp_path, body)


def test_a_version_costs_a_site_the_same_whatever_reads_it_there_and_deltas_cost_less(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        policy = Policy()
        relays = {name: await world.relay(name) for name in ("one", "eight")}
        for _ in range(9):
            await world.publisher.publish(*(version := policy.step()))
            number = version[0].version.number
            for relay, readers in zip(relays.values(), (1, 8), strict=True):
                await world.fetch(relay, version)
                for _ in range(readers):
                    np.testing.assert_array_equal(relay.store.open(number)[1], version[1])
                relay.store.keep_only({number})
            costs = [sent.nbytes for sent in world.publisher.sent if sent.number == number]
            assert len(costs) == 2
            assert costs[0] == costs[1] or number == 1  # until the first anchor is packed, it comes as it is
        assert {sent.kind for sent in list(world.publisher.sent)[2:]} == {"delta"}
        assert costs[0] < version[0].nbytes / 10
        await world.fetch(relays["one"], version)
        assert relays["one"].last.nbytes == 0

    in_world(tmp_path, body)


def test_a_newer_version_may_come_instead_and_an_older_one_by_anchor_and_deltas(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        policy = Policy()
        early, late, raw = await world.relay("early"), await world.relay("late"), await world.relay("raw", "raw")
        versions = []
        for _ in range(4):
            versions.append(policy.step())
            await world.publisher.publish(*versions[-1])
            if len(versions) == 1:
                await world.fetch(early, versions[0])
        await world.fetch(late, versions[2])
        assert late.last.kind == "packed+delta"
        for relay in (early, raw):
            second = versions[1][0].version
            got = await relay.fetch(second.number, second.content_hash, newest=True)
            assert got == versions[3][0]
            np.testing.assert_array_equal(relay.store.open(4)[1], versions[3][1])
        assert early.last.kind == "delta"
        with pytest.raises(RunFailed, match=r"no weight version 3 .a newer one has replaced it"):
            await world.fetch(raw, versions[2])
        with pytest.raises(RunFailed, match=r"no weight version 9 .it is not published"):
            await late.fetch(9, "x", newest=True)
        with pytest.raises(RunFailed, match="corrupt"):
            await late.fetch(4, "of another run")

    in_world(tmp_path, body)


@pytest.mark.parametrize("encoding", ["raw", "delta"])
@pytest.mark.parametrize("place", ["this host", "another host", "outside", "file gone"])
def test_a_relay_on_the_publisher_s_host_copies_the_file_and_any_other_is_sent_it(
    tmp_path: Path, place: str, encoding: Encoding
) -> None:
    class Counting(DamagingLink):
        share = 0.0

    async def body(world: World) -> None:
        host = "other" if place == "another host" else this_host()
        relay = await world.relay("site", encoding, link=Counting, host=host)
        if place == "outside":
            world.hub.peers["site"].site = "far"
        policy = Policy()
        for _ in range(2):
            manifest, plain = policy.step()
            path = tmp_path / f"in_memory_{manifest.version.number}"
            buffer = np.memmap(path, dtype=np.uint8, mode="w+", shape=plain.shape)
            buffer[:] = plain
            if place == "file gone":
                path.unlink()
            await world.publisher.publish(manifest, buffer)
            await world.fetch(relay, (manifest, plain))
        copied = place == "this host"
        assert relay.last.kind == ("complete" if encoding == "raw" or copied else "delta")
        complete = 2 if encoding == "raw" or copied else 1
        least = complete - (0.5 if place == "outside" and encoding == "delta" else 0)  # compressed, over a link
        assert least * plain.nbytes <= relay.bytes_received < (complete + 0.5) * plain.nbytes
        assert sum(relay.link.chunk_bytes) == (0 if copied else relay.bytes_received)

    in_world(tmp_path, body)


def test_a_restarted_relay_goes_on_from_what_its_store_holds(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        policy = Policy()
        relay = await world.relay("site")
        await world.publisher.publish(*(version := policy.step()))
        await world.fetch(relay, version)
        await relay.link.close()
        for _ in range(3):
            await world.publisher.publish(*(version := policy.step()))
        relay = await world.relay("site")
        await world.fetch(relay, version)
        assert relay.last.kind == "delta"
        again = await world.relay("again on the same store")
        again.store = WeightStore(relay.store.directory)
        await world.fetch(again, version)
        assert again.last.kind == "nothing"
        # versions of an earlier life of the run, with the same numbers, are no base
        await world.anchored()
        other = await world.relay("other")
        lay_outs = Policy(seed=9).step()
        fill(other.store, *lay_outs)
        await world.fetch(other, version)
        assert (other.last.kind, other.wrong_bases) == ("packed+delta", 0)

    in_world(tmp_path, body)


class Slow(RecordingPublisher):
    """Publishes many versions while the first one is on its way."""

    policy = Policy()

    async def _send_ranges(self, *args: Any) -> None:
        if not self.sent:
            for _ in range(3 * self.chain.anchor_every):
                await self.publish(*self.policy.step())
        await super()._send_ranges(*args)


def test_after_a_transfer_that_took_longer_than_from_anchor_to_anchor_deltas_come(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        relay = await world.relay("far")
        policy = world.publisher.policy = Policy()
        await world.publisher.publish(*(version := policy.step()))
        await world.fetch(relay, version)
        assert relay.last.kind == "complete"
        await world.anchored()
        assert world.publisher.chain.anchor != 1
        await world.publisher.publish(*(version := policy.step()))
        await world.fetch(relay, version)
        assert relay.last.kind == "delta"

    in_world(tmp_path, body, kind=Slow)


@pytest.mark.parametrize("newest", [True, False])
def test_the_first_complete_version_goes_to_another_site_compressed(tmp_path: Path, newest: bool) -> None:
    async def body(world: World) -> None:
        relay = await world.relay("far")
        world.hub.peers["far"].site = "far"
        await world.publisher.publish(*(version := Policy().step()))
        await world.fetch(relay, version, newest=newest)
        assert relay.last.kind == "packed" and relay.last.nbytes < version[0].nbytes

    in_world(tmp_path, body)


def test_a_version_from_before_the_run_went_back_is_no_base_and_none_is_taken_for_it(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        before, policy = Policy(seed=9), Policy()
        for _ in range(5):
            left = before.step()
        fill(WeightStore(tmp_path / "site"), *left)
        relay = await world.relay("site")
        relay.store.claim(keep_newest=True)
        for number in range(3, 7):  # from the checkpoint on, past the number of what was left
            policy.number = number - 1
            await world.publisher.publish(*(version := policy.step()))
            await world.fetch(relay, version)
            relay.store.keep_only({number})
            assert relay.last.kind == ("complete" if number == 3 else "delta")
        assert relay.wrong_bases == relay.corrupt == 0

    in_world(tmp_path, body)


def test_only_the_version_that_was_sent_last_counts_as_held(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        policy, relay = Policy(), await world.relay("far")
        await world.publisher.publish(*(version := policy.step()))
        await relay.link.send(*wire(Have(number=1)))
        await world.fetch(relay, version)
        await relay.link.send(*wire(Have(number=7)))
        await relay.link.flush(scaled(10))
        assert world.publisher.chain.held == {"far": 1}
        transfer = world.publisher._open["far"] = SimpleNamespace(manifest=version[0], is_delta=True)
        await relay.link.send(*wire(Have(number=7)))
        await relay.link.flush(scaled(10))
        assert (world.publisher.chain.held, world.publisher._open) == ({"far": 1}, {"far": transfer})

    in_world(tmp_path, body)


def test_other_tensors_than_before_come_complete(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        policy = Policy()
        relay = await world.relay("site")
        await world.publisher.publish(*(version := policy.step()))
        await world.fetch(relay, version)
        await world.anchored()  # else the next one is no anchor, as only one is packed at a time
        policy.tensors["bias"] = torch.ones(8)
        await world.publisher.publish(*(version := policy.step()))
        await world.fetch(relay, version)
        assert relay.last.kind in ("complete", "packed")
        await world.anchored()
        assert world.publisher.chain.anchor == 2

    in_world(tmp_path, body)


class Mistaken(RecordingPublisher):
    """Takes what a relay holds for its own version of that number."""

    async def _prepare_path(self, peer: str, order: Fetch) -> Any:
        if order.holds is not None and (held := self._versions.get(order.holds)) is not None:
            order = msgspec.structs.replace(order, holds_hash=held.manifest.version.content_hash)
        return await super()._prepare_path(peer, order)


@pytest.mark.parametrize("same_tensors", [True, False])
def test_a_delta_for_another_base_is_refused_and_complete_weights_come(tmp_path: Path, same_tensors: bool) -> None:
    async def body(world: World) -> None:
        policy, other = Policy(), Policy(seed=3)
        if not same_tensors:
            other.tensors["bias"] = torch.ones(8)
        relay = await world.relay("site")
        first = policy.step()
        await world.publisher.publish(*first)
        await world.fetch(await world.relay("another"), first)
        await world.publisher.publish(*(second := policy.step()))
        wrong = other.step()
        fill(relay.store, *wrong)
        await world.fetch(relay, second)
        assert (relay.wrong_bases, relay.corrupt) == (1, 0)

    in_world(tmp_path, body, kind=Mistaken)


def test_weights_of_another_model_are_refused_naming_the_tensor(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        policy = Policy()
        version = policy.version()
        await world.publisher.publish(*version)
        model = {t.name: (t.dtype, t.shape) for t in version[0].tensors}
        await world.fetch(await world.relay("right", expected=model), version)
        for name, expected, message in (
            ("type", model | {"norm": ("bfloat16", (64,))}, r"'norm' is float32 \[64\], expected bfloat16 \[64\]"),
            ("more", model | {"head": ("float32", (2, 3))}, r"'head' is not there, expected float32 \[2, 3\]"),
            ("less", {"embed": model["embed"]}, r"'norm' is float32 \[64\], expected not there"),
        ):
            relay = await world.relay(name, expected=expected)
            with pytest.raises(RunFailed, match=message):
                await world.fetch(relay, version)
            assert relay.store.newest_verified() is None

    in_world(tmp_path, body)


@pytest.mark.parametrize("encoding", ["raw", "delta"])
def test_a_damaged_version_that_a_newer_one_has_replaced_is_said_to_be_gone_and_the_newer_one_comes(
    tmp_path: Path, encoding: Encoding
) -> None:
    async def body(world: World) -> None:
        relay, policy = await world.relay("site", encoding), Policy()
        for _ in range(3):  # the first one is an anchor
            manifest, buffer = policy.step()
            await world.publisher.publish(manifest, buffer)
            await world.fetch(relay, (manifest, buffer))
        newer = policy.step()
        await world.publisher.publish(*newer)
        flip_a_bit(relay.store.directory / f"version_{manifest.version.number}.bin", 99)
        relay.store.keep_only({manifest.version.number})
        if encoding == "raw":
            with pytest.raises(NotPublished, match="a newer one has replaced it"):
                await relay.ensure(manifest.version.number, manifest.version.content_hash)
        else:  # by anchor and deltas
            await relay.ensure(manifest.version.number, manifest.version.content_hash)
            np.testing.assert_array_equal(relay.store.open(manifest.version.number)[1], buffer)
        await world.fetch(relay, newer)

    in_world(tmp_path, body)


def test_a_version_that_cannot_be_read_at_the_moment_is_not_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(world: World) -> None:
        relay, (manifest, buffer) = await world.relay("site", "raw"), Policy().step()
        await world.publisher.publish(manifest, buffer)
        await world.fetch(relay, (manifest, buffer))

        def is_whole(number: int) -> bool:
            raise OSError("too many open files")

        monkeypatch.setattr(relay.store, "is_whole", is_whole)
        await relay.ensure(manifest.version.number, manifest.version.content_hash)
        assert len(world.publisher.sent) == 1
        np.testing.assert_array_equal(relay.store.open(manifest.version.number)[1], buffer)

    in_world(tmp_path, body)


def test_memory_is_bounded_with_a_relay_that_never_comes_back(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        policy = Policy()
        gone, there = await world.relay("gone"), await world.relay("there")
        await world.publisher.publish(*(version := policy.step()))
        await world.fetch(gone, version)
        for _ in range(40):
            await world.publisher.publish(*(version := policy.step(share=0.2)))
            await world.fetch(there, version)
            # newest, the one before, the one that becomes an anchor, the last anchor, deltas
            assert world.publisher.held_bytes <= 5 * version[0].nbytes
            assert world.publisher.chain.delta_bytes <= version[0].nbytes
        assert len(world.publisher.chain.deltas) < 35
        await world.fetch(gone, version)
        assert gone.last.kind in ("complete", "packed", "packed+delta")
        for relay in (gone, there):
            await relay.link.close()
        await until(lambda: not world.hub.peers)
        await world.publisher.publish(*policy.step())
        await world.publisher.publish(*policy.step())
        assert world.publisher.chain.held == {}
        assert len(world.publisher.chain.deltas) <= 8

    in_world(tmp_path, body)


def test_chunks_are_as_small_as_the_relay_s_link_wants_and_no_faster_than_its_rate(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        version = Policy().version()
        await world.publisher.publish(*version)
        slow, fast = await world.relay("slow", "raw", DamagingLink), await world.relay("fast", "raw", DamagingLink)
        for relay in (slow, fast):
            await world.fetch(relay, version)
        assert max(slow.link.chunk_bytes) == 1000
        assert max(fast.link.chunk_bytes) == 20_000
        seconds = {sent.peer: sent.seconds for sent in world.publisher.sent}
        assert seconds["slow"] >= (version[0].nbytes - 1000) / 100_000 - 0.06  # less what may go in one burst

    in_world(
        tmp_path,
        body,
        rate_of={"slow": 100_000.0, "fast": None}.__getitem__,
        chunk_of={"slow": 1000, "fast": 20_000}.__getitem__,
    )


def test_chunks_over_a_link_begin_small_and_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "MIN_CHUNK_BYTES", 100)

    async def body(world: World) -> None:
        version = Policy().version()
        await world.publisher.publish(*version)
        far, near = await world.relay("far", "raw", DamagingLink), await world.relay("near", "raw", DamagingLink)
        for relay in (far, near):
            await world.fetch(relay, version)
        assert near.link.chunk_bytes[0] == 1000
        assert far.link.chunk_bytes[0] == 100 < max(far.link.chunk_bytes) <= 1000
        assert sum(far.link.chunk_bytes) == sum(near.link.chunk_bytes)

    rates = {"far": 1e9, "near": None}
    in_world(tmp_path, body, rate_of=rates.__getitem__, chunk_of=lambda peer: 1000)


def test_a_version_that_cannot_be_coded_ends_the_run_on_both_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise MemoryError("no room for a delta")

    async def body(world: World) -> None:
        policy = Policy()
        relay = await world.relay("site")
        await world.publisher.publish(*(version := policy.step()))
        await world.fetch(relay, version)
        await world.publisher.publish(*(version := policy.step()))
        await world.fetch(relay, version)
        monkeypatch.setattr(publisher_module, "code", broken)
        await world.publisher.publish(*(version := policy.step()))
        with pytest.raises(RunFailed, match="could not be coded: no room for a delta"):
            await world.fetch(relay, version)
        with pytest.raises(MemoryError):
            await world.publisher.publish(*policy.step())
        with pytest.raises(ValueError, match="published after"):
            await world.publisher.publish(*version)

    in_world(tmp_path, body)
