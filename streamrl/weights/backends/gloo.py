"""The group of the weight path `gloo`: torch's gloo over TCP, between memories of CPUs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist

from streamrl.runtime.interfaces import address_towards
from streamrl.weights.backends.communicator import MEET_S, Communicator

GLOO: Any = dist.ProcessGroupGloo
"""torch's type stubs leave out most of it."""


class GlooCommunicator(Communicator):
    """A gloo group of its own, which leaves torch's default group alone."""

    device = torch.device("cpu")

    def __init__(self, group: Any, limit_s: float) -> None:
        super().__init__()
        self._group = group
        self._limit = timedelta(seconds=limit_s)

    @classmethod
    def connect(cls, store: dist.Store, host: str, rank: int, world: int, limit_s: float) -> Self:
        """Connect to all others by the address of this node that leads to the trainer's, and no other."""
        options = GLOO._Options()
        options._devices = [GLOO.create_device(hostname=address_towards(host), lazy_init=False)]
        options._threads = 1  # broadcasts come one after the other
        options._timeout = timedelta(seconds=MEET_S)
        return cls(GLOO(store, rank, world, options), limit_s)

    def _begin(self, tensor: torch.Tensor) -> Callable[[], None]:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = self._limit
        work = self._group.broadcast([tensor], options)

        def wait() -> None:
            work.wait()

        return wait

    def close(self) -> None:
        """Close all connections: gloo does as its group is freed, once what is under way has failed or ended."""
        self.abort("closed")
        self._group = None
