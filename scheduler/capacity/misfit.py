"""Explanations of why nothing fits: by how much, and the smallest change that would. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from scheduler.capacity.allocation import Allocator, kinds_of, most_replicas
from scheduler.capacity.covering import LONGEST_STEP_S
from scheduler.capacity.plan_refinement import ROUNDING
from scheduler.capacity.problem import Problem
from scheduler.cost.generation_cost import (
    GPU_MEMORY_FRACTION,
    ReplicaKind,
    free_bytes,
    replica_degrees,
    request_bytes,
    slots_of,
)
from scheduler.cost.hardware import machines_of
from scheduler.cost.training_cost import TrainerTime
from scheduler.cost.training_memory import (
    layout_on,
    memory_per_gpu,
    sequence_parallel_degrees,
    smallest_trainer,
    usable,
)


def explain(problem: Problem, schedule: str, cheapest: tuple[float, float] | None) -> str:
    """Write a message for users about a problem that has no plan under a schedule.

    Args:
        problem: the problem.
        schedule: the schedule.
        cheapest: USD per hour of the cheapest plan beyond the budget, and of its traffic alone; None: there is none.
    """
    allocator = Allocator(problem, schedule)
    if not allocator.trainers:
        return _training(problem)
    if not any(allocator.kinds.values()):
        return _generation(problem)
    if cheapest is not None:
        price, traffic = cheapest
        digits = 2 if price >= 1 else 4
        price = math.ceil(price * (1 - ROUNDING) * 10**digits) / 10**digits  # a budget of what is shown is enough
        return (
            f"no plan for {problem.model.name} fits a budget of {problem.budget:g} USD/h; the cheapest that was found "
            f"costs {price:.{digits}f} USD/h, of which traffic {traffic:.{digits}f}: "
            f"{price - problem.budget:.{digits}f} USD/h more"
        )
    return _together(problem, allocator)


def _training(problem: Problem) -> str:
    """Explain why no offer holds the trainer."""
    longest = problem.batch.most_tokens
    lines, changes = [], []
    for number, offer in enumerate(problem.offers):
        if not offer.trains:
            continue
        most = max(gpus for gpus in range(1, offer.count + 1) if machines_of(offer.device, gpus) is not None)
        need = memory_per_gpu(problem.model, problem.work, layout_on(offer.device, problem.model, most), longest)
        has = usable(offer.device)
        lines.append(
            f"{offer.name}: each GPU would need {need / 1e9:.1f} GB for training and has {has / 1e9:.1f} GB to use: "
            f"{(need - has) / 1e9:.1f} GB too much"
        )
        enough = smallest_trainer(problem.model, problem.work, offer.device, longest, shares_rows=True)
        if enough is None:
            at_most = _longest_that_fits(problem, offer.device.memory_gb)
            lines[-1] += f"; no number of them holds a sample of {longest:.0f} tokens ({at_most})"
        else:
            changes.append(_change(problem, number, enough))
    text = f"{problem.model.name} cannot be trained here:\n" + "\n".join(lines)
    if changes:
        text += f"\nthe smallest change that fits: {min(changes)[-1]}"
    return text + _recomputing(problem)


def _change(problem: Problem, number: int, enough: int) -> tuple[int, int, str]:
    """Return what it takes to train on so many GPUs of an offer with a replica beside it: GPUs more, all, in words."""
    offer = problem.offers[number]
    more = enough - offer.count
    changed = _with_more(problem, number, more)
    trainer = TrainerTime(enough, enough, 0.0, 0.0, 0.0, nodes=machines_of(offer.device, enough) or 1)
    text = f"{enough} {_named(problem, number)} ({more} more)"
    lacking = _lacking(changed, kinds_of(changed), number, trainer)
    if lacking is None or not lacking[0]:
        return more, enough, text
    beside, other, degree = lacking
    both = more + beside
    if other == number:
        text += f"; with a replica of {degree} beside it: {enough + beside} ({both} more)"
    else:
        text += f"; with a replica of {degree} also {beside} more {_named(problem, other)}"
    return both, enough, text


def _longest_that_fits(problem: Problem, memory_gb: float) -> str:
    """Describe the longest sample that any number of GPUs of that memory holds."""
    device = max((offer.device for offer in problem.offers if offer.device.memory_gb == memory_gb), key=usable)
    sharing = max(sequence_parallel_degrees(device, problem.model), default=1)
    layout = layout_on(device, problem.model, 10**9, sequence_parallel=sharing)
    low, high = 0.0, problem.batch.most_tokens
    for _ in range(40):
        middle = (low + high) / 2
        if memory_per_gpu(problem.model, problem.work, layout, middle) < usable(device):
            low = middle
        else:
            high = middle
    return f"at most {low:.0f}" if low >= 1 else "not even a short one"


def _generation(problem: Problem) -> str:
    """Explain why no offer holds a replica."""
    model, batch = problem.model, problem.batch
    lines, changes = [], []
    for offer in problem.offers:
        if not offer.generates:
            continue
        possible = replica_degrees(model, offer.device)
        most = max(tp for tp in possible if tp <= offer.count)
        cache = request_bytes(model, offer.device, most, batch.most_tokens)
        short = cache - free_bytes(model, offer.device, most)
        each = offer.device.memory_gb * GPU_MEMORY_FRACTION
        lines.append(
            f"{offer.name}: a replica of {most} GPU(s) with {each:.1f} GB each lacks {short / 1e9:.1f} GB for weights "
            f"and one request of {batch.most_tokens:.0f} tokens"
        )
        if fits := [tp for tp in possible if slots_of(model, offer.device, tp, batch)]:
            changes.append((fits[0] - offer.count, fits[0], offer))
    text = f"{model.name} cannot be served here:\n" + "\n".join(lines)
    if changes:
        more, count, offer = min(changes, key=lambda one: one[:2])
        text += (
            f"\nthe smallest change that fits: {count} {offer.device.name} in {offer.site}, one machine ({more} more)"
        )
    return text + (
        "" if changes else "\nno degree of tensor parallelism inside one machine fits: use GPUs with more memory"
    )


def _together(problem: Problem, allocator: Allocator) -> str:
    """Explain why each stage fits alone, but not both at once."""
    parts = []
    for number, times in allocator.trainers.items():
        offer = problem.offers[number]
        smallest = _smallest_of(times)
        lacking = _lacking(problem, allocator.kinds, number, smallest)
        if lacking is None:
            parts.append(f"with the trainer on {offer.name}, no generation can be reached: a link is missing")
            continue
        more, other, degree = lacking
        part = f"training needs {smallest.gpus} of {offer.name}, and a replica {degree} {_named(problem, other)}: "
        if not more or not _ends(_with_more(problem, other, more), allocator.schedule, number):
            parts.append(
                f"{part}{f'with {more} more' if more else 'both fit, but'} a step takes over {LONGEST_STEP_S:g} s"
            )
            continue
        parts.append(f"{part}{more} more {_named(problem, other)} would fit")
    text = f"{problem.model.name} fits for each stage alone, not for both at once:\n" + "\n".join(parts)
    return text + _recomputing(problem)


def _smallest_of(times: Sequence[TrainerTime | None]) -> TrainerTime:
    return min((one for one in times if one is not None), key=lambda one: one.gpus)


def _lacking(
    problem: Problem, every: Mapping[int, Sequence[ReplicaKind]], trainer: int, time: TrainerTime
) -> tuple[int, int, int] | None:
    """Return the fewest GPUs that are lacking for a replica beside a trainer: (how many, their offer, the replica's).

    None: no offer that can serve the model is reached.
    """
    found = []
    for other, kinds in every.items():
        offer = problem.offers[other]
        if other != trainer and offer.site != problem.offers[trainer].site and not _linked(problem, trainer, other):
            continue
        beside = time if other == trainer else None
        for degree in (kind.tensor_parallel for kind in kinds):
            more = 0
            while not most_replicas(replace(offer, count=offer.count + more), degree, beside):
                more += 1
            found.append((more, other, degree))
    return min(found, default=None)


def _with_more(problem: Problem, number: int, more: int) -> Problem:
    """Return the problem with more GPUs of an offer."""
    offer = problem.offers[number]
    larger = replace(offer, count=offer.count + more)
    return replace(problem, offers=(*problem.offers[:number], larger, *problem.offers[number + 1 :]))


def _ends(problem: Problem, schedule: str, trainer: int) -> bool:
    """Return whether a step with a trainer ends in a time that counts."""
    return Allocator(problem, schedule).possible(trainer, LONGEST_STEP_S)


def _named(problem: Problem, number: int) -> str:
    return f"{problem.offers[number].device.name} in {problem.offers[number].site}"


def _recomputing(problem: Problem) -> str:
    if problem.work.recompute is True:
        return ""
    return "\nor recompute activations (optimizer.gradient_checkpointing: true)"


def _linked(problem: Problem, one: int, other: int) -> bool:
    return problem.route(problem.offers[one].site, problem.offers[other].site) is not None
