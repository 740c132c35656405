"""Speculative decoding: what drafted tokens save, what their verification costs, and how many of them pay.

A step verifies k drafted tokens of a request together with its next one, as k + 1 rows of a batch. If each drafted
token is accepted with probability a, given that those before it were, a step yields

    E(k) = 1 + a + ... + a^k = (1 - a^(k+1)) / (1 - a)

tokens (Leviathan et al., ICML 2023, eq. 1), and takes the time of a batch with that many rows. Rejection sampling keeps
the distribution of the tokens, so only time changes.

Where an instance decodes requests to their ends without refills, it needs T = sum_j (tau(j) - tau(j - 1)) L_j, lengths
sorted descending (`decode.py`). So a token less for the j-th longest saves tau(j) - tau(j - 1): the whole step time of
a single request for the longest one, little for the others. Where others wait for its slot, or where nobody knows which
request is longest, every token saves the mean, tau(b) / b.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.cost.decode import StepCurve


@dataclass(frozen=True)
class Speculation:
    """Speculative decoding as the cost model sees it."""

    acceptance: float
    """Probability, 0 to 1, that a drafted token is accepted, given that those before it were."""
    most: int
    """Most drafted tokens of a request in a step."""
    overhead_s: float = 0.0
    """Seconds that drafting and verification add to a step, besides the rows."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.acceptance <= 1.0:
            raise ValueError(f"acceptance is a probability from 0 to 1, got {self.acceptance}")
        if self.most < 0 or self.overhead_s < 0:
            raise ValueError(f"drafts and overhead must not be negative, got {self.most}, {self.overhead_s}")


def expected_tokens(acceptance: float, drafts: int) -> float:
    """Return E(k), the mean number of tokens of a step with `drafts` drafted ones."""
    return (1.0 - acceptance ** (drafts + 1)) / (1.0 - acceptance) if acceptance < 1.0 else 1.0 + drafts


def best_drafts(curve: StepCurve, batch: int, speculation: Speculation) -> tuple[int, float]:
    """Return the number of drafted tokens per request with the least time per token, and that time in seconds.

    0 drafts where none pay: `curve.base(batch)`.
    """
    best = 0, float(curve.base(batch))
    for drafts in range(1, speculation.most + 1):
        step = float(curve.base(batch * (1 + drafts))) + speculation.overhead_s
        seconds = step / expected_tokens(speculation.acceptance, drafts)
        if seconds < best[1]:
            best = drafts, seconds
    return best


def speculated(curve: StepCurve, speculation: Speculation, largest: int) -> StepCurve:
    """Return the seconds per token of each request, by batch size, with as many drafts as pay at each.

    All that computes with step curves (dispatch, simulation, plans) takes the result for an instance that speculates.
    Reading the context costs per row, so it is not saved; prefilling is as before.

    Args:
        curve: step time of the instance without speculation.
        speculation: acceptance, most drafts and overhead.
        largest: batch size up to which the result is exact; beyond, its last slope goes on.
    """
    points = {batch: best_drafts(curve, batch, speculation)[1] for batch in range(1, largest + 1)}
    return StepCurve.measured(points, curve.per_context_token, curve.per_prefill_token)


def token_values(curve: StepCurve, remaining: Sequence[float | None], refilled: bool = False) -> list[float]:
    """Return the seconds of generation that one token less saves, for each request of a batch.

    Args:
        curve: step time of the instance.
        remaining: tokens that each request is still expected to need; None: unknown.
        refilled: whether another request waits for every slot.
    """
    batch = len(remaining)
    table = curve.table(batch)
    known = [tokens for tokens in remaining if tokens is not None]
    if refilled or len(known) < batch:
        return [float(table[batch]) / batch] * batch
    values = [0.0] * batch
    for rank, index in enumerate(sorted(range(batch), key=lambda i: -known[i])):
        values[index] = float(table[rank + 1] - table[rank])
    return values


def draft_counts(
    curve: StepCurve, chances: Sequence[Sequence[float]], values: Sequence[float], overhead_s: float
) -> list[int]:
    """Return how many tokens of each request's draft to verify, so that the step saves most.

    A token saves its request's value times the probability that it and all before it are accepted. The most valuable n
    tokens of all are verified, n such that savings - (tau(b + n) - tau(b)) - overhead is greatest; none if that is
    never positive.

    Args:
        curve: step time of the instance.
        chances: for each request, the probability that each drafted token is accepted, given those before it.
        values: seconds that one token less saves, for each request (`token_values`).
        overhead_s: seconds that a step with drafts takes longer, besides its rows.
    """
    counts = [0] * len(chances)
    paths = [
        (value * path, position, request)
        for request, (each, value) in enumerate(zip(chances, values, strict=True))
        for position, path in enumerate(np.cumprod(each).tolist())
    ]
    if not paths:
        return counts
    paths.sort(key=lambda one: (-one[0], one[1]))  # equal savings: a token counts only after those before it
    batch = len(chances)
    costs = curve.base(batch + np.arange(1, len(paths) + 1)) - curve.base(batch) + overhead_s
    saved = np.cumsum([saving for saving, _, _ in paths]) - costs
    if saved.max() <= 0:
        return counts
    for _, _, request in paths[: int(saved.argmax()) + 1]:
        counts[request] += 1
    return counts
