"""When the tensors of a version in parcels are hashed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

import numpy as np
import pytest
import torch

from streamrl.weights.backends import parcels
from streamrl.weights.backends.communicator import Communicator
from streamrl.weights.version import checksum, lay_out, type_name


class AtOnce(ThreadPoolExecutor):
    """Threads that are as fast as can be: whatever they are given is done before the caller goes on."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **keywords: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*args, **keywords))
        return done


class OnDemand(ThreadPoolExecutor):
    """Threads that are as slow as can be: they begin once their result is waited for."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **keywords: Any) -> Future[Any]:
        class Late(Future[Any]):
            def result(self, timeout: float | None = None) -> Any:
                if not self.done():
                    self.set_result(work(*args, **keywords))
                return super().result(timeout)

        return Late()


class Queue(Communicator):
    """A group whose device works off a queue: memory has its values once its broadcast has been waited for."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[torch.Tensor] = []

    @classmethod
    def connect(cls, *_: object) -> Self:
        raise NotImplementedError

    def _begin(self, tensor: torch.Tensor) -> Callable[[], None]:
        return lambda: self.sent.append(tensor)

    def close(self) -> None:
        pass

    def receiver(self) -> Receiver:
        """The other end, which gets what has been sent."""
        return Receiver(self.sent)

    def has(self, data: np.ndarray) -> bool:
        """Whether these bytes are of a tensor that has been sent."""
        return any(np.shares_memory(one.numpy(), data) for one in self.sent)


class Receiver(Queue):
    """The other end of a group."""

    def __init__(self, sent: list[torch.Tensor]) -> None:
        super().__init__()
        self._coming = [tensor.clone() for tensor in sent]

    def _begin(self, tensor: torch.Tensor) -> Callable[[], None]:
        def wait() -> None:
            tensor.copy_(self._coming.pop(0))

        return wait


def test_a_parcel_is_hashed_once_the_device_has_filled_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [(str(number), torch.full((50, number), float(number))) for number in range(1, 9)]
    described = [(name, type_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors]
    group, in_time = Queue(), []

    def hashed(data: np.ndarray) -> str:
        in_time.append(group.has(data))
        return checksum(data)

    monkeypatch.setattr(parcels, "PARCEL", 2000)
    monkeypatch.setattr(parcels, "ThreadPoolExecutor", AtOnce)
    monkeypatch.setattr(parcels, "checksum", hashed)
    assert parcels.send(group, described, tensors) == lay_out(0, tensors)[0].version.content_hash
    assert in_time == [True] * len(tensors)
    assert len(group.sent) == len(list(parcels.parcels(described))) + 3  # and their names, with a length, and the hash


def test_a_loader_may_write_into_what_it_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write into tensors, as vLLM's loader for gpt-oss does with biases, in all workers but the first."""
    tensors = [(str(number), torch.full((50, number), float(number))) for number in range(1, 9)]
    described = [(name, type_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors]
    group = Queue()
    monkeypatch.setattr(parcels, "PARCEL", 2000)
    parcels.send(group, described, tensors)
    monkeypatch.setattr(parcels, "ThreadPoolExecutor", OnDemand)
    got = {}
    for name, tensor in parcels.receive(group.receiver()):
        got[name] = tensor.clone()
        tensor.zero_()
    assert all(torch.equal(got[name], tensor) for name, tensor in tensors) and len(got) == len(tensors)
