"""The output head's stage of `streamrl verify --hardware`: is it right on this device, how fast, in how much memory?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch

from streamrl.training.token_logprobs import TokenDistribution, token_logprobs
from streamrl.verify.hardware_measurement import Measurement, Size

BOUNDS = {torch.bfloat16: 5e-3, torch.float32: 1e-4}
"""Largest relative error of a gradient that is rounding."""
LOGPROB_BOUND = 1e-4
"""Largest error of a log-probability that is rounding, in nats."""
COMPARED, TIMED = 256, {"cpu": 256, "cuda": 8192}
"""Tokens that are compared, and tokens of the call that is timed."""


def measure(size: Size, device: torch.device, quickest: Callable[..., float]) -> Iterator[Measurement]:
    """Yield the errors of the output head, and the time and memory of a forward and backward pass.

    The reference is fp64 from the same logits, so the products' own rounding is no error.

    Args:
        size: vocabulary and hidden size.
        device: where it is computed.
        quickest: returns the seconds of one call of a function.

    Raises:
        ValueError: an error is more than rounding.
    """
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    name, on = str(dtype).removeprefix("torch."), f"the output head on {device.type} is wrong"
    of_logprobs, of_gradients = _errors(size, device, dtype)
    note = f"{name} against fp64, tokens from unlikely to certain"
    yield Measurement("head, error of log-probabilities", of_logprobs, "nats", note)
    yield Measurement("head, error of gradients", of_gradients, "", f"{name}, of hidden states and weight, relative")
    if not of_logprobs <= LOGPROB_BOUND:
        raise ValueError(f"{on}: a log-probability differs by {of_logprobs:.2g} nats")
    if not of_gradients <= BOUNDS[dtype]:
        raise ValueError(f"{on}: relative error {of_gradients:.2g} of a gradient")
    count = TIMED[device.type]
    inputs = _inputs(size, count, device, dtype)
    seconds = quickest(partial(_passes, *inputs))
    note = f"{count} tokens x vocabulary of {size.vocabulary} x {size.hidden}, forward and backward"
    yield Measurement("head, a call", seconds * 1e3, "ms", note)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        _passes(*inputs)
        used = torch.cuda.max_memory_allocated(device) - before
        whole = 4 * count * size.vocabulary
        yield Measurement("head, memory", used / 2**30, "GiB", f"all logits in fp32 would take {whole / 2**30:.2g}")


def _inputs(
    size: Size, count: int, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (hidden states, weight, targets, upstream gradients) of tokens with p from about .1 to .9999."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(size.vocabulary, size.hidden, generator=generator) / size.hidden**0.5
    targets = torch.randint(0, size.vocabulary, (count,), generator=generator)
    hidden = weight[targets] * (math.log(size.vocabulary) + torch.linspace(-2, 8, count))[:, None]
    upstream = torch.randn(count, generator=generator)
    leaves = (one.to(device, dtype).requires_grad_() for one in (hidden, weight))
    return *leaves, targets.to(device), upstream.to(device)


def _passes(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, upstream: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the log-probabilities, and the gradients of hidden states and weight."""
    logprobs = token_logprobs(hidden, weight, None, targets, TokenDistribution(), fused=True).logprobs
    return logprobs.detach(), *torch.autograd.grad(logprobs, (hidden, weight), upstream)


def _errors(size: Size, device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Return the largest errors of a log-probability, in nats, and of a gradient, relative."""
    hidden, weight, targets, upstream = _inputs(size, COMPARED, device, dtype)
    ours, *gradients = _passes(hidden, weight, targets, upstream)
    with torch.no_grad():
        every = torch.log_softmax((hidden @ weight.t()).double(), -1)
        expected = every.gather(-1, targets[:, None])
        slopes = -every.exp()
        others = slopes.scatter(-1, targets[:, None], 0.0).sum(-1, keepdim=True)
        slopes = (slopes.scatter(-1, targets[:, None], -others) * upstream[:, None]).float()
        exact = slopes @ weight.float(), slopes.t() @ hidden.float()
        errors = torch.stack([(a.float() - b).norm() / b.norm() for a, b in zip(gradients, exact, strict=True)])
    return float((ours - expected[:, 0]).abs().max()), float(errors.max())  # torch's: NaN is the largest
