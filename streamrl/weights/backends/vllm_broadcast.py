"""The vLLM weight-transfer engine of the weight paths that push: it loads what the trainer sends in their group.

`gloo`, `nccl` and `ipc` differ in their communicator alone.
"""

from __future__ import annotations

from dataclasses import dataclass

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
            self.load(receive(self._group), f"version {update_info.number}")
        except BaseException:
            self.shutdown()  # whoever waits for this member notices
            raise

    def shutdown(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
        self._group = self._store = None
