"""Quantiles of lengths of which some are only known to be greater than what was produced.

A sample that was cut off at a length limit, or that still runs, says "longer than this": it is censored. Leaving it out
biases every mean and quantile to short lengths, counting it as a length binds a forecast to the limit. The
product-limit estimate (Kaplan and Meier 1958) uses both: at each length at which d of the n samples that had got so
far ended, the share that continues falls by the factor 1 - d / n.

Beyond the last end the data say only how fast samples used to end. Log lengths continue there with the constant rate
at which they ended before (a Pareto tail of the lengths; the maximum-likelihood rate under censoring is ends divided by
exposure, as Hill's estimate of 1975).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scheduler.cost.decode import Floats

Bools = npt.NDArray[np.bool_]
PRIOR_ENDS = 5.0
"""Number of ends that a prior rate stands for."""


def kaplan_meier(values: Floats, ended: Bools) -> tuple[Floats, Floats, Floats]:
    """Return the distinct values at which samples ended [K], the number of ends [K], and the share that goes on [K].

    Args:
        values: value (length, log length, residual) at which each sample ended or was cut off [N].
        ended: whether it ended there [N]; of equal values, the ends come first.
    """
    ordered = np.sort(values)
    at, ends = np.unique(values[ended], return_counts=True)
    at_risk = len(values) - np.searchsorted(ordered, at, side="left")
    return at, ends.astype(np.float64), np.cumprod(1 - ends / at_risk).astype(np.float64)


def survival_quantiles(values: Floats, ended: Bools, levels: Floats, rate: float) -> Floats:
    """Return quantiles [Q] of additive values (log lengths, residuals) by Kaplan and Meier.

    Levels between two ends are interpolated (an end stands for the middle of its step). Those beyond the last end are
    continued with `rate`, if anything was cut off after it, and otherwise have the last value.

    Args:
        values: [N], at least one.
        ended: whether the sample ended at its value [N].
        levels: [Q], ascending, in 0..1.
        rate: ends per sample and unit of the value beyond the last end; greater than 0.
    """
    at, ends, beyond = kaplan_meier(values, ended)
    if not len(at):
        return float(values.max()) - np.log1p(-levels) / rate
    before = np.concatenate(([1.0], beyond[:-1]))
    half = (before - beyond) / ends / 2
    share = np.column_stack((1 - before + half, 1 - beyond - half)).ravel()
    quantiles = np.interp(levels, share, np.repeat(at, 2))
    last = float(beyond[-1])
    if last > 1e-12:
        over = levels > 1 - last
        quantiles = np.where(over, at[-1] + np.log(last / np.maximum(1 - levels, 1e-12)) / rate, quantiles)
    return np.asarray(quantiles)


def restricted_mean(values: Floats, ended: Bools) -> float:
    """Return the mean by Kaplan and Meier of values [N] of which some were cut off; what outlasts the greatest one
    counts as that."""
    at, _, beyond = kaplan_meier(values, ended)
    beyond = np.concatenate(([1.0], beyond))
    return float((at * -np.diff(beyond)).sum() + values.max() * beyond[-1])


def end_rate(values: Floats, ended: Bools, start: Floats | float, prior: float | None = None) -> float:
    """Return the ends per sample and unit of the value after `start`: ends divided by exposure; greater than 0.

    Args:
        values: [N].
        ended: [N].
        start: value from which a sample counts [N], or one number.
        prior: rate that counts as `PRIOR_ENDS` ends; None: half an end is added, so that the rate is not 0.
    """
    exposure = float(np.maximum(values - start, 0.0).sum())
    ends = float((ended & (values > start)).sum())
    if prior is None:
        return (ends + 0.5) / max(exposure, 1e-9) if exposure > 1e-9 else 1.0
    return (ends + PRIOR_ENDS) / (exposure + PRIOR_ENDS / prior)
