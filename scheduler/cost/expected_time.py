"""Expected time of an instance for requests whose lengths are known or forecast.

A set of requests of known lengths costs an instance sum_k (tau(k) - tau(k - 1)) L_k (see `decode.py`). An uncertain
length is 16 equally likely ones, of weight 1/16. With A(t) of n requests expected to run at time t, the number that do
is about binomial, and a step costs

    g(A) = P tau(A / P),   P = 1 - (1 - A / n)^n (the probability that any runs),

and the instance needs sum_k (g(k / 16) - g((k - 1) / 16)) v_k over all values v_1 >= v_2 >= ... Requests beyond the
slots run later, at a full batch. Reading the context adds per_context_token * (P L + L^2 / 2) for every request, P the
tokens of context that it begins with.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from scheduler.cost.decode import Floats, StepCurve, replica_time


@dataclass(frozen=True)
class Worker:
    """An instance as plans see it."""

    curve: StepCurve
    slots: int


def expected_time(values: Floats, curve: StepCurve, slots: int) -> float:
    """Return the seconds that one instance is expected to need for requests that may all start now.

    Args:
        values: [n, v] equally likely lengths of each request; v = 1: known lengths.
        curve: step time of the instance.
        slots: largest number of requests at once.
    """
    count, each = values.shape
    if count == 0:
        return 0.0
    if each == 1 and count > slots:
        return replica_time(np.sort(values[:, 0])[::-1], curve, slots=slots)
    context = context_seconds(curve, values.ravel()).sum() / each
    flat = np.sort(values, axis=None)[::-1]
    return float(_steps(curve, slots, count, each) @ flat + context)


@lru_cache(maxsize=512)
def _steps(curve: StepCurve, slots: int, count: int, each: int) -> Floats:
    """Return [count * each] seconds per token of every value, longest first (see the module)."""
    return np.diff(step_cost(np.arange(count * each + 1) / each, curve, slots, None if each == 1 else count))


def context_seconds(curve: StepCurve, lengths: Floats, begun: npt.ArrayLike = 0.0) -> Floats:
    """Return the seconds that reading a request's context adds to the steps.

    Args:
        curve: step time of the instance.
        lengths: tokens to generate.
        begun: tokens of context that each begins with (a prompt, and what it has produced); broadcasts.
    """
    return curve.per_context_token * lengths * (np.asarray(begun, dtype=np.float64) + lengths / 2)


def step_cost(alive: npt.ArrayLike, curve: StepCurve, slots: int, uncertain: int | None = None) -> Floats:
    """Return the expected seconds of a step while `alive` requests are expected to run or wait (the module's g).

    Args:
        alive: expected numbers of requests, any shape.
        curve: step time of the instance.
        slots: largest number of requests at once.
        uncertain: number of requests with uncertain lengths that `alive` is out of; None: `alive` is certain.
    """
    alive = np.asarray(alive, dtype=np.float64)
    running = np.minimum(alive, slots)
    if uncertain is None:
        cost = curve.base(running)
    else:
        any_runs = 1.0 - np.maximum(0.0, 1.0 - running / uncertain) ** uncertain
        cost = any_runs * curve.base(running / np.maximum(any_runs, 1e-12))
    over = alive - running
    if over.any():
        cost = cost + over * (float(curve.base(slots)) / slots)
    return cost


def marginal_costs(worker: Worker, count: int) -> Floats:
    """Return [count] seconds per step that the k-th of so many requests adds to an instance (see the module)."""
    return _marginal(worker.curve, worker.slots, count)


@lru_cache(maxsize=512)
def _marginal(curve: StepCurve, slots: int, count: int) -> Floats:
    return np.diff(step_cost(np.arange(count + 1), curve, slots))
