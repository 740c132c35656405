"""The transfer of new weights from the trainer to the instances: its interface, and the choice of the implementation.

stream   the trainer publishes a version; each site fetches it once, and its instances map it (`streamed.py`)
nccl     the trainer broadcasts into a group of all ranks and all instances' workers (`nccl.py`)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from streamrl.config.generation import EightBits
from streamrl.config.run import RunConfig
from streamrl.weights.version import Manifest

if TYPE_CHECKING:
    from streamrl.transport.endpoint import Link
    from streamrl.weights.sharded import ShardedLayout

Compute = Callable[..., Awaitable[Any]]
"""Calls a function with its arguments in the computing thread."""


@dataclass(frozen=True)
class WeightPath:
    """The way in which a run's weights reach its instances."""

    engine: str
    """Name of the weight-transfer engine in vLLM."""
    fetched: bool
    """Whether instances can load versions from their site's store at any time.

    Otherwise the trainer pushes them into a group that is formed once, when the run begins."""
    module: str
    """Module of the trainer's side; its `make_backend(context, hub, compute)` returns a `WeightBackend`."""
    engine_class: tuple[str, str] | None = None
    """(module, class) of the engine in vLLM; None: it is one of vLLM's own."""


PATHS = {
    "stream": WeightPath(
        engine="streamrl",
        fetched=True,
        module="streamrl.weights.backends.streamed",
        engine_class=("streamrl.weights.backends.vllm_store", "StoreWeightTransferEngine"),
    ),
    "nccl": WeightPath(engine="nccl", fetched=False, module="streamrl.weights.backends.nccl"),
}
"""All weight paths, by their names in `weights.backend`."""


def weight_path(run: RunConfig) -> WeightPath:
    """Return the weight path of a run; `auto` takes no path that has not been run."""
    return PATHS["stream" if run.weights.backend == "auto" else run.weights.backend]


class PublishedModel(Protocol):
    """The trainer's interface for a backend; every method is a collective of its ranks."""

    @property
    def rank(self) -> int:
        """The rank of this process."""

    def lay_out(self, number: int) -> tuple[Manifest, np.ndarray]:
        """Write the current weights into one buffer (uint8 [nbytes]) that all ranks share."""

    @property
    def layout(self) -> ShardedLayout:
        """The tensors of a version, as the checkpoint names them."""


@dataclass(frozen=True)
class Published:
    """A version that was made available to the sites."""

    number: int
    content_hash: str
    """Hash of the weights; '': the backend does not hash what it sends."""
    bytes: int


LOAD_FORMATS: dict[str, EightBits] = {"streamrl_int8": "int8", "streamrl_fp8": "fp8"}
"""vLLM's names of the loaders that quantize a model's files, for engines that multiply in 8 bits
(`generation/instance/eight_bit_vllm.py`)."""


class WeightBackend(ABC):
    """The trainer's side of a weight path; each rank has one."""

    @abstractmethod
    async def serve(self) -> None:
        """Serve relays that fetch weights, until cancelled; return at once if none do. For rank 0 only."""

    @abstractmethod
    async def publish(self, model: PublishedModel, number: int, controller: Link) -> Published:
        """Make the current weights available to all sites as version `number`.

        Raises:
            RunFailed: the weights cannot be laid out, or an instance does not answer.
        """
