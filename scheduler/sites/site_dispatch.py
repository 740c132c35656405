"""Dispatch across sites: which site generates a group (a prompt with its samples). A pure state machine.

It is informed of sites (`join`, `leave`, `hold`), of waiting groups (`submit`) and of samples that have arrived
(`finished`), and decides where groups go (`decide`). Each site's own dispatcher then places the samples on its
instances.

* A group goes to one site, once, as soon as any site takes work. It moves only if its site leaves: `leave` returns
  what is left of it, for the caller to submit again. A site that is held keeps what it has and gets nothing new.
* Groups that wait together are placed together, so that the last of their samples is expected back soonest:

      end = round trip + prompts / bandwidth + max(generation, samples / bandwidth) + last sample / bandwidth.

  Generation is timed by `cost/expected_time.py`, the identical instances of a site taken as one whose batch is spread
  over them; a site's current work counts as far as it delays the new groups.
* Candidates are dealing in proportion to capacity, and the longest first to where the end comes earliest, with and
  without regard to how long a single sample may get. The one that is predicted to end first is taken, and if groups are
  few, they are then moved one by one off the site that ends last; so no placement is predicted worse than dealing by
  capacity.
* With a `price_tolerance`, the cheapest of the placements that end within this share of the first is taken.
* A site whose step times are doubtful, and which has no work and would get none, gets a group all the same, the
  shortest: what it measured beside other load may be many times too slow, and only work can show better.
* There is no clock. Decode steps stand in for one: a sample that arrives with L tokens shows that whatever started
  beside it has been through L steps, too, and forecasts of the rest follow from that.
* A group without a forecast is assumed to be like the samples that have arrived, and those that still run, of which
  only a least length is known (Kaplan and Meier); before any have arrived, all lengths up to `longest` are equally
  likely. So without forecasts sites get work by the speed that they have under it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from scheduler.cost.decode import Floats
from scheduler.cost.length_forecast import MIDPOINTS, Forecast, equally_likely, tails_of
from scheduler.dispatch.remaining_length import beyond
from scheduler.sites.site_candidates import Seats, SiteLoad, SitePrediction, SiteProblem, with_tails

LENGTHS_KEPT = 4096
"""Number of latest sample lengths that the forecast of groups without one is made from: several times what runs at
once, or those that run would count for too much.
"""
LENGTHS_NEEDED = 16
"""Number of samples that must have arrived before their lengths are used: as many as a forecast has values."""
BUNDLES = 256
"""Number of groups beyond which those of similar length are placed together: a bundle is then still small beside what a
site has.
"""


@dataclass(frozen=True)
class SiteGroup:
    """A prompt whose samples are all generated on one site."""

    group_id: str
    size: int
    """Number of samples."""
    forecast: Forecast | None = None
    """Forecast of each sample's length; None if there is none that is trusted."""
    prompt_tokens: int = 0


@dataclass
class _Placed:
    """A group on a site."""

    group: SiteGroup
    left: int
    """Samples that have not arrived."""
    kind: int
    """Index of the site's worker that it was meant for."""
    since: float | None = None
    """The site's decode steps when it started; None: it waits for slots."""


@dataclass
class _Site:
    """A site and its work."""

    facts: SiteLoad
    held: bool = False
    steps: float = 0.0
    """Lower bound of the site's decode steps, inferred from the samples that have arrived."""
    groups: dict[str, _Placed] = field(default_factory=dict)
    """Groups in the order in which they were placed."""

    def start(self) -> None:
        """Record which groups start now: the first ones, as long as there are slots."""
        if not self.groups or next(reversed(self.groups.values())).since is not None:
            return  # groups start in this order, so all have started
        free = self.facts.slots
        for placed in self.groups.values():
            if free <= 0:
                break
            free -= placed.left
            if placed.since is None:
                placed.since = self.steps


class SiteDispatch:
    """Places groups on sites so that their last sample arrives soonest."""

    def __init__(self, longest: float, bytes_per_token: float, price_tolerance: float = 0.0) -> None:
        """Create a dispatcher without sites.

        Args:
            longest: largest number of tokens of a sample (the run's limit).
            bytes_per_token: bytes per token of prompts and samples on a link.
            price_tolerance: share of the earliest end by which a cheaper placement may end later.

        Raises:
            ValueError: one of them is negative, or `longest` is not a positive number.
        """
        if not 0 < longest < math.inf:
            raise ValueError(f"the longest sample must be a positive number of tokens, got {longest}")
        if bytes_per_token < 0 or price_tolerance < 0:
            raise ValueError(
                f"must not be negative: bytes_per_token {bytes_per_token}, price_tolerance {price_tolerance}"
            )
        self.longest, self.bytes_per_token, self.price_tolerance = longest, bytes_per_token, price_tolerance
        self.predicted: SitePrediction | None = None
        """Prediction of the last decision, for display."""
        self._sites: dict[str, _Site] = {}
        self._waiting: dict[str, SiteGroup] = {}
        self._where: dict[str, _Site] = {}
        self._lengths: deque[float] = deque(maxlen=LENGTHS_KEPT)

    @property
    def waiting(self) -> int:
        """Number of groups without a site."""
        return len(self._waiting)

    def join(self, site: SiteLoad) -> None:
        """Add a site that is ready for work, or back after it left.

        Raises:
            ValueError: it has joined already.
        """
        if site.name in self._sites:
            raise ValueError(f"site {site.name} has joined already")
        self._sites[site.name] = _Site(site)

    def groups_of(self, site_name: str) -> list[str]:
        """Return the groups of a site, in the order in which they were placed there."""
        return list(self._sites[site_name].groups)

    def site_of(self, group_id: str) -> str | None:
        """Return the site that still owes samples of a group; None: no site does."""
        site = self._where.get(group_id)
        return None if site is None else site.facts.name

    def change(self, site: SiteLoad) -> None:
        """Replace a site's instances; its work stays there.

        Raises:
            KeyError: it has not joined.
        """
        known = self._sites[site.name]
        known.facts = site
        for placed in known.groups.values():
            placed.kind = min(placed.kind, len(site.workers) - 1)
        known.start()

    def leave(self, site_name: str) -> list[SiteGroup]:
        """Remove a site that is gone and return what is left of its groups, for the caller to submit again."""
        gone = self._sites.pop(site_name)
        for group_id in gone.groups:
            del self._where[group_id]
        return [replace(placed.group, size=placed.left) for placed in gone.groups.values()]

    def hold(self, site_name: str) -> None:
        """Stop giving new work to a congested site; what it has stays there."""
        self._sites[site_name].held = True

    def unhold(self, site_name: str) -> None:
        """Let a held site take work again."""
        self._sites[site_name].held = False

    def submit(self, groups: Iterable[SiteGroup]) -> None:
        """Add groups to be placed.

        Raises:
            ValueError: a group has been submitted already, or has no samples.
        """
        for group in groups:
            if group.group_id in self._waiting or group.group_id in self._where:
                raise ValueError(f"group {group.group_id} has been submitted already")
            if group.size < 1:
                raise ValueError(f"group {group.group_id} has {group.size} samples")
            self._waiting[group.group_id] = group

    def finished(self, group_id: str, length: float) -> None:
        """Record the arrival of a sample with so many tokens; ignored if its group is unknown."""
        if (site := self._where.get(group_id)) is not None:
            placed = site.groups[group_id]
            site.steps = max(site.steps, (site.steps if placed.since is None else placed.since) + length)
            placed.left -= 1
            if not placed.left:
                del site.groups[group_id], self._where[group_id]
            site.start()
        elif (
            group := self._waiting.get(group_id)
        ) is not None:  # its site left, but the sample has arrived all the same
            if group.size > 1:
                self._waiting[group_id] = replace(group, size=group.size - 1)
            else:
                del self._waiting[group_id]
        else:
            return
        self._lengths.append(length)

    def take_back(self, group_id: str) -> None:
        """Record that one sample of a group is not to come from its site any more; ignored if no site has the group."""
        if (site := self._where.get(group_id)) is not None:
            placed = site.groups[group_id]
            placed.left -= 1
            if not placed.left:
                del site.groups[group_id], self._where[group_id]
            site.start()

    def withdraw(self, group_ids: Iterable[str]) -> None:
        """Drop groups that are no longer wanted, waiting or on a site. Unknown ones are ignored."""
        changed = {}
        for group_id in group_ids:
            self._waiting.pop(group_id, None)
            if (site := self._where.pop(group_id, None)) is not None:
                del site.groups[group_id]
                changed[site.facts.name] = site
        for site in changed.values():
            site.start()

    def decide(self) -> list[tuple[str, str]]:
        """Place every waiting group, if any site takes work, and return (group, site), each once."""
        sites = [site for site in self._sites.values() if not site.held]
        if not sites or not self._waiting:
            return []
        problem, order, bundles = self._problem(sites)
        of_bundles, self.predicted = problem.solve(self.price_tolerance)
        if self._try_doubtful(sites, problem, of_bundles):
            self.predicted = problem.predict(of_bundles)
        seats = np.empty(len(order), dtype=np.int64)
        seats[order] = np.repeat(of_bundles, bundles)
        decisions = []
        for (group_id, group), seat in zip(self._waiting.items(), seats.tolist(), strict=True):
            number, kind = problem.kinds[seat]
            sites[number].groups[group_id] = _Placed(group, group.size, kind)
            self._where[group_id] = sites[number]
            decisions.append((group_id, sites[number].facts.name))
        self._waiting.clear()
        for site in sites:
            site.start()
        return decisions

    @staticmethod
    def _try_doubtful(sites: Sequence[_Site], problem: SiteProblem, seats: Seats) -> bool:
        """Give each doubtful site that has no work and gets none the shortest new bundle; return whether any got one.

        Args:
            sites: that take work.
            problem: placement on them.
            seats: worker of each new bundle, the longest first; changed in place.
        """
        moved = False
        for number, site in enumerate(sites):
            at = [problem.kinds[seat][0] for seat in seats.tolist()]
            if not site.facts.doubtful or site.groups or number in at:
                continue
            # not that of another one, which is tried as well
            movable = [bundle for bundle, other in enumerate(at) if not sites[other].facts.doubtful]
            if movable:
                seats[movable[-1]] = problem.kinds.index((number, 0))
                moved = True
        return moved

    def _problem(self, sites: Sequence[_Site]) -> tuple[SiteProblem, Seats, Seats]:
        """Return the placement problem of these sites, the order of the new groups in bundles, and the bundle sizes."""
        facts, new = [site.facts for site in sites], list(self._waiting.values())
        first = np.cumsum([0, *(len(site.workers) for site in facts)]).tolist()
        running = [(first[n] + one.kind, site, one) for n, site in enumerate(sites) for one in site.groups.values()]
        groups = [*new, *(one.group for _, _, one in running)]
        done = [0.0 if one.since is None else site.steps - one.since for _, site, one in running]
        produced = np.concatenate([np.zeros(len(new)), done])
        assumed = self._assumed()
        forecasts = [group.forecast or assumed for group in groups]
        tails = tails_of(forecasts)
        tails[produced > 0] = np.nan
        rests, weights = with_tails(beyond(equally_likely(forecasts), produced, self.longest), tails)
        rests = np.clip(rests, 1.0, np.maximum(1.0, self.longest - produced)[:, None])
        sizes = np.asarray([*(group.size for group in new), *(one.left for _, _, one in running)], dtype=np.float64)
        prompts = np.asarray([group.prompt_tokens for group in groups], dtype=np.float64)
        seats = np.asarray([-1] * len(new) + [seat for seat, _, _ in running])
        order = np.lexsort((-(rests @ weights), seats))
        starts: list[int] = []  # of bundles of similar groups: new ones, then those of each worker
        for seat in np.unique(seats):
            begin, end = int((seats < seat).sum()), int((seats <= seat).sum())
            starts += range(begin, end, -(-(len(new) if seat < 0 else len(running)) // BUNDLES))
        total = np.add.reduceat(sizes[order], starts)

        def mean(part: Floats) -> Floats:
            weighted = (part.T * sizes).T[order]
            return (np.add.reduceat(weighted, starts, axis=0).T / total).T

        problem = SiteProblem(
            *(facts, total, mean(rests), weights, np.add.reduceat(prompts[order], starts)),
            *(mean(prompts + produced), mean(produced), seats[order][starts], self.bytes_per_token),
        )
        return problem, order[: len(new)], np.diff([*starts, len(groups)])[: problem.new]

    def _assumed(self) -> Forecast:
        """Return the forecast of a group without one."""
        if len(self._lengths) < LENGTHS_NEEDED:
            return Forecast(tuple((MIDPOINTS * self.longest).tolist()))
        running = [
            site.steps - placed.since
            for site in self._sites.values()
            for placed in site.groups.values()
            if placed.since is not None
            for _ in range(placed.left)
        ]
        return Forecast.observed(self._lengths, running, self.longest)
