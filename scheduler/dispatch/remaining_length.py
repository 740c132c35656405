"""Remaining lengths of many requests at once: `Forecast.beyond` on arrays, for policies that need it repeatedly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.cost.expected_time import expected_time
from scheduler.cost.length_forecast import MIDPOINTS, Floats, Forecast, equally_likely, same_width
from scheduler.dispatch.policy import Instance, Request

UNKNOWN = Forecast.exactly(1.0)
"""Stand-in for a missing forecast: the request outruns it at once, and then has as much left as it has produced."""


def beyond(values: Floats, produced: Floats, limit: float = np.inf) -> Floats:
    """Return `Forecast.beyond` for each row.

    Args:
        values: [n, v] equally likely lengths, ascending; v is 1 or 16.
        produced: [n] tokens so far.
        limit: largest number of tokens that a request may produce.

    Returns:
        [n, v] remaining tokens; [n, 16] if a known length has been outrun.
    """
    each = values.shape[1]
    kept = (values > produced[:, None]).sum(axis=1)
    if each == 1 and not kept.all():
        return beyond(np.repeat(values, len(MIDPOINTS), axis=1), produced, limit)
    # the kept values are the last of each row; they share the weight of those that are ruled out
    levels = (np.arange(each) + 0.5) / each
    picked = each - kept[:, None] + (levels * kept[:, None]).astype(int)
    left = np.take_along_axis(values, np.minimum(picked, each - 1), axis=1) - produced[:, None]
    outrun = np.where(levels < 0.5, 0.5, 1.5) * produced[:, None]
    left = np.where(kept[:, None] > 0, left, outrun)
    room = np.maximum(1.0, limit - produced)[:, None]
    return np.where(produced[:, None] > 0, np.clip(left, 1.0, room), values)


@dataclass(frozen=True)
class Remaining:
    """Requests with the tokens that each has left."""

    requests: tuple[Request, ...]
    values: Floats
    """[n, v] equally likely numbers of remaining tokens."""
    contexts: Floats
    """[n] tokens of each so far: prompt and produced."""

    @classmethod
    def of(cls, requests: Sequence[Request], produced: Sequence[float], limit: float) -> Remaining:
        """Compute what is left of the given requests.

        Args:
            requests: any number.
            produced: tokens that each has produced.
            limit: largest number of tokens that a request may produce.
        """
        done = np.asarray(produced, dtype=np.float64)
        prompts = np.asarray([request.prompt_tokens for request in requests], dtype=np.float64)
        values = equally_likely([request.forecast or UNKNOWN for request in requests])
        return cls(tuple(requests), beyond(values, done, limit), prompts + done)

    def __len__(self) -> int:
        return len(self.requests)

    def __add__(self, other: Remaining) -> Remaining:
        values = np.concatenate(same_width([self.values, other.values]))
        return Remaining(self.requests + other.requests, values, np.concatenate([self.contexts, other.contexts]))

    def take(self, rows: Sequence[int] | npt.NDArray[np.int64] | range) -> Remaining:
        """Return some of the requests, in the given order."""
        index = np.asarray(rows, dtype=np.int64)
        return Remaining(tuple(self.requests[row] for row in index), self.values[index], self.contexts[index])

    def time_on(self, instance: Instance) -> float:
        """Return the expected seconds until an instance that does nothing else has finished them."""
        if not self.requests:
            return 0.0
        curve = instance.assumed_curve
        reading = curve.per_context_token * float(self.contexts @ self.values.mean(axis=1))
        return expected_time(self.values, curve, instance.slots) + reading
