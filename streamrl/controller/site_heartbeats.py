"""What the services' last heartbeats tell: links, busy instances, tokens."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

from streamrl.config.cluster import ClusterConfig
from streamrl.transport.endpoint import Hub


class SiteHeartbeats:
    """The last heartbeats of all services."""

    def __init__(self, hub: Hub, sites: Mapping[str, str], cluster: ClusterConfig, excluded: Mapping[str, str]) -> None:
        """
        Args:
            hub: the hub that the services are connected to.
            sites: site of each service, by the service's name.
            cluster: the cluster.
            excluded: services that are not used any more, and why.
        """
        self._hub, self._sites, self._cluster, self._excluded = hub, sites, cluster, excluded
        self._left_at: dict[str, float] = {}
        """When each service that has said goodbye did so last, in monotonic seconds."""

    def left(self, name: str) -> None:
        """Record that a service has said goodbye."""
        self._left_at[name] = time.monotonic()

    def away_s(self, name: str) -> float:
        """Return the seconds since a service's last message, or since its goodbye; 0: it has not come yet."""
        if name in self._hub.peers:
            return self._hub.silent_for(name)
        return time.monotonic() - self._left_at[name] if name in self._left_at else 0.0

    def remote(self) -> dict[str, dict[str, Any]]:
        """Return the state of each site behind a link that has come (`run_dir/remote_site.py` RemoteSite)."""
        found: dict[str, dict[str, Any]] = {}
        for name, site in self._sites.items():
            peer = self._hub.peers.get(name)
            if site not in self._cluster.remote_sites:
                continue
            if peer is None:
                if name in self._left_at:
                    found[site] = self._absent(name)
                continue
            state, uplink = peer.state, peer.state.get("uplink", {})
            rtt_s, ratio = state.get("rtt_s"), uplink.get("ratio")
            found[site] = {
                "silent_s": self._hub.silent_for(name),
                "rtt_ms": None if rtt_s is None else rtt_s * 1e3,
                "clock_offset_s": state.get("clock_offset_s"),
                "samples_waiting": uplink.get("backlog_samples", 0),
                "compression": 1 / ratio if ratio and uplink.get("compressing") else None,
                "congested": bool(state.get("congested")),
                "weights_refetched": state.get("weights_refetched", 0),
                "controller_silent_s": state.get("controller_silent_s"),
                "publisher_silent_s": state.get("publisher_silent_s"),
                "empty_connections": max(peer.empty_connections, state.get("empty_connections", 0)),
                "excluded": self._excluded.get(name, ""),
            }
        return found

    def _absent(self, name: str) -> dict[str, Any]:
        """Return the state of a site whose service has said goodbye."""
        left_s, excluded = time.monotonic() - self._left_at[name], self._excluded.get(name, "")
        limit_s = None if excluded else self._cluster.absence_s
        return {"silent_s": left_s, "left_s": left_s, "absence_s": limit_s, "excluded": excluded}

    def busy_since(self) -> dict[str, float]:
        """Return the time since which each busy instance has had work, by the last heartbeats (unix seconds)."""
        return {name: state["busy_since"] for _, name, state in self._instances() if state.get("busy_since")}

    def since_token(self) -> float:
        """Return the seconds since an instance has last produced a token, by the last heartbeats; inf: none is busy."""
        busy = ((service, state) for service, _, state in self._instances() if state.get("running"))
        ages = (state.get("stalled_s", 0.0) + self._hub.silent_for(service) for service, state in busy)
        return min(ages, default=math.inf)

    def lacking(self, service: str, number: int) -> list[str]:
        """Return the names of a service's instances that serve an older version than this one, or none."""
        versions = {name: state.get("weight_version") for one, name, state in self._instances() if one == service}
        return sorted(name for name, version in versions.items() if version is None or version < number)

    def _instances(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Yield (service, instance, state in the last heartbeat) of the connected services that are used."""
        for service in self._sites:
            if service not in self._excluded and (peer := self._hub.peers.get(service)) is not None:
                for name, state in peer.state.get("instances", {}).items():
                    yield service, name, state
