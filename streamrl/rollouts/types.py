"""Records on the way from prompt to gradient: request, sample, group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler.cost.length_forecast import Forecast
from streamrl.rollouts.trajectory import NOT_SAMPLED, Trajectory
from streamrl.rollouts.void import Void

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
ByteArray = npt.NDArray[np.uint8]


def rows_from(blob: bytes | None, row_bytes: int | None) -> ByteArray | None:
    """Return stored experts as rows, uint8 [rows, row_bytes]; None: there are none."""
    return None if blob is None or not row_bytes else np.frombuffer(blob, np.uint8).reshape(-1, row_bytes)


def _check_tokens(sample_id: str, *arrays: npt.NDArray[Any]) -> None:
    """Check that all arrays have the same shape [C].

    Raises:
        ValueError: they do not.
    """
    shapes = {array.shape for array in arrays}
    if len(shapes) != 1 or arrays[0].ndim != 1:
        raise ValueError(f"sample {sample_id!r:.99}: tokens, logprobs and versions differ in shape: {shapes}")


def _check_experts(sample_id: str, experts: ByteArray | None, tokens: int) -> None:
    """Check that experts, if there are any, are rows of bytes, at least one for each token.

    Raises:
        ValueError: they are not.
    """
    if experts is not None and (experts.ndim != 2 or experts.dtype != np.uint8 or len(experts) < tokens):
        raise ValueError(f"sample {sample_id!r:.99}: experts {experts.dtype} {experts.shape} of {tokens} tokens")


def _check_rows(sample_id: str, trajectory: Trajectory, versions: IntArray) -> None:
    """Check that the rows of an episode have its tokens, and that each begins to be sampled after its prompt.

    Raises:
        ValueError: they do not.
    """
    if sum(row.tokens for row in trajectory.rows) != len(versions):
        raise ValueError(f"sample {sample_id!r:.99}: its rows do not add up to its {len(versions)} tokens")
    start = 0
    for row in trajectory.rows:
        sampled = np.flatnonzero(versions[start : start + row.tokens] != NOT_SAMPLED)
        if len(sampled) == 0 or sampled[0] != row.prompt:
            raise ValueError(f"sample {sample_id!r:.99}: a row's first sampled token does not follow its prompt")
        start += row.tokens


@dataclass(frozen=True)
class PartialSample:
    """Tokens of a request that was preempted; it continues from them on another instance."""

    sample_id: str
    completion_tokens: IntArray
    """Sampled token ids, shape [C]."""
    logprobs: FloatArray
    """Log-probabilities as in `Sample`, shape [C]."""
    token_versions: IntArray
    """Weight versions as in `Sample`, shape [C]."""
    t_dispatched: float
    """Unix seconds at which its first instance took it."""
    t_first_token: float
    experts: ByteArray | None = None
    """Experts as in `Sample`; of a part that is not a sample's first: of the positions that its tokens were drawn from,
    [C, row bytes]."""
    t_last_part: float | None = None
    """Start of its last part, as in `Sample`."""

    def __post_init__(self) -> None:
        _check_tokens(self.sample_id, self.completion_tokens, self.logprobs, self.token_versions)
        _check_experts(self.sample_id, self.experts, len(self.completion_tokens))


@dataclass(frozen=True)
class SampleRequest:
    """A request for one completion."""

    sample_id: str
    group_id: str
    prompt_tokens: IntArray
    """Token ids of the templated prompt, shape [P]."""
    seed: int
    t_queued: float
    """Unix seconds at which the controller issued it; for the first time if it has tokens from before a restart."""
    temperature: float | None = None
    """Sampling temperature; 0: greedy; None: the run's."""
    pause_at: int | None = None
    """Total number of tokens at which it will be parked; None: it may run to its end."""
    kept: PartialSample | None = None
    """Tokens produced before it was preempted."""
    expected: float | None = None
    """Forecast tokens of the completion; None: no forecast."""
    cache_version: int | None = None
    """Version with which the KV cache of its prefix is salted; None: that of the instance's weights."""


@dataclass(frozen=True)
class Sample:
    """A finished completion as its instance reports it, or an agent's whole episode; times are unix seconds."""

    sample_id: str
    group_id: str
    completion_tokens: IntArray
    """Sampled token ids, shape [C], with the end token when the model produced it. Of an episode: all tokens of its
    rows, one row after the other."""
    logprobs: FloatArray
    """Log-probability of each sampled token under the distribution it was drawn from, shape [C]; else 0."""
    token_versions: IntArray
    """Weight version under which each token was sampled, shape [C]; `NOT_SAMPLED` for an episode's other tokens."""
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
    """Decoded completion, without special tokens, as the reward gets it."""
    cached_tokens: int = 0
    """Prompt tokens that its last instance had in its prefix cache; 0 of a whole episode, whose steps say it."""
    trajectory: Trajectory | None = None
    """Rows, reward and conversation of an episode; None: a single completion, which is still to be scored."""
    drafted_tokens: int = 0
    """Tokens that the instance on which it ended has drafted for it and verified (speculative decoding)."""
    accepted_tokens: int = 0
    """Those of them that were accepted."""
    t_last_part: float | None = None
    """When its last instance took it, after it had been parked, moved or given back; None: it never was."""
    experts: ByteArray | None = None
    """Experts of each position of prompt and completion but the last, which draws nothing, as bytes: uint8
    [P + C - 1, row bytes] (`machine.router_shape`; [0, row bytes] where C is 0); None: there is no router replay."""

    def __post_init__(self) -> None:
        _check_tokens(self.sample_id, self.completion_tokens, self.logprobs, self.token_versions)
        _check_experts(self.sample_id, self.experts, len(self.completion_tokens))
        if self.trajectory is not None:
            _check_rows(self.sample_id, self.trajectory, self.token_versions)

    @property
    def output_length(self) -> int:
        """Number of generated tokens."""
        return len(self.sampled_versions)

    @property
    def last_began(self) -> float:
        """When its last instance took it, in unix seconds."""
        return self.t_dispatched if self.t_last_part is None else self.t_last_part

    @property
    def longest_answer(self) -> int:
        """Number of tokens of its longest answer, which `sampling.max_tokens` limits; an episode has several."""
        if self.trajectory is None:
            return len(self.token_versions)
        sampled = np.concatenate([[False], self.token_versions != NOT_SAMPLED, [False]])
        begins, ends = np.flatnonzero(np.diff(sampled.astype(np.int8))).reshape(-1, 2).T
        return int((ends - begins).max(initial=0))

    @property
    def sampled_versions(self) -> IntArray:
        """Weight version of each sampled token, shape [output_length]."""
        if self.trajectory is None:
            return self.token_versions
        return self.token_versions[self.token_versions != NOT_SAMPLED]


@dataclass(frozen=True)
class Scored:
    """A sample with its reward, or with the reason why it has none."""

    sample: Sample
    reward: float | None
    """Finite number; None: void."""
    void: Void | None
    """Why the reward is void; None: there is one."""
    t_received: float


@dataclass
class Group:
    """All samples of one prompt; complete when every one is scored or void."""

    group_id: str
    step: int
    """Optimizer step (1-based) that it was issued for; once it is taken, the step that trains on it."""
    prompt_index: int
    prompt_id: str
    task: str
    epoch: int
    prompt: str
    prompt_tokens: IntArray
    size: int
    reward_input: dict[str, Any] = field(default_factory=dict)
    agent: bool = False
    """Whether each sample is an episode that an agent leads from `reward_input`."""
    settings: str = ""
    """All of the run file that its samples are drawn with, as JSON; '': not known."""
    issue_version: int = 0
    """Policy version at issue: the weight version that every instance served then, or that of its oldest token from
    before a resume."""
    oldest: int = 0
    """Oldest weight version that it may have tokens of, from before a resume."""
    kept: int = 0
    """Number of its samples that were generated before a resume."""
    predicted_length: float | None = None
    """Expected tokens of one completion; None: no prediction."""
    forecast: Forecast | None = None
    """Forecast of one completion's length, for dispatch; None: there is none, or it is not trusted."""
    scored: dict[str, Scored] = field(default_factory=dict)
    """Samples whose reward is known, or known to be void, by id."""
    advantages: dict[str, float] = field(default_factory=dict)
    """Advantage of each sample that has a reward, by id; none with `advantage: gae`, which the trainer computes."""
    reference_logprobs: dict[str, FloatArray] = field(default_factory=dict)
    """Log-probabilities under the frozen reference at the sampling temperature, each [C].

    Only samples for which the trainer has computed them while the group waited have an entry.
    """
    t_trained: float | None = None
    given_back: dict[str, list[tuple[str, float, float]]] = field(default_factory=dict)
    """What was generated of each sample before it moved or was parked: (instance, start, end), by id; unix seconds."""

    @property
    def complete(self) -> bool:
        """Whether every sample has its reward, or a void one."""
        return len(self.scored) == self.size

    def members(self) -> list[Scored]:
        """Return all finished samples in the order of their ids, so that training does not depend on their arrival."""
        return [self.scored[sample_id] for sample_id in sorted(self.scored)]

    def survivors(self) -> list[Scored]:
        """Return the samples that have a reward, in the order of their ids; void ones are left out."""
        return [member for member in self.members() if member.void is None]

    def rewards(self) -> list[float]:
        """Return the task's rewards of the survivors, in their order."""
        return [member.reward for member in self.members() if member.reward is not None]

    @property
    def completion_tokens(self) -> int:
        """Completion tokens of all samples: the group's weight in a token-level loss."""
        return sum(item.sample.output_length for item in self.scored.values())
