"""What a model does with its logits after the output projection, read from its configuration and proven on the model.

Hugging Face has no common interface for it: each architecture does it in its own `forward`, and a head that leaves it
out computes the log-probabilities of another model without a word. So the model itself is asked before it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from streamrl.errors import RunFailed
from streamrl.training.decoder_layers import decoder_of, trunk_of
from streamrl.training.token_logprobs import LogitTransform, TokenDistribution, token_logprobs
from streamrl.weights.finite import first_not_finite

PROBE_SIZES = (1.0, 20.0, 400.0)
"""Standard deviations of the projections with which a head is proven: a bias shows in small ones, a cap in large."""

PROBE_TARGETS = 6
"""Tokens spread over the vocabulary that are compared for each of these, besides the likeliest and the least likely."""

TOLERANCE = 1e-4
"""Largest difference of two log-probabilities that rounding explains, over their size (at least 1)."""


def logit_transform(config: PretrainedConfig) -> LogitTransform:
    """Return what an architecture does with its logits, by its configuration.

    It knows `logit_scale` (Cohere: a factor), `logits_scaling` (Granite: a divisor) and `final_logit_softcapping`
    (Gemma); `prove_head` finds what it does not know.
    """
    text = config.get_text_config()
    scale = getattr(text, "logit_scale", None) or 1.0
    divisor = getattr(text, "logits_scaling", None) or 1.0
    return LogitTransform(scale / divisor, getattr(text, "final_logit_softcapping", None))


@torch.no_grad()
def prove_head(model: PreTrainedModel, transform: LogitTransform) -> None:
    """Compare our head with the logits of the model's own `forward`, on random hidden states in place of its trunk's.

    Args:
        model: the model with its weights.
        transform: what `logit_transform` read.

    Raises:
        RunFailed: they differ, or the model has no output projection, or one with weights that are not finite.
    """
    name = type(model).__name__
    head = model.get_output_embeddings()
    if head is None:
        raise RunFailed(f"model.path: {name} has no output projection, expected a causal language model")
    weight: torch.Tensor = head.weight
    bias: torch.Tensor | None = getattr(head, "bias", None)
    if bad := first_not_finite({"weight": weight} if bias is None else {"weight": weight, "bias": bias}):
        raise RunFailed(f"model.path: the {bad} of {name}'s output projection is not finite (NaN or inf in the files)")
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(len(PROBE_SIZES), weight.shape[1], generator=generator).to(weight)
    sizes = torch.tensor(PROBE_SIZES).to(weight)[:, None]
    hidden *= sizes / (hidden @ weight.t()).std(-1, keepdim=True).clamp_min(1e-20)
    with _trunk_returns(model, hidden[None]):
        theirs = model(input_ids=torch.zeros(1, len(hidden), dtype=torch.long, device=weight.device)).logits[0]
    logprobs = theirs.float().log_softmax(-1)
    spread = torch.linspace(0, len(weight) - 1, PROBE_TARGETS).long().expand(len(hidden), -1).to(weight.device)
    targets = torch.cat([logprobs.argmax(-1, keepdim=True), logprobs.argmin(-1, keepdim=True), spread], -1)
    expected = logprobs.gather(-1, targets).flatten()
    rows = hidden.repeat_interleave(targets.shape[1], 0)
    ours = token_logprobs(rows, weight, bias, targets.flatten(), TokenDistribution(transform)).logprobs
    worst = float(((ours - expected).abs() / expected.abs().clamp_min(1.0)).max())
    if not worst <= TOLERANCE:
        raise RunFailed(
            f"model.path: what {name} does with its logits after the output projection is not known to the trainer: "
            f"its log-probabilities differ by {100 * worst:.3g} % with {transform}; expected an architecture that "
            "uses logit_scale, logits_scaling or final_logit_softcapping, or none of them"
        )


@dataclass
class _TrunkOutput(BaseModelOutputWithPast):
    """Hidden states; all else that an architecture expects of its trunk is None."""

    def __getattr__(self, _: str) -> None:
        return None


@contextmanager
def _trunk_returns(model: PreTrainedModel, hidden: torch.Tensor) -> Iterator[None]:
    """Let the model's trunk, and the decoder in it, return these hidden states [1, n, d] for now."""
    trunks: list[Any] = [trunk_of(model), decoder_of(model)]  # OPT passes its trunk by

    def forward(*_: Any, **__: Any) -> _TrunkOutput:
        return _TrunkOutput(last_hidden_state=hidden)

    for trunk in trunks:
        trunk.forward = forward
    try:
        yield
    finally:
        for trunk in trunks:
            vars(trunk).pop("forward", None)  # both may be the same
