"""Norms, rotations and gates by a CPU's own kernels: as the formulas in fp64, and only where a model computes them."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from streamrl.training import layer_kernels
from streamrl.training.layer_kernels import Gate, RMSNorm, Rotate, take_kernels
from streamrl.training.packing_proof import small_model
from streamrl.verify.families import FAMILIES
from tests.training.thread_bits import check_same_bits

EPS = 1e-2
TYPES = [(torch.float32, 2e-6), (torch.bfloat16, 4e-3)]
KINDS = ["norm", "shifted norm", "SiLU", "GELU"]
ROWS = 150
"""Tokens; a weight's gradient is added up by 64 of them."""


def inputs(kind: str, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(2, ROWS // 2, width), (width,) if "norm" in kind else (2, ROWS // 2, width)]
    return [(2.0 * torch.randn(shape)).to(dtype).requires_grad_() for shape in shapes]


def formula(kind: str, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if kind == "SiLU":
        return functional.silu(x) * other
    if kind == "GELU":
        return functional.gelu(x, approximate="tanh") * other
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * (other + (kind == "shifted norm"))


def kernel(kind: str, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if "norm" in kind:
        return RMSNorm.apply(x, other, EPS, float(kind == "shifted norm"))  # type: ignore[no-any-return]
    return Gate.apply(x, other, kind == "GELU")  # type: ignore[no-any-return]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.detach().double() - expected.detach()).norm() / expected.detach().norm())


@pytest.mark.parametrize(("dtype", "bound"), TYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("width", [1, 7, 64, 1030])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_the_formulas(kind: str, width: int, dtype: torch.dtype, bound: float) -> None:
    tensors = inputs(kind, width, dtype)
    exact = [one.detach().double().requires_grad_() for one in tensors]
    found, expected = kernel(kind, *tensors), formula(kind, *exact)
    assert found.dtype == dtype and relative_error(found, expected) < bound
    upstream = torch.randn(expected.shape).to(dtype)
    ours = torch.autograd.grad(found, tensors, upstream)
    theirs = torch.autograd.grad(expected, exact, upstream.double())
    for one, other in zip(ours, theirs, strict=True):
        # the gradient in x of a norm of one number is what is left of two equal ones
        limit = 50 * bound if width == 1 else bound
        assert one.dtype == dtype and relative_error(one, other) < limit
    for row, other in zip(ours[0].flatten(0, 1), theirs[0].flatten(0, 1), strict=True):
        assert width == 1 or relative_error(row, other) < 5 * bound


@pytest.mark.parametrize("kind", KINDS)
def test_any_order_of_memory_and_any_number_of_threads_give_the_same_bits(kind: str) -> None:
    def make(ordered_otherwise: bool) -> list[torch.Tensor]:
        x, other = inputs(kind, 24, torch.float32)
        return [x.transpose(0, 2).contiguous().transpose(0, 2) if ordered_otherwise else x, other]

    check_same_bits(lambda tensors: kernel(kind, *tensors), make)


@pytest.mark.parametrize("kind", KINDS)
def test_only_rows_with_a_number_that_is_none_are_none(kind: str) -> None:
    tensors = [one.detach() for one in inputs(kind, 24, torch.float32)]
    tensors[0][0, 3, 5] = torch.nan
    found, expected = kernel(kind, *tensors), formula(kind, *tensors)
    assert torch.equal(found.isnan(), expected.isnan())


def test_gates_of_any_size_are_finite() -> None:
    x = torch.tensor([-1e30, -3e4, -100.0, -88.0, 0.0, 88.0, 100.0, 3e4, 1e12]).requires_grad_()
    for gelu in (False, True):
        out = Gate.apply(x, torch.ones_like(x), gelu)
        (slope,) = torch.autograd.grad(out.sum(), x)
        at = slice(1, None)  # whose cubes fp32 can hold
        assert torch.allclose(out, functional.relu(x), atol=1e-5)
        assert torch.allclose(slope[at], (x.detach()[at] > 0) + 0.5 * (x.detach()[at] == 0), atol=1e-5)


def test_a_weight_that_is_not_trained_has_no_gradient() -> None:
    x, weight = inputs("norm", 24, torch.float32)
    with_weight = torch.autograd.grad(RMSNorm.apply(x, weight, EPS, 0.0).sum(), [x, weight])
    (alone,) = torch.autograd.grad(RMSNorm.apply(x, weight.detach(), EPS, 0.0).sum(), [x])
    assert torch.equal(alone, with_weight[0])


ANGLES = {"whole heads": 12, "parts of heads": 8}


def rotation(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The formula, in the tensors' own type."""
    width = cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    half = torch.cat([-turned[..., width // 2 :], turned[..., : width // 2]], -1)
    return torch.cat([turned * cos[:, None] + half * sin[:, None], rest], -1)


@pytest.mark.parametrize(("dtype", "bound"), TYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("rotated", ANGLES.values(), ids=ANGLES)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (3, 2, 1, 0)], ids=["heads", "tokens", "columns"])
def test_vectors_and_their_gradients_are_rotated_by_the_formula(
    order: tuple[int, ...], rotated: int, dtype: torch.dtype, bound: float
) -> None:
    """Tensors lie in memory as heads of tokens, as tokens of heads as layers give them, or in any other way."""
    torch.manual_seed(0)
    x = torch.empty([(2, 3, 7, 12)[at] for at in order]).permute(*sorted(range(4), key=order.__getitem__))
    x = x.normal_().to(dtype).requires_grad_()
    cos, sin = torch.randn(2, 2, 7, rotated).to(dtype)
    exact = x.detach().double().requires_grad_()
    found, expected = Rotate.apply(x, cos, sin), rotation(exact, cos.double(), sin.double())
    upstream = torch.randn(expected.shape).to(dtype)
    assert found.dtype == dtype and relative_error(found, expected) < bound
    assert order != (0, 2, 1, 3) or found.stride() == x.stride()
    (ours,) = torch.autograd.grad(found, x, upstream)
    (theirs,) = torch.autograd.grad(expected, exact, upstream.double())
    assert relative_error(ours, theirs) < bound


def test_a_familys_rotation_is_replaced_once_and_gives_up_what_the_kernel_does_not_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = getattr(modeling_llama.apply_rotary_pos_emb, "__wrapped__", modeling_llama.apply_rotary_pos_emb)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", own)
    norm = LlamaRMSNorm(16)
    for _ in range(2):
        take_kernels(norm)
        assert modeling_llama.apply_rotary_pos_emb.__wrapped__ is own
    query, key = torch.randn(2, 3, 7, 12), torch.randn(2, 1, 7, 12)
    cos, sin = torch.randn(2, 2, 7, 12)
    used: list[torch.Tensor] = []
    monkeypatch.setattr(Rotate, "apply", lambda x, *_: used.append(x) or x)
    modeling_llama.apply_rotary_pos_emb(query, key, cos, sin)
    assert len(used) == 2
    used.clear()
    wide = torch.randn(2, 2, 7, 1)
    others = [
        (query, key, cos[:1], sin[:1]),  # the same for all rows
        (query, key, wide[0], wide[1]),
        (query.double(), key.double(), cos.double(), sin.double()),
        (query.bfloat16(), key.bfloat16(), cos, sin),
        (query, key, cos.clone().requires_grad_(), sin),
        (query.transpose(1, 2), key.transpose(1, 2), cos, sin, 2),
    ]
    for given in others:
        found, expected = modeling_llama.apply_rotary_pos_emb(*given), own(*given)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert used == []


def test_a_rotation_of_neighbours_keeps_its_operations() -> None:
    model = small_model(FAMILIES["GLM-4"](), seed=0)
    take_kernels(model)
    assert not hasattr(sys.modules[type(model).__module__].apply_rotary_pos_emb, "takes_kernel")


def taken(model: nn.Module) -> set[str]:
    """Classes of modules that take a kernel."""
    return {type(module).__name__ for module in model.modules() if "forward" in vars(module)}


BY_FAMILY = {
    "Llama": {"LlamaRMSNorm", "LlamaMLP"},
    "Qwen3": {"Qwen3RMSNorm", "Qwen3MLP"},
    "Gemma 3": {"Gemma3RMSNorm", "Gemma3MLP"},
    "OLMo-2": {"Olmo2RMSNorm", "Olmo2MLP"},
    "Cohere 2": {"Cohere2MLP"},
    "gpt-oss": {"GptOssRMSNorm"},
}


@pytest.mark.parametrize("family", BY_FAMILY)
def test_families_that_compute_the_formulas_take_the_kernels(family: str) -> None:
    model = small_model(FAMILIES[family](), seed=0)
    tokens = torch.arange(40)[None] % model.config.get_text_config().vocab_size
    results = []
    for _ in range(2):
        logits = model(tokens).logits
        model.zero_grad()
        logits.square().sum().backward()
        results.append([logits.detach(), *[one.grad for one in model.parameters() if one.grad is not None]])
        take_kernels(model)
    assert taken(model) == BY_FAMILY[family]
    for own, ours in zip(*results, strict=True):
        assert relative_error(ours, own.double()) < 2e-5


class _Bounded(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)).clamp(max=20.0) * self.up_proj(x))  # type: ignore[no-any-return]


class _Scaled(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) * 0.5  # type: ignore[no-any-return]


class _OfScaled(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(0.5 * x)  # type: ignore[no-any-return]


class _NeedsMore(LlamaMLP):
    def forward(self, x: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) + more  # type: ignore[no-any-return]


class _CenteredRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))


class _DetachedRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        square = hidden_states.square().mean(-1, keepdim=True).detach()
        return self.weight * (hidden_states * (square + self.variance_epsilon).rsqrt())


class _LargerRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        scale = (hidden_states.square().mean(-1, keepdim=True) + 2 * self.variance_epsilon).rsqrt()
        return self.weight * (hidden_states * scale)


def llama(**changes: Any) -> LlamaConfig:
    return LlamaConfig(**{"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2} | changes)


@pytest.mark.parametrize(
    "module",
    [
        _Bounded(llama()),
        _Scaled(llama()),
        _OfScaled(llama()),
        _NeedsMore(llama()),
        LlamaMLP(llama(hidden_act="relu")),
        LlamaMLP(llama(hidden_act="gelu")),  # not its tanh form
        _CenteredRMSNorm(16),
        _DetachedRMSNorm(16),
        _LargerRMSNorm(16),
        nn.RMSNorm(16),  # whose epsilon is that of its input's type
    ],
    ids=lambda one: type(one).__name__ + (str(one.config.hidden_act) if isinstance(one, LlamaMLP) else ""),
)
def test_a_module_that_computes_something_else_keeps_its_operations(module: nn.Module) -> None:
    take_kernels(module)
    assert taken(module) == set()


def test_tensors_that_a_kernel_does_not_take_go_to_the_modules_own_operations() -> None:
    norm, mlp = LlamaRMSNorm(16).double(), LlamaMLP(llama()).double()
    x = torch.randn(3, 16, dtype=torch.float64)
    expected = norm(x), mlp(x)
    take_kernels(norm)
    take_kernels(mlp)
    assert taken(norm) and taken(mlp)
    assert torch.equal(norm(x), expected[0]) and torch.equal(mlp(x), expected[1])
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert norm(mode.from_tensor(x)).shape == mlp(mode.from_tensor(x)).shape == (3, 16)
    assert norm(x.float()).dtype == torch.float64  # the product of two types


def test_a_copy_of_a_model_computes_with_its_own_weights() -> None:
    model = nn.ModuleList([LlamaRMSNorm(16), LlamaMLP(llama())])
    x = torch.randn(3, 16)
    take_kernels(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(2.0)
    for one, twin in zip(model, other, strict=True):
        assert taken(twin) and not torch.allclose(one(x), twin(x))


def test_rounding_once_errs_less_than_a_models_own_operations() -> None:
    errors = []
    for kernels in (False, True):
        model: PreTrainedModel = small_model(FAMILIES["Llama"](), seed=0)
        tokens = torch.arange(200)[None] % model.config.vocab_size
        exact = model.double()(tokens).logits
        model = model.to(torch.bfloat16)
        if kernels:
            take_kernels(model)
        errors.append(relative_error(model(tokens).logits, exact))
    assert errors[1] < errors[0]


def test_without_a_compiler_a_model_keeps_its_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_kernels, "_library", lambda: None)
    norm = LlamaRMSNorm(16)
    take_kernels(norm)
    assert taken(norm) == set()
