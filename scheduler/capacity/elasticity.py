"""Elasticity: after every optimizer step, decides whether a generation pool should get one instance more or less. Pure.

StreamRL's rule (arXiv 2504.15930) watches d = T_gen - T_train, the seconds per step in which generation and the trainer
work, and adds a data-parallel unit once d exceeds the time that the unit is predicted to save. Here it works in both
directions, with a margin:

    add      saving = T_gen - T_gen(one more);  d > saving + margin T_gen  and  saving >= min_saving T_gen
    remove   loss = T_gen(one fewer) - T_gen;   -d > loss + margin T_train

The paper's rule alone keeps adding instances that save nothing: where one long answer determines T_gen, every saving is
0 and d exceeds it. So a saving must also be large enough to matter.

Which pool: of those that may grow and save enough, the one that saves most seconds per USD/h (free ones first, by their
saving); of those that can do with one fewer, the one that costs most USD/h, then the one that loses least time; then by
name. An addition waits for d to exceed the saving of that pool; it does not turn to a dearer one that saves less.

Why it does not flap: an addition under the rule leaves d' = d - saving > margin T_gen > 0, and removal needs
d' < 0. A removal under the rule leaves d' = d + loss < -margin T_train < 0, and addition needs d' > 0. Between the
d at which an instance is added and the d at which it is removed again lies loss + margin (T_gen + T_train): noise or a
wrong prediction may be off by that much. In a large fleet that is little, one instance being a small part of it, so
there are three more brakes: a condition must hold in `patience` steps in a row for the same pool; in the direction
opposite to the last change, in `UNDO` times as many; and steps are ignored while a change is in progress and in the
`settle` steps after it, which mix both sizes and warm up caches.

    elasticity = Elasticity({"east/regular": PoolLimits(1, 4, usd_per_hour=2.5)})
    change = elasticity.step_done(41.0, 18.2, {"east/regular": 2}, predict)     # after every step
    ...
    elasticity.changed({"east/regular": 3})                                     # or failed(), if it could not be done

There is no clock and no deadline here: after requesting a change, it waits until `changed` or `failed` is called.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from scheduler.dispatch.policy import DispatchPolicy
from scheduler.simulation.generation_simulator import SimulatedInstance, SimulatedRequest, simulate

UNDO = 3
"""Multiple of `patience` that it takes to go against the last change, whatever caused it. With 10 % of noise on both
times, fleets of 8 to 16 reverse up to 20 times in 500 steps without this, and at most once with it.
"""
REST_AFTER_FAILURE = 20
"""Measured steps for which a pool is left alone after its change has failed (no device is free), so that others get a
turn.
"""

Predict = Callable[[Mapping[str, int]], float]
"""Returns the seconds of generation with so many instances of each pool, for lengths like the recent ones."""


@dataclass(frozen=True)
class PoolLimits:
    """Bounds on the number of a pool's instances."""

    lowest: int
    highest: int
    usd_per_hour: float = 0.0
    """Price of one instance."""

    def __post_init__(self) -> None:
        if not 0 <= self.lowest <= self.highest or self.highest < 1:
            raise ValueError(
                f"a pool's limits must be 0 <= lowest <= highest, and highest 1 or more, got {self.lowest} and "
                f"{self.highest}"
            )
        if not 0 <= self.usd_per_hour < math.inf:
            raise ValueError(f"an instance's price must be 0 or more USD/h, got {self.usd_per_hour}")


@dataclass(frozen=True)
class Change:
    """A requested change of one pool."""

    pool: str
    before: int
    """Number of instances before the change."""
    after: int
    why: str
    """Reason, one sentence with figures."""


@dataclass(frozen=True)
class _Candidate:
    """One instance more or fewer in a pool."""

    pool: str
    seconds: float
    """Seconds of generation per step that it saves or loses."""
    price: float
    """USD/h."""
    holds: bool
    """Whether the rule allows it in this step."""

    @property
    def saved_per_price(self) -> float:
        """Seconds saved per USD/h; infinite for free instances."""
        return self.seconds / self.price if self.price > 0 else math.inf


class Elasticity:
    """Watches step times and requests changes of pools, one at a time."""

    def __init__(
        self,
        limits: Mapping[str, PoolLimits],
        patience: int = 2,
        settle: int = 1,
        margin: float = 0.05,
        min_saving: float = 0.05,
    ) -> None:
        """Create a watcher that has seen no step.

        Args:
            limits: limits by pool; other pools stay as they are.
            patience: steps in a row in which the rule must give the same result.
            settle: steps that are ignored after a change has taken effect; the one in which it did is the first.
            margin: share of T_gen (of T_train, to remove) by which d must exceed the prediction.
            min_saving: share of T_gen that an addition must save; 0 is the paper's rule. Of n identical instances, one
                more saves at most 1 / (n + 1), so large fleets need a smaller value to grow.

        Raises:
            ValueError: there are no pools, or a value is outside of its range.
        """
        if not limits:
            raise ValueError("elasticity needs the limits of at least one pool")
        if patience < 1 or settle < 0:
            raise ValueError(f"patience must be 1 or more steps and settle 0 or more, got {patience} and {settle}")
        if not (0 <= margin < 1 and 0 <= min_saving < 1):
            raise ValueError(f"margin and min_saving must be shares within [0, 1), got {margin} and {min_saving}")
        self.limits = dict(limits)
        self.patience, self.settle, self.margin, self.min_saving = patience, settle, margin, min_saving
        self.waiting: Change | None = None
        """Requested change that has not taken effect."""
        self.note = "no step has been measured"
        """Last decision, or what is being watched, for users."""
        self._replicas: dict[str, int] | None = None
        self._settling = 0
        self._last = 0
        """Direction of the last change: 1 more, -1 fewer, 0 none yet."""
        self._streaks: dict[tuple[int, str], int] = {}
        """(direction, pool) -> steps in a row in which the rule has allowed it."""
        self._resting: dict[str, int] = {}
        """Pool whose change has failed -> steps for which it is left alone."""

    def step_done(
        self, generation_s: float, training_s: float, replicas: Mapping[str, int], predict: Predict
    ) -> Change | None:
        """Process a step's times and return the change to make now, or None.

        A step in which one of the times is 0 was not measured: it is ignored, and neither interrupts patience nor
        counts for it. Numbers of instances that differ from the last ones, while no change is requested, count as
        `changed`.

        Args:
            generation_s: T_gen, seconds of the step in which generation worked.
            training_s: T_train, seconds of the step in which the trainer worked.
            replicas: instances of every pool, including those without limits.
            predict: predicts generation times. Only its ratios to `predict(replicas)` count, so it may be off by a
                factor. It is called for one instance more or fewer at a time, never for none at all, and only if d
                leaves a change possible.

        Raises:
            ValueError: a time is negative or not finite, a pool with limits has no number, or `predict` does not return
                a positive finite number.
        """
        if not (0 <= generation_s < math.inf and 0 <= training_s < math.inf):
            raise ValueError(f"a step's times must be 0 s or more, got {generation_s} and {training_s}")
        self._check(replicas)
        if self.waiting is not None:
            return None
        if self._replicas is None:
            self._replicas = dict(replicas)
        elif self._replicas != dict(replicas):
            self.changed(replicas)
        if not generation_s or not training_s:
            return None
        self._resting = {pool: left - 1 for pool, left in self._resting.items() if left > 1}
        if self._settling:
            self._settling -= 1
            return None
        times = f"generation {in_seconds(generation_s)}, training {in_seconds(training_s)}"
        best, direction = self._best(generation_s, training_s, replicas, predict)
        if best is None:
            self.note = f"{times}: no change of a pool is worth it"
            return None
        pool, amount = best.pool, in_seconds(best.seconds)
        price = f" {best.price:.2f} USD/h" if best.price > 0 else ""
        if direction > 0:
            why = f"{times}: one more instance of {pool} is predicted to save {amount}" + (price and f" for{price}")
        else:
            why = f"{times}: one instance fewer of {pool} is predicted to cost {amount}, which training covers"
            why += price and f", and saves{price}"
        needed = self.patience * (UNDO if direction == -self._last else 1)
        held = self._streaks.get((direction, pool), 0)
        if held < needed:
            self.note = f"{why}; that has held in {held} of {needed} steps"
            return None
        self.waiting = Change(pool, replicas[pool], replicas[pool] + direction, why)
        self.note = why
        return self.waiting

    def changed(self, replicas: Mapping[str, int]) -> None:
        """Record the current numbers of instances, after the requested change or any other one.

        Patience and settling start again. The requested change stays pending if its pool has not changed.

        Raises:
            ValueError: a pool with limits has no number.
        """
        self._check(replicas)
        known = self._replicas or replicas
        more = sum(replicas.values()) - sum(known.values())
        if more:
            self._last = 1 if more > 0 else -1
        self._replicas = dict(replicas)
        self._restart()
        if self.waiting is not None and replicas[self.waiting.pool] != self.waiting.before:
            self.waiting = None
        if self.waiting is None:
            self.note = "now " + ", ".join(f"{pool} {count}" for pool, count in replicas.items())

    def failed(self) -> None:
        """Record that the requested change will not take effect; does nothing if there is none.

        The pool is left alone for `REST_AFTER_FAILURE` steps; patience and settling start again.
        """
        if self.waiting is None:
            return
        change, self.waiting = self.waiting, None
        self._resting[change.pool] = REST_AFTER_FAILURE
        self._restart()
        self.note = f"{change.pool} could not be changed from {change.before} to {change.after} instances"

    def leave_out(self, pool: str) -> None:
        """Leave a pool as it is from now on; a requested change of it has failed."""
        self.limits.pop(pool, None)
        if self._replicas:
            self._replicas = {name: count for name, count in self._replicas.items() if name != pool}
        if self.waiting is not None and self.waiting.pool == pool:
            self.failed()

    def _restart(self) -> None:
        self._settling = self.settle
        self._streaks.clear()

    def _check(self, replicas: Mapping[str, int]) -> None:
        if missing := sorted(set(self.limits) - set(replicas)):
            raise ValueError(f"the number of instances is not given for {', '.join(missing)}")

    def _best(
        self, generation_s: float, training_s: float, replicas: Mapping[str, int], predict: Predict
    ) -> tuple[_Candidate | None, int]:
        """Return the pool to change, if its condition holds, and the direction; count how long all conditions have
        held."""
        d = generation_s - training_s
        candidates: list[_Candidate] = []
        # nothing is simulated where no prediction could make the rule hold
        if d > (self.min_saving + self.margin) * generation_s:
            direction = 1
            for pool, seconds in self._effects(direction, generation_s, replicas, predict).items():
                if seconds >= self.min_saving * generation_s:
                    holds = d > seconds + self.margin * generation_s
                    candidates.append(_Candidate(pool, seconds, self.limits[pool].usd_per_hour, holds))
            candidates.sort(key=lambda c: (-c.saved_per_price, -c.seconds, c.pool))
        elif -d > self.margin * training_s:
            direction = -1
            for pool, seconds in self._effects(direction, generation_s, replicas, predict).items():
                # a simulation may find fewer instances faster, by how requests happen to be placed: no loss, no gain
                loss = max(0.0, seconds)
                if -d > loss + self.margin * training_s:
                    candidates.append(_Candidate(pool, loss, self.limits[pool].usd_per_hour, True))
            candidates.sort(key=lambda c: (-c.price, c.seconds, c.pool))
        else:
            direction = 0
        keys = [(direction, c.pool) for c in candidates if c.holds]
        self._streaks = {key: self._streaks.get(key, 0) + 1 for key in keys}
        return (candidates[0] if candidates and candidates[0].holds else None), direction

    def _effects(
        self, direction: int, generation_s: float, replicas: Mapping[str, int], predict: Predict
    ) -> dict[str, float]:
        """Return the seconds of generation that one instance more saves (one fewer costs), by pool that has room for
        it."""
        possible = []
        for pool, limits in self.limits.items():
            room = limits.highest - replicas[pool] if direction > 0 else replicas[pool] - limits.lowest
            if room > 0 and pool not in self._resting and sum(replicas.values()) + direction > 0:
                possible.append(pool)
        if not possible:
            return {}
        now = _positive(predict(dict(replicas)), replicas)
        effects = {}
        for pool in possible:
            then = {**replicas, pool: replicas[pool] + direction}
            effects[pool] = direction * generation_s * (1 - _positive(predict(then), then) / now)
        return effects


def fleet_of(kinds: Mapping[str, SimulatedInstance], replicas: Mapping[str, int]) -> list[SimulatedInstance]:
    """Create a fleet with so many instances of each pool, each with its own name.

    Args:
        kinds: a template of the instances (slots, step times) of each pool.
        replicas: number of instances by pool.

    Raises:
        ValueError: a pool is unknown, or its number is negative.
    """
    if unknown := sorted(set(replicas) - set(kinds)):
        raise ValueError(f"nothing is known of instances of {', '.join(unknown)}")
    if min(replicas.values(), default=0) < 0:
        raise ValueError(f"numbers of instances must not be negative, got {dict(replicas)}")
    return [replace(kinds[pool], name=f"{pool}-{n}") for pool, count in replicas.items() for n in range(count)]


def generation_time(
    groups: Sequence[tuple[int, Sequence[int]]],
    instances: Sequence[SimulatedInstance],
    make_policy: Callable[[], DispatchPolicy],
) -> float:
    """Return the seconds in which these instances generate these groups, from all idle to the last sample's end.

    0 without groups. Simulated: the policy gets no forecasts, and links between sites cost nothing.

    Args:
        groups: (prompt tokens, output lengths of all its samples) of each group.
        instances: instances that generate.
        make_policy: creates a new dispatch policy.

    Raises:
        ValueError: there are no instances.
    """
    requests = [
        SimulatedRequest(f"{number}.{sample}", float(max(1, length)), f"{number}", prompt)
        for number, (prompt, lengths) in enumerate(groups)
        for sample, length in enumerate(lengths)
    ]
    return simulate(make_policy(), requests, instances).makespan


def _positive(seconds: float, replicas: Mapping[str, int]) -> float:
    if not 0 < seconds < math.inf:
        raise ValueError(f"generation is predicted to take {seconds} s with {dict(replicas)}")
    return seconds


def in_seconds(value: float) -> str:
    """Return seconds as people read them: one decimal place, or two significant digits below one second."""
    return f"{value:.1f} s" if value >= 1 else f"{value:.2g} s"
