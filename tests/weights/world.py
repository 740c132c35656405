"""A publisher with relays that damage, restart and skip, for the tests of transfers."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Delivery, Flow, Hub, Link
from streamrl.weights.description import DESCRIPTION, read_description
from streamrl.weights.publisher import WeightPublisher
from streamrl.weights.site_relay import Encoding, WeightRelay
from streamrl.weights.version import Manifest, Part, lay_out, transfer_kind
from streamrl.weights.version_store import WeightStore
from tests.ports import free_port
from tests.waiting import scaled

Version = tuple[Manifest, np.ndarray]


class Policy:
    """A small model whose weights change as in RL: few elements, mostly by one step of their type."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.tensors = {
            "embed": torch.randn(200, 64, generator=self.generator).bfloat16(),
            "norm": torch.randn(64, generator=self.generator),
            "up": torch.randn(64, 160, generator=self.generator).half(),
            "scalar": torch.tensor(3.5),
            "nothing": torch.zeros(0, 4),
        }
        self.number = 0

    def version(self) -> Version:
        return lay_out(self.number, self.tensors.items())

    def step(self, share: float = 0.02, skip: int = 0) -> Version:
        for tensor in self.tensors.values():
            words = tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)
            words += (torch.rand(tensor.shape, generator=self.generator) < share).to(words.dtype)
        self.number += 1 + skip
        return self.version()


def fill(store: WeightStore, manifest: Manifest, buffer: np.ndarray) -> None:
    """Put a version into a store, as a relay does."""
    draft = store.begin(manifest)
    draft.buffer[:] = buffer
    store.commit(draft)


class DamagingLink(Link):
    """Flips bits in some of the chunks that arrive, each in a payload of its own."""

    share = 0.0
    most_per_payload = 2
    seed = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.random = random.Random(self.seed)
        self.injected: list[tuple[int, int, int]] = []
        """(request, part, tensor)."""
        self.parts: list[Part] = []
        self.transfer = 0
        self.chunk_bytes: list[int] = []

    async def crash(self) -> None:
        """Closes without a goodbye."""
        await self._stop()
        self._socket.close(0)

    async def receive(self) -> Delivery:
        delivery = await super().receive()
        if delivery.kind == "manifest":
            manifest, parts = read_description(delivery.arrays[DESCRIPTION])
            self.parts = [Part.from_dict(values, manifest) for values in parts]
            self.transfer = delivery.body["request"]
        if delivery.kind != "chunk":
            return delivery
        self.chunk_bytes.append(delivery.arrays["data"].nbytes)
        if self.random.random() >= self.share:
            return delivery
        data, body = delivery.arrays["data"].copy(), delivery.body
        at = self.random.randrange(data.size)
        for tensor, payload in enumerate(self.parts[body["part"]].payloads):
            key = (body["request"], body["part"], tensor)
            before = sum(k[0] >= self.transfer and k[1:] == key[1:] for k in self.injected)
            inside = payload.offset <= body["offset"] + at < payload.offset + payload.nbytes
            if inside and key not in self.injected and before < self.most_per_payload:
                data[at] ^= 1 << self.random.randrange(8)
                self.injected.append(key)
        return dataclasses.replace(delivery, arrays={"data": data})


@dataclasses.dataclass(frozen=True)
class Sent:
    """What one transfer to a relay cost."""

    number: int
    peer: str
    nbytes: int
    kind: str
    seconds: float


class RecordingPublisher(WeightPublisher):
    """Notes what it has sent."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sent: list[Sent] = []

    @property
    def held_bytes(self) -> int:
        """Bytes of weights and deltas in memory, without those held only by transfers in flight."""
        held: dict[int, int] = {}
        for version in [*self._versions.values(), *([self._newest] if self._newest else [])]:
            for data in (version.buffer, *(stream[1] for stream in (version.delta, version.packed) if stream)):
                if data is not None:
                    held[id(data)] = data.nbytes
        return sum(held.values())

    async def _send_ranges(self, peer: str, transfer: Any, request: int, ranges: list[tuple[int, int, int]]) -> None:
        started = time.monotonic()
        await super()._send_ranges(peer, transfer, request, ranges)
        kind = transfer_kind([part for part, _ in transfer.streams]) if request == transfer.request else "again"
        nbytes = sum(length for _, _, length in ranges)
        self.sent.append(Sent(transfer.manifest.version.number, peer, nbytes, kind, time.monotonic() - started))


class World:
    """A publisher and relays on loopback."""

    def __init__(self, folder: Path, kind: type[RecordingPublisher] = RecordingPublisher, **options: Any) -> None:
        self.folder = folder
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self.hub = Hub("publisher", WaitRegistry("publisher"), flow=Flow(credits=4)).bind(self.address)
        self.publisher = kind(self.hub, **({"chunk_of": lambda peer: 3000, "anchor_every": 7} | options))
        self.serving = asyncio.create_task(self.publisher.serve())
        self.links: list[Link] = []

    async def relay(self, name: str, encoding: Encoding = "delta", link: type[Link] = Link, **options: Any) -> Any:
        made = await link(name, "relay", WaitRegistry(name)).connect(self.address, scaled(10))
        self.links.append(made)
        return WeightRelay(made, WeightStore(self.folder / name), scaled(10), encoding, **options)

    async def fetch(self, relay: WeightRelay, version: Version, newest: bool = False) -> None:
        """Fetches, and checks that it is there bit for bit; afterwards the publisher has heard of it."""
        manifest, buffer = version
        got = await relay.fetch(manifest.version.number, manifest.version.content_hash, newest)
        await relay.link.flush(scaled(10))
        assert got == manifest
        assert relay.version == relay.last.number == manifest.version.number  # type: ignore[union-attr]
        stored, bytes_there = WeightStore(relay.store.directory).open(manifest.version.number)
        assert stored == manifest
        np.testing.assert_array_equal(bytes_there, buffer)

    async def anchored(self) -> None:
        """Until no anchor is being packed."""
        assert self.publisher._packing is not None
        await self.publisher._packing

    async def close(self) -> None:
        self.serving.cancel()
        for link in self.links:
            await link.close()
        await self.hub.close()


def in_world(folder: Path, body: Callable[[World], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        world = World(folder, **options)
        try:
            async with asyncio.timeout(scaled(60)):
                await body(world)
        finally:
            await world.close()

    asyncio.run(run())


def flip_a_bit(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 16]))
