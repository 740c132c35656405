"""Norms and gates of an instance on a CPU: those of the trainer's kernels to the bit, and in calls that run in C."""

from __future__ import annotations

import pytest
import torch

from streamrl.generation.instance import layer_ops
from streamrl.generation.instance.few_rows import multiply, product_call, products
from streamrl.generation.instance.layer_ops import ADD_AND_NORM, GATE, NORM, TYPES, gate_call, norm_call, rows_of
from streamrl.generation.instance.native_calls import NativeCalls, library
from streamrl.training import layer_kernels

SHAPES = [(1, 8), (3, 7), (2, 5, 40), (33, 576), (4, 2049)]
EPSILON = 1e-5


def numbers(*shape: int, dtype: torch.dtype, scale: float = 3.0) -> torch.Tensor:
    return (torch.randn(shape) * scale).to(dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_norms_are_those_of_the_trainer(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert library() is not None, "no C compiler on this machine"
    torch.manual_seed(0)
    x, residual = numbers(*shape, dtype=dtype), numbers(*shape, dtype=dtype, scale=1.0)
    weight = torch.empty(shape[-1]).uniform_(0.5, 1.5).to(dtype)
    assert torch.equal(NORM(x, weight, EPSILON), layer_kernels.RMSNorm.apply(x, weight, EPSILON, 0.0))
    assert torch.equal(NORM(x, None, EPSILON), layer_kernels.RMSNorm.apply(x, torch.ones_like(weight), EPSILON, 0.0))
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + EPSILON).rsqrt() * weight.double()
    torch.testing.assert_close(NORM(x, weight, EPSILON), exact.to(dtype))
    normed, carried = x.clone(), residual.clone()
    ADD_AND_NORM(normed, carried, weight, EPSILON)
    assert torch.equal(carried, x + residual)
    assert torch.equal(normed, layer_kernels.RMSNorm.apply(x + residual, weight, EPSILON, 0.0))


@pytest.mark.parametrize("dtype", TYPES)
def test_norms_of_heads_in_a_part_of_a_wider_tensor_are_those_of_a_copy(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    whole, weight = numbers(5, 4 * 24, dtype=dtype), numbers(24, dtype=dtype)
    for start, heads in ((0, 2), (48, 1), (72, 1), (0, 4)):
        x = whole[:, start : start + heads * 24].view(5, heads, 24)
        normed = NORM(x, weight, EPSILON)
        assert normed.is_contiguous() and torch.equal(normed, NORM(x.contiguous(), weight, EPSILON))
        out = torch.empty_like(normed)
        NativeCalls([norm_call(x, None, weight, EPSILON, out)])()
        assert torch.equal(out, normed)
    assert rows_of(whole) == (1, 96) and rows_of(whole[:, :48].view(5, 2, 24)) == (2, 96)
    assert rows_of(whole.T) is None and rows_of(whole[:, :48]) is None
    assert rows_of(whole.view(5, 4, 24)[:, ::2]) is None and rows_of(whole.view(5, 4, 24).transpose(1, 2)) is None


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gates_are_those_of_the_trainer(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b = numbers(*shape, dtype=dtype), numbers(*shape, dtype=dtype)
    gated = GATE(torch.cat([a, b], -1))
    assert torch.equal(gated, layer_kernels.Gate.apply(a, b, False))
    torch.testing.assert_close(gated, (torch.nn.functional.silu(a.double()) * b.double()).to(dtype))


def test_numbers_without_a_value_stay() -> None:
    x = torch.tensor([[1.0, float("nan"), float("inf"), -float("inf"), -1e4, 1e4, 1.0, 1.0]] * 2).T.contiguous()
    expected = torch.nn.functional.silu(x[:, :1]) * x[:, 1:]
    torch.testing.assert_close(GATE(x), expected, equal_nan=True)
    assert NORM(x.T.contiguous(), None, EPSILON).isnan().all()


@pytest.mark.parametrize("dtype", TYPES)
def test_calls_in_c_compute_one_after_the_other_what_each_does_alone(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    found = products(dtype)
    x, residual, weight, up, bias = (
        numbers(*shape, dtype=dtype, scale=0.5) for shape in ((3, 64), (3, 64), (64,), (128, 64), (128,))
    )
    outs = torch.empty(3, 64, dtype=dtype), torch.empty(3, 128, dtype=dtype), torch.empty(3, 64, dtype=dtype)
    mine = residual.clone()
    calls = [norm_call(x, mine, weight, EPSILON, outs[0]), gate_call(outs[1], outs[2])]
    if found is not None:
        arranged = found.arrange(up, torch.empty_like(up))
        product = product_call(outs[0], arranged, bias, outs[1])
        assert product is not None
        calls.insert(1, product)
    else:
        outs[1].normal_()
    run = NativeCalls(calls)
    for _ in range(2):
        mine.copy_(residual)
        run()
        normed, carried = x.clone(), residual.clone()
        ADD_AND_NORM(normed, carried, weight, EPSILON)
        assert torch.equal(outs[0], normed) and torch.equal(mine, carried)
        if found is not None:
            assert torch.equal(outs[1], multiply(normed, arranged, bias))
        assert torch.equal(outs[2], layer_ops.gate(outs[1]))
        x.mul_(2)


def test_a_product_that_would_copy_its_arguments_is_no_call_in_c() -> None:
    x, weight, out = torch.randn(2, 4), torch.randn(3, 4), torch.empty(2, 3)
    assert product_call(x, weight, None, out) is not None
    assert product_call(torch.randn(4, 2).T, weight, None, out) is None
    assert product_call(x, weight, torch.randn(3).double(), out) is None
    assert product_call(x.half(), weight.half(), None, out.half()) is None
