"""Group-relative advantages."""

from __future__ import annotations

import numpy as np


def group_advantages(rewards: list[float], normalize_by_std: bool) -> list[float]:
    """Advantage of each sample of a group: A_i = (r_i - mean(r)) / (std(r) + 1e-6), or without the division.

    Source: GRPO, arXiv 2402.03300, eq. 1 (outcome supervision); without the division Dr. GRPO,
    arXiv 2503.20783. Computed in float64. A group whose rewards are all equal gets zeros exactly, and so no
    gradient.

    Args:
        rewards: one reward per sample, shape [G].
        normalize_by_std: divide by the population standard deviation.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.size == 0 or np.all(values == values[0]):
        return [0.0] * int(values.size)
    centred = values - values.mean()
    if normalize_by_std:
        centred = centred / (values.std() + 1e-6)
    return [float(value) for value in centred]
