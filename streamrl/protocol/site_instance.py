"""Messages between a site's generation service and its vLLM instances.

    service -> instance   generate, release, apply_weights, sleep, take_weights, retire
    instance -> service   sample, released, progress, applied, missed, asleep, weights_taken, canary_measured

An instance acknowledges a command at once, before the work. The service acknowledges a finished sample only when the
controller has committed it, and the instance keeps the sample until then.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from streamrl.protocol.controller_site import CanaryMeasured, Meeting
from streamrl.protocol.message import TypedMessage
from streamrl.rollouts.trajectory import Trajectory

# service -> instance


class KeptTokens(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tokens that a request has produced already; its arrays' names have the prefix "kept."."""

    sample_id: str
    t_dispatched: float
    t_first_token: float
    t_last_part: float | None = None


class GenerateSample(TypedMessage, frozen=True, tag="generate"):
    """Generate one sample. Answered by `sample`, or by `released` after a `release`.

    Arrays: prompt_tokens int32 [P]; with `kept`: kept.completion_tokens int32 [C], kept.logprobs float32 [C],
    kept.token_versions int32 [C], with router replay kept.experts uint8 [P + C - 1, row bytes].
    """

    sample_id: str
    group_id: str
    seed: int
    t_queued: float
    temperature: float | None
    pause_at: int | None
    """Number of tokens, kept ones included, at which the sample is released; None: no limit."""
    route: str
    """Route that the dispatch policy counts it under: 'regular' or 'tail'."""
    kept: KeptTokens | None = None
    expected: float | None = None
    """Forecast tokens of the completion, which tell a drafter where drafts pay; None: no forecast."""
    cache_version: int | None = None
    """Version with which the KV cache of its prefix is salted: of an episode whose turns keep their cache over updates
    of the weights; None: that of the instance's weights."""


class Release(TypedMessage, frozen=True, tag="release"):
    """Return a sample with what it has produced. Answered by `released`, or by `sample` if it has just ended."""

    sample_id: str


class ApplyWeights(TypedMessage, frozen=True, tag="apply_weights"):
    """Load a version from the site's store. Answered by `applied`, or by `missed` if it is not there."""

    number: int
    content_hash: str


class SleepInstance(TypedMessage, frozen=True, tag="sleep"):
    """Free the devices for training. Answered by `asleep`; the next `apply_weights` wakes the instance up."""


class TakeWeights(TypedMessage, frozen=True, tag="take_weights"):
    """Carry out a step of an update that the trainer pushes (`WeightCall`). Answered by `weights_taken`."""

    call: str
    step: Literal["join", "pause", "load"]
    number: int
    """Number of the version."""
    meeting: Meeting | None = None
    """Where the group meets; set in `join` only."""
    first_rank: int = 0
    """join: rank of the instance's first worker."""


class Retire(TypedMessage, frozen=True, tag="retire"):
    """End once everything that was sent is acknowledged. Answered by the transport's `bye`."""


# instance -> service


class FinishedSample(TypedMessage, frozen=True, tag="sample"):
    """A sample has ended (`rollouts.types.Sample`). Acknowledged once the controller has committed it.

    Arrays: completion_tokens int32 [C], logprobs float32 [C], token_versions int32 [C]; with router replay experts
    uint8 [P + C - 1, row bytes] (`rollouts.types.Sample`).
    """

    sample_id: str
    group_id: str
    finish_reason: str
    """'stop' or 'length'."""
    site: str
    instance: str
    pool: str
    route: str
    t_queued: float
    """Unix seconds of the controller's clock; the other times are in that of the site's clock."""
    t_dispatched: float
    t_first_token: float
    t_finished: float
    text: str
    cached_tokens: int = 0
    trajectory: Trajectory | None = None
    """Set by the service on its way to the controller, if the sample is an episode."""
    drafted_tokens: int = 0
    """Tokens drafted and verified on the instance that sends it; 0 without speculation."""
    accepted_tokens: int = 0
    t_last_part: float | None = None
    """When the instance that sends it took it, if others or it itself had begun it; None: it has all its tokens."""


class ReleasedSample(TypedMessage, frozen=True, tag="released"):
    """A sample is returned unfinished (`rollouts.types.PartialSample`); arrays as in `FinishedSample`."""

    sample_id: str
    t_dispatched: float
    t_first_token: float
    t_last_part: float | None = None
    """Start of its last part, as in `FinishedSample`."""


class Progress(TypedMessage, frozen=True, tag="progress"):
    """Tokens of running samples since the last message, for the token journal.

    Arrays: completion_tokens int32, logprobs float32, token_versions int32, each concatenated over all parts; with
    router replay experts uint8 [rows, row bytes], too, and expert_rows int64 [parts], their number of each part (-1:
    it has none).
    """

    parts: list[tuple[str, int, int, float, float]]
    """(sample id, index of the first token, number of tokens, t_dispatched, t_first_token) of each part."""


class WeightsApplied(TypedMessage, frozen=True, tag="applied"):
    """The instance has loaded a version; times are unix seconds."""

    number: int
    started: float
    finished: float


class WeightsMissed(TypedMessage, frozen=True, tag="missed"):
    """The version is not in the site's store."""

    number: int


class WeightsTaken(TypedMessage, frozen=True, tag="weights_taken"):
    """A `take_weights` has been carried out, or cannot be; times are unix seconds."""

    call: str
    started: float
    finished: float
    problem: str = ""
    """Why the group broke; '': it did not. After anything else that goes wrong the instance ends."""


class InstanceAsleep(TypedMessage, frozen=True, tag="asleep"):
    """The instance has freed its devices."""


FROM_SERVICE = (GenerateSample, Release, ApplyWeights, SleepInstance, TakeWeights, Retire)
FROM_INSTANCE = (
    FinishedSample,
    ReleasedSample,
    Progress,
    WeightsApplied,
    WeightsMissed,
    InstanceAsleep,
    WeightsTaken,
    CanaryMeasured,
)
