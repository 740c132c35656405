"""The group of the weight path `gloo`: torch's gloo over TCP, between memories of CPUs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist

from streamrl.runtime.interfaces import address_towards
from streamrl.weights.backends.communicator import MEET_S, Communicator, GroupStore, within

GLOO: Any = dist.ProcessGroupGloo
"""torch's type stubs leave out most of it."""


class GlooCommunicator(Communicator):
    """A gloo group of its own, which leaves torch's default group alone."""

    device = torch.device("cpu")

    def __init__(self, group: Any, met: GroupStore, rank: int, limit_s: float) -> None:
        super().__init__(limit_s, met, rank)
        self._group = group
        self._last: dist.Work | None = None
        """The last broadcast; all others have ended before it has."""

    @classmethod
    def connect(
        cls, met: GroupStore, host: str, rank: int, world: int, limit_s: float, stopped: Callable[[], str]
    ) -> Self:
        """Connect to all others by the address of this node that leads to the trainer's, and no other."""
        options = GLOO._Options()
        options._devices = [GLOO.create_device(hostname=address_towards(host), lazy_init=False)]
        options._threads = 1  # broadcasts come one after the other
        options._timeout = timedelta(seconds=MEET_S)
        group = within(MEET_S, lambda: GLOO(met.store, rank, world, options), f"{world - 1} others in gloo", stopped)
        return cls(group, met, rank, limit_s)

    def _begin(self, tensor: torch.Tensor) -> Callable[[], None]:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = timedelta(seconds=self._limit_s)
        self._last = work = self._group.broadcast([tensor], options)

        def wait() -> None:
            self._wait_until(work.is_completed)
            work.wait()

        return wait

    def close(self) -> None:
        """Close all connections, and tell the others.

        gloo closes them as its group is freed, once what is under way has ended or failed. A broadcast whose other end
        has gone in the middle of a tensor does so after its limit alone, so it is left to a thread. Its parcel stays in
        memory until then.
        """
        self.abort("closed")
        self._leave()
        group, last = [self._group], self._last
        self._group = self._last = None  # a broadcast keeps the connections open, too
        if last is None or last.is_completed():
            group.clear()
        else:
            threading.Thread(target=group.clear, name="gloo ends", daemon=True).start()
