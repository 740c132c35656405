"""Surrogate losses: what each is called in a run file, which keys it has, and its formula.

A new loss is a function here, its `SURROGATES` entry and, if it has keys of its own, fields of `SurrogateKeys`; run
files, their reference page, the objective and the tests of all losses take it from there. Run files are read where
torch is not installed, so only types and functions' bodies need it.

The formulas are pure functions of log-probabilities and advantages, for any float type. A batch is a row of N tokens of
whole sequences; `sequence_ids` [N] tells them apart (0, 0, 0, 1, 1, 2, ...). Tokens of one sequence need not follow one
another: the rows of an episode may be one sequence. Every loss is one value per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from pydantic import BaseModel, Field

if TYPE_CHECKING:
    import torch

LOG_RATIO_LIMIT = 20.0
"""Bound of log-ratios, which are clamped before exp: e^20 = 5e8 is far beyond every clip, and its square fits float32.

Beyond the bound a ratio is constant, without a gradient.
"""


class TokenLoss(NamedTuple):
    """A policy loss by token."""

    loss: torch.Tensor
    """Loss, [N], with gradient."""
    clipped: torch.Tensor
    """Tokens whose ratio the clip has changed, [N] bool; with `clip` and `sequence_clip` they have no gradient."""


@dataclass(frozen=True)
class LossInputs:
    """What a loss is computed from; all are [N]."""

    logprobs: torch.Tensor
    """Log-probabilities of the policy in training, with gradient."""
    log_ratio: torch.Tensor
    """`logprobs` minus the log-probabilities of the old policy, with gradient."""
    advantages: torch.Tensor
    sequence_ids: torch.Tensor


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    """Clamp the log-ratio to +-`LOG_RATIO_LIMIT`."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sequence_lengths(sequence_ids: torch.Tensor) -> torch.Tensor:
    """Return the number of tokens of each sequence, [S] int64."""
    return sequence_ids.bincount()


def sequence_sums(values: torch.Tensor, sequence_ids: torch.Tensor) -> torch.Tensor:
    """Sum each sequence's values: [N] -> [S]."""
    return values.new_zeros(len(sequence_lengths(sequence_ids))).index_add(0, sequence_ids, values)


def sequence_means(values: torch.Tensor, sequence_ids: torch.Tensor) -> torch.Tensor:
    """Average each sequence's values: [N] -> [S]."""
    return sequence_sums(values, sequence_ids) / sequence_lengths(sequence_ids)


def clip_loss(log_ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float) -> TokenLoss:
    """Return -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), with r = exp(log_ratio).

    Source: PPO, arXiv 1707.06347, eq. 7; GRPO, arXiv 2402.03300, eq. 3; separate distances up and down: DAPO,
    arXiv 2503.14476, eq. 8.

    Args:
        log_ratio: [N] current minus old log-probability, with gradient.
        advantages: [N].
        clip_low: lower clipping distance.
        clip_high: upper clipping distance.
    """
    ratio = bounded(log_ratio).exp()
    surrogate = ratio * advantages
    limited = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    return TokenLoss(-surrogate.minimum(limited), (limited < surrogate).detach())


def sequence_clip_loss(
    log_ratio: torch.Tensor, advantages: torch.Tensor, sequence_ids: torch.Tensor, clip_low: float, clip_high: float
) -> TokenLoss:
    """Return `clip_loss` with one ratio per sequence, s = exp(mean of its tokens' log_ratio), equal for its tokens.

    With aggregation `sequence` this is GSPO's objective (arXiv 2507.18071, eq. 5-7).

    Args:
        log_ratio: [N], with gradient.
        advantages: [N], the same for all tokens of a sequence.
        sequence_ids: [N].
        clip_low: lower clipping distance.
        clip_high: upper clipping distance.
    """
    return clip_loss(sequence_means(log_ratio, sequence_ids)[sequence_ids], advantages, clip_low, clip_high)


def detached_clip_loss(
    logprobs: torch.Tensor, log_ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> TokenLoss:
    """Return -sg[clip(r, 1 - clip_low, 1 + clip_high)] A log p, where sg stops the gradient.

    Every token keeps its gradient through log p. Source: CISPO, arXiv 2506.13585, eq. 4-5 (there without a lower bound:
    clip_low = 1).

    Args:
        logprobs: [N], with gradient.
        log_ratio: [N]; no gradient flows into it.
        advantages: [N].
        clip_low: lower clipping distance.
        clip_high: upper clipping distance.
    """
    ratio = bounded(log_ratio.detach()).exp()
    limited = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return TokenLoss(-limited * advantages * logprobs, limited != ratio)


def kept_gradient_loss(
    log_ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> TokenLoss:
    """Return `clip_loss`, in which tokens beyond the clip keep a gradient: that of c r / sg(r) A, c the clipped ratio.

    The value is that of `clip_loss`; a token that the clip has changed is weighted by its bound instead of left out.
    Source: GPPO, arXiv 2508.07629.

    Args:
        log_ratio: [N] current minus old log-probability, with gradient.
        advantages: [N].
        clip_low: lower clipping distance.
        clip_high: upper clipping distance.
    """
    log_ratio = bounded(log_ratio)
    ratio, one = log_ratio.exp(), (log_ratio - log_ratio.detach()).exp()  # 1, with the gradient of the log-ratio
    surrogate, limited = ratio * advantages, ratio.detach().clamp(1.0 - clip_low, 1.0 + clip_high) * one * advantages
    return TokenLoss(-surrogate.minimum(limited), (limited < surrogate).detach())


def soft_gate_loss(log_ratio: torch.Tensor, advantages: torch.Tensor, positive: float, negative: float) -> TokenLoss:
    """Return -(4 / tau) sigmoid(tau (r - 1)) A, with r = exp(log_ratio).

    tau is `positive` for tokens with A > 0, else `negative`. At r = 1 the gradient is that of r A; it fades smoothly as
    r moves away. Source: SAPO, arXiv 2511.20347.

    Args:
        log_ratio: [N] current minus old log-probability, with gradient.
        advantages: [N].
        positive: temperature.
        negative: temperature.
    """
    ratio = bounded(log_ratio).exp()
    temperature = ratio.new_full(ratio.shape, negative).masked_fill(advantages > 0, positive)
    gated = 4.0 / temperature * (temperature * (ratio - 1.0)).sigmoid()
    return TokenLoss(-gated * advantages, _none_clipped(ratio))


def reinforce_loss(logprobs: torch.Tensor, advantages: torch.Tensor) -> TokenLoss:
    """Return -A log p, the plain policy gradient (Williams 1992; for language models arXiv 2402.14740, eq. 6).

    Args:
        logprobs: [N], with gradient.
        advantages: [N].
    """
    return TokenLoss(-advantages * logprobs, _none_clipped(logprobs))


def _none_clipped(values: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.zeros_like(values, dtype=torch.bool)


@dataclass(frozen=True)
class Surrogate:
    """A surrogate loss that can be chosen."""

    summary: str
    """What it does with the ratio, for users."""
    loss: Callable[[LossInputs, SurrogateKeys], TokenLoss]
    keys: tuple[str, ...] = ()
    """Fields of `SurrogateKeys` that it needs; it has no use for the others, which then must be null."""
    usual: str = ""
    """Usual values of its keys, for users."""
    has_ratio: bool = True
    """Whether it depends on the ratio to the old policy."""
    by_sequence: bool = False
    """Whether all tokens of a sequence share one ratio."""


CLIP, GATE = ("clip_low", "clip_high"), ("gate_positive", "gate_negative")
SURROGATES = {
    "clip": Surrogate(
        "clip each token's ratio (PPO)",
        lambda of, keys: clip_loss(of.log_ratio, of.advantages, *keys.clip),
        CLIP,
        "0.2 is usual",
    ),
    "sequence_clip": Surrogate(
        "clip one ratio per sequence (GSPO)",
        lambda of, keys: sequence_clip_loss(of.log_ratio, of.advantages, of.sequence_ids, *keys.clip),
        CLIP,
        "3e-4 and 4e-4 are usual",
        by_sequence=True,
    ),
    "detached_clip": Surrogate(
        "use the clipped ratio as a constant weight (CISPO)",
        lambda of, keys: detached_clip_loss(of.logprobs, of.log_ratio, of.advantages, *keys.clip),
        CLIP,
        "1.0 and 4.0 are usual",
    ),
    "kept_gradient": Surrogate(
        "clip each token's ratio, but weight the gradient of clipped tokens by the bound instead of dropping it (GPPO)",
        lambda of, keys: kept_gradient_loss(of.log_ratio, of.advantages, *keys.clip),
        CLIP,
        "0.2 is usual",
    ),
    "soft_gate": Surrogate(
        "a sigmoid of the ratio in place of a clip (SAPO)",
        lambda of, keys: soft_gate_loss(of.log_ratio, of.advantages, *keys.gate),
        GATE,
        "1.0 and 1.05 are usual",
    ),
    "reinforce": Surrogate("no ratio", lambda of, keys: reinforce_loss(of.logprobs, of.advantages), has_ratio=False),
}
"""All surrogate losses, by their names in `algorithm.surrogate`."""

if TYPE_CHECKING:
    SurrogateKind = str
else:
    SurrogateKind = Literal[tuple(SURROGATES)]

# Annotated, so that an algorithm can override the default and keep the description
SurrogateKey = Annotated[
    SurrogateKind, Field(description="; ".join(f"{name}: {one.summary}" for name, one in SURROGATES.items()))
]
ClipLow = Annotated[
    Annotated[float, Field(gt=0, le=1)] | None, Field(description="the ratio is clipped below 1 - clip_low")
]
ClipHigh = Annotated[
    Annotated[float, Field(gt=0)] | None, Field(description="the ratio is clipped above 1 + clip_high")
]
GatePositive = Annotated[
    Annotated[float, Field(gt=0)] | None,
    Field(description="soft_gate: temperature of tokens with a positive advantage"),
]
GateNegative = Annotated[
    Annotated[float, Field(gt=0)] | None, Field(description="soft_gate: temperature of all other tokens")
]


class SurrogateKeys(BaseModel):
    """The keys of an algorithm that belong to its surrogate loss."""

    surrogate: SurrogateKey = "clip"
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2
    gate_positive: GatePositive = None
    gate_negative: GateNegative = None

    @property
    def clip(self) -> tuple[float, float]:
        """Clipping range (clip_low, clip_high) of a surrogate that clips."""
        assert self.clip_low is not None and self.clip_high is not None
        return self.clip_low, self.clip_high

    @property
    def gate(self) -> tuple[float, float]:
        """Temperatures (gate_positive, gate_negative) of surrogate soft_gate."""
        assert self.gate_positive is not None and self.gate_negative is not None
        return self.gate_positive, self.gate_negative

    def mistaken_keys(self) -> str | None:
        """Return which keys the surrogate lacks or has no use for, and what to do; None: none."""
        chosen = SURROGATES[self.surrogate]
        of_some = (key for key in SurrogateKeys.model_fields if key != "surrogate")
        given = [key for key in of_some if getattr(self, key) is not None]
        if foreign := [key for key in given if key not in chosen.keys]:
            other = next(name for name, one in SURROGATES.items() if foreign[0] in one.keys)
            return (
                f"surrogate: {self.surrogate} has no use for {' and '.join(foreign)}: set "
                f"{'it' if len(foreign) == 1 else 'them'} to null, or choose {other}"
            )
        if not set(chosen.keys) <= set(given):
            other = next(name for name, one in SURROGATES.items() if set(one.keys) <= set(given))
            return f"surrogate: {self.surrogate} needs {' and '.join(chosen.keys)} ({chosen.usual}), or choose {other}"
        return None
