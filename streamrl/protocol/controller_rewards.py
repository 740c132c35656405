"""Messages between the controller and the rewards processes.

The rewards process acknowledges a `score` at once, because a reward may take long. The controller repeats requests
without an answer to a process that was restarted.
"""

from __future__ import annotations

from typing import Any

from streamrl.protocol.message import TypedMessage
from streamrl.rollouts.void import LONGEST_TEXT, LONGEST_TRACEBACK, Void, VoidCause, wrong_with_reward


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
    reward: float | None
    """Number that a reward can be (`wrong_with_reward`); None: void."""
    seconds: float
    """Duration of the last try."""
    void_cause: VoidCause | None = None
    """What failed; None: there is a reward."""
    error: str | None = None
    """The failure in one line, at most 1,000 characters; None: there is a reward."""
    traceback: str = ""
    """End of the traceback of a reward function that raised, at most 2,000 characters."""

    def __post_init__(self) -> None:
        """Refuse a number that is no reward, a reward that is both void and not, and more text than is ever sent.

        Raises:
            ValueError: the number is no reward, a void one has no cause or no text, or one of its texts is too long.
        """
        if len(self.error or "") > LONGEST_TEXT or len(self.traceback) > LONGEST_TRACEBACK:
            lengths = f"{len(self.error or '')} and a traceback of {len(self.traceback)}"
            raise ValueError(
                f"an error of {lengths} characters; at most {LONGEST_TEXT} and {LONGEST_TRACEBACK} are sent"
            )
        if self.reward is not None and (wrong := wrong_with_reward(self.reward)) is not None:
            raise ValueError(f"the reward {wrong}")
        if {self.void_cause is None, self.error is None} != {self.reward is not None}:
            raise ValueError("a void reward has a cause and a text, any other has neither")

    @property
    def void(self) -> Void | None:
        """Why the reward is void; None: it is not."""
        return None if self.void_cause is None else Void(self.void_cause, self.error or "")


FROM_CONTROLLER = (ScoreRequest,)
FROM_REWARDS = (ScoreAnswer,)
