"""What an episode of an agent adds to its sample: its rows, its reward, and the conversation for people."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from streamrl.rollouts.void import LONGEST_TEXT, LONGEST_TRACEBACK, Void, VoidCause, wrong_with_reward
from streamrl.transport.wire import is_plain

MOST_STEPS = 1_000
"""Steps of an episode that are kept, the first ones."""
MOST_ROWS = 1_000
"""Rows of an episode; one with more is void."""
MOST_TOLD = 4_000_000
"""Most bytes, as JSON, of the conversation and the steps of an episode."""
MOST_OF_A_MESSAGE = 10_000
"""Characters that are kept of each message of a conversation that is too long."""
MOST_METRICS = 100
"""Numbers that an episode has beside its reward."""
MOST_NAME = 100
"""Characters of such a number's name, and of a step's where a conversation is too long."""
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

    kind: Literal["generate", "tool", "environment", "agent"]
    """'generate': a model call; 'tool': a tool call; 'environment': a reset or step;
    'agent': a remark, or what the agent itself did."""
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
    """Number that a reward can be (`wrong_with_reward`); None: void."""
    void_cause: VoidCause | None = None
    void_text: str = ""
    void_traceback: str = ""
    """End of the traceback of what the agent raised, or of the standard error of a program; '': there is none."""
    metrics: dict[str, float] = {}
    """Finite numbers that the agent has returned beside its reward."""
    messages: list[dict[str, Any]]
    """The conversation of the last call and its answer, for people; plain values (`transport.wire.is_plain`)."""
    steps: list[EpisodeStep]

    def __post_init__(self) -> None:
        """Refuse rows and rewards that cannot be, and a conversation that rollouts cannot hold.

        Raises:
            ValueError: a row's prompt is longer than the row or empty, the reward or another number is not finite, it
                is both void and not, says more of why it is void than is ever sent, or its conversation has values that
                JSON has not, or too many.
        """
        for text, most in ((self.void_text, LONGEST_TEXT), (self.void_traceback, LONGEST_TRACEBACK)):
            if len(text) > most:
                raise ValueError(f"why it is void has {len(text)} characters, at most {most} are sent")
        if any(not 0 < row.prompt <= row.tokens for row in self.rows):
            raise ValueError("a row of a trajectory has a prompt of at least one token, and no fewer tokens than that")
        if self.reward is not None and (wrong := wrong_with_reward(self.reward)) is not None:
            raise ValueError(f"the reward {wrong}")
        if not all(map(math.isfinite, self.metrics.values())):
            raise ValueError("a number beside the reward is not finite")
        if (self.reward is None) != (self.void_cause is not None):
            raise ValueError("an episode has either a reward or a cause for which it is void")
        if not is_plain(self.messages):  # msgpack has bytes and times, too
            raise ValueError("a message of an episode has values that JSON cannot hold, too many, or nested too deeply")

    @property
    def told_bytes(self) -> int:
        """Bytes of the conversation and the steps as JSON."""
        return len(msgspec.json.encode((self.messages, self.steps)))

    @property
    def void(self) -> Void | None:
        """Why there is no reward; None: there is one."""
        return None if self.void_cause is None else Void(self.void_cause, self.void_text)


def kept_of(messages: list[dict[str, Any]], steps: list[EpisodeStep]) -> tuple[list[dict[str, Any]], list[EpisodeStep]]:
    """Return what is kept of an episode's conversation and steps, for people; its tokens are all kept elsewhere."""
    steps = steps[:MOST_STEPS]
    if len(msgspec.json.encode((messages, steps))) <= MOST_TOLD and is_plain(messages):
        return messages, steps
    short = [
        {"role": str(one.get("role")), "content": str(one.get("content") or "")[:MOST_OF_A_MESSAGE]}
        for one in messages[:MOST_STEPS]
    ]
    bare = [msgspec.structs.replace(step, name=step.name[:MOST_NAME], detail="") for step in steps]
    return (short, bare) if len(msgspec.json.encode((short, bare))) <= MOST_TOLD else ([], bare)
