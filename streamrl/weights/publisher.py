"""The publisher of weights: keeps the newest version in memory and sends versions to the relay of each site.

The messages are those of `protocol/weights.py`. A relay that requests `encoding: raw` gets the buffer's bytes. One that
requests `delta`, from another site or another node, gets the cheapest path from the version that it holds
(`chain.py`). On the publisher's own host either copies the buffer itself, which is a file in memory. Deltas are made
only from the first such request on; until then one buffer is held, and nothing is coded. From then on the publisher
holds the newest version, the newest anchor (compressed), the deltas that the chain keeps, and the buffers that are
being coded.

Chunks are reliable messages, so the hub's credits bound the bytes in flight; a rate limit per relay leaves the rest of
its link to samples and heartbeats.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

from streamrl.machine.own_share import usable_cores
from streamrl.protocol.message import MessageReader, wire
from streamrl.protocol.speakers import RIGHTS
from streamrl.protocol.weights import Chunk, Fetch, FetchAgain, Have, ManifestOf, NoVersion
from streamrl.runtime.processes import this_host
from streamrl.runtime.site_connections import MIN_CHUNK_BYTES
from streamrl.transport.endpoint import Hub
from streamrl.weights.chain import Chain, ChainStep, Unreachable
from streamrl.weights.codec.delta import encode_tensor
from streamrl.weights.description import DESCRIPTION, describe
from streamrl.weights.pacing import ChunkSize, Pacer
from streamrl.weights.version import Manifest, Part, Stream, bytes_of, checksum

log = logging.getLogger(__name__)

MAX_CODING_THREADS = 8
"""Limit on the threads that code a version.

More would wait for each other: the codec is numpy over short blocks, and holds the GIL between them."""
CODING_SHARE = 4
"""Cores per coding thread; the others are left to the trainer."""
THREADS_FROM_BYTES = 1 << 20
"""Size of a version that takes longer to code than threads take to start, and the cores of its container to be read."""
CODING_LIMIT_S = 600
"""Seconds allowed for coding one version, far more than any takes."""
MOST_DESCRIBED = 4
"""Descriptions that are kept: that of a large mixture of experts has some 20 MB."""


@dataclass
class _Version:
    manifest: Manifest
    buffer: np.ndarray | None
    """Buffer, uint8 [nbytes], kept while this is the newest version or will become an anchor."""
    delta: Stream | None = None
    packed: Stream | None = None


@dataclass(frozen=True)
class _Transfer:
    """A transfer to a relay; it keeps the bytes alive until the relay has them."""

    request: int
    manifest: Manifest
    streams: tuple[Stream, ...]
    is_delta: bool


def _measured(tried: ChunkSize, nbytes: int) -> Callable[[], None]:
    """Return the function to be called once a chunk that is sent now is acknowledged."""
    began = time.monotonic()
    return lambda: tried.acknowledged(nbytes, time.monotonic() - began)


class _Refused(Exception):
    """A request that cannot be served; the message has the reason."""


class WeightPublisher:
    """Server of weight versions, over a hub that the relays connect to."""

    def __init__(
        self,
        hub: Hub,
        chunk_of: Callable[[str], int],
        rate_of: Callable[[str], float | None] = lambda peer: None,
        anchor_every: int = 10,
        eager: bool = False,
    ) -> None:
        """
        Args:
            hub: hub that the relays connect to.
            chunk_of: returns the most bytes in one message to a relay, given its name; a slow link needs small chunks.
            rate_of: returns the bytes per second that weights for a relay may use (None: no limit), given its name.
            anchor_every: versions from one anchor of the chain to the next.
            eager: whether deltas are made from the first version on, even before any relay has requested one.
        """
        self.hub = hub
        hub.reads = MessageReader(RIGHTS["publisher"])
        hub.can_lose = lambda relay: relay.site is not None  # the controller decides which sites the run needs
        self.chunk_of, self.rate_of, self.eager = chunk_of, rate_of, eager
        self.chain = Chain(anchor_every)
        self._newest: _Version | None = None
        self._versions: dict[int, _Version] = {}
        """Versions that the chain keeps, by number."""
        self._coding: asyncio.Task[None] | None = None
        """Task that makes the newest version's delta."""
        self._packing: asyncio.Task[None] | None = None
        """Task that compresses an anchor."""
        self._open: dict[str, _Transfer] = {}
        """Transfer of each relay, until the relay reports that it has the version."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._pacers: dict[str, Pacer] = {}
        self._sizes: dict[str, ChunkSize] = {}
        """Sizes of chunks to relays behind links."""
        self._described: dict[tuple[tuple[int, int | None, bool], ...], asyncio.Task[np.ndarray]] = {}
        """Descriptions made last, by number, base and coding of their parts."""

    async def publish(self, manifest: Manifest, buffer: np.ndarray) -> None:
        """Make a version available. Its delta is made in the background.

        This first waits for the previous version's delta, so that buffers do not pile up.

        The buffer (uint8 [nbytes]) must not change any more.

        Raises:
            ValueError: the number does not exceed that of the previous version.
            DeadlineExpired: the previous version was not coded in time.
            Exception: coding failed, which is a bug.
        """
        number, before = manifest.version.number, self._newest
        if before is not None and number <= before.manifest.version.number:
            raise ValueError(f"version {number} published after version {before.manifest.version.number}")
        await self._wait_for(self._coding)
        if self._packing is not None and self._packing.done():
            self._packing.result()
        before = self._newest  # a relay may have requested deltas meanwhile
        self._newest = _Version(manifest, buffer)
        if self.eager and before is None:
            self._append(self._newest, None)
        if before is not None and self.chain.newest is not None:
            self._coding = asyncio.create_task(self._extend(before, self._newest))

    def holders(self) -> list[str]:
        """Return what is done with older versions than the newest, in words: their memory is kept until then."""
        found = []
        if self._coding is not None and not self._coding.done():
            found.append("the delta of the served weights to be made")
        newest = None if self._newest is None else self._newest.manifest.version.number
        anchor = self.chain.coming_anchor
        if self._packing is not None and not self._packing.done() and anchor != newest:
            found.append(f"weights {anchor} to be compressed")
        for relay, transfer in self._open.items():
            number = transfer.manifest.version.number
            if number != newest and any(in_file(stream) for _, stream in transfer.streams):
                found.append(f"{relay} to receive weights {number}")
        return found

    async def serve(self) -> None:
        """Serve relays until cancelled."""
        while True:
            delivery = await self.hub.receive()
            match delivery.body:
                case (Fetch() | FetchAgain()) as asked if not self._covered(delivery.peer):
                    self.hub.refusals.count("too many", delivery.peer, f"request {asked.request} so soon after others")
                case (Fetch() | FetchAgain()) as order:
                    self._start(delivery.peer, order)
                case Have() as report:
                    self._stored(delivery.peer, report.number)
                case _ if delivery.kind == "bye":
                    if (task := self._tasks.get(delivery.peer)) is not None:
                        task.cancel()
                    self._open.pop(delivery.peer, None)
                    self._pacers.pop(delivery.peer, None)
                    self._sizes.pop(delivery.peer, None)
                    self.chain.left(delivery.peer)
                    self._collect()
            delivery.ack()

    def _stored(self, peer: str, number: int) -> None:
        """Record that a relay has verified and stored a version, if that is the one which it was sent last."""
        transfer = self._open.get(peer)
        if transfer is None or transfer.manifest.version.number != number:
            return  # of an earlier transfer
        del self._open[peer]
        if transfer.is_delta:
            self.chain.acknowledged(peer, number)
            self._collect()

    def _covered(self, peer: str) -> bool:
        """Charge a request; return whether its sender, if it is of another site, may make one now."""
        site = self._other_site(peer)
        return site is None or self.hub.covered("request", site, 0)

    def _start(self, peer: str, order: Fetch | FetchAgain) -> None:
        """Start a relay's transfer; there is one per relay, so a new request cancels the previous one."""
        if (task := self._tasks.get(peer)) is not None:
            task.cancel()
        task = self._tasks[peer] = asyncio.ensure_future(self._carry_out(peer, order))
        task.add_done_callback(lambda done: self._finished(peer, done))

    async def _carry_out(self, peer: str, order: Fetch | FetchAgain) -> None:
        """Send what a relay has requested; if that fails, it hears why, and need not wait until its limit."""
        try:
            await (self._send(peer, order) if isinstance(order, Fetch) else self._send_again(peer, order))
        except Exception as error:
            if peer in self.hub.peers:
                await self._refuse(peer, order.request, f"sending it failed: {type(error).__name__}: {error}")
            raise

    def _finished(self, peer: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(peer) is task:
            del self._tasks[peer]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("sending weights to %s failed: %s", peer, error, exc_info=error)

    async def _send(self, peer: str, order: Fetch) -> None:
        self._open.pop(peer, None)
        try:
            transfer = await self._prepare(peer, order)
        except _Refused as refused:
            await self._refuse(peer, order.request, str(refused))
            return
        self._open[peer] = transfer
        file = self._file(peer, transfer, order.host)
        description = await self._describe(transfer)
        answer = ManifestOf(request=transfer.request, file=file)
        await self.hub.send(peer, *wire(answer), {DESCRIPTION: description})
        if file is None:
            everything = [(i, 0, part.nbytes) for i, (part, _) in enumerate(transfer.streams)]
            await self._send_ranges(peer, transfer, transfer.request, everything)

    async def _describe(self, transfer: _Transfer) -> np.ndarray:
        """Return a transfer's description, uint8 [bytes], made in a thread unless it is one of the last few.

        A request that is cancelled leaves it to the next one, so that repeated requests make it once.
        """
        parts = [part for part, _ in transfer.streams]
        key = (
            (transfer.manifest.version.number, None, False),
            *((part.number, part.base, part.coded) for part in parts),
        )
        if key not in self._described:
            while len(self._described) >= MOST_DESCRIBED:
                del self._described[next(iter(self._described))]
            self._described[key] = asyncio.create_task(asyncio.to_thread(describe, transfer.manifest, parts))
        try:
            return await asyncio.shield(self._described[key])
        except Exception:  # it may succeed when it is requested again
            self._described.pop(key, None)
            raise

    def _file(self, peer: str, transfer: _Transfer, host: str | None) -> str | None:
        """Return the path from which a relay on this host can read the whole transfer; None: it must be sent."""
        if not transfer.streams or not self._shares_files(peer, host):
            return None
        (part, stream), *others = transfer.streams
        return str(stream.filename) if not part.coded and not others and in_file(stream) else None

    def _shares_files(self, peer: str, host: str | None) -> bool:
        """Return whether a relay can read this process's files.

        Relays of other sites always use their link, even where links are emulated on one host.
        """
        return bool(host) and host == this_host() and self.hub.peers[peer].site is None

    async def _send_again(self, peer: str, order: FetchAgain) -> None:
        transfer = self._open.get(peer)
        try:
            if transfer is None or transfer.request != order.of:
                raise LookupError("no such transfer is in flight")
            wanted = {(i, j): None for i, indexes in order.tensors for j in indexes}
            if len(wanted) < sum(len(indexes) for _, indexes in order.tensors):
                raise LookupError("a payload is there twice")
            payloads = [(i, transfer.streams[i][0].payloads[j]) for i, j in wanted]
        except LookupError as error:
            await self._refuse(peer, order.request, f"cannot send again: {error}")
            return
        ranges = [(i, payload.offset, payload.nbytes) for i, payload in payloads]
        await self._send_ranges(peer, transfer, order.request, ranges)

    async def _refuse(self, peer: str, request: int, reason: str) -> None:
        newest = [] if self._newest is None else [self._newest.manifest.version.number]
        available = sorted({*self.chain.complete, *self.chain.deltas, *newest})
        await self.hub.send(peer, *wire(NoVersion(request=request, available=available, reason=reason)))

    async def _send_ranges(
        self, peer: str, transfer: _Transfer, request: int, ranges: list[tuple[int, int, int]]
    ) -> None:
        """Send ranges (part, offset, bytes) of the transfer's streams in chunks, within the peer's rate."""
        pacer, most = self._pacers.setdefault(peer, Pacer()), self.chunk_of(peer)
        tried = None if self.rate_of(peer) is None else self._sizes.setdefault(peer, ChunkSize(MIN_CHUNK_BYTES))
        for part, first, nbytes in ranges:
            stream, offset = transfer.streams[part][1], first
            while offset < first + nbytes:
                size = most if tried is None else tried.within(most)
                chunk = stream[offset : min(offset + size, first + nbytes)]
                if (wait_s := pacer.wait_s(chunk.nbytes, self.rate_of(peer), time.monotonic())) > 0:
                    await asyncio.sleep(wait_s)
                on_ack = None if tried is None else _measured(tried, chunk.nbytes)
                order = Chunk(request=request, part=part, offset=offset)
                await self.hub.send(peer, *wire(order), {"data": chunk}, on_ack=on_ack)
                offset += chunk.nbytes

    async def _prepare(self, peer: str, order: Fetch) -> _Transfer:
        """Choose what to send.

        Raises:
            _Refused: the requested version cannot be sent.
        """
        if self._newest is None or order.number > self._newest.manifest.version.number:
            raise _Refused("it is not published")
        if order.encoding == "delta" and not (self._shares_files(peer, order.host) and in_file(self._newest.buffer)):
            return await self._prepare_path(peer, order)
        manifest, buffer = self._newest.manifest, self._newest.buffer
        assert buffer is not None
        if manifest.version.number != order.number and not order.newest:
            raise _Refused("a newer one has replaced it")
        return _Transfer(order.request, manifest, ((Part.of_buffer(manifest), buffer),), is_delta=False)

    async def _prepare_path(self, peer: str, order: Fetch) -> _Transfer:
        """Choose the cheapest path of the chain from the version that a relay holds.

        Raises:
            _Refused: no path leads to the requested version.
        """
        number, newest = order.number, order.newest
        assert self._newest is not None
        if self.chain.newest is None:
            self._append(self._newest, None)
        assert self.chain.newest is not None
        held = self._versions.get(order.holds) if order.holds is not None else None
        base = None
        if held is not None and held.manifest.version.content_hash == order.holds_hash:
            base = held.manifest.version.number
        try:
            if number > self.chain.newest:
                await self._wait_for(self._coding)
            want = self.chain.newest if newest else number
            far = self._other_site(peer) is not None  # then compressing takes less time than it saves
            older, small = want != self.chain.newest, far and want == self.chain.coming_anchor
            if base is None and (older or small):  # it may need an anchor, or complete weights in few bytes
                await self._wait_for(self._packing)
        except Exception as error:  # the next `publish` ends the run with it; the relay should hear of it now
            raise _Refused(f"it could not be coded: {error}") from error
        self.chain.acknowledged(peer, base)
        try:
            want = self.chain.newest if newest else number  # a newer one may have come meanwhile
            path = self.chain.path(base, want)
        except Unreachable as error:
            raise _Refused(str(error)) from error
        self.chain.sends(peer, want)
        streams = tuple(self._stream(step) for step in path)
        return _Transfer(order.request, self._versions[want].manifest, streams, is_delta=True)

    def _other_site(self, peer: str) -> str | None:
        """Return the other site that a relay is of; None: it is of this site, or has left."""
        return self.hub.peers[peer].site if peer in self.hub.peers else None

    def _stream(self, step: ChainStep) -> Stream:
        """Return the bytes of a step; a complete version that is not packed is the newest one."""
        version = self._versions[step.number]
        stream = version.packed if step.base is None else version.delta
        if stream is not None:
            return stream
        assert version.buffer is not None
        return Part.of_buffer(version.manifest), version.buffer

    async def _extend(self, before: _Version, version: _Version) -> None:
        """Make a version's delta, then append the version to the chain."""
        assert before.buffer is not None and version.buffer is not None
        delta = None
        if version.manifest.like(before.manifest):
            old = before.manifest.version.number, before.buffer
            delta = await asyncio.to_thread(code, version.manifest, version.buffer, old)
        self._append(version, delta)

    def _append(self, version: _Version, delta: Stream | None) -> None:
        number = version.manifest.version.number
        version.delta = delta
        self._versions[number] = version
        delta_bytes = None if delta is None else delta[0].nbytes
        if self.chain.published(number, delta_bytes, version.manifest.nbytes):
            self._packing = asyncio.create_task(self._pack(version))
        self._collect()

    async def _pack(self, version: _Version) -> None:
        """Compress an anchor, so that it costs less to keep and to send."""
        assert version.buffer is not None
        version.packed = await asyncio.to_thread(code, version.manifest, version.buffer, None)
        self.chain.anchored(version.packed[0].nbytes)
        self._collect()

    def _collect(self) -> None:
        """Free everything that the chain no longer needs."""
        self.chain.collect()
        for number, version in list(self._versions.items()):
            if number not in self.chain.deltas:
                version.delta = None
            if number not in self.chain.complete:
                version.packed = None
            if number not in (self.chain.newest, self.chain.coming_anchor):
                version.buffer = None
        bases = {version.delta[0].base for version in self._versions.values() if version.delta is not None}
        kept = {*self.chain.complete, *self.chain.deltas, *bases, self.chain.coming_anchor}
        for number in self._versions.keys() - kept:
            del self._versions[number]

    async def _wait_for(self, task: asyncio.Task[None] | None) -> None:
        if task is not None:
            async with self.hub.waits.deadline("weights to be coded", CODING_LIMIT_S):
                await asyncio.shield(task)


def in_file(buffer: np.ndarray | None) -> TypeGuard[np.memmap]:
    """Return whether a buffer is the content of a file."""
    return isinstance(buffer, np.memmap)


def code(manifest: Manifest, buffer: np.ndarray, old: tuple[int, np.ndarray] | None) -> Stream:
    """Code a version (its buffer, uint8 [nbytes]) into the delta codec's payloads, concatenated.

    They start from the version in `old`, number and buffer of the same layout; None: they are complete.
    """

    def one(index: int) -> np.ndarray:
        t = manifest.tensors[index]
        return encode_tensor(bytes_of(t, buffer), None if old is None else bytes_of(t, old[1]), t.dtype)

    tensors = range(len(manifest.tensors))
    if manifest.nbytes < THREADS_FROM_BYTES:
        payloads = [one(index) for index in tensors]
    else:
        with ThreadPoolExecutor(max(1, min(MAX_CODING_THREADS, usable_cores() // CODING_SHARE))) as pool:
            payloads = list(pool.map(one, tensors))
    stream = np.concatenate([*payloads, np.empty(0, dtype=np.uint8)])
    sizes = [(payload.nbytes, checksum(payload)) for payload in payloads]
    return Part.of_payloads(manifest.version.number, None if old is None else old[0], sizes), stream
