"""Log-probabilities and gradients of the head are those of a plain log-softmax, whatever is kept or computed again."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from streamrl.training import token_logprobs as head
from streamrl.training.token_logprobs import LogitTransform, TokenDistribution, measured_tokens, token_logprobs
from streamrl.training.truncation import Truncation
from tests.training.conftest import head_inputs, relative_error
from tests.training.test_truncation import kept_tokens

PLAIN = TokenDistribution()
DISTRIBUTIONS = [
    PLAIN,
    TokenDistribution(LogitTransform(scale=0.25), temperature=0.7),
    TokenDistribution(LogitTransform(scale=1.5, softcap=20.0), temperature=1.3),
    TokenDistribution(LogitTransform(scale=0.25), 0.7, Truncation(top_k=40, top_p=0.8, min_p=0.01)),
    TokenDistribution(LogitTransform(softcap=4.0), 1.3, Truncation(top_p=0.9)),
]
VOCABULARY, WIDTH, TOKENS = 500, 32, 150


@pytest.fixture(params=["kept", "recomputed"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What becomes of the logits; those that are computed again come in several slabs."""
    if request.param == "recomputed":
        monkeypatch.setattr(head, "KEPT_BYTES", 0)
        monkeypatch.setitem(head.SLAB_BYTES, "cpu", 4 * VOCABULARY * head.CACHED_TOKENS)
    return str(request.param)


def plain(values: list[torch.Tensor], targets: torch.Tensor, distribution: TokenDistribution) -> torch.Tensor:
    """All log-probabilities [N, V] in fp64, by torch's own functions."""
    hidden, weight, bias = values
    logits = (hidden @ weight.t() + bias) * distribution.transform.scale
    if cap := distribution.transform.softcap:
        logits = cap * torch.tanh(logits / cap)
    logits = logits / distribution.temperature
    if distribution.truncation:
        dropped = torch.ones_like(logits, dtype=torch.bool)
        for row, target in enumerate(targets.tolist()):
            dropped[row, [*kept_tokens(logits[row].tolist(), distribution.truncation), target]] = False
        logits = logits.masked_fill(dropped, -1e4)
    return torch.log_softmax(logits, -1)


@pytest.mark.parametrize(
    "distribution", DISTRIBUTIONS, ids=["plain", "scaled", "capped", "truncated", "capped and truncated"]
)
def test_values_and_gradients_are_those_of_a_plain_log_softmax(distribution: TokenDistribution, memory: str) -> None:
    values, targets, upstream = head_inputs(TOKENS, WIDTH, VOCABULARY)
    output = token_logprobs(*values, targets, distribution)
    exact = [value.detach().double().requires_grad_() for value in values]
    every = plain(exact, targets, distribution)
    expected = every.gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(output.logprobs.double(), expected, rtol=1e-5, atol=1e-5)
    entropy = -(every.exp() * every).sum(-1)[measured_tokens(targets)]
    torch.testing.assert_close(output.entropy.double(), entropy, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(token_logprobs(*values, targets, distribution), output, rtol=1e-5, atol=1e-5)

    (output.logprobs * upstream).sum().backward()
    (expected * upstream).sum().backward()
    for ours, theirs in zip(values, exact, strict=True):
        assert relative_error(ours.grad, theirs.grad) < 2e-6


@pytest.mark.parametrize("every_entropy", [False, True])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS[:3], ids=["plain", "scaled", "capped"])
def test_in_bf16_they_are_those_of_the_rounded_products(
    distribution: TokenDistribution, every_entropy: bool, memory: str
) -> None:
    """The products' rows are filled up to a multiple of a few, which must not reach the gradient of the bias."""
    values, targets, upstream = head_inputs(TOKENS, WIDTH, VOCABULARY)
    rounded = [value.detach().bfloat16().requires_grad_() for value in values]
    output = token_logprobs(*rounded, targets, distribution, every_entropy)
    exact = [value.detach().double().requires_grad_() for value in rounded]
    every = plain(exact, targets, distribution)
    chosen, entropies = every.gather(-1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)
    torch.testing.assert_close(output.logprobs.double(), chosen, rtol=0, atol=0.1)
    loss, expected = (output.logprobs * upstream).sum(), (chosen * upstream).sum()
    if every_entropy:
        loss, expected = loss + (output.entropy * upstream).sum(), expected + (entropies * upstream).sum()
    loss.backward()
    expected.backward()
    for ours, theirs in zip(rounded, exact, strict=True):
        assert relative_error(ours.grad.double(), theirs.grad) < 0.02


@pytest.mark.parametrize(
    "distribution", DISTRIBUTIONS, ids=["plain", "scaled", "capped", "truncated", "capped and truncated"]
)
def test_the_entropy_of_every_token_and_its_gradient_are_those_of_autograd(
    distribution: TokenDistribution, memory: str
) -> None:
    values, targets, of_logprobs = head_inputs(TOKENS, WIDTH, VOCABULARY)
    of_entropies = torch.randn(TOKENS, generator=torch.Generator().manual_seed(1))
    output = token_logprobs(*values, targets, distribution, every_entropy=True)
    exact = [value.detach().double().requires_grad_() for value in values]
    every = plain(exact, targets, distribution)
    chosen, expected = every.gather(-1, targets[:, None])[:, 0], -(every.exp() * every).sum(-1)
    torch.testing.assert_close(output.entropy.double(), expected, rtol=1e-5, atol=1e-5)
    (output.entropy * of_entropies + output.logprobs * of_logprobs).sum().backward()
    (expected * of_entropies + chosen * of_logprobs).sum().backward()
    for ours, theirs in zip(values, exact, strict=True):
        assert relative_error(ours.grad, theirs.grad) < 4e-6


def test_the_gradient_of_an_entropy_next_to_zero_is_finite(memory: str) -> None:
    hidden, weight = torch.full((1, 1), 1e4, requires_grad=True), torch.arange(5.0)[:, None].requires_grad_()
    output = token_logprobs(hidden, weight, None, torch.tensor([4]), PLAIN, every_entropy=True)
    output.entropy.sum().backward()
    assert output.entropy.item() == 0.0
    assert torch.isfinite(hidden.grad).all() and torch.isfinite(weight.grad).all()


def test_only_what_needs_a_gradient_gets_one(memory: str) -> None:
    (hidden, weight, bias), targets, _ = head_inputs(TOKENS, WIDTH, VOCABULARY)
    token_logprobs(hidden, weight.detach(), None, targets, PLAIN).logprobs.sum().backward()
    token_logprobs(hidden.detach(), weight.detach(), bias, targets, PLAIN).logprobs.sum().backward()
    assert weight.grad is None and hidden.grad is not None and bias.grad is not None


def test_no_tokens_have_no_log_probabilities_and_a_gradient_of_zeros(memory: str) -> None:
    (hidden, weight, bias), targets, _ = head_inputs(TOKENS, WIDTH, VOCABULARY)
    output = token_logprobs(hidden[:0], weight, bias, targets[:0], PLAIN)
    output.logprobs.sum().backward()
    assert output.logprobs.shape == output.entropy.shape == (0,)
    assert not weight.grad.any() and not bias.grad.any()


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation returns, and the largest one in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = self.of_fp32 = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.elements = max(self.elements, made.numel())
            if made.dtype == torch.float32:
                self.of_fp32 = max(self.of_fp32, made.numel())
        return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_more_tokens_than_a_slab_never_exist_at_once(dtype: torch.dtype, memory: str) -> None:
    values, targets, _ = head_inputs(TOKENS, WIDTH, VOCABULARY)
    values = [value.detach().to(dtype).requires_grad_() for value in values]
    with Largest() as largest:
        token_logprobs(*values, targets, PLAIN).logprobs.sum().backward()
    if memory == "kept" and dtype == torch.float32:
        assert largest.elements == TOKENS * VOCABULARY
    elif memory == "kept":
        assert largest.of_fp32 == head.CACHED_TOKENS * VOCABULARY
    elif memory == "recomputed":
        assert largest.elements == head.CACHED_TOKENS * VOCABULARY


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_stay_only_for_a_backward_pass_and_only_for_one(dtype: torch.dtype) -> None:
    values, targets, _ = head_inputs(TOKENS, WIDTH, VOCABULARY)
    values = [value.detach().to(dtype).requires_grad_() for value in values]
    with torch.no_grad(), Largest() as largest:
        token_logprobs(*values, targets, PLAIN)
    assert largest.elements <= max(head._slab_tokens(values[1]), TOKENS) * VOCABULARY

    kept: list[torch.Tensor] = []

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(noted, lambda tensor: tensor):
        with torch.no_grad():
            token_logprobs(*values, targets, PLAIN)
        assert kept == []
        loss = token_logprobs(*values, targets, PLAIN).logprobs.sum()
    assert max(tensor.numel() for tensor in kept) >= TOKENS * VOCABULARY
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward pass through the head"):
        loss.backward()


def test_autocast_changes_no_type_of_what_stays() -> None:
    values, targets, _ = head_inputs(TOKENS, WIDTH, VOCABULARY)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = token_logprobs(*values, targets, PLAIN).logprobs.sum()
    loss.backward()
    assert all(value.grad.dtype == torch.float32 for value in values)


def test_without_a_truncation_nothing_is_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "truncate_", None)
    values, targets, _ = head_inputs(TOKENS, WIDTH, VOCABULARY)
    assert not token_logprobs(*values, targets, PLAIN).outside.any()


@pytest.mark.parametrize(
    "truncation", [Truncation(), Truncation(top_k=5), Truncation(top_p=0.9), Truncation(min_p=0.1)]
)
def test_a_logit_that_is_not_a_number_is_never_hidden(truncation: Truncation) -> None:
    (hidden, weight, bias), targets, _ = head_inputs(TOKENS, WIDTH, VOCABULARY)
    with torch.no_grad():
        bias[(int(targets[0]) + 1) % VOCABULARY] = float("nan")
        output = token_logprobs(
            hidden, weight, bias, targets[:1].expand(TOKENS), TokenDistribution(truncation=truncation)
        )
    assert output.logprobs.isnan().all()


@functools.cache
def confident(mean: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, weight and targets whose mean probability is about that."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(2000, 128, generator=generator) / 128**0.5
    targets = torch.randint(0, 2000, (256,), generator=generator)
    noise = torch.randn(256, 128, generator=generator) * 0.2
    low, high = 0.0, 60.0
    for _ in range(12):
        size = (low + high) / 2
        hidden = size * (weight[targets] + noise)
        p = torch.softmax((hidden.to(dtype) @ weight.to(dtype).t()).double(), -1)
        low, high = (size, high) if p.gather(-1, targets[:, None]).mean() < mean else (low, size)
    return hidden.to(dtype), weight.to(dtype), targets


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 5e-3), (torch.float32, 1e-4)])
@pytest.mark.parametrize("mean", [0.5, 0.9, 0.994, 0.9994, 0.99999])
def test_the_gradient_is_exact_to_rounding_at_any_confidence(
    mean: float, dtype: torch.dtype, bound: float, memory: str
) -> None:
    """The reference is fp64 from the same logits. A softmax in bf16 would be off by 37 % at 0.9994."""
    hidden, weight, targets = confident(mean, dtype)
    hidden, weight = (one.clone().requires_grad_() for one in (hidden, weight))
    upstream = torch.randn(len(targets), generator=torch.Generator().manual_seed(1))
    output = token_logprobs(hidden, weight, None, targets, PLAIN)
    (output.logprobs * upstream).sum().backward()
    with torch.no_grad():
        logits = (hidden @ weight.t()).double()
        grad_logits = -torch.softmax(logits, -1) * upstream[:, None]
        others = torch.softmax(logits, -1).scatter(-1, targets[:, None], 0.0).sum(-1)
        grad_logits[torch.arange(len(targets)), targets] = others * upstream
        of_hidden, of_weight = grad_logits @ weight.double(), grad_logits.t() @ hidden.double()
        expected = torch.log1p(-others)
    assert relative_error(output.logprobs.detach().double(), expected) < 1e-4
    assert relative_error(hidden.grad.double(), of_hidden) < bound
    assert relative_error(weight.grad.double(), of_weight) < bound
    if dtype == torch.float32:  # also of the surest token
        assert float(((hidden.grad - of_hidden).norm(dim=-1) / of_hidden.norm(dim=-1)).max()) < bound


@pytest.mark.parametrize("length", [3, 8, 9, 16])
@pytest.mark.parametrize("together", [1, 6])
def test_entropies_are_measured_at_all_places_of_completions_alike(length: int, together: int) -> None:
    """Whether completions of one length come in a micro-batch each or six at a time."""
    drawn, places = torch.Generator().manual_seed(0), torch.zeros(length)
    for _ in range(2_000 // together):
        numbers = measured_tokens(torch.randint(3, 320, (length * together,), generator=drawn))
        assert len(numbers) == -(-length * together // 8) and bool((numbers.diff() > 0).all())
        places += torch.bincount(numbers % length, minlength=length)
    assert places.min() > 0.8 * places.mean() and places.max() < 1.25 * places.mean(), places


def test_the_tokens_to_measure_follow_from_the_targets_alone() -> None:
    targets = torch.arange(5_000) % 50
    numbers = measured_tokens(targets)
    assert torch.equal(numbers, measured_tokens(targets.int())) and torch.equal(numbers // 8, torch.arange(625))
    assert not torch.equal(numbers, measured_tokens(targets.index_fill(0, torch.tensor([4_999]), 7)))
    assert measured_tokens(targets[:0]).shape == (0,) and measured_tokens(targets[:1]).tolist() == [0]
