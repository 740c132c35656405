"""What is trained and sampled: the model, the batch of a step, the distribution of completions."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, JsonValue, field_validator, model_validator

from streamrl.config.cluster import StrictModel

OF_THE_CALL = frozenset(
    [
        "conversation",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    ]
)
"""Arguments of transformers' `apply_chat_template` that are no variables of a template, or depend on the prompt."""


class ModelConfig(StrictModel):
    """The policy model."""

    refused: ClassVar[dict[str, str]] = dict.fromkeys(
        ("lora", "lora_rank", "lora_alpha", "peft"), "there are no adapters, all weights are trained"
    )
    """Keys of other libraries that this one does not have, and why."""

    path: str = Field(
        "smollm2-135m",
        description="a model known to `streamrl fetch-model`, a folder in HF format, or a Hugging Face hub id",
    )
    max_context: int = Field(1024, ge=16, description="most tokens of prompt and completion together")
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto",
        description="compute type of trainer and instances (master weights are always fp32); auto: bfloat16 on devices "
        "where it is fast, float32 elsewhere",
    )
    system_prompt: str | None = Field(
        None, description="system message before every prompt that has none of its own; none: no message"
    )
    chat_template_kwargs: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="variables of the model's chat template, e.g. {enable_thinking: false}; each must occur in it",
    )

    @field_validator("chat_template_kwargs")
    @classmethod
    def _variables(cls, given: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if taken := sorted(set(given) & OF_THE_CALL):
            raise ValueError(
                f"{', '.join(taken)} is what streamrl itself gives the chat template: expected variables of the "
                "template, such as enable_thinking"
            )
        return given


class BatchConfig(StrictModel):
    """The batch of one optimizer step."""

    prompts_per_step: int = Field(8, ge=1, description="prompts (groups) per optimizer step")
    samples_per_prompt: int = Field(8, ge=1, description="completions per prompt (group size)")
    micro_batch_tokens: int = Field(
        2048,
        ge=64,
        description="most tokens in one forward/backward pass of a rank; a larger group is cut into parts that each "
        "repeat its prompt. A single completion that is longer with its prompt, or an episode whose rows must stay "
        "together, runs alone",
    )
    epochs: int = Field(
        1,
        ge=1,
        le=64,
        description="passes over each batch, each with mini_batches optimizer updates; old log-probabilities stay "
        "those of the samples",
    )
    mini_batches: int = Field(
        1,
        ge=1,
        description="equal parts of a batch, each with an optimizer update of its own; drawn anew in each pass",
    )
    packing: Literal["auto", "shared", "separate"] = Field(
        "auto",
        description="shared: a prompt is computed once for all its completions; separate: every completion with its "
        "prompt, slower; auto: shared where it is proven for the model's architecture "
        "(see `streamrl verify`), else separate",
    )

    @property
    def updates(self) -> int:
        """Optimizer updates on each batch."""
        return self.epochs * self.mini_batches

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.prompts_per_step % self.mini_batches:
            raise ValueError(
                f"mini_batches ({self.mini_batches}) must divide prompts_per_step ({self.prompts_per_step}) into equal "
                "parts"
            )
        return self


class SamplingConfig(StrictModel):
    """Sampling of completions; the trainer's log-probabilities are of the same distribution."""

    refused: ClassVar[dict[str, str]] = dict.fromkeys(
        (
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "logit_bias",
            "bad_words",
            "allowed_token_ids",
            "min_tokens",
            "logits_processors",
            "structured_outputs",
        ),
        "the trainer could not recompute the log-probabilities of tokens that are drawn so",
    )
    """Options of vLLM that a run cannot have, each with the reason."""

    temperature: float = Field(
        1.0, ge=0.01, le=2, description="divisor of the logits; greedy samples have no ratio to learn from"
    )
    top_p: float = Field(
        1.0, gt=0, le=1, description="sample among the likeliest tokens that reach this probability together; 1: all"
    )
    top_k: int = Field(0, ge=0, description="sample among the k likeliest tokens; 0: all")
    min_p: float = Field(
        0.0, ge=0, le=1, description="sample among tokens of at least this share of the likeliest one's probability"
    )
    max_tokens: int = Field(128, ge=1, description="most tokens in one completion")
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list,
        description="strings that end a completion, and stay in its text as rewards get it; special tokens too, which "
        "do not",
    )

    @property
    def truncates(self) -> bool:
        """Whether some tokens cannot be sampled."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0
