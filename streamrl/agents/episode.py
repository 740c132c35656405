"""Records of an episode: what is ordered, what the model generated in one turn, and the rows that are trained.

An episode is one run of a user's agent for one task: one trajectory, one sample of a group, one reward. It makes
model calls (turns) and tool calls. Its tokens are kept as one or more rows. A row is what the model saw and produced
in calls that extend each other: in a row, the tokens of a turn (prompt and output) are a bit-exact prefix of the next
prompt. A call that does not extend any row begins a new one.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from streamrl.rollouts.trajectory import NOT_SAMPLED, EpisodeStep
from streamrl.rollouts.types import FloatArray, IntArray
from streamrl.rollouts.void import Void

FinishReason = Literal["stop", "length"]
POLICY = "policy"
"""Name of the model that is trained, as agents call it."""


@dataclass(frozen=True)
class EpisodeOrder:
    """An order to run one episode."""

    sample_id: str
    group_id: str
    task: str
    """Key of the task in the run file."""
    item: dict[str, Any]
    """What the agent gets as its task."""
    seed: int
    temperature: float | None
    """Sampling temperature of every turn; 0: greedy; None: the run's."""


@dataclass(frozen=True)
class TurnOrder:
    """An order to generate one turn."""

    turn_id: str
    """`<sample_id>/<attempt>.<n>`; the attempt is random, so that an id is never used again after a restart."""
    sample_id: str
    group_id: str
    prompt_tokens: IntArray
    """All tokens before the turn, those of earlier turns included, shape [P]."""
    seed: int
    temperature: float | None
    """Temperature of the turn, as in `EpisodeOrder`."""
    extends: str | None = None
    """Id of the turn whose prompt and output this prompt begins with; None: of none."""


@dataclass(frozen=True)
class GeneratedTurn:
    """What the model generated in one turn."""

    tokens: IntArray
    """Sampled token ids, shape [C], with the end token when the model produced it."""
    logprobs: FloatArray
    """Log-probability of each token under the distribution it was drawn from, shape [C]."""
    versions: IntArray
    """Weight version under which each token was sampled, shape [C]."""
    finish_reason: FinishReason
    """'stop' (end token or stop string) or 'length' (token limit)."""
    text: str
    """Decoded tokens, without special tokens."""
    cached_tokens: int = 0
    """Prompt tokens that the instance had in its prefix cache."""
    from_before: bool = False
    """Whether it was ordered before the episode was run again."""

    def __post_init__(self) -> None:
        _check_shapes("a turn", self.tokens, self.logprobs, self.versions)


GenerateTurn = Callable[[TurnOrder], Awaitable[GeneratedTurn]]


@dataclass(frozen=True)
class TrajectoryRow:
    """One sequence of tokens of an episode; a token is trained if and only if it was sampled in this row."""

    tokens: IntArray
    """Token ids, shape [T]."""
    logprobs: FloatArray
    """Log-probability of each sampled token as in `GeneratedTurn`; 0 where it was not sampled. Shape [T]."""
    versions: IntArray
    """Weight version of each sampled token; `NOT_SAMPLED` elsewhere. This is the mask of the loss. Shape [T]."""
    prompt_length: int
    """Number of tokens before the first sampled one."""

    def __post_init__(self) -> None:
        """Check shapes and mask.

        Raises:
            ValueError: arrays differ in shape, or `prompt_length` is not where the first sampled token is.
        """
        _check_shapes("a row", self.tokens, self.logprobs, self.versions)
        first = int(np.argmax(self.sampled)) if self.sampled.any() else len(self.tokens)
        if first != self.prompt_length:
            raise ValueError(f"a row's first sampled token is {first}, not {self.prompt_length}")

    @property
    def sampled(self) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """Return which tokens were sampled, and so are trained: booleans of shape [T]."""
        return np.asarray(self.versions != NOT_SAMPLED)


@dataclass(frozen=True)
class Episode:
    """A finished episode; exactly one of `reward` and `void` is set. Times are unix seconds."""

    sample_id: str
    rows: list[TrajectoryRow]
    """Empty if the agent never called the model."""
    reward: float | None
    void: Void | None
    finish_reason: FinishReason
    """'length': a token limit cut a turn, or left a conversation no room, which did not go on then; else 'stop'."""
    messages: list[dict[str, Any]]
    """The conversation of the last call and its answer, for people."""
    steps: list[EpisodeStep]
    """What it did, in the order of the starts."""
    t_started: float
    t_first_token: float | None
    """When the first turn's answer came; None: no turn was answered."""
    t_finished: float
    metrics: dict[str, float] = field(default_factory=dict)
    """What the agent returned beside its reward."""
    traceback: str = ""
    """End of the traceback, as in `EpisodeOutcome`."""

    def __post_init__(self) -> None:
        """Check that there is a reward or a reason why there is none.

        Raises:
            ValueError: both are there, or neither.
        """
        if (self.reward is None) == (self.void is None):
            raise ValueError(
                f"episode {self.sample_id!r:.99} needs a reward or the reason why it is void, and not both"
            )


@dataclass(frozen=True)
class EpisodeOutcome:
    """What became of the agent; exactly one of `reward` and `void` is set."""

    reward: float | None
    void: Void | None
    steps: list[EpisodeStep] = field(default_factory=list)
    """Its tool calls and its own remarks; model calls are recorded by the endpoint."""
    metrics: dict[str, float] = field(default_factory=dict)
    traceback: str = ""
    """End of the traceback of what the agent raised, or of the standard error of a program; '': there is none."""
    again: bool = False
    """Whether another episode may have caused this void one, so that it should be run again, in a new session."""
    refused: bool = False
    """Whether the agent ended with an error that may be the endpoint's refusal, and does not say so: that of a program,
    or of an HTTP client, which keeps the status alone."""
    ended: float = field(default_factory=time.monotonic, compare=False)
    """When the agent ended, in seconds of `time.monotonic`, which all processes of a machine share. What was answered
    later is not part of the episode."""


class EpisodeRunner(Protocol):
    """Runs agents; `EpisodeWorkers` does so in processes of their own."""

    async def run(self, order: EpisodeOrder, base_url: str, api_key: str) -> EpisodeOutcome:
        """Run the agent of one episode to its end; a failure is a void outcome, never an exception.

        Args:
            order: The episode.
            base_url: What an OpenAI client takes as its base URL, such as `http://127.0.0.1:4711/sessions/abc/v1`.
            api_key: What it takes as its key; it names the session as well.
        """


def _check_shapes(what: str, *arrays: np.ndarray[Any, np.dtype[Any]]) -> None:
    shapes = {array.shape for array in arrays}
    if len(shapes) != 1 or arrays[0].ndim != 1:
        raise ValueError(f"tokens, logprobs and versions of {what} differ in shape: {shapes}")
