"""What kernels compute of the head is a plain log-softmax.

Those of GPUs run uncompiled here; `tests/gpu` compiles them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from streamrl.config.run import RunConfig
from streamrl.training import head_kernels
from streamrl.training import token_logprobs as head
from streamrl.training.compiled_parts import compiles
from streamrl.training.fused_logprobs import COMPILED, OF_CPUS, FusedTokenLogprobs, Kernels, kernels_for
from streamrl.training.head_kernels import Changes
from streamrl.training.token_logprobs import LogitTransform, TokenDistribution, measured_tokens, token_logprobs
from tests.training.conftest import head_inputs, relative_error

VOCABULARY, WIDTH, TOKENS = 2100, 32, 50
"""A CPU's kernel takes 1,024 logits at a time."""
CHANGES = [Changes(1.0, None, 1.0), Changes(0.25, None, 0.7), Changes(1.5, 20.0, 1.3)]
BOTH = pytest.mark.parametrize("kernels", [COMPILED, OF_CPUS], ids=["compiled", "of CPUs"])


@pytest.mark.parametrize(("at_once", "keeps"), [(7, False), (25, False), (1000, False), (7, True)])
@pytest.mark.parametrize("changes", CHANGES, ids=["plain", "scaled", "capped"])
@BOTH
def test_values_and_gradients_are_those_of_a_plain_log_softmax(
    kernels: Kernels, changes: Changes, at_once: int, keeps: bool
) -> None:
    values, targets, upstream = head_inputs(TOKENS, WIDTH, VOCABULARY)
    targets[:4] = torch.tensor([0, 1023, 1024, VOCABULARY - 1])
    logprobs, entropy = FusedTokenLogprobs.apply(*values, targets, changes, kernels, at_once, keeps)
    hidden, weight, bias = exact = [value.detach().double().requires_grad_() for value in values]
    logits = (hidden @ weight.t() + bias) * changes.scale
    if changes.softcap:
        logits = changes.softcap * torch.tanh(logits / changes.softcap)
    every = torch.log_softmax(logits / changes.temperature, -1)
    expected = every.gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), -(every.exp() * every).sum(-1), rtol=1e-5, atol=1e-5)
    (logprobs * upstream).sum().backward()
    (expected * upstream).sum().backward()
    for ours, theirs in zip(values, exact, strict=True):
        assert relative_error(ours.grad, theirs.grad) < 2e-6


@pytest.mark.parametrize(
    ("kernels", "tokens", "keeps"),
    [(COMPILED, 48, False), (OF_CPUS, TOKENS, False), (OF_CPUS, TOKENS, True)],
    ids=["compiled", "of CPUs, with rows that fill up", "of CPUs, kept"],
)
def test_in_bf16_it_is_as_exact_as_the_head_that_keeps_fp32_logits(kernels: Kernels, tokens: int, keeps: bool) -> None:
    values, targets, upstream = head_inputs(tokens, WIDTH, VOCABULARY)
    halves = [value.detach().bfloat16().requires_grad_() for value in values]
    plain = token_logprobs(*halves, targets, TokenDistribution(LogitTransform(0.5, 30.0), 0.7))
    logprobs, entropy = FusedTokenLogprobs.apply(*halves, targets, Changes(0.5, 30.0, 0.7), kernels, 16, keeps)
    torch.testing.assert_close(logprobs, plain.logprobs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy[measured_tokens(targets)], plain.entropy, rtol=1e-6, atol=1e-6)
    theirs = torch.autograd.grad((plain.logprobs * upstream).sum(), halves)
    ours = torch.autograd.grad((logprobs * upstream).sum(), halves)
    assert all(one.dtype == torch.bfloat16 for one in ours)
    for one, other in zip(ours, theirs, strict=True):
        assert relative_error(one, other) < 0.01


@BOTH
def test_near_certainty_nothing_cancels_and_a_token_that_is_ruled_out_has_no_entropy(kernels: Kernels) -> None:
    hidden = torch.tensor([[1.0]], requires_grad=True)
    weight = torch.tensor([[0.0], [-18.0], [-torch.inf]])
    targets = torch.tensor([0])
    logprobs, entropy = FusedTokenLogprobs.apply(hidden, weight, None, targets, CHANGES[0], kernels, 4, False)
    rest = torch.exp(torch.tensor(-18.0))
    torch.testing.assert_close(logprobs, -rest[None], rtol=1e-6, atol=0.0)
    torch.testing.assert_close(entropy, (19 * rest)[None], rtol=1e-3, atol=0.0)


@BOTH
def test_a_small_logit_keeps_its_digits_under_a_cap(kernels: Kernels) -> None:
    """A difference of 1 and almost 1 would lose them."""
    hidden = torch.tensor([[1e-4]])
    weight = torch.tensor([[1.0], [0.0]], requires_grad=True)
    capped = Changes(1e4, 1e4, 1.0)  # z = 1e4 tanh(1e-4) and 0
    logprobs, _ = FusedTokenLogprobs.apply(hidden, weight, None, torch.tensor([0]), capped, kernels, 4, False)
    expected = torch.log_softmax(1e4 * torch.tanh(torch.tensor([1e-4, 0.0], dtype=torch.double)), -1)[0]
    torch.testing.assert_close(logprobs.double(), expected[None], rtol=2e-6, atol=0.0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@BOTH
def test_a_logit_that_is_not_finite_shows_in_its_row_alone(kernels: Kernels, bad: float) -> None:
    hidden = torch.tensor([[1.0], [bad]])
    weight = torch.ones(3, 1, requires_grad=True)
    about = None, torch.tensor([0, 1]), CHANGES[0], kernels, 4, False
    logprobs, entropy = FusedTokenLogprobs.apply(hidden, weight, *about)
    assert logprobs.isfinite().tolist() == entropy.isfinite().tolist() == [True, False]
    assert torch.autograd.grad(logprobs.sum(), weight)[0].isnan().all()


@BOTH
def test_only_what_needs_a_gradient_gets_one(kernels: Kernels) -> None:
    (hidden, weight, bias), targets, _ = head_inputs(TOKENS, WIDTH, VOCABULARY)
    frozen = weight.detach(), bias.detach()
    FusedTokenLogprobs.apply(hidden, *frozen, targets, CHANGES[0], kernels, 9, False)[0].sum().backward()
    assert hidden.grad is not None and frozen[0].grad is None and frozen[1].grad is None


def test_any_number_of_threads_gives_the_same_bits() -> None:
    products, targets = (
        torch.randn(TOKENS, VOCABULARY, generator=torch.Generator().manual_seed(0)),
        torch.arange(TOKENS),
    )

    def results(threads: int) -> list[torch.Tensor]:
        torch.set_num_threads(threads)
        _, totals, largest, _ = found = head_kernels.log_sums(products, targets, CHANGES[2])
        slopes = head_kernels.slopes_(products.clone(), targets, largest, totals, largest, CHANGES[2])
        return [*found, slopes]

    before = torch.get_num_threads()
    try:
        pairs = zip(results(1), results(3), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)
    finally:
        torch.set_num_threads(before)


def test_logits_that_were_kept_serve_one_backward_pass() -> None:
    values, targets, _ = head_inputs(TOKENS, WIDTH, VOCABULARY)
    logprobs = token_logprobs(*values, targets, TokenDistribution(), fused=True).logprobs
    logprobs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward pass through the head"):
        logprobs.sum().backward()


def test_a_head_takes_kernels_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    values, targets, upstream = head_inputs(TOKENS, WIDTH, VOCABULARY)
    plain = token_logprobs(*values, targets, TokenDistribution())
    theirs = torch.autograd.grad((plain.logprobs * upstream).sum(), values)
    calls: list[str] = []
    call = head_kernels._call

    def counted(name: str, *rest: Any) -> None:
        calls.append(name)
        call(name, *rest)

    monkeypatch.setattr(head_kernels, "_call", counted)
    for kept_bytes, tokens in ((2**30, TOKENS), (0, 32)):
        monkeypatch.setattr(head, "KEPT_BYTES", kept_bytes)
        monkeypatch.setitem(head.SLAB_BYTES, "cpu", 4 * VOCABULARY * head.CACHED_TOKENS)
        calls.clear()
        output = token_logprobs(*values, targets, TokenDistribution(), fused=True)
        ours = torch.autograd.grad((output.logprobs * upstream).sum(), values)
        parts = -(-TOKENS // tokens)
        assert calls == ["log_sums"] * parts + ["slopes"] * parts
        torch.testing.assert_close(output.logprobs, plain.logprobs)
        torch.testing.assert_close(output.entropy, plain.entropy)
        assert not output.outside.any()
        for one, other in zip(ours, theirs, strict=True):
            assert relative_error(one, other) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_has_kernels_for_plain_weights_of_these_types(dtype: torch.dtype) -> None:
    assert kernels_for(torch.zeros(2, 2, dtype=dtype)) is OF_CPUS
    assert kernels_for(torch.nn.Parameter(torch.zeros(2, 2, dtype=dtype))) is OF_CPUS
    with FakeTensorMode():
        assert kernels_for(torch.zeros(2, 2, dtype=dtype)) is None


def test_without_a_compiler_or_for_other_types_a_cpu_has_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels_for(torch.zeros(2, 2, dtype=torch.float16)) is None
    monkeypatch.setattr(head_kernels, "_library", lambda: None)
    assert kernels_for(torch.zeros(2, 2)) is None


def test_on_a_cpu_torch_compiles_nothing() -> None:
    assert not compiles(RunConfig(), torch.device("cpu"))
    assert compiles(RunConfig(), torch.device("cuda"))
    assert not compiles(RunConfig.model_validate({"optimizer": {"compile": False}}), torch.device("cuda"))
