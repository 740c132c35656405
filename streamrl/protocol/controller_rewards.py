"""Messages between the controller and the rewards processes.

The rewards process acknowledges a `score` at once, because a reward may take long. The controller repeats requests
without an answer to a process that was restarted.
"""

from __future__ import annotations

from typing import Any

from streamrl.protocol.message import TypedMessage


class ScoreRequest(TypedMessage, frozen=True, tag="score"):
    """Score a completion. Answered by `scored`."""

    sample_id: str
    task: str
    """Key of the task in the run file."""
    completion: str
    reward_input: dict[str, Any]
    """Fields of the prompt's item that the task's scorer needs."""


class ScoreAnswer(TypedMessage, frozen=True, tag="scored"):
    """A completion's reward."""

    sample_id: str
    reward: float
    error: str | None
    """Reason for the scorer's failure; None: it did not fail."""
    seconds: float


FROM_CONTROLLER = (ScoreRequest,)
FROM_REWARDS = (ScoreAnswer,)
