"""Messages between the controller and the rewards processes.

The rewards process acknowledges a `score` at once, for a reward may take long. The controller repeats what is open to a
process that was restarted.
"""

from __future__ import annotations

from typing import Any

from streamrl.protocol.message import TypedMessage


class ScoreRequest(TypedMessage, frozen=True, tag="score"):
    """ScoreRequest a completion. Answered by `scored`."""

    sample_id: str
    task: str
    """Key of the run file's task."""
    completion: str
    reward_input: dict[str, Any]
    """What the task's scorer needs to know of the prompt's item."""


class ScoreAnswer(TypedMessage, frozen=True, tag="scored"):
    """A completion's reward."""

    sample_id: str
    reward: float
    error: str | None
    """Why the scorer failed; None: it did not."""
    seconds: float


FROM_CONTROLLER = (ScoreRequest,)
FROM_REWARDS = (ScoreAnswer,)
