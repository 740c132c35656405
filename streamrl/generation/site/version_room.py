"""Room in a site's store for the next version of the weights.

Two versions have to fit, which a launch makes sure of: the served one and the next. An instance that falls silent while
it loads one keeps that version longer, so that the one after the next may not fit. Then its site waits until that
instance has loaded the old version or has ended, and fetches again. A site that passes weights on keeps a version until
its delta is made, it is compressed, and those have it that it is being sent to; its site waits for that, too. Where
a third version fits, nobody waits.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial

from streamrl.config.recovery import DeadlineConfig
from streamrl.generation.site.instance_weights import InstanceWeights
from streamrl.generation.site.site_weights import SiteWeights
from streamrl.protocol.controller_site import LoadWeights
from streamrl.transport.deadlines import WaitRegistry
from streamrl.weights.version import WeightVersion
from streamrl.weights.version_store import NoRoom

log = logging.getLogger(__name__)

TRIES = 3
"""Number of fetches for which there may be no room: what was freed may be taken by somebody else."""
LOOK_S = 0.1
LET_GO_S = 5.0
"""Seconds for the system to free the memory of a version after the last instance has let go of it."""


class VersionRoom:
    """Keeps in the store what instances may load, and makes room for what is fetched."""

    def __init__(self, site: SiteWeights, loaded: InstanceWeights, limits: DeadlineConfig, waits: WaitRegistry) -> None:
        """
        Args:
            site: fetches versions into the site's store.
            loaded: what the site's instances load from there.
            limits: how long an instance may be silent, and may take to load a version.
            waits: registry of waits for instances.
        """
        self._site, self._store, self._loaded, self._waits = site, site.store, loaded, waits
        self._limit_s = limits.heartbeat_s + limits.weights_s
        """Seconds in which a silent instance counts as dead, or is heard again and then loads a version."""

    def tidy(self) -> None:
        """Delete the versions that no instance loads, now or later."""
        if self._loaded.served is not None:
            self._store.keep_only({self._loaded.served.number} | self._loaded.being_loaded())

    async def fetch(self, order: LoadWeights) -> tuple[WeightVersion, str | None]:
        """Fetch a version as `SiteWeights.fetch` does, again once there is room for it.

        Raises:
            NoRoom: there is none, although nothing keeps an old version.
            DeadlineExpired: one is kept for too long, by what the message names; or as of `SiteWeights.fetch`.
            RunFailed, RestartNeeded: as of `SiteWeights.fetch`.
        """
        fetch = partial(self._site.fetch, order.number, order.content_hash, order.source)
        for _ in range(TRIES - 1):
            try:
                return await fetch()
            except NoRoom as error:
                await self._freed(error)
        return await fetch()

    async def _freed(self, error: NoRoom) -> None:
        """Wait until a fetch that had no room is worth another try.

        Raises:
            NoRoom: this very error; waiting would not help.
            DeadlineExpired: an old version is kept for too long.
        """
        before = self._store.room()
        self.tidy()
        held = bool(self._holders())

        def what() -> str:
            return f"{' and '.join(self._holders())}: {error}"

        if held and not self._grown(error, before):
            log.warning("waiting for %s", what())
        async with self._waits.deadline(what, self._limit_s):
            while self._holders() and not self._grown(error, before):
                await asyncio.sleep(LOOK_S)
                self.tidy()
        end = time.monotonic() + LET_GO_S
        while not self._grown(error, before) and time.monotonic() < end:
            await asyncio.sleep(LOOK_S)
        if not held and self._store.room() < error.nbytes:  # else what kept a version has ended just before
            raise error

    def _holders(self) -> list[str]:
        """Return what keeps older versions than the served one, as what is waited for."""
        instances = self._loaded.holders()
        loads = [f"{', '.join(instances)} to load an older weight version, or to end"] if instances else []
        return loads + self._site.holders()

    def _grown(self, error: NoRoom, before: int) -> bool:
        """Return whether there is more room than `before`, and enough; a quota may leave less than what is free."""
        return self._store.room() >= max(error.nbytes, before + 1)
