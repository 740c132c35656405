"""The relay of a site: fetches each version once from the publisher, verifies it, and stores it for the instances.

With `encoding: delta` the publisher sends the deltas from the newest version in the store to the requested one. The
stored file is copied, and the deltas are applied to the copy. Bytes from a link become a version only after two checks:

- every payload has a checksum, and only payloads that do not match it are fetched again;
- every resulting tensor has a checksum in the manifest. One that does not match although the payloads did was made from
  a wrong base: then the complete version is fetched, as by a relay that holds nothing.

Only then does the file get its name, and only then is the publisher informed. So a base is always verified, and no
delta is skipped. A relay that takes over an earlier one's store verifies what is in it before it reports holding it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from streamrl.errors import RunFailed
from streamrl.protocol.message import M, kind_of, parse, wire
from streamrl.protocol.weights import Chunk, Fetch, FetchAgain, Have, ManifestOf, NoVersion
from streamrl.transport.endpoint import Delivery, Link
from streamrl.transport.wire import Arrays, MalformedMessage
from streamrl.weights.codec.delta import decode_tensor
from streamrl.weights.version import CorruptTensors, CorruptWeights, Manifest, Part, Stream, bytes_of, transfer_kind
from streamrl.weights.version_store import WeightStore

log = logging.getLogger(__name__)

FETCH_TRIES = 3
"""Number of corrupt transfers in a row after which the run fails: that is no accident any more."""

DECODING_THREADS = 2
"""Threads that decode a version."""

Encoding = Literal["raw", "delta"]


class NotPublished(RunFailed):
    """The publisher does not have the version yet, or no longer has it."""


class WrongBase(CorruptWeights):
    """Deltas do not fit the version that they were applied to."""


@dataclass(frozen=True)
class Received:
    """The cost of one fetch."""

    number: int
    nbytes: int
    """Payload bytes, repeated ones included."""
    kind: str
    """One of: complete, packed, delta, packed+delta, nothing (`transfer_kind`)."""
    seconds: float
    """Seconds from the request until the version was verified and stored."""


class WeightRelay:
    """Client that fetches versions from a publisher into a site's store."""

    def __init__(
        self,
        link: Link,
        store: WeightStore,
        limit_s: float,
        encoding: Encoding = "raw",
        expected: Mapping[str, tuple[str, tuple[int, ...]]] | None = None,
        host: str = "",
    ) -> None:
        """
        Args:
            link: connection to the publisher's hub.
            store: store of the site.
            limit_s: seconds allowed for one fetch.
            encoding: raw for complete weights as they are, delta for the fewest bytes.
            expected: type (torch's name) and shape of every tensor of the site's model; None: unknown.
            host: `this_host()` inside the publisher's site: on the publisher's own host its file is copied.
        """
        self.link, self.store, self.limit_s = link, store, limit_s
        self.encoding, self.expected = encoding, expected
        self._request = self._first = 0
        """Numbers of the current request and of the one that began the transfer."""
        self._early: list[Delivery] = []
        """Chunks of the current request that arrived before its manifest."""
        self.corrupt = 0
        """Number of payloads and of whole answers that failed verification and were fetched again."""
        self.wrong_bases = 0
        """Number of times that deltas did not fit their base, and complete weights were fetched instead."""
        self.bytes_received = 0
        """Payload bytes since the start."""
        self.version: int | None = None
        """Newest version that this relay has stored, verified; reading it accesses no file."""
        self.host = host
        """Host reported to the publisher; '': weights must be sent."""
        self.last: Received | None = None
        """The latest fetch."""

    async def fetch(self, number: int, content_hash: str, newest: bool = False) -> Manifest:
        """Fetch a version into the store and return its manifest; with `newest` a newer version may come instead.

        Raises:
            DeadlineExpired: the version did not come in time.
            RunFailed: it was corrupt `FETCH_TRIES` times, the publisher does not have it, or it is of another model.
        """
        started, received = time.monotonic(), self.bytes_received
        base = await asyncio.to_thread(self._base) if self.encoding == "delta" else None
        for _ in range(FETCH_TRIES):
            try:
                manifest, kind = await self._transfer(number, content_hash, newest, base)
            except WrongBase as error:
                self.wrong_bases += 1
                log.warning("fetching complete weights: %s", error)
                assert base is not None
                self.store.distrust(base.version.number)
                base = None
            except (CorruptWeights, MalformedMessage) as error:
                self.corrupt += 1
                log.warning("fetching the weights again: %s", error)
            else:
                await self.link.send(*wire(Have(number=manifest.version.number)))
                nbytes = self.bytes_received - received
                self.version = manifest.version.number
                self.last = Received(manifest.version.number, nbytes, kind, time.monotonic() - started)
                return manifest
        raise RunFailed(f"weight version {number} arrived corrupt {FETCH_TRIES} times")

    def beside(self, link: Link) -> WeightRelay:
        """Return another relay into the same store, over another link; only one may be used at a time."""
        return WeightRelay(link, self.store, self.limit_s, self.encoding, self.expected)

    def seed(self, manifest: Manifest, buffer: np.ndarray) -> None:
        """Store a version made of the model's own files, if the store is empty, so that the first fetch can be a delta.

        It takes a while. The publisher checks the version's hash before it uses it as a base.

        Raises:
            CorruptWeights: manifest and buffer do not match.
        """
        if self.store.newest_verified() is None:
            target = self.store.begin(manifest)
            target[:] = buffer
            self.store.commit(manifest, target)

    def _base(self) -> Manifest | None:
        number = self.store.newest_verified()
        return None if number is None else self.store.open(number)[0]

    async def _transfer(
        self, number: int, content_hash: str, newest: bool, base: Manifest | None
    ) -> tuple[Manifest, str]:
        self._request += 1  # distinguishes late messages of an earlier, failed request
        self._first = self._request
        self._early.clear()
        order = Fetch(
            request=self._request,
            number=number,
            newest=newest,
            encoding=self.encoding,
            host=self.host,
            holds=None if base is None else base.version.number,
            holds_hash=None if base is None else base.version.content_hash,
        )
        begun: int | None = None
        try:
            async with self.link.waits.deadline(f"the publisher to send weight version {number}", self.limit_s):
                await self.link.send(*wire(order))
                answer, _ = await self._next(ManifestOf, number)
                manifest = Manifest.from_dict(answer.manifest)
                parts = self._check(manifest, answer.parts, number, content_hash, newest, base)
                if not parts:
                    return manifest, transfer_kind(parts)
                begun, first = manifest.version.number, parts[0].base
                file = answer.file if self.host else None
                try:
                    target = await asyncio.to_thread(self.store.begin, manifest, first, file)
                except (FileNotFoundError, PermissionError) as error:
                    if file is not None:
                        self.host = ""  # so that it is sent
                        raise CorruptWeights(f"the publisher's file cannot be copied: {error}") from error
                    if isinstance(error, PermissionError):
                        raise
                    raise WrongBase(f"version {first} is gone: {error}") from error
                incoming = [(p, np.empty(p.nbytes, np.uint8) if p.coded else target) for p in parts]
                if file is None:
                    await self._receive(incoming, [(i, 0, part.nbytes) for i, part in enumerate(parts)], begun)
                else:
                    self.bytes_received += manifest.nbytes
                await self._complete(manifest, target, incoming)
                begun = None
                return manifest, transfer_kind(parts)
        finally:
            if begun is not None:
                self.store.abandon(begun)

    def _check(
        self,
        manifest: Manifest,
        parts: list[dict[str, Any]],
        number: int,
        content_hash: str,
        newest: bool,
        base: Manifest | None,
    ) -> list[Part]:
        """Check that an answer fits its request, and return its parts.

        Raises:
            CorruptWeights: it is not the requested version, or its parts do not lead to it.
            RunFailed: it is of another model.
        """
        version = manifest.version
        if version.number == number:
            if version.content_hash != content_hash:
                raise CorruptWeights(f"version {number} is not the one that was announced")
        elif not newest or version.number < number:
            raise CorruptWeights(f"version {version.number} came instead of {number}")
        self._check_model(manifest)
        way = [Part.from_dict(values, manifest) for values in parts]
        at = None if base is None else base.version.number
        for part in way:
            if part.base is not None and part.base != at:
                raise CorruptWeights(f"a delta starts from version {part.base}, not from {at}")
            if not part.coded and len(way) > 1:
                raise CorruptWeights(f"complete weights of version {part.number} are only one of several parts")
            at = part.number
        if at != version.number or (base is not None and not way and base.version != version):
            raise CorruptWeights(f"the parts lead to version {at}, not to {version.number}")
        if base is not None and way and way[0].base is not None and not base.like(manifest):
            raise WrongBase(f"version {version.number} has other tensors than {base.version.number}, its base")
        return way

    def _check_model(self, manifest: Manifest) -> None:
        number, found = manifest.version.number, {t.name: (t.dtype, t.shape) for t in manifest.tensors}
        expected = found if self.expected is None else self.expected
        for name in dict.fromkeys([*expected, *found]):
            here, there = expected.get(name), found.get(name)
            if here != there:
                raise RunFailed(
                    f"weight version {number} does not fit this site's model: tensor {name!r} is "
                    f"{_described(there)}, expected {_described(here)}"
                )

    async def _next(self, wanted: type[M], number: int) -> tuple[M, Arrays]:
        """Return the next message of this type that belongs to the current request, and its arrays.

        After a reconnect messages may arrive out of order: chunks that arrive before their manifest wait.

        Raises:
            CorruptWeights: another message came.
            MalformedMessage: one came that does not fit its type.
            NotPublished: the publisher does not have the version.
        """
        while wanted is not Chunk or not self._early:
            delivery = await self.link.receive()
            delivery.ack()
            if delivery.body.get("request") != self._request:
                log.debug("ignoring %r of another request", delivery.kind)
            elif delivery.kind == kind_of(NoVersion):
                no = parse(NoVersion, delivery.body)
                raise NotPublished(f"the publisher has no weight version {number} ({no.reason}); it has {no.available}")
            elif delivery.kind == kind_of(wanted):
                return parse(wanted, delivery.body), delivery.arrays
            elif delivery.kind == kind_of(Chunk):
                self._early.append(delivery)
            else:
                raise CorruptWeights(f"{delivery.kind!r} came instead of {kind_of(wanted)!r}")
        early = self._early.pop()
        return parse(wanted, early.body), early.arrays

    async def _receive(self, incoming: list[Stream], ranges: list[tuple[int, int, int]], number: int) -> None:
        """Receive the ranges (part, offset, bytes) of the streams."""
        missing = sum(nbytes for _, _, nbytes in ranges)
        while missing > 0:
            chunk, arrays = await self._next(Chunk, number)
            data, part, at = arrays.get("data"), chunk.part, chunk.offset
            if data is None or data.dtype != np.uint8 or data.ndim != 1 or data.size == 0:
                raise CorruptWeights(f"a chunk of version {number} has no bytes")
            if not any(part == i and o <= at and at + data.size <= o + nbytes for i, o, nbytes in ranges):
                raise CorruptWeights(f"a chunk of version {number} is at {part}, {at}, which was not requested")
            incoming[part][1][at : at + data.size] = data
            self.bytes_received += data.nbytes
            missing -= data.nbytes

    async def _refetch(
        self, incoming: list[Stream], corrupt: list[tuple[int, tuple[int, ...]]], tries: int, number: int
    ) -> None:
        """Fetch corrupt payloads, given as (part, tensors), again after they arrived `tries` times.

        Raises:
            RunFailed: that was the last of `FETCH_TRIES` tries.
        """
        count = sum(len(indexes) for _, indexes in corrupt)
        self.corrupt += count
        if tries == FETCH_TRIES:
            raise RunFailed(f"weight version {number} arrived corrupt {FETCH_TRIES} times")
        log.warning("weight version %d: fetching %d corrupt payloads again", number, count)
        self._request += 1
        self._early.clear()
        tensors = [(i, list(indexes)) for i, indexes in corrupt]
        await self.link.send(*wire(FetchAgain(request=self._request, of=self._first, tensors=tensors)))
        payloads = [(i, incoming[i][0].payloads[j]) for i, indexes in corrupt for j in indexes]
        await self._receive(incoming, [(i, payload.offset, payload.nbytes) for i, payload in payloads], number)

    async def _complete(self, manifest: Manifest, target: np.ndarray, incoming: list[Stream]) -> None:
        """Verify, decode and commit a version; fetch corrupt payloads again. The work is done in threads."""
        number = manifest.version.number
        if not incoming[0][0].coded:
            await self._commit_raw(manifest, target, incoming)
            return
        tries, todo = 1, [(i, tuple(range(len(part.payloads)))) for i, (part, _) in enumerate(incoming)]
        while corrupt := await asyncio.to_thread(_corrupt_of, incoming, todo):
            await self._refetch(incoming, corrupt, tries, number)
            tries, todo = tries + 1, corrupt
        try:
            await asyncio.to_thread(_decode, manifest, target, incoming)
            await asyncio.to_thread(self.store.commit, manifest, target)
        except CorruptWeights as error:  # although every payload arrived as it was sent
            if (base := incoming[0][0].base) is None:
                raise
            raise WrongBase(f"version {number} does not follow from version {base}: {error}") from error

    async def _commit_raw(self, manifest: Manifest, target: np.ndarray, incoming: list[Stream]) -> None:
        """Commit uncoded weights: their payloads are the tensors, so they are verified only once."""
        for tries in itertools.count(1):
            try:
                await asyncio.to_thread(self.store.commit, manifest, target)
                return
            except CorruptTensors as error:
                await self._refetch(incoming, [(0, error.indexes)], tries, manifest.version.number)


def _corrupt_of(incoming: list[Stream], todo: list[tuple[int, tuple[int, ...]]]) -> list[tuple[int, tuple[int, ...]]]:
    """Return those of the payloads in `todo`, given as (part, tensors), that do not match their checksums."""
    found = [(i, incoming[i][0].corrupt(incoming[i][1], indexes)) for i, indexes in todo]
    return [(i, indexes) for i, indexes in found if indexes]


def _decode(manifest: Manifest, target: np.ndarray, streams: list[Stream]) -> None:
    """Apply coded parts in order to a buffer (uint8 [nbytes]) that holds the base of the first one.

    Raises:
        CorruptDelta: a payload cannot be decoded.
    """
    buffer = np.asarray(target)

    def one(index: int) -> None:
        t = manifest.tensors[index]
        for part, stream in streams:
            decode_tensor(bytes_of(part.payloads[index], stream), bytes_of(t, buffer), t.dtype)

    with ThreadPoolExecutor(DECODING_THREADS) as pool:
        list(pool.map(one, range(len(manifest.tensors))))


def _described(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    return "not there" if tensor is None else f"{tensor[0]} {list(tensor[1])}"
