"""What GPUs compile for the head is a plain log-softmax. Here it runs uncompiled; `tests/gpu` compiles it."""

from __future__ import annotations

import pytest
import torch

from streamrl.config.run import RunConfig
from streamrl.training.compiled_parts import compiles
from streamrl.training.fused_logprobs import Changes, FusedTokenLogprobs, fuses
from streamrl.training.token_logprobs import LogitTransform, TokenDistribution, measured_tokens, token_logprobs
from tests.training.conftest import head_inputs, relative_error

VOCABULARY, WIDTH, TOKENS = 300, 32, 50
CHANGES = [Changes(1.0, None, 1.0), Changes(0.25, None, 0.7), Changes(1.5, 20.0, 1.3)]


@pytest.mark.parametrize("at_once", [7, 25, 1000])
@pytest.mark.parametrize("changes", CHANGES, ids=["plain", "scaled", "capped"])
def test_values_and_gradients_are_those_of_a_plain_log_softmax(changes: Changes, at_once: int) -> None:
    values, targets, upstream = head_inputs(TOKENS, WIDTH, VOCABULARY)
    logprobs, entropy = FusedTokenLogprobs.apply(*values, targets, changes, at_once)
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


def test_in_bf16_it_is_as_exact_as_the_head_that_keeps_fp32_logits() -> None:
    values, targets, upstream = head_inputs(TOKENS, WIDTH, VOCABULARY)
    halves = [value.detach().bfloat16().requires_grad_() for value in values]
    changes = Changes(0.5, None, 0.7)
    plain = token_logprobs(*halves, targets, TokenDistribution(LogitTransform(0.5), 0.7))
    logprobs, entropy = FusedTokenLogprobs.apply(*halves, targets, changes, 16)
    torch.testing.assert_close(logprobs, plain.logprobs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy[measured_tokens(targets)], plain.entropy, rtol=1e-6, atol=1e-6)
    theirs = torch.autograd.grad((plain.logprobs * upstream).sum(), halves)
    ours = torch.autograd.grad((logprobs * upstream).sum(), halves)
    assert all(one.dtype == torch.bfloat16 for one in ours)
    for one, other in zip(ours, theirs, strict=True):
        assert relative_error(one, other) < 0.01


def test_near_certainty_nothing_cancels_and_a_token_that_is_ruled_out_has_no_entropy() -> None:
    hidden = torch.tensor([[1.0]], requires_grad=True)
    weight = torch.tensor([[0.0], [-18.0], [-torch.inf]])
    logprobs, entropy = FusedTokenLogprobs.apply(hidden, weight, None, torch.tensor([0]), CHANGES[0], 4)
    rest = torch.exp(torch.tensor(-18.0))
    torch.testing.assert_close(logprobs, -rest[None], rtol=1e-6, atol=0.0)
    torch.testing.assert_close(entropy, (19 * rest)[None], rtol=1e-3, atol=0.0)


def test_only_what_needs_a_gradient_gets_one() -> None:
    (hidden, weight, bias), targets, _ = head_inputs(TOKENS, WIDTH, VOCABULARY)
    frozen = weight.detach(), bias.detach()
    FusedTokenLogprobs.apply(hidden, *frozen, targets, CHANGES[0], 9)[0].sum().backward()
    assert hidden.grad is not None and frozen[0].grad is None and frozen[1].grad is None


def test_on_a_cpu_nothing_is_compiled() -> None:
    assert not fuses(torch.zeros(2, 2, dtype=torch.bfloat16))
    assert not compiles(RunConfig(), torch.device("cpu"))
    assert compiles(RunConfig(), torch.device("cuda"))
    assert not compiles(RunConfig.model_validate({"optimizer": {"compile": False}}), torch.device("cuda"))
