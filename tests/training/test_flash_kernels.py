"""Which library's kernels compute attention on a GPU: the calls, the comparison, and what becomes of a failure.

The kernels themselves need a GPU (`tests/gpu`); here the formula stands in for both, with the arguments of each.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from streamrl.training import flash_kernels
from streamrl.training.flash_kernels import Sequences, flash_backward, flash_forward, newer_agrees, newer_forward
from streamrl.training.recomputation import KEPT, _policy

DEVICE = torch.device("cpu")
KIND = torch.float32, 4, 2, 16


def scores_of(query: torch.Tensor, key: torch.Tensor, causal: bool, scale: float, left: int | None) -> torch.Tensor:
    """Scores of one sequence, [H, n, k]; the last query sees all keys, or the last `left + 1` of them."""
    keys = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = torch.einsum("nhd,khd->hnk", query, keys) * scale
    behind = torch.arange(len(query))[:, None] + len(key) - len(query) - torch.arange(len(key))
    hidden = (behind < 0) & causal
    if left is not None:
        hidden = hidden | (behind > left)
    return scores.masked_fill(hidden, -torch.inf)


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_ends: torch.Tensor,
    key_ends: torch.Tensor,
    causal: bool,
    scale: float,
    left: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    outs, sums = [], []
    for q0, q1, k0, k1 in zip(query_ends[:-1], query_ends[1:], key_ends[:-1], key_ends[1:], strict=True):
        scores = scores_of(query[q0:q1], key[k0:k1], causal, scale, left)
        values = value[k0:k1].repeat_interleave(query.shape[1] // key.shape[1], 1)
        outs.append(torch.einsum("hnk,khd->nhd", scores.softmax(-1), values))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(sums, 1)


def backward(grad: torch.Tensor, *inputs: Any) -> tuple[torch.Tensor, ...]:
    # a kernel saves nothing, so what this does must not be seen by a checkpoint around it
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda one: one, lambda one: one):
        leaves = [x.detach().requires_grad_() for x in inputs[:3]]
        return torch.autograd.grad(forward(*leaves, *inputs[3:])[0], leaves, grad)


class FlashAttention4:
    """The interface of the package, by the formula; `off` is added to its gradients."""

    def __init__(self) -> None:
        self.off = 0.0
        self.calls = self.calls_of_torch = 0
        self.calls_that_work = 100

    def _flash_attn_fwd(self, q: Any, k: Any, v: Any, **about: Any) -> tuple[torch.Tensor | None, ...]:
        self.calls += 1
        if self.calls > self.calls_that_work:
            raise RuntimeError("no such kernel")
        assert about["return_lse"] and about["window_size_right"] in (None, 0)
        return (*forward(q, k, v, *self._about(about)), None, None, None)

    def _flash_attn_bwd(self, q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any, **about: Any) -> Any:
        assert out.shape == dout.shape and lse.shape == (q.shape[1], len(q))
        return tuple(one + self.off for one in backward(dout, q, k, v, *self._about(about)))

    @staticmethod
    def _about(about: dict[str, Any]) -> tuple[Any, ...]:
        assert about["max_seqlen_q"] == int(about["cu_seqlens_q"].diff().max())
        assert about["max_seqlen_k"] == int(about["cu_seqlens_k"].diff().max())
        ends = about["cu_seqlens_q"], about["cu_seqlens_k"]
        return *ends, about["causal"], about["softmax_scale"], about["window_size_left"]


def raised(error: Exception) -> None:
    raise error


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[FlashAttention4]:
    def seen(sequences: Sequences, scale: float) -> tuple[Any, ...]:
        left = None if sequences.window is None else sequences.window - 1
        return sequences.query_ends, sequences.key_ends, sequences.causal, scale, left

    def torch_forward(query: Any, key: Any, value: Any, *about: Any) -> Any:
        found.calls_of_torch += 1
        return forward(query, key, value, *seen(*about))

    def torch_backward(grad: Any, query: Any, key: Any, value: Any, out: Any, lse: Any, *about: Any) -> Any:
        return backward(grad, query, key, value, *seen(*about))

    found = FlashAttention4()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flash_kernels, "_torch_forward", torch_forward)
    monkeypatch.setattr(flash_kernels, "_torch_backward", torch_backward)
    monkeypatch.setattr(flash_kernels, "_newer", lambda: found)
    monkeypatch.setattr(flash_kernels, "failed", set())
    newer_agrees.cache_clear()
    yield found
    newer_agrees.cache_clear()


@pytest.mark.parametrize("windowed", [False, True])
def test_the_package_is_used_where_it_computes_what_torch_does(package: FlashAttention4, windowed: bool) -> None:
    assert newer_agrees(DEVICE, *KIND, windowed)
    assert package.calls == (1 if windowed else 2)  # a causal piece, and a shared prompt
    assert newer_agrees(DEVICE, *KIND, windowed) and package.calls == (1 if windowed else 2)  # tried once


@pytest.mark.parametrize("off", [0.1, float("nan")])
def test_a_difference_leaves_it_to_torch_and_is_told(
    package: FlashAttention4, caplog: pytest.LogCaptureFixture, off: float
) -> None:
    package.off = off
    assert not newer_agrees(DEVICE, *KIND, False)
    assert "by torch's kernels: flash-attn-4 differs by" in caplog.text and "4 heads over 2 of width 16" in caplog.text


def test_a_window_of_another_width_is_noticed(package: FlashAttention4, monkeypatch: pytest.MonkeyPatch) -> None:
    right = flash_kernels._as_newer_calls
    monkeypatch.setattr(
        flash_kernels, "_as_newer_calls", lambda one, scale: right(replace(one, window=one.window + 1), scale)
    )
    assert not newer_agrees(DEVICE, *KIND, True)


def test_a_failure_leaves_it_to_torch_and_is_told(
    package: FlashAttention4, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash_kernels, "_newer", lambda: SimpleNamespace())
    assert not newer_agrees(DEVICE, *KIND, False)
    assert "flash-attn-4 failed for 4 heads over 2 of width 16 in float32" in caplog.text


def test_without_the_package_or_its_hardware_torch_computes_silently(
    package: FlashAttention4, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(flash_kernels, "_newer", lambda: raised(ModuleNotFoundError(name="flash_attn")))
    assert not newer_agrees(DEVICE, *KIND, False)
    monkeypatch.setattr(flash_kernels, "_newer", lambda: package)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    newer_agrees.cache_clear()
    assert not newer_agrees(DEVICE, *KIND, False)
    assert caplog.text == "" and package.calls == 0


@pytest.mark.parametrize("error", [ModuleNotFoundError(name="quack"), OSError("libcute_dsl_runtime.so"), ImportError()])
def test_a_broken_installation_is_told(
    package: FlashAttention4, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(flash_kernels, "_newer", lambda: raised(error))
    assert not newer_agrees(DEVICE, *KIND, False)
    assert "flash-attn-4 failed" in caplog.text and type(error).__name__ in caplog.text


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 3)])
def test_both_directions_go_to_the_package_and_what_it_has_no_kernel_for_to_torch(
    package: FlashAttention4,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    causal: bool,
    window: int | None,
    fails: bool,
) -> None:
    monkeypatch.setattr(flash_kernels, "_uses_newer", lambda *kind: True)
    if fails:
        monkeypatch.setattr(flash_kernels, "_newer", lambda: raised(RuntimeError("no such kernel")))
    else:
        monkeypatch.setattr(flash_kernels, "_torch_forward", None)
        monkeypatch.setattr(flash_kernels, "_torch_backward", None)
    torch.manual_seed(0)
    queries, keys = torch.tensor([0, 4, 9], dtype=torch.int32), torch.tensor([0, 6, 11], dtype=torch.int32)
    query, grad = torch.randn(2, 9, 4, 16)
    key, value = torch.randn(2, 11, 2, 16)
    about = Sequences(queries, keys, 5, 6, causal, window), 0.3
    out, lse = flash_forward(query, key, value, *about)
    found = flash_backward(grad, query, key, value, out, lse, *about)
    seen = queries, keys, causal, 0.3, None if window is None else window - 1
    expected = (*forward(query, key, value, *seen), *backward(grad, query, key, value, *seen))
    assert all(map(torch.equal, (out, lse, *found), expected))
    flash_backward(grad, query, key, value, *flash_forward(query, key, value, *about), *about)
    assert caplog.text.count("by torch's kernels from now on") == len(flash_kernels.failed) == 2 * fails  # once each


class Attention(torch.autograd.Function):
    """A layer's attention, as an autograd function around the operation."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        assert newer_agrees(DEVICE, *KIND, False)
        out: torch.Tensor = newer_forward(query, query, query, ends, ends, len(query), len(query), True, -1, 1.0)[0]
        ctx.save_for_backward(out)
        return out.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] * ctx.saved_tensors[0], None


@pytest.mark.parametrize("fails", [False, True])
def test_selective_checkpoints_keep_its_results(package: FlashAttention4, fails: bool) -> None:
    query, ends = torch.randn(5, 2, 8, requires_grad=True), torch.tensor([0, 5], dtype=torch.int32)
    found = []
    for kept in (KEPT, frozenset()):
        newer_agrees.cache_clear()  # so that both libraries are compared in the middle of the layer
        package.calls, package.calls_that_work, package.calls_of_torch = -2, 0 if fails else 9, -2
        flash_kernels.failed.clear()
        contexts = partial(create_selective_checkpoint_contexts, partial(_policy, kept))
        out = checkpoint(Attention.apply, query, ends, use_reentrant=False, context_fn=contexts)
        out.sum().backward()
        found.append((package.calls, package.calls_of_torch))
    assert found == ([(1, 1), (1, 2)] if fails else [(1, 0), (2, 0)])


def test_short_sequences_and_very_many_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(flash_kernels, "newer_agrees", lambda *kind: asked.append(kind) or True)
    query = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16, shape=(9000, 4, 64))
    ends = torch.zeros(257, dtype=torch.int32)

    def uses(queries: int, keys: int, ends: torch.Tensor = ends, window: int | None = None) -> bool:
        sequences = Sequences(ends, ends, queries, keys, True, window)
        return flash_kernels._uses_newer(query, query, sequences)  # type: ignore[arg-type]

    assert uses(512, 512) and uses(9000, 512, window=7)
    assert asked == [(query.device, torch.bfloat16, 4, 4, 64, windowed) for windowed in (False, True)]
    assert not uses(511, 9000) and not uses(9000, 511) and not uses(600, 600, torch.zeros(258, dtype=torch.int32))
    query.device = torch.device("cpu")
    assert not uses(9000, 9000) and len(asked) == 2


def test_the_operation_tells_the_shapes_of_its_results() -> None:
    ends = torch.tensor([0, 5], dtype=torch.int32)
    arguments = (torch.randn(5, 2, 8), torch.randn(5, 1, 8), torch.randn(5, 1, 8), ends, ends, 5, 5, True, -1, 1.0)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments]
        out, lse = newer_forward(*fake)
    assert out.shape == (5, 2, 8) and lse.shape == (2, 5) and lse.dtype == torch.float32
