"""Tensors wait in host memory without memory of their own, and come back with the same bits."""

from __future__ import annotations

import pytest
import torch

from streamrl.training import host_offload
from streamrl.training.host_offload import HostOffload


def test_all_views_of_a_block_leave_and_return_together() -> None:
    block = torch.randn(10)
    tied, part = block.view(2, 5), block[3:5]
    before = block.clone()
    offload = HostOffload(pinned=False)
    assert offload.hold([part, block, tied, torch.empty(0)]) == 40
    assert block.untyped_storage().nbytes() == tied.untyped_storage().nbytes() == 0
    offload.restore()
    assert torch.equal(block, before) and torch.equal(part, before[3:5])


def test_every_bit_pattern_and_type_returns() -> None:
    odd = torch.tensor([0x7FC00001, -1, 0, -(2**31)], dtype=torch.int32)  # a NaN with a payload, -0.0
    tensors = [odd.view(torch.float32), torch.tensor([1.5, -2.0]).bfloat16(), torch.tensor(7), torch.ones(3) > 0]
    before = [tensor.clone().view(torch.uint8) if tensor.dim() else tensor.clone() for tensor in tensors]
    offload = HostOffload(pinned=False)
    for _ in range(2):  # the second time into the same host memory
        offload.hold(tensors)
        offload.restore()
    after = [tensor.view(torch.uint8) if tensor.dim() else tensor for tensor in tensors]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_contents_that_changed_in_between_are_the_ones_that_wait() -> None:
    weight, offload = torch.zeros(4), HostOffload(pinned=False)
    offload.hold([weight])
    offload.restore()
    weight += 1
    offload.hold([weight])
    offload.restore()
    assert weight.tolist() == [1, 1, 1, 1]


def test_host_memory_is_hardly_more_than_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned blocks are rounded up to powers of two, and these are just above some."""
    monkeypatch.setattr(host_offload, "SLAB", slab := 4096)
    tensors = [torch.randn(count) for count in (1025, 3, 4097, 2049, 1)]
    before = [tensor.clone() for tensor in tensors]
    offload = HostOffload(pinned=False)
    for order in (tensors, tensors[::-1]):
        assert offload.hold(order) == 4 * 7175
        allocated = [one.untyped_storage().nbytes() for one in offload._slabs]
        assert set(allocated) == {slab} and sum(allocated) < 4 * 7175 + len(tensors) * host_offload.ALIGNMENT + slab
        offload.restore()
        assert all(torch.equal(one, other) for one, other in zip(tensors, before, strict=True))
    assert host_offload.SLAB.bit_count() == 1 and host_offload.SLAB % host_offload.ALIGNMENT == 0


def test_more_may_leave_after_others_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_offload, "SLAB", 512)
    first, second = torch.randn(200), torch.randn(300)
    before = first.clone(), second.clone()
    offload = HostOffload(pinned=False)
    assert (offload.hold([first]), offload.hold([first, second])) == (800, 1200)
    assert first.untyped_storage().nbytes() == second.untyped_storage().nbytes() == 0
    offload.restore()
    assert torch.equal(first, before[0]) and torch.equal(second, before[1])
