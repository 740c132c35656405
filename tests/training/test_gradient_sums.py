"""Gradients in bf16 are added to fp32 totals as torch adds them, by a kernel where tensors are plain."""

from __future__ import annotations

import math

import pytest
import torch

from streamrl.training import gradient_sums
from streamrl.training.gradient_sums import add_all

SPECIAL = 0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, 3e38, -3e38, 1.0, -1.0


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 10.0


def bits(tensors: list[torch.Tensor]) -> list[list[int]]:
    return [one.view(torch.int32).flatten().tolist() for one in tensors]


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_sums_have_the_bits_of_torch_and_are_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(1,), (7,), (64, 33), (3, 5, 17), (0,), (1023,), ()]
    totals = [numbers(*shape, seed=number) for number, shape in enumerate(shapes)]
    gradients = [numbers(*shape, seed=100 + number).bfloat16() for number, shape in enumerate(shapes)]
    expected = [total.clone() for total in totals]
    torch._foreach_add_(expected, gradients)

    def unused(*_: object) -> None:
        raise AssertionError("torch was to add nothing")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "_foreach_add_", unused)
        add_all(totals, gradients)
    assert bits(totals) == bits(expected)


def test_what_is_not_a_number_and_bounds_of_types_are_added_as_torch_does() -> None:
    special = torch.tensor(SPECIAL)
    total = special.repeat_interleave(len(SPECIAL))
    gradient = special.repeat(len(SPECIAL)).bfloat16()
    expected = total + gradient.float()
    add_all([total], [gradient])
    assert torch.equal(total.isnan(), expected.isnan())
    known = ~expected.isnan()
    assert bits([total[known]]) == bits([expected[known]])


@pytest.mark.parametrize("kind", ["other type", "other layout", "other layout of the total"])
def test_torch_adds_what_the_kernel_does_not_take(kind: str) -> None:
    total, gradient, plain = numbers(6, 4, seed=0), numbers(6, 4, seed=1).bfloat16(), numbers(5, seed=2)
    if kind == "other type":
        gradient = gradient.half()
    elif kind == "other layout":
        gradient = gradient.t().contiguous().t()
    else:
        total = total.t().contiguous().t()
    expected = [total + gradient, plain + plain.bfloat16()]
    add_all([total, plain], [gradient, plain.bfloat16()])
    assert bits([total.contiguous(), plain]) == bits([expected[0].contiguous(), expected[1]])


def test_without_a_compiler_torch_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_sums, "_library", lambda: None)
    total, gradient = numbers(40, seed=0), numbers(40, seed=1).bfloat16()
    expected = total + gradient
    add_all([total], [gradient])
    assert bits([total]) == bits([expected])
