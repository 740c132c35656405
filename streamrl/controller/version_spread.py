"""Which weight version each site serves, loads and gets next. Pure: no I/O and no clock.

made -> queued -> in flight -> served       a site takes one version at a time, then skips to the newest
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping

import msgspec

from scheduler.sites.relay_tree import RelayPath, relay_tree
from streamrl.config.cluster import ClusterConfig
from streamrl.protocol.controller_site import LoadWeights, WeightsReady

MEASURED_BYTES = 500_000
"""Smallest transfer of weights from which the bandwidth of its path is measured, bytes."""
HISTORY = 10
"""Number of versions for which the controller remembers that a site has served them."""


class VersionSpread:
    """The spread of weight versions over the sites' services, by their names."""

    def __init__(self, sites: Mapping[str, str], cluster: ClusterConfig) -> None:
        """Begin without any version; `sites` has the site of each service, by the service's name."""
        self._sites, self._cluster = sites, cluster
        self._serving = dict.fromkeys(sites, -1)
        """Newest version that every instance of a site serves."""
        self._holds: dict[str, int | None] = dict.fromkeys(sites)
        """Version that a site's relay has stored last; None: it may have none."""
        self._served: dict[str, deque[int]] = {name: deque(maxlen=HISTORY) for name in sites}
        """Newest versions that a site has served, by service; its relay has the deltas from any of them."""
        self._paths = {
            frozenset(link.between): RelayPath(link.bytes_per_s * link.weight_share, link.rtt_s)
            for link in cluster.links
        }
        """Paths between sites: as declared, then as measured."""
        self._version_bytes = 0.0
        """Bytes of the last transfer of weights that was large enough to be measured."""
        self.in_flight: dict[str, int] = {}
        """Version in flight to a site's instances, by service."""
        self.queued: dict[str, LoadWeights] = {}
        """Announcement that a site gets after the version in flight, by service."""
        self._newest: LoadWeights | None = None
        self.newest = 0
        """Number of the newest version that was made for the sites."""

    def version(self, used: Iterable[str]) -> int:
        """Return the newest version such that every instance of these sites serves it or a newer one; -1: none yet.

        Without sites it is the newest one that was made.
        """
        return min((self._serving[name] for name in used), default=self.newest)

    def made(self, newest: LoadWeights, used: Iterable[str]) -> list[str]:
        """Queue a new version for the sites that are used; return those that can take it at once."""
        self._newest, self.newest = newest, newest.number
        behind = [name for name in used if self._serving[name] < newest.number]
        self.queued |= dict.fromkeys(behind, newest)
        return [name for name in behind if name not in self.in_flight]

    def delivered(self, number: int) -> None:
        """Record that all sites serve a version which the trainer itself has pushed to them."""
        self._serving = dict.fromkeys(self._sites, number)
        self.newest = number

    def start(self, name: str, able: Collection[str]) -> LoadWeights:
        """Put a site's queued version in flight.

        Args:
            name: the site's service.
            able: other services that can pass weights on now.

        Returns:
            The announcement, with the site that it is to come from.
        """
        message = msgspec.structs.replace(self.queued.pop(name), source=self._source(name, able))
        self.in_flight[name] = message.number
        return message

    def _source(self, name: str, able: Collection[str]) -> str | None:
        """Return the site whose relay a service gets its next weights from; None: the trainer's."""
        site, holds = self._sites[name], self._holds[name]
        if holds is None:
            return None  # it may need complete weights
        allowed = self._cluster.relays_for(site)
        relays = {self._sites[peer] for peer in able if self._sites[peer] in allowed and holds in self._served[peer]}
        if not relays:
            return None
        root = self._cluster.trainer_site
        parents = relay_tree(root, self._cluster.remote_sites, self._paths, relays, self._version_bytes)
        return None if parents[site] == root else parents[site]

    def ready(self, name: str, report: WeightsReady) -> bool:
        """Record that a site serves the version that was in flight to it, or a newer one.

        Returns:
            Whether a version is queued for it.
        """
        ends = frozenset((self._sites[name], report.source or self._cluster.trainer_site))
        if report.bytes >= MEASURED_BYTES and report.transfer_s > 0 and ends in self._paths:
            self._paths[ends] = RelayPath(report.bytes / report.transfer_s, self._paths[ends].rtt_s)
            self._version_bytes = report.bytes
        del self.in_flight[name]
        self._serving[name] = self._holds[name] = report.number
        self._served[name].append(report.number)
        if name in self.queued and self.queued[name].number <= report.number:
            del self.queued[name]
        return name in self.queued

    def restarted(self, name: str) -> bool:
        """Record that a site's relay has lost what it had; return whether the newest version is queued for it."""
        self.in_flight.pop(name, None)
        self._holds[name] = None
        self._served[name].clear()
        if self._newest is not None:
            self.queued[name] = self._newest
        return self._newest is not None

    def drop(self, name: str) -> None:
        """Forget a site that is not used any more."""
        self.in_flight.pop(name, None)
        self.queued.pop(name, None)
        self._served[name].clear()
