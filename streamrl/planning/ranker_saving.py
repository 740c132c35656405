"""Simulate how much time dispatching by a ranker's forecasts saves, on batches of held-out samples.

Each batch is dispatched least-loaded, by each kind of forecast, and by the true lengths (the oracle). The possible
saving depends on the fleet, so there are three, of instances with the published step times of a 7B model on an H800:

* with slots for all requests: isolating the longest requests saves time, and the single longest one decides;
* with slots for half of a batch with four samples per group: starting long requests first also saves time;
* with slots for an eighth: starting long requests first saves nearly all of it, and one unforeseeable answer matters
  little.
"""

from __future__ import annotations

import numpy as np

from ranker.held_out import HeldOut
from ranker.segments import Array
from ranker.training_report import Captured, Dispatch
from scheduler.cost.decode import PAPER_7B_H800
from scheduler.cost.length_forecast import Forecast
from scheduler.simulation.generation_simulator import SimulatedInstance, SimulatedRequest
from scheduler.simulation.saving import Replay, Saving

GROUPS, SAMPLES = 128, 8
"""Groups of a batch, and most samples of each. A prompt is one group in each step, as the policy changes between steps
and its lengths with it."""
MIN_GROUPS = 16
"""Fewest groups that make a batch."""
BATCHES = 6
"""Most batches. One alone is mostly luck, as its longest request decides; all take some 12 s on one core."""
INSTANCES, SLOTS = 4, (256, 64, 16)
"""Instances of a fleet, and the slots of each instance, by fleet."""


def dispatch_saving(held: HeldOut, seed: int = 0) -> list[Dispatch]:
    """Simulate batches of held-out samples under each kind of forecast; [] with fewer than `MIN_GROUPS` groups.

    A kind of forecast that lacks some sample is left out.

    Args:
        held: lengths and forecasts of samples.
        seed: seed for the choice of groups and samples.
    """
    batches = _batches(held.unit, seed)
    return [_on_fleet(held, batches, slots) for slots in SLOTS] if batches else []


def _on_fleet(held: HeldOut, batches: list[Array], slots: int) -> Dispatch:
    """Simulate all batches with all forecasts on instances with `slots` slots each."""
    fleet = [SimulatedInstance(f"instance {n}", PAPER_7B_H800, slots) for n in range(INSTANCES)]
    sums: dict[str, Saving] = {}
    found: list[Saving | None] = [None] * len(batches)
    replay = Replay(fleet, longest=held.limit)
    chosen = np.concatenate(batches)
    for name, quantiles in held.forecasts.items():
        if np.isfinite(quantiles[chosen]).all():
            parts = [
                replay.saving(_requests(held, quantiles, rows), same) for rows, same in zip(batches, found, strict=True)
            ]
            found[:], sums[name] = parts, sum(parts, Saving(0.0, 0.0, 0.0))
    some = next(iter(sums.values()))
    plural = "batch" if len(batches) == 1 else "batches"
    groups = len(np.unique(held.unit[batches[0]]))
    return Dispatch(
        setting=f"{len(batches)} {plural} of {groups} groups ({len(chosen)} requests in all), {INSTANCES} instances "
        f"with {slots} slots, step times of a 7B model on an H800",
        oracle=some.oracle / some.least_loaded,
        forecasts={name: Captured(total.policy / total.least_loaded, total.captured) for name, total in sums.items()},
    )


def _batches(unit: Array, seed: int) -> list[Array]:
    """Return the rows of each batch, in random order; no group is in two batches."""
    rng = np.random.default_rng(seed)
    units = rng.permutation(np.unique(unit))
    if len(units) < MIN_GROUPS:
        return []
    count = int(np.clip(len(units) // GROUPS, 1, BATCHES))
    order = rng.permutation(len(unit))
    order = order[np.argsort(unit[order], kind="stable")]
    sizes = np.bincount(unit)
    rank = np.arange(len(unit)) - (np.cumsum(sizes) - sizes)[unit[order]]
    kept = order[rank < SAMPLES]
    return [kept[np.isin(unit[kept], units[n * GROUPS : (n + 1) * GROUPS])] for n in range(count)]


def _requests(held: HeldOut, quantiles: Array, rows: Array) -> list[SimulatedRequest]:
    """Return samples as requests with these forecasts [N, Q]."""
    return [
        SimulatedRequest(
            str(row),
            float(held.length[row]),
            str(held.unit[row]),
            forecast=Forecast.from_quantiles(held.levels, quantiles[row]),
        )
        for row in rows
    ]
