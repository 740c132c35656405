"""Distribution tree of new weights: which site each site receives them from, rooted at the site that trains. Pure.

A relay passes a version on only after it has received and verified all of it. So a site at the end of a path has it
after

    sum over the path's links of (round trip + bytes / bandwidth)        (store and forward)

and the tree in which every site has it soonest is that of the shortest paths (Dijkstra). In this model neither links
nor transfers that leave one site share bandwidth.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RelayPath:
    """Connection between two sites."""

    bytes_per_s: float
    rtt_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or not self.rtt_s >= 0:
            raise ValueError(f"a path needs a positive bandwidth and no negative round trip, got {self}")

    def seconds(self, nbytes: float) -> float:
        """Return the seconds to send so many bytes."""
        return self.rtt_s + nbytes / self.bytes_per_s


def relay_tree(
    root: str, sites: Collection[str], paths: Mapping[frozenset[str], RelayPath], relays: Collection[str], nbytes: float
) -> dict[str, str]:
    """Return the parent of each site.

    Args:
        root: the site that trains.
        sites: all other sites.
        paths: paths between pairs of sites; the root has one to each site.
        relays: sites that can pass weights on.
        nbytes: approximate size of a version: with few bytes round trips count, with many bandwidths.

    Raises:
        ValueError: a site cannot be reached.
    """
    arrives = {root: 0.0}
    parents: dict[str, str] = {}
    # by time, then by hops and name: ties are broken the same way every time, in favour of fewer relays
    due: list[tuple[float, int, str]] = [(0.0, 0, root)]
    done: set[str] = set()
    while due:
        at, hops, sender = heapq.heappop(due)
        if sender in done:
            continue
        done.add(sender)
        if sender != root and sender not in relays:
            continue
        for site in sorted(sites):
            path = paths.get(frozenset((sender, site)))
            if path is None or site in done:
                continue
            if (then := at + path.seconds(nbytes)) < arrives.get(site, float("inf")):
                arrives[site], parents[site] = then, sender
                heapq.heappush(due, (then, hops + 1, site))
    if missing := sorted(set(sites) - parents.keys()):
        raise ValueError(f"no way from {root} to {', '.join(missing)}")
    return parents
