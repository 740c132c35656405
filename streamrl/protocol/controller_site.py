"""Messages between the controller and the generation service of each site.

    controller -> service   generate, park, resume, use, scale, weights, sleep, weight_call, finish
    service -> controller   samples, parked, weights_ready, asleep, fleet, weight_answer, canary_measured

The service acknowledges a command once it has passed it on. The controller acknowledges samples once they are in the
ledger, and everything else once it has processed it.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from streamrl.protocol.message import TypedMessage

# controller -> service


class IssuedForecast(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The predicted distribution of a request's output length (`scheduler.cost.length_forecast.Forecast`)."""

    lengths: tuple[float, ...]
    tail: tuple[float, ...]


class IssuedEpisode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an agent starts from."""

    task: str
    """Key of the task in the run file."""
    item: dict[str, Any]


class IssuedGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt and the samples to generate from it."""

    group_id: str
    samples: list[tuple[str, int, float | None]]
    """(sample id, seed, temperature or None for the run's) of each sample."""
    forecast: IssuedForecast | None
    episode: IssuedEpisode | None = None
    """Each sample is an episode of an agent; None: one completion."""
    oldest: int = 0
    """Oldest weight version of tokens, from before a resume, that its samples may be continued from."""


class Generate(TypedMessage, frozen=True, tag="generate"):
    """Generate these groups, which are dispatched together. Answered by `samples` and `parked`, sample by sample.

    Arrays: prompt_tokens int32 [tokens of all prompts], prompt_lengths int32 [groups].
    """

    t_queued: float
    """Unix seconds of the controller's clock."""
    budget: int | None
    """Tokens after which a sample is parked; None: it runs to its end."""
    groups: list[IssuedGroup]
    train_tokens_s: float | None = None
    """Tokens, prompts included, that the trainer processed per second in the last step; None before the first."""
    newest: int = 0
    """Newest version of the weights of the run; what newer ones have produced is from before it went back to a
    checkpoint."""
    more: bool = False
    """Whether the next `generate` has further groups that are dispatched together with these: a message holds only so
    many."""


class Park(TypedMessage, frozen=True, tag="park"):
    """Preempt these samples and keep what they have produced."""

    sample_ids: list[str]
    more: bool = False
    """Whether the next `park` names further samples that are parked together with these, as in `generate`."""


class Resume(TypedMessage, frozen=True, tag="resume"):
    """Continue these parked samples, with another budget."""

    sample_ids: list[str]
    budget: int | None
    round: int
    """Number of the new round."""
    more: bool = False
    """Whether the next `resume` names further samples that continue together with these, as in `generate`."""


class Use(TypedMessage, frozen=True, tag="use"):
    """Give new requests to these instances only."""

    instances: list[str]


class ScalePools(TypedMessage, frozen=True, tag="scale"):
    """Bring pools to a number of instances. Answered by a `fleet` for every change that this causes."""

    replicas: dict[str, int]
    """Number of instances by pool."""
    replace_dead: bool = False
    """Whether those of these pools that are dead for good leave, so that new ones may have their numbers."""


class LoadWeights(TypedMessage, frozen=True, tag="weights"):
    """Fetch a version once and have every instance load it. Answered by `weights_ready`."""

    number: int
    content_hash: str
    source: str | None
    """Site to fetch the version from; None: the trainer's."""


class Sleep(TypedMessage, frozen=True, tag="sleep"):
    """Free the devices for training. Answered by `asleep`."""


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True, order=True):
    """An instance as a member of the group in which the trainer pushes weights (`weights/membership.py`)."""

    name: str
    process: int
    """Number of its process: a restarted instance is another member."""
    workers: int
    """Number of its workers, each of which has a rank in the group."""


class Meeting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the processes of a group meet, and how many they are."""

    host: str
    port: int
    world: int
    """Number of ranks: the trainer's, and that of every worker."""


class WeightCall(TypedMessage, frozen=True, tag="weight_call"):
    """Carry out a step of an update that the trainer pushes to the instances.

    Answered by `weight_answer` with the same call; while instances are at work, also by some that are `pending`.
    """

    call: str
    step: Literal["members", "join", "pause", "load"]
    """members: tell who could load weights now; join: meet in a new group; pause: pause generation; load: receive the
    weights that the trainer sends in that group, and continue."""
    number: int
    """Number of the version."""
    members: list[Member]
    """Instances concerned, in the order of their ranks; [] in `members`."""
    behind: bool = False
    """members: only those that do not hold the served weights."""
    meeting: Meeting | None = None
    """Set in `join` only."""


class Finish(TypedMessage, frozen=True, tag="finish"):
    """End the service, because the run is over."""

    state: str
    error: str | None


# service -> controller


class SampleBatch(TypedMessage, frozen=True, tag="samples"):
    """Finished samples (`generation/site/sample_batches.py` packs them). Acknowledged once they are in the ledger.

    Arrays: lengths, completion_tokens, logprobs, token_versions and bodies if raw, with router replay experts and
    expert_rows, too; payload if zstd.
    """

    packing: Literal["raw", "zstd"]
    samples: int | None = None
    """Number of packed samples; None, like the fields below, if raw."""
    tokens: int | None = None
    bodies: int | None = None
    """Bytes of the samples' encoded bodies."""
    narrow: list[str] | None = None
    """Columns that were narrowed to 16 bits."""
    experts: list[int] | None = None
    """Shape of the samples' experts, [rows, row bytes]; None: they have none, or are raw."""


class Parked(TypedMessage, frozen=True, tag="parked"):
    """A sample has used up its budget and waits for `resume`."""

    sample_id: str
    tokens: int
    """Tokens that the sample has produced."""
    round: int


class GivenBack(TypedMessage, frozen=True, tag="given_back"):
    """An instance has returned a sample unfinished, which goes on elsewhere or later."""

    sample_id: str
    instance: str
    started: float
    """When the instance took it; both times are unix seconds of the controller's clock."""
    ended: float


class WeightsReady(TypedMessage, frozen=True, tag="weights_ready"):
    """All instances of the site serve a version."""

    number: int
    source: str | None
    """Site that the version was fetched from; None: the trainer's."""
    transfer_s: float
    bytes: int
    """Bytes received for the version."""
    started: float
    """When the service began to fetch it; all times are unix seconds of the controller's clock."""
    fetched: float
    applied: dict[str, tuple[float, float]]
    """(start, end) of the loading, by instance."""


class SiteAsleep(TypedMessage, frozen=True, tag="asleep"):
    """All instances of the site have freed their devices."""


class InstanceState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The state of an instance."""

    pool: str
    life: str
    detail: str
    """Cause of its latest death; '': it has not died."""
    for_good: bool = False
    """Whether it is dead and will not be restarted."""


class FleetChanged(TypedMessage, frozen=True, tag="fleet"):
    """The instances of the site, or their states, have changed."""

    fleet: list[dict[str, Any]]
    """Instances that are present, as made by `samples.fleet_to_wire`."""
    instances: dict[str, InstanceState]


class WeightAnswer(TypedMessage, frozen=True, tag="weight_answer"):
    """What has become of a `weight_call`. It is sent at once when an instance is lost: others may still be at work."""

    call: str
    pending: bool = False
    """Whether this is a sign of life only: instances are at work."""
    members: list[Member] = msgspec.field(default_factory=list)
    """Answer to `members`."""
    done: dict[str, tuple[float, float]] = msgspec.field(default_factory=dict)
    """(start, end) in unix seconds of the controller's clock, by instance that has carried it out."""
    lost: dict[str, str] = msgspec.field(default_factory=dict)
    """Why instances will not answer: they died, or fell silent."""
    failed: dict[str, str] = msgspec.field(default_factory=dict)
    """Why living instances could not carry it out: the group broke."""


class CanaryMeasured(TypedMessage, frozen=True, tag="canary_measured"):
    """An instance has computed the canary's log-probabilities with a version that it has loaded.

    The service passes it on to the controller. Arrays: logprobs float32 [completion tokens].
    """

    number: int
    instance: str
    dtype: str
    """Compute type of the instance."""


FROM_CONTROLLER = (Generate, Park, Resume, Use, ScalePools, LoadWeights, Sleep, WeightCall, Finish)
FROM_SERVICE = (SampleBatch, Parked, GivenBack, WeightsReady, SiteAsleep, FleetChanged, WeightAnswer, CanaryMeasured)
