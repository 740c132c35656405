"""The relay of a site: fetches each version once from the publisher, verifies it, and stores it for the instances.

With `encoding: delta` the publisher sends the deltas from the newest version in the store to the requested one. The
stored file is copied, and the deltas are applied to the copy. Bytes from a link become a version only after two checks:

- every payload has a checksum, and only payloads that do not match it are fetched again;
- every resulting tensor has a checksum in the manifest. One that does not match although the payloads did was made from
  a wrong base: then the complete version is fetched, as by a relay that holds nothing.

Only then does the file get its name, and only then is the publisher informed. So a base is always verified, and no
delta is skipped. A relay that takes over an earlier one's store verifies what is in it before it reports holding it.

Relays of one store work one after the other, and one that is cancelled waits for its threads before it gives up its
draft: no thread ever works on bytes, or gives a name to a file, that belong to a later transfer.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from streamrl.errors import RunFailed
from streamrl.protocol.message import M, kind_of, parse, wire
from streamrl.protocol.weights import Chunk, Fetch, FetchAgain, Have, ManifestOf, NoVersion
from streamrl.transport.endpoint import Delivery, Link
from streamrl.transport.wire import Arrays, MalformedMessage
from streamrl.weights.description import DESCRIPTION, largest_description, read_description
from streamrl.weights.received_weights import corrupt_payloads, decode_parts, in_thread
from streamrl.weights.version import CorruptTensors, CorruptWeights, Manifest, Part, Stream, places, transfer_kind
from streamrl.weights.version_store import WeightDraft, WeightStore

log = logging.getLogger(__name__)

FETCH_TRIES = 3
"""Number of corrupt transfers in a row after which the run fails: that is no accident any more."""
MOST_EARLY, MOST_EARLY_BYTES = 256, 1 << 30
"""Most chunks, and their bytes, that wait for a manifest: more than any publisher has in flight."""

Encoding = Literal["raw", "delta"]
T = TypeVar("T")


class NotPublished(RunFailed):
    """The publisher does not have the version yet, or no longer has it."""

    def __init__(self, message: str, available: tuple[int, ...]) -> None:
        super().__init__(message)
        self.available = available
        """Versions that it has."""


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
        self._request = self._first = secrets.randbits(48)
        """Numbers of the current request and of the one that began the transfer.

        They begin at random: chunks that a publisher still sends to an earlier process of this name are not taken.
        """
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
        self._progressed_at = -math.inf
        """When a manifest, or bytes of a version, came last, or were last worked on (monotonic seconds)."""
        self._works = False
        """Whether received bytes are being worked on in a thread."""
        self._most_described: int | None = None
        """Bytes of the largest description that is read; None: of any that a publisher makes."""
        self._turn = asyncio.Lock()
        """Held by the one relay of the store that is fetching or verifying."""

    @property
    def since_progress(self) -> float:
        """Seconds since the publisher's last manifest or bytes of a version; 0 while they are worked on here."""
        return 0.0 if self._works else time.monotonic() - self._progressed_at

    async def fetch(self, number: int, content_hash: str, newest: bool = False) -> Manifest:
        """Fetch a version into the store and return its manifest; with `newest` a newer version may come instead.

        The newer version's hash is then the publisher's own. So `newest` is for the trainer's publisher alone; from
        anyone else only the bytes of the given hash are accepted.

        Raises:
            DeadlineExpired: the version did not come in time.
            RunFailed: it was corrupt `FETCH_TRIES` times, the publisher does not have it, or it is of another model.
        """
        async with self._turns(number):
            return await self._fetch(number, content_hash, newest)

    async def ensure(self, number: int, content_hash: str) -> None:
        """Verify a stored version; fetch it again if it is damaged or gone.

        One that cannot be read at the moment stays as it is: who loads it verifies it, too.

        Raises:
            NotPublished: it is damaged, and the publisher no longer has it.
            DeadlineExpired, RunFailed: it is damaged, and cannot be fetched again.
        """
        async with self._turns(number):
            try:
                whole = await in_thread(self.store.is_whole, number)
            except OSError as error:
                log.warning("weights %d are not verified before they are loaded: %s", number, error)
                return
            if not whole:
                log.warning("weights %d are damaged in the store: fetching them again", number)
                await self._fetch(number, content_hash, newest=False)

    @contextlib.asynccontextmanager
    async def _turns(self, number: int) -> AsyncIterator[None]:
        """Wait for the store's other transfers, then hold it."""
        async with self.link.waits.deadline(f"the transfer before weight version {number}", FETCH_TRIES * self.limit_s):
            await self._turn.acquire()
        try:
            yield
        finally:
            self._turn.release()

    async def _fetch(self, number: int, content_hash: str, newest: bool) -> Manifest:
        started, received = time.monotonic(), self.bytes_received
        base = await in_thread(self._base) if self.encoding == "delta" else None
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
        """Return another relay into the same store, over a link to another site; they fetch one after the other."""
        other = WeightRelay(link, self.store, self.limit_s, self.encoding, self.expected)
        other._turn = self._turn
        if self.expected is not None:
            other._most_described = largest_description(self.expected)
        return other

    def seed(self, manifest: Manifest, buffer: np.ndarray) -> None:
        """Store a version made of the model's own files, if the store is empty, so that the first fetch can be a delta.

        It takes a while. The publisher checks the version's hash before it uses it as a base.

        Raises:
            CorruptWeights: manifest and buffer do not match.
        """
        if self.store.newest_verified() is None:
            draft = self.store.begin(manifest)
            draft.buffer[:] = buffer
            self.store.commit(draft)

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
        drafts: list[WeightDraft] = []
        try:
            async with self.link.waits.deadline(f"the publisher to send weight version {number}", self.limit_s):
                await self.link.send(*wire(order))
                answer, arrays = await self._next(ManifestOf, number)
                self._progressed_at = time.monotonic()
                manifest, described = await self._work(read_description, arrays.get(DESCRIPTION), self._most_described)
                parts = self._check(manifest, described, number, content_hash, newest, base)
                if not parts:
                    return manifest, transfer_kind(parts)
                first, file = parts[0].base, answer.file if self.host else None
                try:
                    await self._work(lambda: drafts.append(self.store.begin(manifest, first, file)))
                except (FileNotFoundError, PermissionError) as error:
                    if file is not None:
                        self.host = ""  # so that it is sent
                        raise CorruptWeights(f"the publisher's file cannot be copied: {error}") from error
                    if isinstance(error, PermissionError):
                        raise
                    raise WrongBase(f"version {first} is gone: {error}") from error
                (draft,) = drafts
                incoming = [(p, np.empty(p.nbytes, np.uint8) if p.coded else draft.buffer) for p in parts]
                if file is None:
                    everything = [(i, 0, part.nbytes) for i, part in enumerate(parts)]
                    await self._receive(incoming, everything, manifest.version.number)
                else:
                    self.bytes_received += manifest.nbytes
                await self._complete(draft, incoming)
                return manifest, transfer_kind(parts)
        finally:
            for draft in drafts:
                self.store.abandon(draft)

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
        # before anything is allocated: no path is larger than an anchor, coded, and deltas that may be as large as it
        if (nbytes := sum(part.nbytes for part in way)) > 2 * manifest.nbytes + len(manifest.tensors):
            raise CorruptWeights(f"the parts have {nbytes} bytes, and version {version.number} {manifest.nbytes}")
        if at != version.number or (base is not None and not way and base.version != version):
            raise CorruptWeights(f"the parts lead to version {at}, not to {version.number}")
        if base is not None and way and way[0].base is not None and not base.like(manifest):
            raise WrongBase(f"version {version.number} has other tensors than {base.version.number}, its base")
        return way

    def _check_model(self, manifest: Manifest) -> None:
        """Check that a manifest has this site's tensors, and is no larger than they are; raises like `_check`."""
        number, found = manifest.version.number, {t.name: (t.dtype, t.shape) for t in manifest.tensors}
        expected = found if self.expected is None else self.expected
        for name in dict.fromkeys([*expected, *found]):
            here, there = expected.get(name), found.get(name)
            if here != there:
                raise RunFailed(
                    f"weight version {number} does not fit this site's model: tensor {name!r} is "
                    f"{_described(there)}, expected {_described(here)}"
                )
        if self.expected is not None:  # the content hash covers neither places nor sizes
            entries, nbytes = places((t.name, t.dtype, t.shape) for t in manifest.tensors)
            lies = [(t.offset, t.nbytes) for t in manifest.tensors] != [(t.offset, t.nbytes) for t in entries]
            if lies or manifest.nbytes != nbytes:
                raise CorruptWeights(f"tensors of version {number} do not lie one after the other")

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
                reason = f"the publisher has no weight version {number} ({no.reason}); it has {no.available}"
                raise NotPublished(reason, tuple(no.available))
            elif delivery.kind == kind_of(wanted):
                return parse(wanted, delivery.body), delivery.arrays
            elif delivery.kind == kind_of(Chunk):
                self._early.append(delivery)
                nbytes = sum(array.nbytes for one in self._early for array in one.arrays.values())
                if len(self._early) > MOST_EARLY or nbytes > MOST_EARLY_BYTES:
                    raise CorruptWeights(f"{len(self._early)} chunks of version {number} came without its manifest")
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
            self._progressed_at = time.monotonic()
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

    async def _work(self, function: Callable[..., T], *args: Any) -> T:
        """Work on received bytes in a thread, as `in_thread`; this counts as progress."""
        self._works = True
        try:
            return await in_thread(function, *args)
        finally:
            self._works, self._progressed_at = False, time.monotonic()

    async def _complete(self, draft: WeightDraft, incoming: list[Stream]) -> None:
        """Verify, decode and commit a version; fetch corrupt payloads again. The work is done in threads."""
        number = draft.manifest.version.number
        if not incoming[0][0].coded:
            await self._commit_raw(draft, incoming)
            return
        tries, todo = 1, [(i, tuple(range(len(part.payloads)))) for i, (part, _) in enumerate(incoming)]
        while corrupt := await self._work(corrupt_payloads, incoming, todo):
            await self._refetch(incoming, corrupt, tries, number)
            tries, todo = tries + 1, corrupt
        try:
            await self._work(decode_parts, draft.manifest, draft.buffer, incoming)
            await self._work(self.store.commit, draft)
        except CorruptWeights as error:  # although every payload arrived as it was sent
            if (base := incoming[0][0].base) is None:
                raise
            raise WrongBase(f"version {number} does not follow from version {base}: {error}") from error

    async def _commit_raw(self, draft: WeightDraft, incoming: list[Stream]) -> None:
        """Commit uncoded weights: their payloads are the tensors, so they are verified only once."""
        for tries in itertools.count(1):
            try:
                await self._work(self.store.commit, draft)
                return
            except CorruptTensors as error:
                await self._refetch(incoming, [(0, error.indexes)], tries, draft.manifest.version.number)


def _described(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    return "not there" if tensor is None else f"{tensor[0]} {list(tensor[1])}"
