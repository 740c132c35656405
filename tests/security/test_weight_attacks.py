"""Attacks on the way of the weights: what is loaded is what the controller announced, or nothing is."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
import zmq

from streamrl.config.run import RunConfig
from streamrl.controller.controller import Controller
from streamrl.errors import FULL, RunFailed
from streamrl.generation.site import site_weights
from streamrl.generation.site.site_weights import SiteWeights
from streamrl.protocol.message import wire
from streamrl.protocol.weights import Chunk, ManifestOf
from streamrl.run_dir.checkpoints import CheckpointFolder
from streamrl.runtime.site_connections import to_relay
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Delivery, Hub, Link
from streamrl.transport.peer import MOST_OPEN, stranger_inbox
from streamrl.transport.wire import MAX_FRAME_BYTES, Message, encode
from streamrl.weights.description import MAX_DESCRIPTION_BYTES, MOST_PARTS, describe, largest_description
from streamrl.weights.quantize import full_precision
from streamrl.weights.site_relay import MOST_EARLY, WeightRelay
from streamrl.weights.version import CorruptTensors, CorruptWeights, Manifest, Part, lay_out
from streamrl.weights.version_store import NoRoom, WeightStore
from tests.ports import free_port
from tests.waiting import scaled, until
from tests.weights.world import RecordingPublisher, World, fill, flip_a_bit, in_world

TENSORS = {"a": torch.arange(5000.0), "b": torch.full((300, 7), 2.0)}


def version(number: int, plus: float = 0.0) -> tuple[Manifest, np.ndarray]:
    return lay_out(number, [(name, tensor + plus) for name, tensor in TENSORS.items()])


def stored(folder: Path, number: int = 1) -> WeightStore:
    store = WeightStore(folder)
    manifest, buffer = version(number)
    fill(store, manifest, buffer)
    return store


def test_a_cancelled_transfer_names_no_file_of_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verifying, go_on = threading.Event(), threading.Event()
    verify = Manifest.verify

    def slow(manifest: Manifest, buffer: np.ndarray) -> None:
        verify(manifest, buffer)
        verifying.set()
        go_on.wait(scaled(60))

    monkeypatch.setattr(Manifest, "verify", slow)

    class Stalling(RecordingPublisher):
        async def _send_ranges(self, *args: Any) -> None:
            if not verifying.is_set():  # the second transfer gets its manifest, and no bytes
                await super()._send_ranges(*args)

    async def body(world: World) -> None:
        manifest, buffer = version(1)
        await world.publisher.publish(manifest, buffer)
        relay = await world.relay("site", "raw")
        first = asyncio.create_task(relay.fetch(1, manifest.version.content_hash))
        await until(verifying.is_set)
        first.cancel()
        second = asyncio.create_task(relay.fetch(1, manifest.version.content_hash))
        for _ in range(20):  # what can go on without the thread goes on
            await asyncio.sleep(0)
        assert not first.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await first
        await until(lambda: len(list(relay.store.directory.glob("partial_*.bin"))) == 1)
        assert relay.store.newest_verified() == 1
        np.testing.assert_array_equal(relay.store.open(1)[1], buffer)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert not list(relay.store.directory.glob("partial_*"))

    in_world(tmp_path, body, kind=Stalling)


def test_two_drafts_of_a_version_have_nothing_in_common(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    manifest, buffer = version(1)
    one, other = store.begin(manifest), store.begin(manifest)
    other.buffer[:] = buffer
    store.commit(other)
    held = one.buffer
    store.abandon(one)
    held[:] = 7  # as a thread would that still worked on it
    np.testing.assert_array_equal(store.open(1)[1], buffer)
    with pytest.raises(FileNotFoundError):
        store.commit(one)
    np.testing.assert_array_equal(store.open(1)[1], buffer)


def test_a_repair_and_a_transfer_of_one_version_do_not_steal_each_others_chunks(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        relay = await world.relay("site", "raw")
        manifest, buffer = version(1)
        await world.publisher.publish(manifest, buffer)
        await relay.fetch(1, manifest.version.content_hash)
        flip_a_bit(relay.store.directory / "version_1.bin", 99)
        both = relay.ensure(1, manifest.version.content_hash), relay.fetch(1, manifest.version.content_hash)
        assert (await asyncio.gather(*both))[1] == manifest
        np.testing.assert_array_equal(relay.store.open(1)[1], buffer)
        assert relay.corrupt == 0 and len(world.publisher.sent) == 3

    in_world(tmp_path, body)


def test_a_site_that_passes_weights_on_cannot_pass_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(world: World) -> None:
        evil = World(tmp_path / "evil")
        try:
            manifest, buffer = version(1)
            await world.publisher.publish(manifest, buffer)
            await evil.publisher.publish(*version(5, plus=666.0))  # a higher number, with a hash that fits its bytes
            home = await world.relay("site", "raw")
            link = (await evil.relay("site", "raw")).link
            monkeypatch.setattr(site_weights, "make_relay", lambda *_: home)
            monkeypatch.setattr(site_weights, "to_home", lambda *_: None)
            context: Any = SimpleNamespace(addresses=SimpleNamespace(relay_outside=None))
            site = SiteWeights(context, WaitRegistry("service"))
            site._others["evil"] = home.beside(link)
            found, source = await site.fetch(1, manifest.version.content_hash, "evil")
            assert (found, source) == (manifest.version, None)  # from the trainer's site, at once
            assert not home.store.has(5)
            np.testing.assert_array_equal(home.store.open(1)[1], buffer)
        finally:
            await evil.close()

    in_world(tmp_path, body)


@pytest.mark.parametrize("name", TENSORS)
def test_bytes_that_changed_after_they_were_verified_are_not_loaded(tmp_path: Path, name: str) -> None:
    store = stored(tmp_path)
    manifest, _ = store.open(1)
    entry = next(entry for entry in manifest.tensors if entry.name == name)
    flip_a_bit(tmp_path / "version_1.bin", entry.offset + entry.nbytes - 1)
    with pytest.raises(CorruptTensors, match=f"tensor {name!r} is corrupt"):
        dict(full_precision(*store.open(1), torch.float32))


def test_scales_are_checked_before_codes_are_multiplied_by_them(tmp_path: Path) -> None:
    codes = {"w.weight": torch.ones(4, 8, dtype=torch.int8), "w.weight.scale": torch.ones(4)}
    manifest, buffer = lay_out(1, codes.items())
    buffer[manifest.tensors[1].offset] ^= 1
    with pytest.raises(CorruptTensors, match="scale"):
        dict(full_precision(manifest, buffer, torch.float32))


def test_the_space_of_a_draft_is_there_before_anything_is_written(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    manifest, _ = version(1)
    stored(tmp_path, 3)
    for base in (None, 3):
        draft = store.begin(manifest, base)
        assert draft.path.stat().st_blocks * 512 >= manifest.nbytes
        store.abandon(draft)


@pytest.mark.parametrize("number", FULL)
def test_a_full_shared_memory_is_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def full(*_: int) -> None:
        raise OSError(number, os.strerror(number))

    store, (manifest, buffer) = WeightStore(tmp_path), version(1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(NoRoom, match=rf"^no room for weights in {tmp_path}: .* needed, .* free.*E1007") as found:
            store.begin(manifest)
        assert os.strerror(number) in str(found.value) and found.value.nbytes == manifest.nbytes
    assert not list(tmp_path.iterdir())
    draft = store.begin(manifest)
    draft.buffer[:] = buffer
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(NoRoom, match=rf"^no room for the description of weights in {tmp_path}: ") as found:
            store.commit(draft)
        assert os.strerror(number) in str(found.value) and found.value.nbytes > manifest.nbytes
    store.abandon(draft)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("squat", ["link", "open to others", "of another user", "no folder"])
def test_a_folder_that_others_have_made_is_used_by_neither_writer_nor_reader(tmp_path: Path, squat: str) -> None:
    folder = tmp_path / "streamrl-0123456789ab"
    theirs = tmp_path / "theirs"
    stored(theirs)
    if squat == "link":
        folder.symlink_to(theirs)
    elif squat == "no folder":
        folder.write_text("")
    else:
        theirs.rename(folder)
        if squat == "open to others":
            folder.chmod(0o777)
        elif os.geteuid():
            pytest.skip("only root can give a folder away")
        else:
            os.chown(folder, 12345, 12345)
    for use in (lambda: WeightStore(folder).begin(version(2)[0]), lambda: WeightStore(folder).open(1)):
        with pytest.raises((RunFailed, FileExistsError), match=str(folder)):
            use()


def test_a_link_in_the_place_of_a_version_is_not_followed(tmp_path: Path) -> None:
    store = stored(tmp_path / "store")
    path = tmp_path / "store" / "version_1.bin"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        store.open(1)


def test_a_file_of_weights_is_for_its_user_alone(tmp_path: Path) -> None:
    stored(tmp_path / "store")
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "store").iterdir()} == {0o600}
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o711])
def test_a_folder_of_this_user_that_others_may_enter_is_closed_to_them(tmp_path: Path, mode: int) -> None:
    for name, use in (
        ("begun", lambda store: store.begin(version(1)[0])),
        ("claimed", lambda store: store.claim(True)),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
        use(WeightStore(tmp_path / name))
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o700


def test_bytes_are_on_disk_before_a_restart_can_trust_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    named: dict[str, bool] = {}
    fsync, rename = os.fsync, Path.rename

    def note_sync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def note_name(path: Path, target: Path) -> Path:
        inside = [path, *path.rglob("*")]
        named[target.name] = all(one.stat().st_ino in synced for one in inside)
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "rename", note_name)
    stored(tmp_path / "store")
    checkpoints = CheckpointFolder(tmp_path / "checkpoints")
    (checkpoints.begin(3) / "deep").mkdir()
    (checkpoints.partial(3) / "deep" / "model.bin").write_bytes(b"weights")
    checkpoints.commit(3, keep=1)
    assert named == {"version_1.json": True, "version_1.bin": True, "step_3": True}
    assert {(tmp_path / "store").stat().st_ino, (tmp_path / "checkpoints").stat().st_ino} <= synced


def test_a_relay_of_another_site_can_queue_no_more_than_the_limits(controller: Controller) -> None:
    async def body() -> None:
        link = to_relay(controller.context, "far", WaitRegistry("home"))
        link._hub_session, sent = "life", MOST_OPEN + 500
        for number in range(1, sent + 1):
            link._arrived(list(encode(Message("chunk", "life", number, {}))))
        assert link._inbox.qsize() == MOST_OPEN and link.refused() == {"too many": {"hub": 500}}
        await link.close()

    asyncio.run(body())


def test_chunks_without_a_manifest_are_not_collected_for_ever(tmp_path: Path) -> None:
    class Chunks:
        async def receive(self) -> Delivery:
            values = {"request": relay._request, "part": 0, "offset": 0}
            return Delivery("hub", "chunk", values, {"data": np.zeros(1, np.uint8)}, lambda: None)

    relay = WeightRelay(Chunks(), WeightStore(tmp_path), 1.0)  # type: ignore[arg-type]
    with pytest.raises(CorruptWeights, match=f"{MOST_EARLY + 1} chunks of version 3 came without its manifest"):
        asyncio.run(relay._next(ManifestOf, 3))


def expected(manifest: Manifest) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {t.name: (t.dtype, t.shape) for t in manifest.tensors}


@pytest.mark.parametrize("lie", ["space at the end", "space between", "size"])
def test_tensors_take_no_more_room_than_this_sites_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    honest, _ = version(1)
    tensors, more = list(honest.tensors), 1 << 20
    if lie == "space between":
        tensors[1] = replace(tensors[1], offset=tensors[1].offset + more)
    elif lie == "size":
        tensors[1] = replace(tensors[1], nbytes=tensors[1].nbytes + more)
    manifest = replace(honest, nbytes=honest.nbytes + more, tensors=tuple(tensors))  # of the same hash

    async def body(world: World) -> None:
        begun: list[Manifest] = []
        monkeypatch.setattr(WeightStore, "begin", lambda store, one, *_: begun.append(one))
        await world.publisher.publish(manifest, np.zeros(manifest.nbytes, np.uint8))
        relay = await world.relay("site", "raw", expected=expected(honest))
        with pytest.raises(RunFailed, match="version 1 arrived corrupt 3 times"):
            await relay.fetch(1, manifest.version.content_hash)
        assert begun == []

    in_world(tmp_path, body)


def test_parts_are_no_larger_than_any_path_before_memory_is_taken_for_them(tmp_path: Path) -> None:
    manifest, _ = version(1)
    relay = WeightRelay(None, WeightStore(tmp_path), 1.0, "delta", expected(manifest))  # type: ignore[arg-type]
    sizes = [(t.nbytes + 1, t.checksum) for t in manifest.tensors]

    def check(deltas: int, share: float) -> list[Part]:
        """Check an anchor that nothing could compress, and deltas that together are as large as a share of it."""
        small = [(max(1, int(nbytes * share / deltas)), digest) for nbytes, digest in sizes]
        way = [Part.of_payloads(1 - deltas, None, sizes)]
        way += [Part.of_payloads(number, number - 1, small) for number in range(2 - deltas, 2)]
        return relay._check(manifest, [part.to_dict() for part in way], 1, manifest.version.content_hash, False, None)

    assert len(check(9, 0.99)) == 10
    with pytest.raises(CorruptWeights, match=rf"the parts have \d+ bytes, and version 1 {manifest.nbytes}"):
        check(9, 1.05)


def test_another_sites_relay_describes_a_version_by_no_more_bytes_than_this_sites_model_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, _ = version(1)
    most = largest_description(expected(manifest))
    far = replace(manifest, version=replace(manifest.version, number=1 << 62))
    long = Part.of_payloads(1 << 62, 1 << 61, [(1 << 62, t.checksum) for t in manifest.tensors])
    assert describe(far, [long] * MOST_PARTS).nbytes <= most < describe(far, [long] * 3 * MOST_PARTS).nbytes

    class Endless(RecordingPublisher):
        async def _describe(self, transfer: Any) -> np.ndarray:
            return np.full(most + 1, 0x90, np.uint8)  # empty lists

    async def body(world: World) -> None:
        await world.publisher.publish(*version(1))
        home = await world.relay("site", expected=expected(manifest))
        sizes, unpack = [], msgpack.unpackb
        monkeypatch.setattr(msgpack, "unpackb", lambda data, **how: (sizes.append(len(data)), unpack(data, **how))[1])
        with pytest.raises(RunFailed, match="version 1 arrived corrupt 3 times"):
            await home.beside(home.link).fetch(1, manifest.version.content_hash)
        assert max(sizes) <= most  # nothing but envelopes

    in_world(tmp_path, body, kind=Endless)


def test_a_link_over_a_network_takes_the_largest_message_of_weights_and_no_frame_without_end() -> None:
    largest = int(RunConfig.model_validate({"weights": {"chunk_mb": 256}}).weights.chunk_mb * 2**20)
    with pytest.raises(ValueError, match="chunk_mb"):
        RunConfig.model_validate({"weights": {"chunk_mb": 257}})
    assert max(largest, MAX_DESCRIPTION_BYTES) < MAX_FRAME_BYTES

    async def body(hub: Hub, address: str) -> None:
        link = await Link("west", "relay", WaitRegistry("west"), {"site": "west"}, inbox=stranger_inbox()).connect(
            address, scaled(10)
        )
        assert link._socket.getsockopt(zmq.MAXMSGSIZE) == MAX_FRAME_BYTES
        assert link._socket.getsockopt(zmq.RCVHWM) == MOST_OPEN
        try:
            async with asyncio.timeout(scaled(60)):
                chunk = np.zeros(largest, np.uint8)
                await hub.send("west", *wire(Chunk(request=1, part=0, offset=0)), {"data": chunk})
                found = await link.receive()
                assert found.arrays["data"].nbytes == largest
                found.ack()
        finally:
            await link.close()

    async def run() -> None:
        hub = Hub("publisher", WaitRegistry("publisher"))
        hub.bind_outside(address := f"tcp://127.0.0.1:{free_port()}", None)
        try:
            await body(hub, address)
        finally:
            await hub.close()

    asyncio.run(run())


def test_a_relay_takes_no_chunks_that_were_meant_for_an_earlier_process_of_its_name(tmp_path: Path) -> None:
    class Stale:
        """What is left of the earlier process's first transfer, then an answer."""

        def __init__(self) -> None:
            self.kinds = ["chunk", "manifest"]

        async def receive(self) -> Delivery:
            kind, data = self.kinds.pop(0), {"data": np.zeros(1, np.uint8)}
            if kind == "chunk":
                return Delivery("hub", kind, {"request": earlier._request, "part": 0, "offset": 0}, data, lambda: None)
            return Delivery("hub", kind, {"request": relay._request}, {}, lambda: None)

    earlier, relay = (WeightRelay(Stale(), WeightStore(tmp_path), 1.0) for _ in range(2))  # type: ignore[arg-type]
    earlier._request, relay._request = earlier._request + 1, relay._request + 1
    asyncio.run(relay._next(ManifestOf, 3))
    assert relay._early == []
