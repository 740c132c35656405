"""A site's finished samples on their way to the controller: batched, compressed when it pays, never dropped.

put -> batch -> pack (large ones in a thread) -> link -> committed by the controller -> every sample's `on_ack`

Nothing is dropped: a sample counts into the backlog from `put` until the controller has committed its batch, and the
link keeps and repeats what is not acknowledged. So a link that is down lets the backlog grow. Above the high mark the
uplink is congested, and whoever dispatches must start no new requests until it is below half of it (`changed`,
`Dispatcher.throttle`). `put` itself never waits: what runs may always finish. So the backlog is bounded by

    high mark + (requests that run when it is passed) x (bytes of the longest sample)

and memory by that and the packed copies of the batch that is just being sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamrl.generation.site.sample_batches import (
    KIND,
    CompressionChoice,
    HighMark,
    SampleBatcher,
    pack_samples,
    sample_bytes,
)
from streamrl.runtime.process_context import RoleContext
from streamrl.runtime.site_connections import BATCH_BYTES
from streamrl.transport.endpoint import Link
from streamrl.transport.wire import Arrays

BATCH_S = 0.05
"""Seconds that a sample waits for others before it goes over a link."""
BATCH_SAMPLES = 256
THREAD_BYTES = 128 * 1024
"""Batches from this size on are packed in a thread: smaller ones take less than a millisecond."""
MARK_S = 10.0
MIN_MARK, MAX_MARK = 4 * 1000 * 1000, 256 * 1000 * 1000

PackedSamples = tuple[dict[str, Any], dict[str, np.ndarray]]


@dataclass(frozen=True)
class _Waiting:
    body: dict[str, Any]
    arrays: Arrays
    nbytes: int
    on_ack: Callable[[], None]


class Uplink:
    """See the module's text. `run` must run as a task; all else is called from its event loop."""

    def __init__(
        self,
        link: Link,
        batcher: SampleBatcher[Any],
        choice: CompressionChoice,
        high_mark: int,
        limit_s: float | None = None,
    ) -> None:
        """
        Args:
            link: to the controller; may be in use for other messages too.
            batcher: an empty one, when a batch goes.
            choice: whether it is compressed.
            high_mark: bytes of backlog above which it is congested; see `marks`.
            limit_s: seconds that a batch may wait for the link to take it; None: what the link allows by default, which
                is at least as long as its hub may be away.

        Raises:
            ValueError: the mark is not positive.
        """
        self.link = link
        self.batcher = batcher
        self.choice = choice
        self.limit_s = limit_s
        self.backlog_bytes = self.backlog_samples = 0
        """Put and not yet acknowledged; bytes as if packed raw."""
        self.samples = self.batches = 0
        """Handed to the link since the start."""
        self.raw_bytes = self.sent_bytes = 0
        """Of these: as if packed raw, and of the arrays that the link got."""
        self.compress_s = 0.0
        """Seconds spent on compressing, packing included."""
        self._mark = HighMark(high_mark)
        self._told = False
        self._change = asyncio.Event()
        self._news = asyncio.Event()
        self._empty = asyncio.Event()
        self._rushed = False

    @staticmethod
    def marks(bytes_per_s: float | None, rtt_s: float) -> int:
        """A high mark in bytes for a link: what it carries in 10 s and a round trip, which is many times bandwidth x
        delay, so that throttling starves no link that works; 4 to 256 MB. None: a link without a known limit."""
        return int(min(MAX_MARK, max(MIN_MARK, (np.inf if bytes_per_s is None else bytes_per_s) * (MARK_S + rtt_s))))

    @property
    def congested(self) -> bool:
        """Whether no new requests should be started: from above the high mark until below half of it."""
        return self._mark.passed

    async def changed(self) -> bool:
        """Waits until `congested` is not what this returned last (at first: False), and returns it.

        It waits as long as all is well; a link that is down for too long ends `run`. For one caller.
        """
        while self.congested == self._told:
            self._change.clear()
            await self._change.wait()
        self._told = self.congested
        return self._told

    async def put(self, body: dict[str, Any], arrays: Arrays, on_ack: Callable[[], None]) -> None:
        """Takes a finished sample, at once; `on_ack` is called once, when the controller has committed it.

        Raises:
            ValueError: it is not a sample, or cannot be packed; it is not taken.
        """
        nbytes = sample_bytes(body, arrays)
        self.batcher.add(_Waiting(body, arrays, nbytes, on_ack), nbytes, time.monotonic())
        self._count(1, nbytes)
        self._news.set()

    async def run(self) -> None:
        """Sends batches when they are due, until cancelled.

        Raises:
            DeadlineExpired: the link took nothing for `limit_s` seconds.
            Refused: the hub no longer lets this process in.
        """
        while True:
            self._news.clear()
            now = time.monotonic()
            due = self.batcher.due(now)
            if due is None:
                await self._news.wait()
            elif due > now and not self._rushed:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), due - now)
            else:
                await self._send(self.batcher.take())

    async def flush(self, limit_s: float) -> None:
        """Sends what waits without waiting for more, until everything that was put is acknowledged; `run` must run.

        Raises:
            DeadlineExpired: after `limit_s` seconds.
        """
        self._rushed = True
        self._news.set()
        try:
            async with self.link.waits.deadline(f"the hub to acknowledge {self.backlog_samples} samples", limit_s):
                while self.backlog_samples:
                    self._empty.clear()
                    await self._empty.wait()
        finally:
            self._rushed = False

    def state(self) -> dict[str, Any]:
        """What a heartbeat tells of it, as plain values."""
        return {
            "backlog_samples": self.backlog_samples,
            "backlog_bytes": self.backlog_bytes,
            "congested": self.congested,
            "samples": self.samples,
            "batches": self.batches,
            "raw_bytes": self.raw_bytes,
            "sent_bytes": self.sent_bytes,
            "compress_s": self.compress_s,
            "compressing": self.choice.compressing,
            "ratio": self.choice.ratio,
            "mb_per_s": self.choice.mb_per_s,
        }

    async def _send(self, batch: Sequence[_Waiting]) -> None:
        raw_bytes = sum(waiting.nbytes for waiting in batch)
        body, arrays = await self._pack(batch, raw_bytes)
        acks = [waiting.on_ack for waiting in batch]
        sent_bytes = sum(array.nbytes for array in arrays.values())
        on_ack = functools.partial(self._acknowledged, acks, raw_bytes)
        await self.link.send(KIND, body, arrays, limit_s=self.limit_s, on_ack=on_ack)
        self.samples += len(batch)
        self.batches += 1
        self.raw_bytes += raw_bytes
        self.sent_bytes += sent_bytes

    async def _pack(self, batch: Sequence[_Waiting], nbytes: int) -> PackedSamples:
        how = self.choice.next()
        raw = small = None
        if how != "zstd":
            raw, seconds = await self._packed(batch, nbytes, False)
            self.choice.packed_raw(nbytes, seconds)
        if how != "raw":
            small, seconds = await self._packed(batch, nbytes, True)
            self.choice.packed_small(nbytes, seconds, sum(array.nbytes for array in small[1].values()))
            self.compress_s += seconds
        chosen = small if raw is None or (small is not None and self.choice.compressing) else raw
        assert chosen is not None
        return chosen

    async def _packed(self, batch: Sequence[_Waiting], nbytes: int, compress: bool) -> tuple[PackedSamples, float]:
        """The batch packed, and the seconds that it took."""

        def pack() -> tuple[PackedSamples, float]:
            started = time.perf_counter()
            packed = pack_samples([(waiting.body, waiting.arrays) for waiting in batch], compress)
            return packed, time.perf_counter() - started

        return await asyncio.to_thread(pack) if nbytes >= THREAD_BYTES else pack()

    def _acknowledged(self, acks: Sequence[Callable[[], None]], nbytes: int) -> None:
        self._count(-len(acks), -nbytes)
        for on_ack in acks:
            on_ack()

    def _count(self, samples: int, nbytes: int) -> None:
        self.backlog_samples += samples
        self.backlog_bytes += nbytes
        if self._mark.update(self.backlog_bytes):
            self._change.set()
        if not self.backlog_samples:
            self._empty.set()


def make_uplink(context: RoleContext, controller: Link) -> Uplink:
    """A site's finished samples on their way to the controller: one by one inside a site, in batches over a link."""
    link = context.link
    bandwidth = None if link is None else link.bytes_per_s
    batcher: SampleBatcher[Any] = SampleBatcher(0.0 if link is None else BATCH_S, BATCH_BYTES, BATCH_SAMPLES)
    mark = Uplink.marks(bandwidth, link.rtt_s if link else 0.0)
    patience = context.cluster.absence_s if link else context.run.deadlines.heartbeat_s
    return Uplink(controller, batcher, CompressionChoice(bandwidth), mark, max(300.0, patience))
