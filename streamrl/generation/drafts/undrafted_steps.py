"""Steps without drafts, which vLLM 0.32 sends through the verification of drafts all the same.

With a `speculative_config`, vLLM's runner verifies in every step, whether there are drafts or not: it samples, then
fills a [requests, vocabulary] tensor with noise for the tokens that would replace rejected ones, and gathers
log-probabilities twice. Where nothing is drafted the plain sampler does; its output has the same form, one token per
request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class VerifyingSampler:
    """vLLM's rejection sampler for steps with drafts, its plain sampler for the others."""

    def __init__(self, rejection_sampler: Any) -> None:
        """
        Args:
            rejection_sampler: vLLM's `RejectionSampler`.
        """
        self._verify = rejection_sampler

    def __call__(self, metadata: Any, draft_probs: Tensor | None, logits: Tensor, sampling_metadata: Any) -> Any:
        """Sample from logits of shape [drafted tokens + requests, vocabulary]; return vLLM's `SamplerOutput`."""
        if metadata.max_spec_len > 0:
            return self._verify(metadata, draft_probs, logits, sampling_metadata)
        return self._verify.sampler(logits=logits, sampling_metadata=sampling_metadata)
