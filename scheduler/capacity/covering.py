"""Cheapest set of replicas that generates a batch by a deadline: an integer program by branch and bound. Pure.

Every replica generates a share of the batch, and the shares must add up to 1 or more. Choices are ordered by
their price per share; the bound of a branch is the price of what is missing at the best remaining price per share.
After `MOST_NODES` nodes the best so far is taken: the first dive already costs at most about one replica too much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from scheduler.cost.generation_cost import ReplicaKind

BISECTIONS = 45
"""Bisections of a step time: to a 10^-9th or so."""
LONGEST_STEP_S = 1e7
"""Seconds beyond which a step does not count as a plan."""
MOST_NODES = 400
"""Largest number of branch-and-bound nodes for one step time."""


@dataclass(frozen=True)
class Replicas:
    """Replicas on a part of an offer."""

    offer: int
    count: int
    kind: ReplicaKind = field(repr=False)

    @property
    def gpus(self) -> int:
        """GPUs of all replicas together."""
        return self.count * self.kind.tensor_parallel


@dataclass(frozen=True)
class Choice:
    """Replicas that one offer can add to generation by a deadline."""

    offer: int
    site: int
    kinds: tuple[tuple[ReplicaKind, float, float, int], ...]
    """(kind, share, USD per hour of a replica, traffic included, most replicas), best price per share first."""

    @property
    def ratio(self) -> float:
        """USD per hour and share of the best kind."""
        return self.kinds[0][2] / self.kinds[0][1]


@dataclass
class Cover:
    """Branch and bound over numbers of replicas, offers in order of their price per share."""

    choices: Sequence[Choice]
    fixed: Sequence[float]
    """USD per hour of taking part at all, by site."""
    room: Sequence[float]
    """Largest share by site."""
    best: float = math.inf
    found: tuple[tuple[int, int, ReplicaKind], ...] | None = None
    nodes: int = 0

    @property
    def enough(self) -> bool:
        """Whether all choices together generate a batch."""
        most = [0.0] * len(self.room)
        for choice in self.choices:
            most[choice.site] += max(share * count for _, share, _, count in choice.kinds)
        return sum(map(min, most, self.room)) >= 1 - 1e-12

    def solve(self) -> tuple[float, tuple[Replicas, ...]] | None:
        """Return USD per hour and replicas; None: all choices together do not suffice."""
        if not self.enough:
            return None
        self._branch(0, 1.0, 0.0, (), {})
        if self.found is None:
            return None
        in_order = sorted(self.found, key=lambda one: one[0])  # simulated steps differ by the order of pools
        return self.best, tuple(Replicas(offer, count, kind) for offer, count, kind in in_order)

    def _branch(
        self,
        place: int,
        need: float,
        spent: float,
        taken: tuple[tuple[int, int, ReplicaKind], ...],
        used: dict[int, float],
    ) -> None:
        """Try the choices from `place` on; `used` is the share of each site that takes part."""
        if need <= 1e-12:
            if spent < self.best * (1 - 1e-12):
                self.best, self.found = spent, taken
            return
        if place == len(self.choices) or (self.nodes >= MOST_NODES and self.found is not None):
            return
        self.nodes += 1
        choice = self.choices[place]
        if spent + need * choice.ratio >= self.best * (1 - 1e-12):
            return
        entry = 0.0 if choice.site in used else self.fixed[choice.site]
        left = self.room[choice.site] - used.get(choice.site, 0.0)
        after = self.choices[place + 1].ratio if place + 1 < len(self.choices) else math.inf
        for kind, share, price, possible in choice.kinds:
            enough = math.ceil(need / share - 1e-9)
            most = min(possible, enough)
            if left < need and left < most * share:
                most = math.floor(left / share + 1e-9)
            for count in range(most, 0, -1):
                rest = need - count * share
                bound = spent + entry + count * price + (max(rest, 0.0) * after if rest > 1e-12 else 0.0)
                if bound >= self.best * (1 - 1e-12):
                    if count < enough and after >= price / share:
                        break  # fewer of these only means more of the dearer ones
                    continue
                more = {**used, choice.site: used.get(choice.site, 0.0) + min(count * share, need)}
                self._branch(
                    place + 1,
                    rest if rest > 1e-12 else 0.0,
                    spent + entry + count * price,
                    (*taken, (choice.offer, count, kind)),
                    more,
                )
                if self.nodes >= MOST_NODES and self.found is not None:
                    return
        self._branch(place + 1, need, spent, taken, used)


def generation_seconds(generation: Sequence[Replicas], steady: bool) -> float:
    """Return the seconds in which these replicas generate a batch: the time at which their shares add up to 1.

    Args:
        generation: replicas of any kinds.
        steady: generation continues across steps (async).
    """

    def done(t: float) -> bool:
        return sum(one.count * one.kind.share(t, steady) for one in generation) >= 1

    return least_time(done)


def least_time(done: Callable[[float], bool]) -> float:
    """Return the least time at which a condition holds that then stays true (bisection).

    Infinite if it does not hold within `LONGEST_STEP_S`.
    """
    low, high = 0.0, 1e-3
    while not done(high):
        low, high = high, high * 4
        if high > LONGEST_STEP_S:
            return math.inf
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if done(middle) else (middle, high)
    return high
