"""Weights at a site that generates: from the trainer's site or from another one's relay, and on to others.

Every version is verified before it is stored, and stored before it is passed on (`weights/site_relay.py`). A site that
the controller tells to get its weights elsewhere than at the trainer's falls back to that if they are not there in
time.
"""

from __future__ import annotations

import asyncio
import logging

from streamrl.errors import RunFailed
from streamrl.runtime.process_context import RoleContext
from streamrl.runtime.site_connections import (
    bind_outside,
    connect_home,
    connect_relay,
    relay_hub,
    to_home,
    to_relay,
)
from streamrl.transport.deadlines import WaitRegistry
from streamrl.weights.assembly import make_publisher, make_relay
from streamrl.weights.site_relay import NotPublished, WeightRelay
from streamrl.weights.version import WeightVersion

log = logging.getLogger(__name__)

SOURCE_S = 60.0
"""For a version to come from another site's relay, which may itself be waiting for it."""
ASK_AGAIN_S = 0.25


class SiteWeights:
    """See the module's text."""

    def __init__(self, context: RoleContext, waits: WaitRegistry) -> None:
        self.context, self.waits = context, waits
        self.home = make_relay(context, to_home(context, "relay", waits))
        """Gets weights from the trainer's site."""
        self.store = self.home.store
        self.version: int | None = None
        """Newest one in the store."""
        self._last = self.home
        self._others: dict[str, WeightRelay] = {}
        """Relays that get weights from other sites, once they were needed."""
        self._hub = relay_hub(context, waits) if context.addresses.relay_outside else None
        self._publisher = make_publisher(context, self._hub) if self._hub is not None else None

    @property
    def passes_on(self) -> bool:
        """Whether other sites can get weights from this one."""
        return self._publisher is not None

    @property
    def bytes_received(self) -> int:
        """Of weights, since the start."""
        return self.home.bytes_received + sum(relay.bytes_received for relay in self._others.values())

    @property
    def corrupt(self) -> int:
        """Parts that arrived damaged and were fetched again."""
        return self.home.corrupt + sum(relay.corrupt for relay in self._others.values())

    async def connect(self) -> None:
        """Connects to the trainer's site, and opens the door to others if there is one."""
        if self._hub is not None:
            bind_outside(self.context, self._hub, self.context.addresses.relay_outside)
        await connect_home(self.context, self.home.link, self.context.addresses.publisher)

    async def serve(self) -> None:
        """Serves other sites until cancelled; returns at once if there is no door to them."""
        if self._publisher is not None:
            await self._publisher.serve()

    async def fetch(self, number: int, content_hash: str, source: str | None) -> tuple[WeightVersion, str | None]:
        """Brings a version, or a newer one, into the store, and makes it available to other sites.

        Args:
            number: of the version.
            content_hash: of its weights.
            source: the site to get it from; None: the trainer's.

        Returns:
            The version, and where it came from, as `source`.

        Raises:
            DeadlineExpired: it was not there in time.
            RunFailed: it cannot be had, or is of another model.
        """
        if source is not None:
            try:
                async with self.waits.deadline(f"weights {number} from {source}", SOURCE_S):
                    found = await self._fetch_from(source, number, content_hash)
            except RunFailed as error:
                log.warning("getting weights %d from the trainer's site: %s", number, error)
                source = None
        if source is None:
            found, self._last = (await self.home.fetch(number, content_hash, newest=True)).version, self.home
        if self._publisher is not None and (self.version is None or found.number > self.version):
            await self._publisher.publish(*self.store.open(found.number))
        self.version = found.number
        return found, source

    async def ensure(self, version: WeightVersion) -> None:
        """Sees to it that a version that was fetched a while ago is still whole in the store.

        Raises:
            DeadlineExpired, RunFailed: it is not, and cannot be had again.
        """
        if not await asyncio.to_thread(self.store.is_whole, version.number):
            log.warning("weights %d are damaged in the store: fetching them again", version.number)
            await self.home.fetch(version.number, version.content_hash)

    @property
    def last_s(self) -> float:
        """Seconds of the transfer that ended last."""
        return self._last.last.seconds if self._last.last is not None else 0.0

    async def _fetch_from(self, source: str, number: int, content_hash: str) -> WeightVersion:
        """From another site's relay, asked again until it has the version."""
        if source not in self._others:
            link = to_relay(self.context, source, self.waits)
            await connect_relay(self.context, link, source)
            self._others[source] = self.home.beside(link)
        while True:
            try:
                found = (await self._others[source].fetch(number, content_hash, newest=True)).version
            except NotPublished:
                await asyncio.sleep(ASK_AGAIN_S)
            else:
                log.info("weights %d came from the relay of %s", found.number, source)
                self._last = self._others[source]
                return found

    async def close(self) -> None:
        """Closes all connections."""
        for relay in (self.home, *self._others.values()):
            await relay.link.close()
        if self._hub is not None:
            await self._hub.close()
