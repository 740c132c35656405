"""Sampling in vLLM's CPU engines without work whose results nobody reads.

For 64 requests of SmolLM2-135M (a vocabulary of 49,152), sampling took as long as a step's products in bf16 on a CPU
with AMX. vLLM draws noise for every token of the vocabulary, by two logarithms each, and takes the largest sum. Here
one random number per request is looked up in the cumulative distribution, which is that of the log-probabilities that
are returned anyway. A C function (`sampling.c`) computes both while a row is in the caches; without a compiler torch
does. vLLM also ranks each sampled token among all others, which nothing here reads.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

from streamrl.machine import compiled_c

if TYPE_CHECKING:
    from collections.abc import Mapping

PART = 256
"""Tokens of a part of the vocabulary. A part is found by the sums of parts, a token by those inside its part: summing
one after the other takes long, and would need fp64 for the rare tokens at its end."""


def draw(probabilities: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return the token of each row in whose share of the probability a number lies.

    Args:
        probabilities: [rows, vocabulary] fp32, of any positive sum.
        numbers: [rows] fp64, uniform in [0, 1).

    Returns:
        [rows] int64; never a token of probability 0, and any token of a row that is not finite.
    """
    rows, vocabulary = probabilities.shape
    whole = vocabulary - vocabulary % PART
    parts = probabilities[:, :whole].view(rows, whole // PART, PART).sum(-1)
    ends = torch.cat([parts, probabilities[:, whole:].sum(-1, keepdim=True)], dim=-1).double().cumsum(-1)
    wanted = (numbers * ends[:, -1])[:, None]
    part = _first_beyond(ends, wanted)
    before = torch.where(part > 0, ends.gather(-1, (part - 1).clamp_min(0)), 0.0)
    places = (part * PART + torch.arange(PART)).clamp_max(vocabulary - 1)
    inside = probabilities.gather(-1, places).double().cumsum(-1)
    return places.gather(-1, _first_beyond(inside, wanted - before).clamp_max(PART - 1))[:, 0]


def _first_beyond(ends: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return the first place of each row whose end is beyond a value; the last one that adds something, if none is."""
    most = torch.nextafter(ends[:, -1:], torch.zeros((), dtype=ends.dtype))  # the sum of a part is rounded
    return torch.searchsorted(ends, torch.minimum(wanted, most), right=True)


@functools.cache
def _library() -> ctypes.CDLL | None:
    """Return the library of `sampling.c`; None: there is no compiler, or it failed."""
    found = compiled_c.load(Path(__file__).with_name("sampling.c"), "tokens are drawn by torch")
    if found is not None:
        found.draw.argtypes, found.draw.restype = [ctypes.c_void_p] * 3 + [ctypes.c_long] * 3, None
    return found


def draw_(logits: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Turn logits into log-probabilities, and return the token of each row in whose share a number lies.

    Args:
        logits: [rows, vocabulary] fp32; written to. A row may be part of a longer one: vLLM pads vocabularies to a
            multiple of 64.
        numbers: [rows] fp64, uniform in [0, 1).

    Returns:
        [rows] int64; never a token of probability 0, and any token of a row that is not finite.
    """
    library = _library()
    if library is None or logits.stride(1) != 1:
        logprobs = logits.log_softmax(dim=-1)
        tokens = draw(torch.exp(logprobs, out=logits), numbers)  # new memory takes longer than the powers
        logits.copy_(logprobs)
        return tokens
    tokens = torch.empty(len(logits), dtype=torch.int64)
    library.draw(logits.data_ptr(), numbers.data_ptr(), tokens.data_ptr(), *logits.shape, logits.stride(0))
    return tokens


def sample(
    sampler: TopKTopPSampler,
    logits: torch.Tensor,
    generators: Mapping[int, torch.Generator],
    k: torch.Tensor | None,
    p: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Do the work of `TopKTopPSampler.forward_cpu`: a request with a seed draws by its own generator.

    Args:
        sampler: vLLM's sampler.
        logits: [requests, vocabulary], after temperature and min-p; may be written to.
        generators: generator of each request that has a seed, by its row.
        k: [requests] `top_k`, or None.
        p: [requests] `top_p`, or None.

    Returns:
        [requests] sampled tokens, and what `logprobs_mode` asks for: [requests, vocabulary] or None.
    """
    logits = apply_top_k_top_p(logits, k, p)
    numbers = torch.rand(len(logits), dtype=torch.float64)
    for row, generator in generators.items():
        numbers[row] = torch.rand((), generator=generator, dtype=torch.float64)
    logprobs = logits.clone() if sampler.logprobs_mode == "processed_logits" else logits.float()
    tokens = draw_(logprobs, numbers)
    returned = {"processed_logits": logits, "processed_logprobs": logprobs}
    return tokens, returned.get(sampler.logprobs_mode)


_gather = Sampler.gather_logprobs


def gather_logprobs(logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> LogprobsTensors:
    """Do the work of `Sampler.gather_logprobs`; where it is the sampled token's alone, its rank is given as 0.

    Args:
        logprobs: [tokens, vocabulary].
        num_logprobs: number of the likeliest tokens to return besides.
        token_ids: [tokens] int64.
    """
    if num_logprobs:
        return _gather(logprobs, num_logprobs, token_ids)
    tokens = token_ids[:, None]
    return LogprobsTensors(tokens.int(), logprobs.gather(-1, tokens), torch.zeros_like(token_ids))


def install() -> None:
    """Replace vLLM's CPU sampling in this process.

    Raises:
        RuntimeError: this vLLM has no such methods.
    """
    names: dict[type, dict[str, Any]] = {
        TopKTopPSampler: {"forward_cpu": sample},
        Sampler: {"gather_logprobs": staticmethod(gather_logprobs)},
    }
    if missing := [
        f"{owner.__name__}.{name}" for owner, new in names.items() for name in new if not hasattr(owner, name)
    ]:
        raise RuntimeError(f"this vLLM has no {', '.join(missing)}")
    for owner, methods in names.items():
        for name, method in methods.items():
            setattr(owner, name, method)
