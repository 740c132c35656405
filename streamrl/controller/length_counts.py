"""Lengths of a step's samples as a few numbers, however many samples it has: the status is written twice a second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from streamrl.run_dir.status import LENGTH_BINS


def length_counts(lengths: Sequence[int], predicted: npt.NDArray[np.int64]) -> dict[str, Any]:
    """Return the fields of `StepProgress` about lengths, both in bins of one width.

    Args:
        lengths: output lengths of the samples that have finished, tokens.
        predicted: predicted lengths of all samples, tokens, [samples].
    """
    came = np.asarray(lengths, dtype=np.int64)
    longest = int(max(came.max(initial=0), predicted.max(initial=0)))
    width = longest // LENGTH_BINS + 1
    return {"length_counts": _counted(came, width), "predicted_length_counts": _counted(predicted, width)}


def _counted(lengths: npt.NDArray[np.int64], width: int) -> dict[str, Any] | None:
    """Return the fields of `LengthCounts`; None: there is no length."""
    if not len(lengths):
        return None
    middle = len(lengths) // 2
    return {
        "counts": np.bincount(lengths // width, minlength=LENGTH_BINS).tolist(),
        "width": width,
        "median": int(np.partition(lengths, middle)[middle]),
        "longest": int(lengths.max()),
    }
