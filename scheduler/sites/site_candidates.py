"""Placements of groups on sites: their predicted end and price, and the search for good ones. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
import numpy.typing as npt

from scheduler.cost.decode import Floats, StepCurve
from scheduler.cost.expected_time import Worker, step_cost
from scheduler.cost.length_forecast import MIDPOINTS, TAIL_LEVELS, log_quantiles

Seats = npt.NDArray[np.int64]
"""[groups] worker indices."""

LOOKS, FEW_GROUPS = 64, 128
"""Number of placements that moving groups one by one may evaluate, and number of groups beyond which a single move
hardly matters.
"""
STRETCHES = (1.0, 0.9, 0.8)
"""Shares of the allowed time up to which cheap sites are filled: the greedy rule's predictions are not exact."""
REACH = -3
"""Index, among a group's values with tails (see `with_tails`), of the value for its longest sample: level 0.995."""
PARTS = np.diff([0.9375, *np.convolve([MIDPOINTS[-1], *TAIL_LEVELS], [0.5, 0.5], "valid"), 1.0])
"""[6] probability of each of the values into which `with_tails` cuts a forecast's last sixteenth."""


@dataclass(frozen=True)
class SiteLoad:
    """Instances, link and prices of a site that generates."""

    name: str
    instances: tuple[tuple[int, StepCurve], ...]
    """(slots, step times) of each instance."""
    bytes_per_s: float | None = None
    """Bandwidth of its link to the trainer's site, each way; None: it is the trainer's site."""
    rtt_s: float = 0.0
    """Round trip in seconds."""
    price_per_hour: float = 0.0
    """USD per hour of all its instances."""
    price_per_gb: float = 0.0
    """USD per 10^9 bytes on its link."""
    doubtful: bool = False
    """Whether the step times of all its instances are doubtful, so that only work there can show how fast it is."""

    def __post_init__(self) -> None:
        if not self.instances or min(slots for slots, _ in self.instances) < 1:
            raise ValueError(f"site {self.name} needs instances with a slot or more each")
        if self.bytes_per_s is not None and not self.bytes_per_s > 0:
            raise ValueError(f"site {self.name}: its link's bandwidth must be positive, got {self.bytes_per_s}")
        if min(self.rtt_s, self.price_per_hour, self.price_per_gb) < 0:
            raise ValueError(f"site {self.name}: round trip and prices must not be negative")

    @cached_property
    def workers(self) -> tuple[Worker, ...]:
        """Its instances, identical ones combined into one worker whose batch and context are spread over them."""
        spread = []
        for (slots, curve), count in Counter(self.instances).items():
            context, prefill = curve.per_context_token / count, curve.per_prefill_token / count
            batches = tuple(batch * count for batch in curve.batches)
            spread.append(Worker(StepCurve(batches, curve.seconds, context, prefill), slots * count))
        return tuple(spread)

    @property
    def slots(self) -> int:
        """Largest number of samples at once."""
        return sum(slots for slots, _ in self.instances)

    @property
    def capacity(self) -> float:
        """Tokens per second with all slots taken, context left out."""
        return sum(slots / float(curve.base(slots)) for slots, curve in self.instances)


@dataclass(frozen=True)
class SitePrediction:
    """Predicted result of a placement."""

    end: float
    """Seconds until the last sample of the placed groups has arrived."""
    usd: float
    """USD of the sites that work, each until it has nothing left, and of the traffic on their links."""


def with_tails(values: Floats, tails: Floats) -> tuple[Floats, Floats]:
    """Cut the last of sixteen equally likely values into six.

    A site waits for the longest of hundreds of samples, and these come from the last sixteenth.

    Args:
        values: [n, 16] ascending, or [n, 1] known lengths, which are returned as they are.
        tails: [n, 5] result of `length_forecast.tails_of`; NaN: a straight line in log length against the normal score.

    Returns:
        [n, 21] values, and [21] their probabilities ([n, 1], [1]).
    """
    if values.shape[1] == 1:
        return values, np.ones(1)
    weights = np.concatenate([np.full(len(MIDPOINTS) - 1, 1 / len(MIDPOINTS)), PARTS])
    return np.exp(log_quantiles(values, tails)), weights


class SiteProblem:
    """Groups to place on sites beside their current work; times placements and searches for good ones. Pure.

    A placement gives each new group a worker: the identical instances of a site (see `SiteLoad.workers`).
    """

    def __init__(
        self,
        sites: Sequence[SiteLoad],
        sizes: Floats,
        rests: Floats,
        weights: Floats,
        prompts: Floats,
        contexts: Floats,
        produced: Floats,
        running: Seats,
        bytes_per_token: float,
    ) -> None:
        """Prepare the arrays that every placement is timed on.

        Args:
            sites: sites that take work.
            sizes: [n] samples that each group still lacks: new groups first, then those that sites have.
            rests: [n, v] possible remaining tokens of each of a group's samples; v = 1: known.
            weights: [v] their probabilities.
            prompts: [n] tokens of each group's prompt.
            contexts: [n] tokens that each of its samples has, prompt and produced.
            produced: [n] tokens that each of its samples has produced.
            running: [n] worker of each group that a site has, counted over all sites; -1: a new one.
            bytes_per_token: bytes per token on a link.
        """
        self.sites = sites
        self.kinds = [(number, kind) for number, site in enumerate(sites) for kind in range(len(site.workers))]
        """(site, index among its workers) of every worker."""
        self.workers = [sites[number].workers[kind] for number, kind in self.kinds]
        self.new = int((running < 0).sum())
        """Number of groups to place."""
        self._site_of = np.asarray([number for number, _ in self.kinds])
        self._sizes, self._prompts, self._contexts = sizes, prompts, contexts
        self._known, self._reach = rests.shape[1] == 1, rests[:, REACH if rests.shape[1] > 1 else 0]
        self._means, self._squares = rests @ weights, (rests * rests) @ weights
        self._tokens = sizes * (self._means + produced)  # tokens that return to the trainer's site
        self._rtt = np.asarray([site.rtt_s for site in sites])
        self._link = np.asarray([bytes_per_token / site.bytes_per_s if site.bytes_per_s else 0.0 for site in sites])
        """[sites] seconds per token."""
        self._usd_per_second = np.asarray([site.price_per_hour / 3600 for site in sites])
        self._usd_per_token = np.asarray([site.price_per_gb * bytes_per_token / 1e9 for site in sites])
        # every value of every group, longest first; a placement only selects from them
        order = np.argsort(-rests, axis=None, kind="stable")
        self._flat, self._owner = rests.ravel()[order], order // rests.shape[1]
        self._weights = (sizes[:, None] * weights).ravel()[order]
        self._old, self._ran = running[self.new :], sizes[self.new :]
        self._down = np.bincount(self._site_of[self._old], self._tokens[self.new :], len(sites))
        """[sites] tokens that return in any placement."""

    def solve(self, price_tolerance: float = 0.0) -> tuple[Seats, SitePrediction]:
        """Return the placement that ends first; with a tolerance the cheapest that ends at most that share later."""
        tried = [self._tried(self.earliest_end(tails)) for tails in (True, False)] + [self._tried(self.by_capacity())]
        best = self._improved(*min(tried, key=lambda one: (one[1].end, one[1].usd)))
        if price_tolerance:
            limit = best[1].end * (1 + price_tolerance)
            tried += [self._tried(self.earliest_end(limit=limit * part)) for part in STRETCHES]
            best = min([best, *(one for one in tried if one[1].end <= limit)], key=lambda one: (one[1].usd, one[1].end))
        return best

    def predict(self, seats: Seats) -> SitePrediction:
        """Predict the result of a placement of the new groups."""
        return self._together(seats, [self._on(worker, seats) for worker in range(len(self.workers))])[0]

    def _tried(self, seats: Seats) -> tuple[Seats, SitePrediction]:
        return seats, self.predict(seats)

    def _on(self, number: int, seats: Seats) -> tuple[float, float, float]:
        """Time one worker: seconds until it is idle, seconds until its new groups have ended, and their longest sample.

        The last two are 0 if it has no new groups.
        """
        worker, everyone = self.workers[number], np.concatenate([seats, self._old])
        rows = everyone == number
        mine = rows[self._owner]
        values, weights, new = self._flat[mine], self._weights[mine], self._owner[mine] < self.new
        if not len(values):
            return 0.0, 0.0, 0.0
        alive = np.concatenate([[0.0], np.cumsum(weights)])
        uncertain = None if self._known else int(self._sizes[rows].sum())
        costs = np.diff(step_cost(alive, worker.curve, worker.slots, uncertain))
        fixed = worker.curve.per_prefill_token * float(self._prompts[: self.new][rows[: self.new]].sum())
        per_context, contexts = worker.curve.per_context_token, self._contexts[self._owner[mine]]

        def seconds(steps: Floats) -> float:
            reading = per_context * float(weights @ (contexts * steps + steps * steps / 2)) if per_context else 0.0
            return fixed + float(costs @ steps) + reading

        top = float(values[new.argmax()]) if new.any() else 0.0
        # work that continues after the new groups have ended does not delay them
        return seconds(values), seconds(np.minimum(values, top)) if top else 0.0, top

    def _together(self, seats: Seats, times: Sequence[tuple[float, float, float]]) -> tuple[SitePrediction, Floats]:
        """Combine the results of `_on` with the links: the prediction, and [sites] ends (0: no new groups there)."""
        count = len(self.sites)
        busy, generation, last = np.zeros(count), np.zeros(count), np.zeros(count)
        for site, (all_, new, top) in zip(self._site_of.tolist(), times, strict=True):
            busy[site], generation[site] = max(busy[site], all_), max(generation[site], new)
            last[site] = max(last[site], top)
        at = self._site_of[seats]
        there = np.bincount(at, self._prompts[: self.new], count)
        back = np.bincount(at, self._tokens[: self.new], count)
        down = back + self._down
        ends = self._rtt + self._link * (there + last) + np.maximum(generation, self._link * down)
        ends = np.where(last > 0, ends, 0.0)
        usd = busy @ self._usd_per_second + (there + back) @ self._usd_per_token
        return SitePrediction(float(ends.max()), float(usd)), ends

    def _improved(self, seats: Seats, prediction: SitePrediction) -> tuple[Seats, SitePrediction]:
        """Move groups one by one off the site that ends last, as long as the end comes earlier; only if groups are
        few."""
        if self.new > FEW_GROUPS or len(self.workers) == 1:
            return seats, prediction
        times = [self._on(worker, seats) for worker in range(len(self.workers))]
        looks, found = 0, True
        while found and looks < LOOKS:
            found = False
            ends = self._together(seats, times)[1]
            movable = np.flatnonzero(self._site_of[seats] == ends.argmax())
            by_length = movable[np.argsort(self._means[movable], kind="stable")].tolist()
            targets = np.argsort(ends[self._site_of], kind="stable").tolist()
            for group, target in product(by_length, targets):
                if target == seats[group] or looks >= LOOKS:
                    continue
                looks += 1
                moved, changed = seats.copy(), list(times)
                moved[group] = target
                for worker in (target, int(seats[group])):
                    changed[worker] = self._on(worker, moved)
                then = self._together(moved, changed)[0]
                if then.end < prediction.end:
                    seats, times, prediction, found = moved, changed, then, True
                    break
        return seats, prediction

    def by_capacity(self) -> Seats:
        """Place each group, in the given order, where samples per capacity stay lowest."""
        capacity = [worker.slots / float(worker.curve.base(worker.slots)) for worker in self.workers]
        loads = np.bincount(self._old, self._ran, len(self.workers)).tolist()
        seats = []
        for size in self._sizes[: self.new].tolist():
            chosen = min(range(len(loads)), key=lambda seat: (loads[seat] + size) / capacity[seat])
            loads[chosen] += size
            seats.append(chosen)
        return np.asarray(seats)

    def earliest_end(self, tails: bool = True, limit: float = 0.0) -> Seats:
        """Place the longest groups first, each on the worker whose end then comes earliest, by mean lengths.

        This is LPT with marginal step times.

        Args:
            tails: whether an end also waits for the group's longest sample, as if it ran alone.
            limit: seconds; each group goes to the cheapest worker that ends within the limit, if there is one.
        """
        every, batches = range(len(self.workers)), np.arange(int(self._sizes.sum()) + 1)
        costs = [step_cost(batches, worker.curve, worker.slots).tolist() for worker in self.workers]
        ran = np.bincount(self._old, self._ran, len(self.workers)).astype(int).tolist()
        generation = [self._on(number, np.full(self.new, -1))[0] for number in every]
        context = [worker.curve.per_context_token for worker in self.workers]
        prefill = [worker.curve.per_prefill_token for worker in self.workers]
        alone = [float(worker.curve.base(1)) if tails else 0.0 for worker in self.workers]
        there, back = self._rtt.tolist(), (self._down * self._link).tolist()
        rate, site_of = self._link.tolist(), self._site_of.tolist()
        by_price = np.argsort(self._usd_of_token(), kind="stable").tolist()
        reading = self._sizes * (self._contexts * self._means + self._squares / 2)
        order = np.argsort(-self._means[: self.new], kind="stable")
        parts = (self._sizes, self._means, self._prompts, self._tokens, reading, self._reach)
        seats = np.zeros(self.new, dtype=np.int64)
        # plain numbers: with arrays of a few workers each, the loop takes several times as long
        for group, size, mean, prompt, tokens, read, reach in zip(
            order.tolist(), *(part[order].tolist() for part in parts), strict=True
        ):
            grown, ends = [], []
            for seat in every:
                site, had = site_of[seat], ran[seat]
                more = (costs[seat][had + int(size)] - costs[seat][had]) * mean
                grown.append(generation[seat] + more + context[seat] * read + prefill[seat] * prompt)
                slowest = max(grown[seat], back[site] + rate[site] * tokens, alone[seat] * reach)
                ends.append(there[site] + rate[site] * prompt + slowest)
            chosen = ends.index(min(ends))
            if limit:
                chosen = next((seat for seat in by_price if ends[seat] <= limit), chosen)
            site = site_of[chosen]
            generation[chosen], ran[chosen] = grown[chosen], ran[chosen] + int(size)
            there[site] += rate[site] * prompt
            back[site] += rate[site] * tokens
            seats[group] = chosen
        return seats

    def _usd_of_token(self) -> Floats:
        """Return [workers] USD per token with all slots of their sites taken."""
        capacity = np.asarray([site.capacity for site in self.sites])
        return (self._usd_per_second / capacity + self._usd_per_token)[self._site_of]
