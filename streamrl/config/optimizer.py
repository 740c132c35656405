"""The `optimizer:` section of a run file."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from streamrl.config.cluster import StrictModel

Recomputation = bool | Literal["selective"]
"""What layers compute again in the backward pass: all (True), all but products and attention, nothing (False)."""

Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(StrictModel):
    """AdamW with fp32 master weights."""

    lr: float = Field(5e-6, gt=0, description="learning rate after warm-up")
    warmup_steps: int = Field(0, ge=0, description="optimizer steps of linear warm-up")
    decay: Literal["constant", "linear", "cosine", "wsd"] = Field(
        "constant",
        description="learning rate after warm-up: linear, cosine: down to min_lr_fraction at the last step; wsd: "
        "constant, then linear over the last decay_steps",
    )
    decay_steps: int | None = Field(None, ge=1, description="steps of the decay of wsd (default: a tenth of `steps`)")
    min_lr_fraction: float = Field(
        0.1, ge=0, le=1, description="learning rate of the last step of a decay, as a share of lr"
    )
    betas: tuple[Beta, Beta] = Field(
        (0.9, 0.95), description="decay per step of the running means of gradients and of their squares, each below 1"
    )
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    end_after_refused: int = Field(
        3,
        ge=1,
        description="refused optimizer steps that end the run; a step is refused where a loss, a gradient, a weight or "
        "the update is not finite, and is then tried again without the groups that caused it",
    )
    gradient_checkpointing: Recomputation = Field(
        False,
        description="what the backward pass computes again, to save memory; true: each layer from its input, which "
        "costs a third more operations; selective: norms and activation functions, from the kept results of products "
        "and attention; false: nothing",
    )

    compile: bool = Field(
        True,
        description="on GPUs, let torch compile dense layers as a whole, norms and plain MLPs of others, and the "
        "log-probabilities of the output head into fewer kernels, which takes some twenty seconds at the first step "
        "(with gradient_checkpointing: selective or tensor parallelism, only the last of these)",
    )

    def decay_length(self, total_steps: int) -> int:
        """Return the steps of the decay of wsd in a run of `total_steps`."""
        return self.decay_steps or max(1, round(total_steps / 10))

    @model_validator(mode="after")
    def _decays(self) -> Self:
        if self.decay_steps is not None and self.decay != "wsd":
            raise ValueError(
                f"decay_steps belongs to decay: wsd, got decay: {self.decay}, which ends with the run: leave "
                "it out, or choose wsd"
            )
        return self
