"""The path of a site's finished samples to the controller: batched, compressed when it pays, never dropped.

put -> batch -> pack (large ones in a thread) -> link -> committed by the controller -> every sample's `on_ack`

Nothing is dropped: a sample counts towards the backlog from `put` until the controller has committed its batch, and the
link keeps and repeats what is not acknowledged. So the backlog grows while a link is down. Above the high mark the
uplink is congested, and the dispatcher must start no new requests until the backlog is below half of it (`changed`,
`Dispatcher.throttle`). `put` itself never waits: running requests may always finish. So the backlog is bounded by

    high mark + (requests that run when it is passed) x (bytes of the longest sample)

and memory by that plus the packed copies of the batch being sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from streamrl.generation.site.sample_batches import (
    BATCH_SAMPLES,
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
THREAD_BYTES = 128 * 1024
"""Smallest batch that is packed in a thread; smaller ones take less than a millisecond."""
MARK_S = 10.0
MIN_MARK, MAX_MARK = 4 * 1000 * 1000, 256 * 1000 * 1000

PackedSamples = tuple[dict[str, Any], dict[str, np.ndarray]]


class _Waiting(NamedTuple):
    body: dict[str, Any]
    arrays: Arrays
    nbytes: int
    on_ack: Callable[[], None]


class Uplink:
    """A queue of finished samples that are sent to the controller in batches.

    `run` must run as a task; everything else is called from its event loop.
    """

    def __init__(
        self,
        link: Link,
        batcher: SampleBatcher[Any],
        choice: CompressionChoice,
        high_mark: int,
        limit_s: float,
    ) -> None:
        """
        Args:
            link: connection to the controller; other messages may use it, too.
            batcher: empty batcher that decides when a batch is sent.
            choice: decides whether a batch is compressed.
            high_mark: bytes of backlog above which the uplink is congested; see `marks`.
            limit_s: seconds that a batch may wait for the link to take it.

        Raises:
            ValueError: the mark is not positive.
        """
        self.link, self.batcher, self.choice, self.limit_s = link, batcher, choice, limit_s
        self.backlog_bytes = self.backlog_samples = 0
        """Backlog of samples that are not yet acknowledged; bytes as if packed raw."""
        self.samples = self.batches = 0
        """Samples and batches handed to the link since the start."""
        self.raw_bytes = self.sent_bytes = 0
        """Bytes of these samples: as if packed raw, and of the arrays that were handed to the link."""
        self.compress_s = 0.0
        """Seconds spent on compression, packing included."""
        self._mark = HighMark(high_mark)
        self._returned = False
        self._change = asyncio.Event()
        self._news = asyncio.Event()

    @staticmethod
    def marks(bytes_per_s: float | None, rtt_s: float) -> int:
        """Return a high mark for a link: the bytes that it carries in 10 s and a round trip, within 4 to 256 MB.

        This is many times bandwidth x delay, so that throttling never starves a working link. `bytes_per_s` None: the
        link has no known limit.
        """
        return int(min(MAX_MARK, max(MIN_MARK, (np.inf if bytes_per_s is None else bytes_per_s) * (MARK_S + rtt_s))))

    @property
    def congested(self) -> bool:
        """Whether no new requests should be started: from above the high mark until below half of it."""
        return self._mark.passed

    async def changed(self) -> bool:
        """Wait until `congested` differs from what this returned last (at first: False), and return it.

        It waits without a limit; a link that is down for too long ends `run`. For a single caller.
        """
        while self.congested == self._returned:
            self._change.clear()
            await self._change.wait()
        self._returned = self.congested
        return self._returned

    async def put(self, body: dict[str, Any], arrays: Arrays, on_ack: Callable[[], None]) -> None:
        """Queue a finished sample without waiting; `on_ack` is called once, when the controller has committed it.

        Raises:
            ValueError: it is not a sample, or cannot be packed; it is not queued.
        """
        nbytes = sample_bytes(body, arrays)
        self.batcher.add(_Waiting(body, arrays, nbytes, on_ack), nbytes, time.monotonic())
        self._count(1, nbytes)
        self._news.set()

    async def run(self) -> None:
        """Send batches when they are due, until cancelled.

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
            elif due > now:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), due - now)
            else:
                await self._send(self.batcher.take())

    def state(self) -> dict[str, Any]:
        """Return the fields for a heartbeat, as plain values."""
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
        on_ack = functools.partial(self._acknowledged, [waiting.on_ack for waiting in batch], raw_bytes)
        await self.link.send(KIND, body, arrays, limit_s=self.limit_s, on_ack=on_ack)
        self.samples += len(batch)
        self.batches += 1
        self.raw_bytes += raw_bytes
        self.sent_bytes += sum(array.nbytes for array in arrays.values())

    async def _pack(self, batch: Sequence[_Waiting], nbytes: int) -> PackedSamples:
        how = self.choice.next()
        if how != "zstd":
            raw, seconds = await self._packed(batch, nbytes, False)
            self.choice.packed_raw(nbytes, seconds)
            if how == "raw":
                return raw
        small, seconds = await self._packed(batch, nbytes, True)
        self.choice.packed_small(nbytes, seconds, sum(array.nbytes for array in small[1].values()))
        self.compress_s += seconds
        return small if how == "zstd" or self.choice.compressing else raw

    async def _packed(self, batch: Sequence[_Waiting], nbytes: int, compress: bool) -> tuple[PackedSamples, float]:
        """Return the packed batch, and the seconds that packing took."""

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


def make_uplink(context: RoleContext, controller: Link) -> Uplink:
    """Make a site's uplink to the controller: samples go one by one inside a site, in batches over a link."""
    link = context.link
    bandwidth = None if link is None else link.bytes_per_s
    batcher: SampleBatcher[Any] = SampleBatcher(0.0 if link is None else BATCH_S, BATCH_BYTES, BATCH_SAMPLES)
    mark = Uplink.marks(bandwidth, link.rtt_s if link else 0.0)
    patience = context.cluster.absence_s if link else context.run.deadlines.heartbeat_s
    return Uplink(controller, batcher, CompressionChoice(bandwidth), mark, max(300.0, patience))
