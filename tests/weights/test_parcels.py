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
from streamrl.weights.version import CorruptWeights, checksum, lay_out, type_name


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
        super().__init__(1.0)
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
    assert len(group.sent) == len(list(parcels.parcels(described))) + 3  # head, description and hash


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


TENSORS = [("a.weight", torch.randn(100, 100)), ("b.weight", torch.arange(64.0))]
DESCRIBED = [(name, type_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in TENSORS]


@pytest.mark.parametrize("message", range(4))
def test_whatever_is_damaged_on_its_way_is_a_corrupt_version(message: int) -> None:
    group = Queue()
    parcels.send(group, DESCRIBED, TENSORS)
    assert len(group.sent) == 4  # head, description, parcel, hash
    size = group.sent[message].numel()
    places = range(size) if size < 1000 else range(0, size, 997)
    for place in places:
        for bit in range(8):
            there = group.receiver()
            there._coming[message].view(torch.uint8)[place] ^= 1 << bit
            got = {}
            with pytest.raises(CorruptWeights):
                got.update({name: tensor.clone() for name, tensor in parcels.receive(there)})
            assert len(there._coming) == (0 if message > 1 else 3 - message), "nothing is received by damaged words"


def test_no_description_is_larger_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    group, asked = Queue(), []
    parcels.send(group, DESCRIBED, TENSORS)
    length = group.sent[1].numel()
    monkeypatch.setattr(parcels, "MAX_DESCRIPTION_BYTES", length - 1)
    with pytest.raises(ValueError, match=f"description of 2 tensors has {length} bytes"):
        parcels.send(group, DESCRIBED, TENSORS)
    there = group.receiver()
    monkeypatch.setattr(there, "begin", lambda tensor, begin=there.begin: asked.append(tensor.numel()) or begin(tensor))
    with pytest.raises(CorruptWeights, match="head"):
        list(parcels.receive(there))
    assert asked == [group.sent[0].numel()]
