"""Simulated steps of a split under `async`: with tails, staleness and what is in flight. Pure, and deterministic.

Rates alone would say that nobody ever waits. What they leave out is in the discrete events of a whole run
(`simulation.pipeline`), which the schedule's own rules drive: groups are issued as far as the staleness allows, a step
takes complete groups, one that is due may not be overtaken, a group is complete with its last sample, and requests
share slots and step times. So this runs the chosen replicas for a number of steps and takes the mean of `MEASURED`.

Large batches are thinned: each simulated request stands for `m` of them, on instances with 1/m of the slots, whose step
of b requests takes as long as one of m b.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from scheduler.capacity.covering import Replicas
from scheduler.cost.decode import StepCurve
from scheduler.cost.generation_cost import Batch, answers_of
from scheduler.cost.training_cost import TrainerTime
from scheduler.dispatch.registry import make_policy
from scheduler.schedule.schedules import make_schedule
from scheduler.simulation.generation_simulator import SimulatedInstance, SimulatedRequest
from scheduler.simulation.pipeline import Pipeline
from scheduler.simulation.stages import SimulatedLink, Stages

REQUESTS, GROUPS = 160, 32
"""Fewest simulated requests and groups of a batch. On the paper's 7B cluster, steps with 128 to 1,024 of them differ by
up to 5 %.
"""
SLOTS = 8
"""Fewest simulated slots of an instance, which then differ by at most 1 in 16 from its own."""
MOST_REQUESTS = 2048
"""Simulated requests of a batch beyond which instances have fewer slots than that: a plan should take seconds."""
MEASURED = 4
"""Steps whose mean is taken. Before them are those that fill the pipeline: all groups that the staleness allows are
issued at once at first. After them are as many as its groups may be ahead, so that the last ones have followers."""


@dataclass(frozen=True)
class SteadyStep:
    """Mean step of a run under `async`."""

    seconds: float
    generation_bubble: float
    """Share of the replicas' time in which they have nothing to do."""
    staleness: float
    """Mean steps between a group's policy version at issue and the weights that train on it."""


def steady_step(
    generation: Sequence[Replicas],
    batch: Batch,
    trainer: TrainerTime,
    weights_s: float,
    load_s: float = 0.0,
    sync_every: int = 1,
) -> SteadyStep:
    """Simulate steps.

    Args:
        generation: replicas that generate.
        batch: samples of a step.
        trainer: the trainer that processes it.
        weights_s: seconds until new weights have reached all replicas.
        load_s: seconds for which replicas then pause to load them.
        sync_every: steps between versions of the weights.
    """
    group = min(batch.group, batch.samples)
    most = batch.samples // max(REQUESTS, GROUPS * group)
    by_slots = min(pool.kind.slots for pool in generation) // SLOTS
    merged = max(1, min(most, max(by_slots, batch.samples // MOST_REQUESTS)))
    groups = max(1, batch.samples // merged // group)
    curves = [_thinned(pool.kind.curve, merged) for pool in generation]
    fleet = [
        SimulatedInstance(f"{number}.{k}", curves[number], max(1, round(pool.kind.slots / merged)))
        for number, pool in enumerate(generation)
        for k in range(pool.count)
    ]
    # a batch of whole groups of merged requests may differ a little from the one asked for
    share = groups * group * merged / batch.samples
    tokens = (batch.mean_length + batch.prompt_tokens) * groups * group
    # of `merged` samples that come together, each takes a rank of its own
    ranks = trainer.busy_ranks(tokens * merged, batch.usual_longest + batch.prompt_tokens) / merged
    rate, delay = tokens / (trainer.seconds * share), SimulatedLink(delay_s=weights_s)
    processes = max(1, batch.environment_processes // merged)
    stages = Stages(
        rate,
        link=delay,
        load_s=load_s,
        train_ranks=max(1.0, ranks),
        environment_s=batch.environment_s * merged * processes / batch.environment_processes,
        environment_processes=processes,
        after_batch=trainer.after_batch,
    )
    schedule = make_schedule("async", batch.staleness, sync_every)
    policy = make_policy("least-loaded", batch.longest_answer, affinity=group)
    warm = batch.staleness + 2
    end = warm + MEASURED
    steps = end + batch.staleness - 1
    outcome = Pipeline(policy, fleet, stages, schedule, groups).run(_groups(batch, groups, group), steps)
    times = outcome.iteration_times()[warm:end]
    (began, _), (ended, _) = outcome.busy_until[warm - 1], outcome.busy_until[end - 1]
    seconds = float(np.mean(times)) / share
    busy = (ended - began) / sum(times)
    stale = float(np.mean(outcome.staleness_by_step[warm:end]))
    return SteadyStep(seconds, 1.0 - min(1.0, busy), stale)


def _groups(batch: Batch, groups: int, group: int) -> Iterator[list[SimulatedRequest]]:
    """Yield groups without end; each batch of them has the lengths of `batch`, in another order."""
    rng, number = np.random.default_rng(0), 0
    lengths = answers_of(batch, groups * group)
    prompt = round(batch.prompt_tokens)
    while True:
        for drawn in rng.permutation(lengths).reshape(groups, group).tolist():
            yield [SimulatedRequest(f"{number}.{k}", length, f"{number}", prompt) for k, length in enumerate(drawn)]
            number += 1


def _thinned(curve: StepCurve, merged: int) -> StepCurve:
    """Return the curve of instances on which one request stands for `merged`."""
    if merged == 1:
        return curve
    sizes = sorted({max(1, part) for size in curve.batches for part in (size // merged, -(-size // merged))})
    seconds = tuple(float(curve.base(size * merged)) for size in sizes)
    return replace(
        curve,
        batches=tuple(sizes),
        seconds=seconds,
        per_context_token=curve.per_context_token * merged,
        per_prefill_token=curve.per_prefill_token * merged,
    )
