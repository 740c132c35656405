"""Likelihood of normal values of which some are cut off (Tobin 1958), as boosting needs it.

A value that ended at y has the density of the normal around its prediction; one that was cut off at y has the
probability of lying beyond y. With z = (y - prediction) / scale, and the hazard h(z) = density / probability beyond
of the standard normal, the derivatives of the log likelihood are z / scale and h(z) / scale.
"""

from __future__ import annotations

import math

import numpy as np

from ranker.segments import Array

_REACH = 8.0
_POINTS = np.linspace(-_REACH, _REACH, 4001)
_BEYOND = np.array([0.5 * math.erfc(z / math.sqrt(2)) for z in _POINTS])
_HAZARD = np.exp(-(_POINTS**2) / 2) / math.sqrt(2 * math.pi) / _BEYOND


def hazard(z: Array) -> Array:
    """Return density / probability beyond of the standard normal at z [N] (error below 1e-5; z + 1 / z far out)."""
    near = np.interp(z, _POINTS, _HAZARD)
    return np.asarray(np.where(z > _REACH, z + 1 / np.maximum(z, 1.0), near))


def pseudo_residual(residual: Array, ended: Array, scale: float) -> tuple[Array, Array]:
    """Return the likelihood's derivative and its negative second derivative [N], both times the squared scale.

    Args:
        residual: value less prediction [N]; of what was cut off, the point of the cut less prediction.
        ended: whether the value ended there [N].
        scale: standard deviation.
    """
    cut, derivative, slope = ~ended, residual.copy(), np.ones(len(residual))
    z = residual[cut] / scale
    beyond = hazard(z)
    derivative[cut], slope[cut] = scale * beyond, np.maximum(beyond * (beyond - z), 1e-3)
    return derivative, slope


def scale_of(residual: Array, ended: Array, scale: float, rounds: int = 1) -> float:
    """Return the standard deviation after steps of expectation maximisation from `scale`."""
    cut, squares = ~ended, residual**2
    beyond = residual[cut]
    for _ in range(rounds if len(beyond) else 1):  # where nothing was cut off, further steps change nothing
        z = beyond / scale
        squares[cut] = scale**2 * np.maximum(1 + z * hazard(z), 1e-6)
        scale = max(1e-3, math.sqrt(float(squares.mean())))
    return scale


def likelihood_loss(residual: Array, ended: Array) -> float:
    """Return the mean negative log likelihood of residuals [N], at the scale that suits them best."""
    scale = scale_of(residual, ended, max(1e-3, float(np.sqrt((residual**2).mean()))), rounds=8)
    cut, z = ~ended, residual / scale
    logs = -(z**2) / 2 - math.log(scale * math.sqrt(2 * math.pi))
    z = z[cut]
    # log of the probability beyond z: its logarithm to 8, then by the hazard
    far = -(z**2) / 2 - math.log(math.sqrt(2 * math.pi)) - np.log(hazard(np.maximum(z, 1.0)))
    logs[cut] = np.where(z > _REACH, far, np.log(np.interp(z, _POINTS, _BEYOND)))
    return float(-logs.mean())
