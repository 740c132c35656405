"""Allocation of GPUs to training and generation: StreamRL's two algorithms (arXiv 2504.15930) as one search.

The paper splits n GPUs of one site so that max(T_gen(x), T_train(y)) is least, and between two sites shrinks the faster
stage to match the slower. Both are one question here: *what is the cheapest set of GPUs whose stages both end by t?* It
is answered for GPUs of several types in several sites (`Offer`):

* one offer trains, with the fewest GPUs that end by t (`training_cost.trainer_times`);
* of the remaining GPUs, any offers generate: a replica of kind k generates a share c_k(t) of the batch
  (`generation_cost.py`), and the shares must add up to 1. Integers are found by branch and bound; the bound is the
  price of the rest at the best price per share. After `covering.MOST_NODES` nodes the best so far is taken;
* a remote site takes part only if new weights and its share of the samples get over its link within t. Traffic that
  costs money is part of the price.

More time never needs more GPUs. So for throughput, the least t that fits counts and budget is found by bisection, and
whatever the set at that t does not use is *released*. For cost, t runs over a grid with steps of `COARSE`, refined to
`FINE` around the best: a set for t costs no more than one for any smaller t, so no plan is cheaper by more than a
coarse step. Under synchronous schedules the times of the stages add up, and under `stream` in part: for every number of
trainer GPUs (if many, a geometric selection of `SYNC_SIZES`, then all around the best) the best generation beside it is
found. Their steps wait for new weights as well, so it is sought again without the offers whose weights come last.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import Literal

import numpy as np

from scheduler.capacity.covering import LONGEST_STEP_S, Choice, Cover, Replicas, generation_seconds, least_time
from scheduler.capacity.problem import Offer, Problem, Route
from scheduler.cost.decode import Floats
from scheduler.cost.generation_cost import (
    Batch,
    ReplicaKind,
    most_requests,
    replica_degrees,
    replica_kind,
    requests_of_share,
    share_ends,
)
from scheduler.cost.training_cost import TrainerTime, trainer_times
from scheduler.schedule.schedules import KINDS

PlanObjective = Literal["throughput", "cost"]

COARSE, FINE = 1.03, 1.002
"""Ratios of neighbouring step times in the search for the cheapest plan."""
SYNC_SIZES, SYNC_KEPT = 32, 64
"""Number of trainer sizes that a synchronous schedule tries, and number of splits of each trainer that are
evaluated."""
NEAR = 0.001
"""Share of the training's seconds by which weights of two offers may come apart and count as coming together."""
SLOWER = tuple(1.15**k for k in range(40))
"""Generation times that a synchronous schedule tries for the cheapest plan, as multiples of the shortest one."""
CLEAR = 1e-11
"""Share of a batch by which replicas generate clearly enough, or too little: more than sums are rounded."""
ROWS_GAIN = 0.01
"""Share by which GPUs that share rows of tokens must be faster: that layout has not run on GPUs."""


@dataclass(frozen=True)
class Split:
    """Assignment of GPUs to training and generation."""

    trainer: int
    """Index of the offer that trains."""
    time: TrainerTime
    generation: tuple[Replicas, ...]

    @property
    def key(self) -> tuple[object, ...]:
        """Key that is equal for the same split."""
        pools = tuple((one.offer, one.count, one.kind.tensor_parallel) for one in self.generation)
        return self.trainer, self.time.gpus, pools

    @property
    def used(self) -> dict[int, int]:
        """GPUs of each offer that train or generate."""
        used = {self.trainer: self.time.gpus}
        for one in self.generation:
            used[one.offer] = used.get(one.offer, 0) + one.gpus
        return used

    def rent(self, offers: Sequence[Offer]) -> float:
        """Return the USD per hour of all GPUs that are used."""
        return sum(offers[number].rent(gpus) for number, gpus in self.used.items())

    def price(self, offers: Sequence[Offer], number: int) -> float:
        """Return the USD per hour of each GPU of an offer that is used, on average."""
        offer = offers[number]
        return offer.rent(self.used[number]) / self.used[number] if offer.tiers else offer.usd_per_hour


@dataclass(frozen=True)
class _Reached:
    """Offer that can generate beside a trainer."""

    offer: int
    site: str
    route: Route | None
    """Link from the trainer's site; None: it is the same site."""
    transfer_s: float
    """Seconds of new weights to all its GPUs."""
    weights_s: float
    """Seconds of new weights over the link."""
    kinds: tuple[tuple[ReplicaKind, float, int], ...]
    """(kind, USD per hour of a replica's GPUs, most replicas)."""


class Allocator:
    """Answers the module's question for one problem, and searches for splits."""

    def __init__(self, problem: Problem, schedule: str = "async") -> None:
        self.problem, self.schedule = problem, schedule
        self.steady = KINDS[schedule].continuous
        self.trainers = trainers_of(problem)
        """Times of each offer that holds the trainer, by GPUs."""
        self.kinds = kinds_of(problem)
        """Replicas that each offer holds."""
        self._reached: dict[tuple[int, int, int], list[_Reached]] = {}
        """Offers that can generate beside a trainer, by its offer, GPUs and nodes: kept for all step times."""

    def generation_s(self, generation: Sequence[Replicas]) -> float:
        """Return the seconds in which these replicas generate a batch under the schedule."""
        return generation_seconds(generation, self.steady)

    def smallest(self, trainer: int, deadline: float) -> TrainerTime | None:
        """Return the trainer with the fewest GPUs of an offer that ends by a deadline."""
        times = self.trainers[trainer]
        place = bisect_left(times, -deadline, key=lambda one: -math.inf if one is None else -one.seconds)
        return times[place] if place < len(times) else None

    def cover(
        self, trainer: int, time: TrainerTime, deadline: float, transfer_s: float | None = None
    ) -> tuple[float, tuple[Replicas, ...]] | None:
        """Return the cheapest generation beside a trainer: USD per hour with traffic, and the replicas.

        Args:
            trainer: index of the offer that trains.
            time: the trainer.
            deadline: seconds in which the batch is generated.
            transfer_s: seconds within which new weights come to every replica; None: over the links by the deadline.
        """
        return self._to_cover(trainer, time, deadline, transfer_s).solve()

    def possible(self, trainer: int, deadline: float) -> bool:
        """Return whether the stages can both end by a deadline, whatever it costs."""
        time = self.smallest(trainer, deadline)
        return time is not None and self._to_cover(trainer, time, deadline).enough

    def _to_cover(self, trainer: int, time: TrainerTime, deadline: float, transfer_s: float | None = None) -> Cover:
        problem = self.problem
        sites: list[str] = []
        fixed: list[float] = []
        room: list[float] = []
        choices: list[Choice] = []
        for one in self._beside_trainer(trainer, time):
            route = one.route
            between = deadline * problem.sync_every  # versions
            if transfer_s is not None and one.transfer_s > transfer_s:
                continue
            if transfer_s is None and one.weights_s > between:
                continue
            usd_per_byte = 0.0 if route is None else route.usd_per_gb / 1e9 * 3600 / deadline
            if one.site not in sites:
                sites.append(one.site)
                fixed.append(usd_per_byte * problem.sent_bytes / problem.sync_every)
                room.append(_room(one, deadline, problem.sample_bytes))
            traffic = usd_per_byte * problem.sample_bytes
            useful = []
            for kind, rent, most in one.kinds:
                share = kind.share(deadline, self.steady)
                if share > 0:
                    useful.append((kind, share, rent + traffic * min(share, 1.0), most))
            if useful:
                useful.sort(key=lambda one: (one[2] / one[1], one[0].tensor_parallel))
                choices.append(Choice(one.offer, sites.index(one.site), tuple(useful)))
        choices.sort(key=lambda one: (one.ratio, one.offer))
        return Cover(choices, fixed, room)

    def _beside_trainer(self, trainer: int, time: TrainerTime) -> list[_Reached]:
        """Return what is the same at any deadline of the offers that can generate beside a trainer."""
        key = trainer, time.gpus, time.nodes
        if (found := self._reached.get(key)) is not None:
            return found
        problem, home = self.problem, self.problem.offers[trainer].site
        found = self._reached[key] = []
        for number, kinds in self.kinds.items():
            offer = problem.offers[number]
            beside = time if number == trainer else None
            route = None if offer.site == home else problem.route(home, offer.site)
            if offer.site != home and route is None:
                continue
            weights_s = 0.0 if route is None else route.weight_seconds(problem.sent_bytes)
            price = _price_beside(offer, beside)
            each = ((kind, most_replicas(offer, kind.tensor_parallel, beside)) for kind in kinds)
            held = tuple((kind, kind.tensor_parallel * price, most) for kind, most in each if most > 0)
            found.append(_Reached(number, offer.site, route, problem.transfer_s(number, home), weights_s, held))
        return found

    def split(self, trainer: int, deadline: float) -> tuple[float, Split] | None:
        """Return the cheapest split with this trainer whose stages both end by a deadline: (USD per hour, split)."""
        time = self.smallest(trainer, deadline)
        if time is None:
            return None
        covered = self.cover(trainer, time, deadline)
        if covered is None:
            return None
        split = Split(trainer, time, covered[1])
        rent = self._with_trainer(covered[0], split)
        return (rent, split) if rent <= self.problem.budget else None

    def _with_trainer(self, usd: float, split: Split) -> float:
        """Return the USD per hour of a split whose generation was covered for so many.

        A cover counts the GPUs of an offer at the mean price of all that the trainer leaves; used are the cheapest.
        """
        offers, trainer = self.problem.offers, split.trainer
        usd += offers[trainer].rent(split.time.gpus)
        for one in split.generation:
            offer = offers[one.offer]
            if offer.tiers:
                beside = split.time if one.offer == trainer else None
                before = 0 if beside is None else beside.gpus
                usd += offer.rent(before + one.gpus) - offer.rent(before) - one.gpus * _price_beside(offer, beside)
        return usd

    def fastest(self, trainer: int) -> float:
        """Return the seconds of the shortest step with this trainer; infinite: it is not possible."""
        if math.isinf(self.problem.budget):
            return least_time(lambda t: self.possible(trainer, t))
        return least_time(lambda t: self.split(trainer, t) is not None)

    def candidates(self, objective: PlanObjective) -> Iterator[Split]:
        """Yield splits of which one is the best; several for each trainer."""
        for trainer in self.trainers:
            if not KINDS[self.schedule].overlaps:
                yield from self._following(trainer, objective)
            if not KINDS[self.schedule].whole_batches or KINDS[self.schedule].overlaps:
                yield from self._overlapping(trainer, objective)

    def _overlapping(self, trainer: int, objective: PlanObjective) -> Iterator[Split]:
        least = self.fastest(trainer)
        if not math.isfinite(least):
            return
        estimates: list[tuple[float, float]] = []

        def at(deadline: float) -> Iterator[Split]:
            found = self.split(trainer, deadline)
            if found is not None:
                estimates.append((found[0] * deadline, deadline))
                yield found[1]

        yield from at(least)
        for slower in (1.1, 1.25, 1.5, 2.0):
            yield from at(least * slower)
        if objective == "cost":
            trainer_s = max(one.seconds for one in self.trainers[trainer] if one is not None)
            slowest = max(least * 4, trainer_s * 1.5, self._one_replica() * 1.1)
            for deadline in _grid(least, min(slowest, least * 1e4), COARSE):
                yield from at(deadline)
            for _, best in sorted(estimates)[:2]:
                for deadline in _grid(max(least, best / COARSE), best * COARSE, FINE):
                    yield from at(deadline)

    def _one_replica(self) -> float:
        """Return the seconds in which the slowest kind of replica generates a batch alone."""
        alone = [Replicas(n, 1, kind) for n, kinds in self.kinds.items() for kind in kinds]
        return max((self.generation_s([one]) for one in alone), default=0.0)

    def _following(self, trainer: int, objective: PlanObjective) -> Iterator[Split]:
        """Yield splits for stages of which the second waits for (parts of) the first: all trainer sizes, or a selection
        and then those around the best one."""
        times = [one for one in self.trainers[trainer] if one is not None]
        sizes = [time for _, time in sorted({one.gpus: one for one in times}.items())]
        tried: dict[int, list[tuple[float, Split]]] = {}

        def attempt(places: Iterable[int]) -> None:
            for place in places:
                if place not in tried:
                    tried[place] = list(self._beside(trainer, sizes[place], objective))

        def merit(place: int) -> float:
            return min((worth for worth, _ in tried[place]), default=math.inf)

        coarse = np.unique(np.geomspace(1, len(sizes), SYNC_SIZES).round().astype(int) - 1).tolist()
        attempt(coarse if len(sizes) > SYNC_SIZES else range(len(sizes)))
        best = min(tried, key=merit)
        around = sorted(tried).index(best)
        reach = sorted(tried)[max(0, around - 1) : around + 2]
        attempt(range(reach[0], reach[-1] + 1))
        found = sorted((one for some in tried.values() for one in some), key=lambda one: one[0])
        yield from list({split.key: split for _, split in found}.values())[:SYNC_KEPT]

    def _beside(self, trainer: int, time: TrainerTime, objective: PlanObjective) -> Iterator[tuple[float, Split]]:
        """Yield the fastest generation beside a trainer, and for `cost` slower ones, by how late weights may come.

        Each with what is to be small: the seconds of a step, or for `cost` its price, USD per hour times these seconds.
        """
        problem = self.problem
        home = problem.offers[trainer].site
        waits = self._waits(home, NEAR * time.seconds * problem.sync_every)
        if not waits:
            return
        shortest = self._affordable_s(trainer, time, waits[-1])
        tried: set[tuple[object, ...]] = set()
        for place, wait in enumerate(waits):
            least = shortest if wait == waits[-1] else self._affordable_s(trainer, time, wait)
            if not math.isfinite(least):
                continue
            for slower in SLOWER if objective == "cost" else (1.0,):
                found = self.cover(trainer, time, least * slower, wait)
                if found is None:
                    continue
                split = Split(trainer, time, found[1])
                weights_s = max(problem.transfer_s(one.offer, home) for one in found[1])
                if split.key in tried or (place and weights_s <= waits[place - 1]):
                    continue  # one as good was found at a shorter time, or without the offers that this set adds
                tried.add(split.key)
                seconds = following_seconds(self.schedule, split, least * slower, problem.batch)
                seconds += weights_s / problem.sync_every
                price = self._with_trainer(found[0], split)
                yield price * seconds if objective == "cost" else seconds, split
            # offers whose weights come later save no more of generation than it still takes beyond the shortest
            later = waits[min(place + 1, len(waits) - 1)] - wait
            if objective == "throughput" and least - shortest <= later / problem.sync_every:
                return

    def _waits(self, home: str, near: float) -> list[float]:
        """Return the seconds in which new weights come to offers that generate, each for those that are near it."""
        every = sorted({self.problem.transfer_s(number, home) for number in self.kinds})
        every = [one for one in every if one < LONGEST_STEP_S * self.problem.sync_every]
        return [one for one, after in zip(every, [*every[1:], math.inf], strict=False) if after - one > near]

    def _affordable_s(self, trainer: int, time: TrainerTime, wait: float) -> float:
        """Return the least seconds of generation beside a trainer that the budget pays; infinite: there are none."""

        def affordable(t: float) -> bool:
            if math.isinf(self.problem.budget) and (enough := self._enough(trainer, time, t, wait)) is not None:
                return enough
            found = self.cover(trainer, time, t, wait)
            if found is None:
                return False
            return self._with_trainer(found[0], Split(trainer, time, found[1])) <= self.problem.budget

        return least_time(affordable)

    def _enough(self, trainer: int, time: TrainerTime, deadline: float, wait: float) -> bool | None:
        """Return whether all replicas beside a trainer generate a batch by a deadline, whatever they cost.

        None: it is too close for this sum of shares, or a link limits how many replicas of a site are of use.
        """
        total = 0.0
        for one in self._beside_trainer(trainer, time):
            if one.transfer_s <= wait:
                if _room(one, deadline, self.problem.sample_bytes) < 1 + CLEAR:
                    return None
                total += max((kind.share(deadline, self.steady) * most for kind, _, most in one.kinds), default=0.0)
        return None if abs(total - 1) <= CLEAR else total > 1


def _room(reached: _Reached, deadline: float, sample_bytes: float) -> float:
    """Return the largest share of a batch that gets over the link of an offer by a deadline."""
    if reached.route is None or not sample_bytes:
        return math.inf
    return deadline * reached.route.bytes_per_s / sample_bytes


def kinds_of(problem: Problem) -> dict[int, list[ReplicaKind]]:
    """Return the replicas that each offer holds, of each degree of tensor parallelism; [] if it holds none."""
    kinds = {}
    for number, offer in enumerate(problem.offers):
        if offer.generates:
            fits = (
                replica_kind(problem.model, offer.device, tp, problem.batch, offer.max_batch)
                for tp in replica_degrees(problem.model, offer.device)
                if tp <= offer.count
            )
            kinds[number] = [kind for kind in fits if kind is not None]
    return kinds


def trainers_of(problem: Problem) -> dict[int, tuple[TrainerTime | None, ...]]:
    """Return the trainer's times on at most so many GPUs of each offer that holds it.

    GPUs share rows of tokens where no offer holds the trainer otherwise. With `Problem.shares_rows` they also do so
    where that is faster by more than `ROWS_GAIN`, or fewer of them hold it.
    """
    step = problem.batch.step_tokens(problem.model)
    found: list[dict[int, tuple[TrainerTime | None, ...]]] = []
    for by_rows in (False, True):
        times = {
            number: trainer_times(problem.model, problem.work, offer.device, offer.count, step, by_rows)
            for number, offer in enumerate(problem.offers)
            if offer.trains
        }
        found.append({number: some for number, some in times.items() if some[-1] is not None})
        if found[-1] and not problem.shares_rows:
            break
    by_layers, by_rows_too = found[0], found[-1]
    if not problem.shares_rows or not by_layers:
        return by_rows_too
    return {
        number: _faster(by_layers.get(number, ()), by_rows_too.get(number, ()))
        for number in sorted({*by_layers, *by_rows_too})
    }


def _faster(layers: Sequence[TrainerTime | None], rows: Sequence[TrainerTime | None]) -> tuple[TrainerTime | None, ...]:
    """Return the faster of both by number of GPUs; those that share rows must be so by more than `ROWS_GAIN`."""
    times: list[TrainerTime | None] = []
    for one, other in zip_longest(layers, rows):
        best = times[-1] if times else None
        for time, least in ((one, 0.0), (other, ROWS_GAIN)):
            if time is not None and (best is None or time.seconds < best.seconds * (1 - least)):
                best = time
        times.append(best)
    return tuple(times)


def _price_beside(offer: Offer, trainer: TrainerTime | None) -> float:
    """Return the mean price of the GPUs that a trainer leaves of an offer; None: it takes none of them."""
    if not offer.tiers or trainer is None or trainer.gpus >= offer.count:
        return offer.usd_per_hour
    return (offer.rent(offer.count) - offer.rent(trainer.gpus)) / (offer.count - trainer.gpus)


def most_replicas(offer: Offer, tensor_parallel: int, trainer: TrainerTime | None = None) -> int:
    """Return how many replicas of so many GPUs, each inside a machine, the GPUs of an offer can be.

    Args:
        offer: GPUs, on as few machines as hold them.
        tensor_parallel: GPUs of a replica.
        trainer: one that takes GPUs of these machines, as many of each of its nodes; None: there is none.
    """
    each, machines = int(offer.device.per_machine), math.ceil(offer.count / offer.device.per_machine)
    gpus, nodes = (trainer.gpus, trainer.nodes) if trainer is not None else (0, 0)
    beside = nodes * ((each - gpus // nodes) // tensor_parallel) if nodes else 0
    return min((offer.count - gpus) // tensor_parallel, beside + (machines - nodes) * (each // tensor_parallel))


def following_seconds(schedule: str, split: Split, makespan_s: float, batch: Batch) -> float:
    """Return the seconds of generation and training of a step under a schedule that does not overlap steps.

    Args:
        schedule: whether training waits for whole batches.
        split: replicas that generate the batch, and the trainer.
        makespan_s: seconds in which they generate it.
        batch: the batch.
    """
    generation, training_s = split.generation, split.time.seconds
    if KINDS[schedule].whole_batches:
        return makespan_s + training_s
    main = max(generation, key=lambda one: one.count * one.kind.share(makespan_s, False))
    # the ends are scaled to the makespan: so many that the first one comes early, as training begins with it
    share = min(main.kind.share(makespan_s, False), 10 * most_requests(main.kind.slots) / batch.samples)
    whole, after, ends = _ends_of_share(main.kind, batch, max(1, round(min(share, 1.0) * batch.samples)))
    # one rank processes a sample, and each length stands for several samples
    each = batch.samples / len(whole)
    alone = whole * split.time.busy_ranks(whole.sum() * each, whole.max()) / each
    behind = split.time.after_batch
    streamed = (1 - behind) * training_s * np.maximum(after, alone) / whole.sum()
    rest = behind * training_s * max(1.0, alone.max() / whole.sum())
    return float((ends / ends.max() * makespan_s + streamed).max() + rest)


@lru_cache(maxsize=32)
def _ends_of_share(kind: ReplicaKind, batch: Batch, count: int) -> tuple[Floats, Floats, Floats]:
    """Return a replica's share of a batch by when its requests end: their tokens, those left from each on, the ends.

    Kept, as a search asks for the same share beside many trainers, and again when it evaluates the splits.
    """
    lengths = requests_of_share(batch, count / batch.samples)
    ends = share_ends(kind.curve, kind.slots, batch, lengths)
    order = np.argsort(ends, kind="stable")
    whole = lengths[order] + batch.prompt_tokens
    return whole, np.cumsum(whole[::-1])[::-1], ends[order]


def _grid(low: float, high: float, ratio: float) -> Iterator[float]:
    """Return a geometric grid, both ends included."""
    count = max(1, math.ceil(math.log(high / low) / math.log(ratio)))
    return (low * (high / low) ** (k / count) for k in range(count + 1))
