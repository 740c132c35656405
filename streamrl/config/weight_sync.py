"""The `weights:` and `mismatch:` sections of a run file: how weights reach instances, and what these then compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, model_validator

from streamrl.config.cluster import StrictModel


@dataclass(frozen=True)
class WeightPath:
    """A way in which a run's weights reach its instances."""

    summary: str
    """How weights travel, for users."""
    engine: str
    """Name of the weight-transfer engine in vLLM."""
    fetched: bool
    """Whether instances can load versions from their site's store at any time.

    Otherwise the trainer pushes them into a group with the instances' workers, inside one site."""
    module: str
    """Module of the trainer's side; its `make_backend(context, hub, compute)` returns a `WeightBackend`."""
    engine_class: tuple[str, str] | None = None
    """(module, class) of the engine in vLLM; None: it is one of vLLM's own."""
    communicator: tuple[str, str] | None = None
    """(module, class) of what connects the members of the group; None: there is no group."""
    one_machine: bool = False
    """Whether all processes of the site must be on one machine."""
    eight_bits: bool = False
    """Whether it sends weights of 8 bits, and to instances that quantize them as they load."""
    untried: str = ""
    """What of it has never been run on GPUs, and what has run in its place; '': nothing that is its own."""


def _pushed(summary: str, name: str, kind: str, *, one_machine: bool = False, untried: str = "") -> WeightPath:
    """Return a path on which the trainer pushes: these differ in their communicators, each in a module of its name."""
    return WeightPath(
        summary,
        engine=f"streamrl_{name}",
        fetched=False,
        module="streamrl.weights.backends.broadcast",
        engine_class=("streamrl.weights.backends.vllm_broadcast", "BroadcastWeightTransferEngine"),
        communicator=(f"streamrl.weights.backends.{name}", f"{kind}Communicator"),
        one_machine=one_machine,
        untried=untried,
    )


WEIGHT_PATHS = {
    "stream": WeightPath(
        "over ZeroMQ to one relay per site",
        engine="streamrl",
        fetched=True,
        module="streamrl.weights.backends.streamed",
        engine_class=("streamrl.weights.backends.vllm_store", "StoreWeightTransferEngine"),
        eight_bits=True,
    ),
    "gloo": _pushed("broadcast by gloo into a group of trainer and instances, inside one site", "gloo", "Gloo"),
    "nccl": _pushed(
        "the same by NCCL between GPUs, which has not been run so far",
        "nccl",
        "Nccl",
        untried="broadcast by NCCL; gloo, which differs in the communicator alone, has run on CPUs",
    ),
    "ipc": _pushed(
        "the same through memory that the processes of one machine share; by CUDA IPC it has run on one GPU so far",
        "ipc",
        "Ipc",
        one_machine=True,
        untried="memory of one GPU opened by a process on another one; a whole run had one GPU for both",
    ),
}
"""All weight paths, by their names in `weights.backend`."""
COLLECTIVE_S = {"cpu": 1800.0, "cuda": 600.0}
"""Seconds after which torch ends a collective of some of the trainer's ranks, by hardware: its defaults for gloo and
NCCL, which a device mesh leaves to the groups that it makes. For a dimension of all ranks it takes the default group,
with the limit of `training/rank_store.py`."""
LONGER = 2.0
"""Times `deadlines.weights_s` that the limit of a collective has to be, at least, where the trainer pushes weights:
while rank 0 waits for the end of one broadcast, the other ranks wait for it in a collective, and it must be the first
to give up."""
FETCHING = ("encoding", "anchor_every", "chunk_mb")
"""Keys of `weights` that say how versions are sent to relays, which fetch them."""
AUTO_PATH = "stream"
"""Taken for `auto`: it has been run."""

if TYPE_CHECKING:
    BackendName = str
else:
    BackendName = Literal[("auto", *WEIGHT_PATHS)]
SUMMARIES = "; ".join(f"{name}: {path.summary}" for name, path in WEIGHT_PATHS.items())


class WeightSyncConfig(StrictModel):
    """Delivery of new weights to the instances."""

    backend: BackendName = Field("auto", description=f"{SUMMARIES}; auto: {AUTO_PATH}")
    encoding: Literal["auto", "raw", "delta"] = Field(
        "auto",
        description="what relays fetch: raw: all bytes; delta: lossless differences; auto: raw on one machine, delta "
        "across sites and nodes; whatever it is, nothing is sent on the trainer's own node, where its file is copied",
    )
    anchor_every: int = Field(
        10, ge=1, description="delta: published versions between complete ones, from which late relays start"
    )
    chunk_mb: float = Field(4.0, ge=0.001, le=256, description="largest weight frame in MiB; smaller on slow links")
    generation_dtype: Literal["same", "fp8", "int8"] = Field(
        "same",
        description="type of the linear weights sent to instances; same: as all other weights; fp8, int8: 8 bits, "
        "which halves the bytes sent and makes generation slightly off-policy (see algorithm.off_policy)",
    )

    @property
    def path(self) -> WeightPath:
        """The way that the run's weights take."""
        return WEIGHT_PATHS[AUTO_PATH if self.backend == "auto" else self.backend]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.generation_dtype != "same" and not self.path.eight_bits:
            raise ValueError(
                f"weights.backend {self.backend} does not send weights.generation_dtype: {self.generation_dtype}; "
                "set backend: stream, or generation_dtype: same"
            )
        return self


class MismatchConfig(StrictModel):
    """Comparison of trainer and instances: both compute log-probabilities of a fixed text with each weight version."""

    on_mismatch: Literal["auto", "warn", "stop"] = Field(
        "auto",
        description="what follows a difference above the bound, of the fixed text or of a step's samples; warn: log, "
        "status and report say so; stop: the run ends, too; at a fixed text of an instance of another site it goes on "
        "without that site, if others can generate; auto: as stop if the fixed text with the run's first version, or "
        "the samples of its first step, differ by more than any rounding explains (0.1 nats in float32, 1 if one of "
        "the two is not in it, 2.5 with 8-bit weights), otherwise as warn",
    )
    bound: float | None = Field(
        None,
        gt=0,
        description="largest mean |difference| of log-probabilities, nats; none: 0.001 if trainer and instance compute "
        "in float32, 0.1 if one of them does not, 0.5 with 8-bit weights",
    )
