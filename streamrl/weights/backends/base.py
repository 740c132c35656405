"""The transfer of new weights from the trainer to the instances: its interface.

stream   the trainer publishes a version; each site fetches it once, and its instances map it (`streamed.py`)
gloo     the trainer broadcasts into a group with all instances' workers (`broadcast.py`, `gloo.py`)
nccl     the same between GPUs (`broadcast.py`, `nccl.py`)
ipc      the same through memory that the processes of one machine share (`broadcast.py`, `ipc.py`)

`WEIGHT_PATHS` of `streamrl/config/weight_sync.py` has them by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from streamrl.config.generation import EightBits
from streamrl.errors import RunFailed
from streamrl.weights.version import Manifest

if TYPE_CHECKING:
    from streamrl.protocol.controller_site import WeightAnswer
    from streamrl.transport.endpoint import Link
    from streamrl.weights.sharded import ShardedLayout

Compute = Callable[..., Awaitable[Any]]
"""Calls a function with its arguments in the computing thread."""


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
    applied: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """(start, end) of the loading in unix seconds, by instance that the version was pushed to."""
    behind: bool = False
    """Whether it was pushed once more, to those instances only that did not hold it."""


LOAD_FORMATS: dict[str, EightBits] = {"streamrl_int8": "int8", "streamrl_fp8": "fp8"}
"""vLLM's names of the loaders that quantize a model's files, for engines that multiply in 8 bits
(`generation/instance/eight_bit_vllm.py`)."""


class WeightBackend(ABC):
    """The trainer's side of a weight path; each rank has one."""

    @abstractmethod
    async def serve(self) -> None:
        """Serve relays that fetch weights, until cancelled; return at once if none do. For rank 0 only."""

    @abstractmethod
    async def publish(self, model: PublishedModel, number: int, controller: Link, behind: bool = False) -> Published:
        """Make the current weights available to all sites as version `number`.

        Args:
            model: the trainer's model.
            number: number of the version.
            controller: link to the controller.
            behind: only to instances that do not hold the version; for paths that push.

        Raises:
            RunFailed: the weights cannot be laid out, or cannot be pushed.
        """

    def answered(self, answer: WeightAnswer) -> None:
        """Take what became of a call to the instances.

        Raises:
            RunFailed: this path makes no calls.
        """
        raise RunFailed(f"an answer to {answer.call!r}, which nobody has asked")
