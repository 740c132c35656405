"""The records that walk from prompt to gradient: request, sample, group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler.cost.length_forecast import Forecast

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


def _check_tokens(sample_id: str, *arrays: npt.NDArray[Any]) -> None:
    """Raises ValueError unless all have one shape [C]."""
    shapes = {array.shape for array in arrays}
    if len(shapes) != 1 or arrays[0].ndim != 1:
        raise ValueError(f"sample {sample_id!r:.99}: tokens, logprobs and versions differ in shape: {shapes}")


@dataclass(frozen=True)
class PartialSample:
    """What a request had produced when it was taken off an instance; it goes on from there on another."""

    sample_id: str
    completion_tokens: IntArray
    """Sampled token ids, shape [C]."""
    logprobs: FloatArray
    """Shape [C], as in `Sample`."""
    token_versions: IntArray
    """Shape [C], as in `Sample`."""
    t_dispatched: float
    """Unix seconds at which its first instance took it."""
    t_first_token: float

    def __post_init__(self) -> None:
        _check_tokens(self.sample_id, self.completion_tokens, self.logprobs, self.token_versions)


@dataclass(frozen=True)
class SampleRequest:
    """One completion to be generated."""

    sample_id: str
    group_id: str
    prompt_tokens: IntArray
    """Token ids of the templated prompt, shape [P]."""
    seed: int
    t_queued: float
    """Unix seconds at which the controller issued it."""
    temperature: float | None = None
    """Of the sampling; 0: greedy; None: the run's."""
    pause_at: int | None = None
    """Tokens, those that it has included, at which it is to be parked; None: it may run to its end."""
    kept: PartialSample | None = None
    """What was produced of it before it was taken off an instance."""


@dataclass(frozen=True)
class Sample:
    """A finished completion as its instance reports it; times are unix seconds."""

    sample_id: str
    group_id: str
    completion_tokens: IntArray
    """Sampled token ids, shape [C], with the end token when the model produced it."""
    logprobs: FloatArray
    """Log-probability of each sampled token under the distribution it was drawn from, shape [C]."""
    token_versions: IntArray
    """Weight version under which each token was sampled, shape [C]."""
    finish_reason: str
    """'stop' (end token or stop string) or 'length' (token limit)."""
    site: str
    instance: str
    pool: str
    route: str
    t_queued: float
    t_dispatched: float
    t_first_token: float
    t_finished: float
    text: str = ""
    """Decoded completion, without special tokens: what the reward sees."""

    def __post_init__(self) -> None:
        _check_tokens(self.sample_id, self.completion_tokens, self.logprobs, self.token_versions)

    @property
    def output_length(self) -> int:
        """Tokens generated."""
        return len(self.completion_tokens)


@dataclass(frozen=True)
class Scored:
    """A sample with its reward."""

    sample: Sample
    reward: float
    error: str | None
    t_received: float


@dataclass
class Group:
    """All samples of one prompt; complete when every one is scored."""

    group_id: str
    step: int
    """Optimizer step (1-based) that it was issued for; once it is taken, the one that trains on it."""
    prompt_index: int
    prompt_id: str
    task: str
    epoch: int
    prompt: str
    prompt_tokens: IntArray
    size: int
    reward_input: dict[str, Any] = field(default_factory=dict)
    issued_under: int = 0
    """Weight version that every instance served when it was issued."""
    predicted_rank: float | None = None
    """Place of its predicted length among its step's groups: 0 the shortest, 1 the longest; None: no prediction."""
    predicted_length: float | None = None
    """Expected tokens of one completion."""
    forecast: Forecast | None = None
    """Of one completion's length, what dispatch goes by; None: there is no prediction, or it is not trusted."""
    scored: dict[str, Scored] = field(default_factory=dict)
    advantages: dict[str, float] = field(default_factory=dict)
    reference_logprobs: dict[str, FloatArray] = field(default_factory=dict)
    """Of those samples for which the trainer has computed them while the group waited, each [C], under the frozen
    reference at the sampling temperature."""
    t_trained: float | None = None

    @property
    def complete(self) -> bool:
        """Whether every sibling has its reward."""
        return len(self.scored) == self.size

    def members(self) -> list[Scored]:
        """Scored samples in the order of their ids (not of arrival), so that training does not depend on it."""
        return [self.scored[sample_id] for sample_id in sorted(self.scored)]

    @property
    def completion_tokens(self) -> int:
        """Completion tokens of all samples: the group's weight in a token-level loss."""
        return sum(item.sample.output_length for item in self.scored.values())
