"""What an episode of an agent adds to its sample: its rows, its reward, and the conversation for people."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from streamrl.rollouts.void import Void, VoidCause

NOT_SAMPLED = -1
"""Weight version of a token that no policy has sampled: of a prompt, a tool's result, a template."""


class RowExtent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The length of one row: tokens that the model has seen as one context."""

    tokens: int
    """Number of tokens, prompt included."""
    prompt: int
    """Number of tokens before the first one that was sampled."""


class EpisodeStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One thing that an episode did, for trace and report; times are unix seconds."""

    kind: Literal["generate", "tool", "agent"]
    """'generate': a model call; 'tool': a tool call; 'agent': a remark, or what the agent itself did."""
    name: str
    started: float
    finished: float
    detail: str = ""
    tokens: int = 0
    """Sampled tokens of a model call; else 0."""


class Trajectory(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The rows of an episode, whose tokens are those of its sample, row after row; and what became of it.

    Context that was only appended to is one row. Where the agent has edited the history, another row begins.
    """

    rows: list[RowExtent]
    reward: float | None
    """Finite number; None: void."""
    void_cause: VoidCause | None = None
    void_text: str = ""
    messages: list[dict[str, Any]]
    """The conversation of the last call and its answer, for people."""
    steps: list[EpisodeStep]

    def __post_init__(self) -> None:
        """Refuse rows and rewards that cannot be.

        Raises:
            ValueError: a row's prompt is longer than the row or empty, the reward is not finite, or it is both void and
                not.
        """
        if any(not 0 < row.prompt <= row.tokens for row in self.rows):
            raise ValueError("a row of a trajectory has a prompt of at least one token, and no fewer tokens than that")
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError(f"the reward is {self.reward}, expected a finite number or null")
        if (self.reward is None) != (self.void_cause is not None):
            raise ValueError("an episode has either a reward or a cause for which it is void")

    @property
    def void(self) -> Void | None:
        """Why there is no reward; None: there is one."""
        return None if self.void_cause is None else Void(self.void_cause, self.void_text)
