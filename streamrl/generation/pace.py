"""How an instance's steps compare with what its step curve says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from scheduler.cost import StepCurve

if TYPE_CHECKING:
    from streamrl.generation.engine import Worked

LEAST_TOKENS = 16
"""Of a stretch of work: of fewer, one prompt that was read in says more than the steps."""


def pace(curve: StepCurve, before: Worked, now: Worked) -> float | None:
    """How many times as long as the curve says the steps of a stretch of work took.

    A running request gets one token per step, so the mean step took request_s / tokens, and its batch was
    request_s / busy_s. Prompts that were read in meanwhile count as part of it.

    Args:
        curve: the instance's.
        before: what it had done when the stretch began.
        now: what it has done.

    Returns:
        None: it has done too little.
    """
    tokens, request_s, busy_s = now.tokens - before.tokens, now.request_s - before.request_s, now.busy_s - before.busy_s
    if tokens < LEAST_TOKENS or busy_s <= 0:
        return None
    return request_s / tokens / float(curve.base(request_s / busy_s))
