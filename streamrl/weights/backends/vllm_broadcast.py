"""The vLLM weight-transfer engine of the weight paths that push: it loads what the trainer sends in their group.

`gloo`, `nccl` and `ipc` differ in their communicator alone. Every worker of an instance is a member of the group.

vLLM's executor of several workers stops at the first that raises and leaves the answers of the others in their queues,
where the next call would take them for its own. So a group that breaks, after which an instance goes on, is an answer
of `GroupWorker` and no exception.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from streamrl.weights.backends.communicator import Communicator, GroupBroken, communicator_of, join
from streamrl.weights.backends.parcels import receive
from streamrl.weights.backends.vllm_reload import ReloadingEngine


@dataclass
class GroupInitInfo(WeightTransferInitInfo):
    """Arguments of the engine's initialization: where its group meets."""

    host: str
    port: int
    world: int
    """Number of ranks."""
    first_rank: int
    """Rank of the instance's first worker."""
    limit_s: float
    """Seconds for all to meet, and for one broadcast."""


@dataclass
class PushedUpdateInfo(WeightTransferUpdateInfo):
    """Arguments of an update: the number of the version that comes."""

    number: int


class BroadcastWeightTransferEngine(ReloadingEngine[GroupInitInfo, PushedUpdateInfo]):
    """A weight-transfer engine that receives versions from the trainer, in a group that is formed as it changes."""

    init_info_cls = GroupInitInfo
    update_info_cls = PushedUpdateInfo

    _group: Communicator | None = None
    _store: dist.Store | None = None

    def init_transfer_engine(self, init_info: GroupInitInfo) -> None:
        """Leave the group that stands, and meet in a new one.

        Raises:
            GroupBroken: the others have not come.
        """
        self.shutdown()
        kind = communicator_of(self.config.backend)
        rank = init_info.first_rank + self.parallel_config.rank
        place = init_info.host, init_info.port, rank, init_info.world
        self._group, self._store = join(kind, *place, init_info.limit_s)

    def receive_weights(self, update_info: PushedUpdateInfo) -> None:
        """Load the version that the trainer sends.

        Raises:
            GroupBroken: the group broke meanwhile; some layers have their new weights then, and others none.
            CorruptWeights: other tensors were sent than received, or fewer than the model has.
        """
        if self._group is None:
            raise GroupBroken("it was left")
        try:
            tensors = receive(self._group)
            self.load(tensors, f"version {update_info.number}")
            for _ in tensors:  # a loader that needs no more leaves the hash, or what the next version begins with
                pass
        except BaseException:
            self.shutdown()  # whoever waits for this member notices
            raise

    def shutdown(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
        self._group = self._store = None


class GroupWorker:
    """Extension of vLLM's worker: the calls in which its group may break. Each returns how it did; '': it stands."""

    init_weight_transfer_engine: Callable[[dict[str, Any]], None]
    update_weights: Callable[[dict[str, Any]], None]

    def join_weight_group(self, meeting: dict[str, Any]) -> str:
        """Meet the trainer and all other workers; `meeting`: the fields of `GroupInitInfo`."""
        return _broken(self.init_weight_transfer_engine, meeting)

    def receive_version(self, number: int) -> str:
        """Load the version that the trainer sends, in an update that has begun; one that broke off is begun anew.

        Raises:
            CorruptWeights: as `BroadcastWeightTransferEngine.receive_weights`.
        """
        return _broken(self.update_weights, {"number": number})


def _broken(work: Callable[[dict[str, Any]], None], argument: dict[str, Any]) -> str:
    try:
        work(argument)
    except GroupBroken as error:
        return str(error)
    return ""
