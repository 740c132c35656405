"""Sums and extremes over consecutive segments of an array, in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def segment_reduce(ufunc: np.ufunc, values: Array, segment: Array, count: int, empty: float) -> Array:
    """Reduce `values` [M, ...] by `segment` [M] (ascending, in 0..count-1) to [count, ...]; `empty` where there are
    none."""
    out = np.full((count, *values.shape[1:]), empty, dtype=values.dtype if values.dtype.kind == "f" else np.float64)
    if len(values):
        sizes = np.bincount(segment, minlength=count)
        starts = np.cumsum(sizes) - sizes
        present = sizes > 0
        out[present] = ufunc.reduceat(values, starts[present], axis=0)
    return out


def sum_between(values: Array, begin: Array) -> Array:
    """Sum `values` [M, ...] from begin[i] to begin[i + 1] to [N, ...], for `begin` [N + 1]; 0 for empty ranges."""
    out = np.zeros((len(begin) - 1, *values.shape[1:]), dtype=values.dtype)
    present = begin[1:] > begin[:-1]
    if present.any():
        out[present] = np.add.reduceat(values, begin[:-1][present], axis=0)
    return out


def last_of(values: Array, segment: Array, count: int, empty: float) -> Array:
    """Return the last of each segment's `values` [M] (segments ascending) as [count]; `empty` for empty segments."""
    out = np.full(count, empty)
    out[segment] = values  # the last write to an index stays
    return out


def first_of(values: Array, segment: Array, count: int, empty: float) -> Array:
    """Return the first of each segment's `values` [M] (segments ascending) as [count]; `empty` for empty segments."""
    return last_of(values[::-1], segment[::-1], count, empty)


def runs(mask: Array) -> tuple[Array, Array]:
    """Return starts and lengths of the runs of True in `mask` [M]."""
    if not len(mask):
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    changes = np.flatnonzero(mask[1:] != mask[:-1]) + 1
    edges = np.concatenate(([0] if mask[0] else [], changes, [len(mask)] if mask[-1] else [])).astype(np.int64)
    return edges[::2], edges[1::2] - edges[::2]
