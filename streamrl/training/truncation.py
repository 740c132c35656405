"""Truncation of a distribution over tokens as vLLM samples from it: min-p, then top-k, then top-p.

vLLM divides logits by the temperature, cuts, and reports log-probabilities of what it kept, renormalised
(`logprobs_mode: processed_logprobs`; vllm/v1/sample/sampler.py and ops/topk_topp_sampler.py). The trainer cuts its own
logits by the same rules, so with equal weights both have the same distribution:

    min_p   drop tokens with p < min_p max p
    top_k   drop tokens below the k-th largest logit; its equals stay
    top_p   renormalise what is left, and drop a token if the likelier ones sum to top_p or more

Once the weights have moved, the trainer keeps what its *own* logits keep: its distribution is the one that it would
sample from. The token that was sampled may lie outside of it, where its probability would be 0 and its log-ratio
infinite; it is kept in addition, and reported. No gradient flows through what is dropped, nor through the choice.

A token at the very edge of top-p may be kept by one side and dropped by the other, because their sums differ by
rounding; the log-probability then differs by that token's share. Of tokens with equal logits at the edge vLLM keeps
some: the sampled one counts as the likeliest of them, as vLLM has kept it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

FIRST_LIKELIEST = 256
"""Tokens of a row that are sorted at first to find the edge of top-p; eight times as many until they suffice."""


@dataclass(frozen=True)
class Truncation:
    """The tokens that may be sampled; the defaults keep all."""

    top_k: int = 0
    """Number of likeliest tokens kept; 0: all."""
    top_p: float = 1.0
    """Probability that the kept tokens reach together."""
    min_p: float = 0.0
    """Smallest probability kept, over the likeliest token's."""

    def __bool__(self) -> bool:
        """Return whether anything is dropped."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


ALL_TOKENS = Truncation()
"""Nothing is dropped."""


def truncate_(logits: torch.Tensor, targets: torch.Tensor, truncation: Truncation) -> torch.Tensor:
    """Set the logits of dropped tokens to -inf, in place; those of the targets stay.

    Args:
        logits: after the temperature, fp32 [n, V].
        targets: the sampled tokens [n].
        truncation: what to keep.

    Returns:
        Whether each target lies outside of what is kept, bool [n].
    """
    of_targets = logits.gather(-1, targets[:, None])
    if truncation.min_p > 0.0:
        logits.masked_fill_(logits < logits.amax(-1, keepdim=True) + math.log(truncation.min_p), -math.inf)
    if 0 < truncation.top_k < logits.shape[-1]:
        smallest = logits.topk(truncation.top_k).values[:, -1:]
        logits.masked_fill_(logits < smallest, -math.inf)
    if truncation.top_p < 1.0:
        _keep_top_p_(logits, targets, truncation.top_p)
    outside = logits.gather(-1, targets[:, None]).isneginf()[:, 0]
    logits.scatter_(-1, targets[:, None], of_targets)
    return outside


def _keep_top_p_(logits: torch.Tensor, targets: torch.Tensor, top_p: float) -> None:
    """Drop tokens [n, V] whose likelier ones sum to `top_p` or more; of equals a target is the likeliest."""
    of_targets = logits.gather(-1, targets[:, None])
    above = torch.nextafter(of_targets, of_targets.new_tensor(math.inf))  # of one that was dropped: still no share
    logits.scatter_(-1, targets[:, None], above)
    total = logits.logsumexp(-1, keepdim=True).double()
    vocabulary = logits.shape[-1]
    count = min(FIRST_LIKELIEST, vocabulary)
    kept = torch.zeros_like(logits, dtype=torch.bool)
    rows = torch.arange(len(logits), device=logits.device)  # those whose edge is not found yet
    while len(rows):
        likeliest, places = (logits if len(rows) == len(logits) else logits[rows]).topk(count)
        shares = (likeliest.double() - total[rows]).exp()
        before = shares.cumsum(-1) - shares
        keep = ~(before >= top_p)  # NaN stays, and makes the log-probability NaN
        found = ~keep[:, -1] if count < vocabulary else torch.ones_like(rows, dtype=torch.bool)
        kept[rows[found, None], places[found]] = keep[found]
        rows, count = rows[~found], min(8 * count, vocabulary)
    logits.masked_fill_(~kept, -math.inf)
