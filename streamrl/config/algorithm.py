"""The `algorithm:` section of a run file: how rewards become a gradient.

All algorithms share one set of keys; a name sets their defaults to those of its paper. The training code reads the
keys, never the name, so keys of different papers can be combined where that makes sense; where it does not, the file is
refused with the reason. docs/explanation/algorithms.md has the formulas and sources.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from streamrl.config.cluster import StrictModel
from streamrl.surrogates import SURROGATES, ClipHigh, ClipLow, GateNegative, GatePositive, SurrogateKey, SurrogateKeys

GroupAdvantage = Literal["group_std", "group_mean", "leave_one_out"]
AdvantageKind = Literal["group_std", "group_mean", "leave_one_out", "batch", "batch_group_baseline", "gae"]
AggregationKind = Literal["token", "sequence", "constant"]
KLEstimator = Literal["k1", "k2", "k3"]

GROUP_ADVANTAGES: tuple[GroupAdvantage, ...] = ("group_std", "group_mean", "leave_one_out")
"""Advantages that are known as soon as a group is complete."""

ROUNDING = 1e-9
"""Share of a product that rounding may have taken from it, and far more."""

# Annotated, so that an algorithm can override the default and keep the description
AdvantageKey = Annotated[
    AdvantageKind,
    Field(
        description="group_std: reward minus the group's mean, divided by its deviation; group_mean: the same "
        "without the division; leave_one_out: reward minus the mean of the group's other samples; batch: normalised "
        "by mean and deviation of the batch; batch_group_baseline: reward minus the group's mean, divided by the "
        "batch's deviation; gae: estimated with a critic (ppo)",
    ),
]
AggregationKey = Annotated[
    AggregationKind,
    Field(
        description="token: mean over all tokens of the batch; sequence: mean over each sequence's tokens, then over "
        "sequences; constant: sum over tokens / (sequences * sampling.max_tokens)",
    ),
]


class KLConfig(StrictModel):
    """The KL divergence to a reference policy, the initial weights."""

    coef: float = Field(0.0, ge=0, description="weight of the KL term (0: no term, and no reference is loaded)")
    estimator: KLEstimator = Field(
        "k3",
        description="estimate per token, with d = log policy - log reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 "
        "+ d",
    )
    placement: Literal["loss", "reward"] = Field(
        "loss",
        description="loss: added to the loss; reward: subtracted from each token's reward before GAE (ppo)",
    )


class OffPolicyConfig(StrictModel):
    """The correction for off-policy samples, drawn with older weights or other numerics than the policy in training."""

    ratio_to: Literal["generator", "proximal"] = Field(
        "generator",
        description="denominator of the surrogate's ratio: the generator's own log-probabilities, or (proximal) "
        "those of the trainer's weights after the last step that publishes (decoupled PPO)",
    )
    correction: Literal["none", "truncate", "mask"] = Field(
        "none",
        description="use of the weight w: none: 1 in its place; truncate: min(w, high); mask: 0 outside [low, high]. "
        "w = proximal / generator; with ratio_to: generator, w = trainer / generator",
    )
    level: Literal["token", "sequence", "geometric"] = Field(
        "token",
        description="token: w of each token; sequence: product over the tokens; geometric: the product's length-th "
        "root",
    )
    low: float = Field(0.5, ge=0, le=1, description="mask: smallest w that is kept")
    high: float = Field(5.0, ge=1, description="mask: largest w that is kept; truncate: upper bound of w")


class OverlongConfig(StrictModel):
    """The penalty on completions near the token limit (DAPO's soft overlong punishment)."""

    margin_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens before sampling.max_tokens over which the penalty grows, fewer than those (default: a "
        "fifth of the limit); an episode of an agent is as long as its longest answer",
    )
    penalty: float = Field(
        1.0, gt=0, description="amount subtracted from the reward of a completion that reaches the limit"
    )


class CriticConfig(StrictModel):
    """The value model of ppo: a language model with a scalar head and its own AdamW.

    Betas, weight decay and gradient clipping are those of `optimizer`.
    """

    lr: float = Field(1e-5, gt=0, description="learning rate after warm-up (constant)")
    path: str | None = Field(None, description="initial weights of the critic (default: model.path)")
    warmup_steps: int = Field(0, ge=0, description="optimizer steps of linear warm-up")
    value_clip: float | None = Field(
        None,
        gt=0,
        description="clip a new value to within this distance of the one from before the step's first update, and take "
        "the larger of the two squared errors; needs batch.epochs or mini_batches above 1; none: no clip",
    )


class Algorithm(SurrogateKeys, StrictModel):
    """The keys that all algorithms share."""

    name: str
    advantage: AdvantageKey = "group_std"
    aggregation: AggregationKey = "token"
    kl: KLConfig = Field(default_factory=KLConfig)
    entropy_coef: float = Field(
        0.0,
        ge=0,
        le=1,
        description="weight of the entropy bonus: the entropy of the distribution that each token is drawn from, nats, "
        "is subtracted from its loss (0: no bonus)",
    )
    off_policy: OffPolicyConfig = Field(default_factory=OffPolicyConfig)
    router_replay: bool = Field(
        False,
        description="mixtures of experts: train with the experts that the generator chose for each token and layer "
        "(R3, rollout routing replay), in place of those that the trainer's own numerics would choose; the routers "
        "still learn",
    )
    overlong: OverlongConfig | None = Field(
        None, description="penalty on completions near the token limit; none: no penalty"
    )
    mask_truncated: bool = Field(False, description="exclude samples cut by the token limit from the loss")
    dynamic_sampling: bool = Field(
        False, description="replace groups whose task rewards are all equal, before any penalty, by new prompts"
    )
    max_replaced: float = Field(
        2.0,
        gt=0,
        description="dynamic_sampling: most groups replaced per step, as a multiple of batch.prompts_per_step, rounded "
        "down; further ones are kept",
    )
    max_importance_ratio: float | None = Field(
        None,
        gt=1,
        description="skip an optimizer step if its batch's mean importance ratio, over tokens, exceeds this; the "
        "ratio is the surrogate's (sequence_clip: the sequence's); none: no limit",
    )

    def most_replaced(self, prompts: int) -> int:
        """Return the most groups that dynamic sampling replaces in a step of so many prompts.

        0.29 of 100 prompts are 29, though their product is a little less.
        """
        return math.floor(self.max_replaced * prompts * (1 + ROUNDING))

    @property
    def needs_reference(self) -> bool:
        """Whether the initial weights are kept for a KL term."""
        return self.kl.coef > 0

    @property
    def compares_siblings(self) -> bool:
        """Whether a sample's advantage is relative to its group; with one sample per prompt it is always 0."""
        return self.advantage in GROUP_ADVANTAGES or self.advantage == "batch_group_baseline"

    @property
    def by_advantage_alone(self) -> bool:
        """Whether a sample whose advantage is 0 has no gradient: there is no KL term and no entropy bonus."""
        return not self.needs_reference and not self.entropy_coef

    @property
    def skips_flat_groups(self) -> bool:
        """Whether groups with equal rewards have no gradient and need not be sent to the trainer."""
        return self.compares_siblings and self.by_advantage_alone

    @property
    def needs_trajectories(self) -> bool:
        """Whether all rows of an episode have one ratio or weight, so that the trainer needs them together."""
        options = self.off_policy
        corrected = options.level != "token" and options.correction != "none"
        return SURROGATES[self.surrogate].by_sequence or corrected

    def needs_proximal(self, updates: int) -> bool:
        """Whether a copy of the weights after the last step that publishes must be kept.

        Args:
            updates: updates of the weights between publications. With 1 the published weights are those before the
                update, so the trainer's own detached log-probabilities are the proximal policy's.
        """
        return self.off_policy.ratio_to == "proximal" and updates > 1

    @model_validator(mode="before")
    @classmethod
    def _critic_is_for_ppo(cls, data: Any) -> Any:
        if isinstance(data, dict):
            of_critic = ("critic", "gamma", "lam", "whiten_advantages")
            foreign = [key for key in of_critic if key in data and key not in cls.model_fields]
            if foreign:
                raise ValueError(
                    f"{data.get('name')} has no critic and no use for {', '.join(foreign)}: leave it out, or choose "
                    "`name: ppo`"
                )
        return data

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        for reason in (self._about_advantage(), self.mistaken_keys(), self._about_kl(), self._about_off_policy()):
            if reason:
                raise ValueError(reason)
        return self

    def _about_advantage(self) -> str | None:
        if self.advantage == "gae" and self.name != "ppo":
            return f"advantage: gae needs a critic, which {self.name} has not: choose group_std, or `name: ppo`"
        if self.dynamic_sampling and not self.compares_siblings:
            return (
                "dynamic_sampling replaces groups without a gradient, but with "
                f"advantage: {self.advantage} a group whose rewards are all equal has one: leave it out, or choose "
                "advantage: group_std"
            )
        return None

    def _about_kl(self) -> str | None:
        if self.kl.placement == "reward" and self.advantage != "gae":
            return (
                "kl.placement: reward is a reward of every token, which only ppo's GAE can use; "
                f"{self.name} has one reward per sequence: choose placement: loss"
            )
        if self.kl.placement == "loss" and self.kl.estimator == "k1" and self.needs_reference:
            nearest = ", or placement: reward" if self.advantage == "gae" else ""
            return (
                "kl.estimator: k1 in the loss does nothing, its gradient is 0 in expectation: choose k3, or k2, whose "
                f"gradient is the KL's{nearest}"
            )
        return None

    def _about_off_policy(self) -> str | None:
        options = self.off_policy
        has_ratio = SURROGATES[self.surrogate].has_ratio
        if not has_ratio and options.ratio_to == "proximal":
            return (
                f"off_policy.ratio_to: proximal has no meaning with surrogate: {self.surrogate}, which has no ratio: "
                "leave it out; correction: truncate weighs by trainer / generator"
            )
        if options.ratio_to == "generator" and options.correction == "truncate" and has_ratio:
            return (
                "off_policy.correction: truncate does nothing with ratio_to: generator, where the surrogate's ratio "
                "contains the weight already: choose ratio_to: proximal, or correction: mask"
            )
        return None


class GRPOConfig(Algorithm):
    """GRPO: group-relative policy optimisation as in its paper (arXiv 2402.03300)."""

    name: Literal["grpo"] = "grpo"
    aggregation: AggregationKey = "sequence"


class DrGRPOConfig(Algorithm):
    """Dr. GRPO: GRPO without its length and difficulty biases (arXiv 2503.20783)."""

    name: Literal["dr_grpo"] = "dr_grpo"
    advantage: AdvantageKey = "group_mean"
    aggregation: AggregationKey = "constant"


class DAPOConfig(Algorithm):
    """DAPO: clip-higher, dynamic sampling, token-level loss and overlong shaping (arXiv 2503.14476)."""

    name: Literal["dapo"] = "dapo"
    clip_high: ClipHigh = 0.28
    overlong: OverlongConfig | None = Field(
        default_factory=OverlongConfig, description="penalty on completions near the token limit; null: no penalty"
    )
    dynamic_sampling: bool = Field(
        True, description="replace groups whose task rewards are all equal, before any penalty, by new prompts"
    )


class GSPOConfig(Algorithm):
    """GSPO: one length-normalised ratio per sequence (arXiv 2507.18071)."""

    name: Literal["gspo"] = "gspo"
    surrogate: SurrogateKey = "sequence_clip"
    aggregation: AggregationKey = "sequence"
    clip_low: ClipLow = 3e-4
    clip_high: ClipHigh = 4e-4


class CISPOConfig(Algorithm):
    """CISPO: the clipped ratio weights the policy gradient, so every token keeps one (MiniMax-M1, arXiv 2506.13585).

    There is no lower bound, as in the paper. The paper gives no upper bound; 5 is from ScaleRL (arXiv 2510.13786).
    """

    name: Literal["cispo"] = "cispo"
    surrogate: SurrogateKey = "detached_clip"
    clip_low: ClipLow = 1.0
    clip_high: ClipHigh = 4.0


class SAPOConfig(Algorithm):
    """SAPO: a smooth gate on each token's ratio in place of a clip (arXiv 2511.20347)."""

    name: Literal["sapo"] = "sapo"
    surrogate: SurrogateKey = "soft_gate"
    aggregation: AggregationKey = "sequence"
    clip_low: ClipLow = None
    clip_high: ClipHigh = None
    gate_positive: GatePositive = 1.0
    gate_negative: GateNegative = 1.05


class RLOOConfig(Algorithm):
    """RLOO: REINFORCE with the other samples' mean reward as baseline (arXiv 2402.14740).

    The paper sums log-probabilities over a sequence; `constant` is that sum divided by sampling.max_tokens.
    """

    name: Literal["rloo"] = "rloo"
    advantage: AdvantageKey = "leave_one_out"
    surrogate: SurrogateKey = "reinforce"
    aggregation: AggregationKey = "constant"
    clip_low: ClipLow = None
    clip_high: ClipHigh = None


class ReinforcePPConfig(Algorithm):
    """REINFORCE++ (arXiv 2501.03262); with `advantage: batch_group_baseline` it is REINFORCE++-baseline."""

    name: Literal["reinforce_pp"] = "reinforce_pp"
    advantage: AdvantageKey = "batch"


class PPOConfig(Algorithm):
    """PPO (arXiv 1707.06347) with a critic and generalised advantage estimation (arXiv 1506.02438)."""

    name: Literal["ppo"] = "ppo"
    advantage: AdvantageKey = "gae"
    critic: CriticConfig = Field(description="value model; {} for its defaults")
    gamma: float = Field(1.0, gt=0, le=1, description="discount per token")
    lam: float = Field(0.95, ge=0, le=1, description="lambda of GAE: 0 trusts the critic, 1 the rewards")
    whiten_advantages: bool = Field(
        False,
        description="shift and scale the advantages to mean 0 and variance 1 over the step's tokens with a loss; "
        "training then begins once the batch is complete",
    )

    @model_validator(mode="before")
    @classmethod
    def _has_a_critic(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("critic") is None:
            raise ValueError("ppo needs a critic: add `critic: {}`, or choose rloo or grpo, which need none")
        return data

    @model_validator(mode="after")
    def _uses_it(self) -> Self:
        if self.advantage != "gae":
            raise ValueError(
                f"ppo's critic has no use with advantage: {self.advantage}: leave advantage out (gae), or choose "
                "`name: grpo`, which has no critic"
            )
        if SURROGATES[self.surrogate].by_sequence:
            raise ValueError(
                f"surrogate: {self.surrogate} gives a sequence one ratio, but gae each token its own advantage: choose "
                "clip, or `name: gspo`"
            )
        return self


AlgorithmConfig = Annotated[
    GRPOConfig
    | DrGRPOConfig
    | DAPOConfig
    | GSPOConfig
    | CISPOConfig
    | SAPOConfig
    | RLOOConfig
    | ReinforcePPConfig
    | PPOConfig,
    Field(discriminator="name"),
]
