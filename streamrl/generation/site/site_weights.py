"""Weights at a site that generates: fetched from the trainer's site or another site's relay, and passed on to others.

Every version is verified before it is stored, and stored before it is passed on (`weights/site_relay.py`). When the
controller names another site as the source and the weights do not come from there in time, the trainer's site is used.
A site that has not even answered, or has sent something else, is not asked again for a while.

Another site is believed only if its weights have the hash that the controller has announced. So nothing newer is taken
from there, whatever its number; from the trainer's own publisher it is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial

from streamrl.errors import RestartNeeded, RunFailed, UserError
from streamrl.runtime.process_context import RoleContext
from streamrl.runtime.site_connections import (
    PUBLISHER,
    connect_home,
    connect_relay,
    relay_hub,
    to_home,
    to_relay,
)
from streamrl.transport.deadlines import DeadlineExpired, WaitRegistry, never
from streamrl.transport.endpoint import Link
from streamrl.transport.endpoint_base import Endpoint, PeerLost, Refused
from streamrl.weights.assembly import make_relay
from streamrl.weights.backends.streamed import make_publisher
from streamrl.weights.site_relay import NotPublished, WeightRelay
from streamrl.weights.version import WeightVersion
from streamrl.weights.version_store import NoRoom

log = logging.getLogger(__name__)

SOURCE_S = 60.0
"""Seconds without progress after which another site's relay is given up; it may itself be waiting for the version."""
SOURCE_SHARE = 0.5
"""Share of the time for a fetch in which the version must have come from there, so that the trainer's site still can
send it in time."""
LEFT_OUT_S = 600.0
"""Seconds for which another site is not asked after its relay could not be used, so that its absence costs little."""
ASK_AGAIN_S = 0.25


class RelayRestarted(PeerLost):
    """Raised when another site's relay is a new process, which does not know what its predecessor was asked for."""


class SiteWeights:
    """The weights of one site: its store, the relays that fill it, and the publisher that passes them on."""

    def __init__(self, context: RoleContext, waits: WaitRegistry) -> None:
        self.context, self.waits = context, waits
        self.home = make_relay(context, to_home(context, "relay", waits))
        """Relay that gets weights from the trainer's site."""
        self.home.link.on_new_hub = self._trainer_restarted
        self._connected = False
        self.store = self.home.store
        self.version: int | None = None
        """Newest version in the store."""
        self._last = self.home
        self._others: dict[str, WeightRelay] = {}
        """Relays that get weights from other sites, by site; made when first needed."""
        self._asked: str | None = None
        """The site whose relay is asked for a version now; None: no other site's."""
        self._left_out: dict[str, float] = {}
        """Until when sites are not asked whose relays could not be used (monotonic seconds), by site."""
        self._closed_bytes = self._closed_corrupt = 0
        """Bytes and damaged payloads that came over connections to other sites which were closed since."""
        self._answered = False
        """Whether the relay that was asked last has answered: without the version, or with a part of it."""
        self._hub = relay_hub(context, waits) if context.addresses.relay_outside else None
        self._publisher = make_publisher(context, self._hub) if self._hub is not None else None

    @property
    def passes_on(self) -> bool:
        """Whether other sites can get weights from this one."""
        return self._publisher is not None

    @property
    def endpoints(self) -> list[Endpoint]:
        """The hub for other sites' relays, if there is one, and the link to the trainer's publisher."""
        return [self.home.link, *([self._hub] if self._hub is not None else [])]

    @property
    def bytes_received(self) -> int:
        """Bytes of weights received since the start."""
        others = sum(relay.bytes_received for relay in self._others.values())
        return self.home.bytes_received + others + self._closed_bytes

    @property
    def corrupt(self) -> int:
        """Payloads that arrived damaged and were fetched again."""
        return self.home.corrupt + sum(relay.corrupt for relay in self._others.values()) + self._closed_corrupt

    @property
    def publisher_silent_s(self) -> float | None:
        """Seconds since the trainer's publisher was last heard; None: it is at this site, or not connected yet."""
        return self.home.link.silent_for if self.context.remote and self._connected else None

    async def connect(self) -> None:
        """Connect to the trainer's site, and listen for other sites if this one passes weights on."""
        if self._hub is not None:
            self._hub.bind_outside(self.context.addresses.relay_outside, self.context.server_security())
        await connect_home(self.context, self.home.link, PUBLISHER, self.context.addresses.publisher)
        self._connected = True

    async def serve(self) -> None:
        """Serve other sites until cancelled; return at once if this one does not pass weights on."""
        if self._publisher is not None:
            await self._publisher.serve()

    async def fetch(self, number: int, content_hash: str, source: str | None) -> tuple[WeightVersion, str | None]:
        """Bring a version, or a newer one, into the store, and make it available to other sites.

        Args:
            number: number of the version.
            content_hash: hash of its weights.
            source: the site to get it from; None: the trainer's.

        Returns:
            The version, and the site that it came from, in the form of `source`.

        Raises:
            DeadlineExpired: the version did not come in time.
            NoRoom: the store has no room for it.
            RunFailed: the version is not available, or belongs to another model.
            RestartNeeded: the trainer was restarted.
        """
        if source is not None and time.monotonic() < self._left_out.get(source, 0.0):
            source = None
        if source is not None:
            try:
                found = await self._fetch_in_time(source, number, content_hash)
            except NoRoom:
                raise  # here, whoever sends it
            except (RunFailed, UserError, MemoryError) as error:
                log.warning("getting weights %d from the trainer's site: %s", number, error)
                # one that has it too late, has skipped it, or was restarted, may have the next version
                may_have_next = isinstance(error, NotPublished | RelayRestarted)
                if not (may_have_next or (isinstance(error, DeadlineExpired) and self._answered)):
                    self._left_out[source] = time.monotonic() + LEFT_OUT_S
                if isinstance(error, PeerLost | Refused):  # such a link sends no heartbeats any more
                    await self._drop(source)
                source = None
        if source is None:
            found, self._last = (await self.home.fetch(number, content_hash, newest=True)).version, self.home
        if self._publisher is not None and (self.version is None or found.number > self.version):
            await self._publisher.publish(*self.store.open(found.number))
        self.version = found.number
        return found, source

    async def ensure(self, version: WeightVersion) -> None:
        """Make sure that a version that was fetched earlier is still intact in the store; fetch it again otherwise.

        Raises:
            NotPublished: it is damaged, and the trainer's site has a newer one in its place.
            DeadlineExpired, RunFailed: it is damaged, and cannot be fetched again.
        """
        await self.home.ensure(version.number, version.content_hash)

    def holders(self) -> list[str]:
        """Return what is done for other sites with older versions than the newest, whose memory is kept until then."""
        return [] if self._publisher is None else self._publisher.holders()

    @property
    def last_s(self) -> float:
        """Seconds that the latest transfer took."""
        return self._last.last.seconds if self._last.last is not None else 0.0

    def _trainer_restarted(self) -> None:
        """End the link to the publisher, and with it a fetch: a new trainer does not have the versions of the old one.

        Raises:
            RestartNeeded: always.
        """
        self.home.link.forget_sent()
        raise RestartNeeded("the trainer was restarted")

    def _relay_restarted(self, source: str, link: Link) -> None:
        """End the link to another site's relay if it is being asked, as the new process will not answer.

        Raises:
            RelayRestarted: it is.
        """
        link.forget_sent()
        if self._asked == source:
            raise RelayRestarted(f"the relay of {source} was restarted")

    async def _fetch_in_time(self, source: str, number: int, content_hash: str) -> WeightVersion:
        """Fetch as `_fetch_from` does, as long as bytes come, and within `SOURCE_SHARE` of the time for a fetch.

        Raises:
            DeadlineExpired: the version did not come in time; `_answered` says whether the relay has answered.
            NotPublished, RunFailed, UserError: as of `_fetch_from`.
        """
        began, self._answered, what = time.monotonic(), False, f"weights {number} from {source}"

        def since_progress() -> float:
            return self._others[source].since_progress if source in self._others else never()

        async with self.waits.deadline(what, SOURCE_SHARE * self.home.limit_s):
            self._asked = source
            try:
                async with self.waits.deadline(what, SOURCE_S, since_progress):
                    return await self._fetch_from(source, number, content_hash)
            finally:
                self._asked = None
                self._answered |= since_progress() < time.monotonic() - began

    async def _drop(self, source: str) -> None:
        """Close the connection to another site; the next fetch from there makes a new one."""
        if (relay := self._others.pop(source, None)) is not None:
            self._closed_bytes += relay.bytes_received
            self._closed_corrupt += relay.corrupt
            await relay.link.close()

    async def _fetch_from(self, source: str, number: int, content_hash: str) -> WeightVersion:
        """Fetch exactly this version from another site's relay, and repeat until that relay has it.

        Raises:
            NotPublished: the relay has newer versions, but not this one, or fails to send it.
            RelayRestarted: the relay was restarted meanwhile.
            RunFailed: it cannot be fetched from there.
            UserError: a key is missing, or other users can read the secret key.
        """
        if source not in self._others:
            link = to_relay(self.context, source, self.waits)
            link.on_new_hub = partial(self._relay_restarted, source, link)
            try:
                await connect_relay(self.context, link, source)
            except BaseException:
                await link.close()
                raise
            self._others[source] = self.home.beside(link)
        while True:
            try:
                found = (await self._others[source].fetch(number, content_hash)).version
            except NotPublished as error:
                self._answered = True
                if max(error.available, default=-1) >= number:
                    raise  # it has skipped this version, no longer has it, or cannot send it
                await asyncio.sleep(ASK_AGAIN_S)
            else:
                log.info("weights %d came from the relay of %s", found.number, source)
                self._last = self._others[source]
                return found

    async def close(self) -> None:
        """Close all connections."""
        for relay in (self.home, *self._others.values()):
            await relay.link.close()
        if self._hub is not None:
            await self._hub.close()
