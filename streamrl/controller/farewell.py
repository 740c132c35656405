"""The end of a run as it is recorded, and as the sites that have launchers of their own hear of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Mapping
from pathlib import Path

from streamrl.config.cluster import ClusterConfig
from streamrl.controller.telemetry import Telemetry
from streamrl.errors import RunFailed
from streamrl.protocol.controller_site import Finish
from streamrl.protocol.message import wire
from streamrl.run_dir import layout
from streamrl.run_dir.status import HEARS_END
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Hub

log = logging.getLogger(__name__)

FINISH_S = 3.0
"""Seconds for a site to acknowledge that the run is over; a site that does not will notice the silence."""
FAREWELL_S = 60.0
"""Most seconds for sites that are away to come back and acknowledge that the run is done; `absence_s` if it is less."""
LOOK_S = 0.1
"""Seconds between two looks at whether a site has come back."""


class Farewell:
    """What the controller does last: it writes its last status, and tells remote sites that the run is over."""

    def __init__(
        self,
        hub: Hub,
        waits: WaitRegistry,
        sites: Mapping[str, str],
        cluster: ClusterConfig,
        excluded: Collection[str],
        telemetry: Telemetry,
        run_dir: Path,
    ) -> None:
        """
        Args:
            hub: the hub that the services are connected to.
            waits: the controller's waits.
            sites: site of each service, by the service's name.
            cluster: the cluster.
            excluded: services that are not used any more.
            telemetry: what writes the status.
            run_dir: the run's folder.
        """
        self._hub, self._waits, self._cluster, self._excluded = hub, waits, cluster, excluded
        self._telemetry, self._run_dir = telemetry, run_dir
        self._remote = {name: site for name, site in sites.items() if site in cluster.remote_sites}
        self._informed: set[str] = set()
        """Services that have acknowledged that the run is over."""

    async def close(self, state: str, error: str | None = None) -> None:
        """Write the last status, and notify the sites that have launchers of their own.

        A run that is done stays so, whatever happens while the sites are notified.
        """
        telemetry = self._telemetry
        if telemetry.state != "done":
            telemetry.close(state, error)
        emulated = (self._run_dir / layout.NETWORK).is_dir()  # these sites end with the launcher
        patient = state == "done" and not emulated
        untold = await self.tell(telemetry.state, telemetry.error, patient)
        if untold and telemetry.state == "done":
            telemetry.untold = untold
            log.warning("the run is done, which %s could not be told", ", ".join(untold))
            with contextlib.suppress(OSError):
                telemetry.write()

    async def tell(self, state: str, error: str | None, patient: bool = False) -> list[str]:
        """Tell remote sites that the run is over and how it ended, each as soon as it is there.

        Args:
            state: how the run ended.
            error: why it failed.
            patient: give sites that are away the time to come back, not only those that are connected `FINISH_S`.

        Returns:
            Sites that have not acknowledged it.
        """
        told = Finish(state=state, error=error)
        left = {name: site for name, site in self._remote.items() if name not in self._informed}
        await asyncio.gather(*(self._tell(name, told, patient) for name in left))
        return [site for name, site in left.items() if name not in self._informed]

    async def _tell(self, name: str, told: Finish, patient: bool) -> None:
        """Tell one service, and again each process that comes in its place."""
        if name not in self._hub.peers and (not patient or name in self._excluded):
            return
        limit_s = min(self._cluster.absence_s, FAREWELL_S) if patient else FINISH_S
        heard = asyncio.Event()  # it may also be set later, when nobody waits for it any more

        def acknowledged() -> None:
            self._informed.add(name)
            heard.set()

        addressed = None
        with contextlib.suppress(RunFailed):
            async with self._waits.deadline(f"{name}{HEARS_END}", limit_s):
                while not heard.is_set():
                    peer = self._hub.peers.get(name)
                    if peer is not None and peer is not addressed:
                        addressed = peer
                        with contextlib.suppress(KeyError):  # it leaves meanwhile
                            await self._hub.send(name, *wire(told), on_ack=acknowledged)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(LOOK_S):
                            await heard.wait()
