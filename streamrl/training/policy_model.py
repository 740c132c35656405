"""The policy: a Hugging Face causal LM that returns log-probabilities of completion tokens only."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from streamrl.config.optimizer import Recomputation
from streamrl.training.attention import SHARED_PREFIX
from streamrl.training.attention_in_parts import IN_PARTS
from streamrl.training.compute_copies import ComputeCopies
from streamrl.training.hidden_states import predicting_states
from streamrl.training.output_head import logit_transform, prove_head
from streamrl.training.packing import PackedBatch
from streamrl.training.recomputation import set_recomputation
from streamrl.training.router_replay import RouterReplay
from streamrl.training.sequence_parallel import SequenceRanks, TokenShares, check_heads
from streamrl.training.tensor_parallel import whole
from streamrl.training.token_logprobs import ENTROPY_STRIDE, HeadOutput, TokenDistribution, token_logprobs
from streamrl.training.truncation import ALL_TOKENS, Truncation


class Policy(nn.Module):
    """A causal LM behind one forward: packed batch in, log-probabilities of its completion tokens out."""

    def __init__(
        self,
        model: PreTrainedModel,
        separate: bool = False,
        replays: bool = False,
        ranks: SequenceRanks | None = None,
    ) -> None:
        """Errors as `RouterReplay`, with `replays`: whether experts that come with a batch are replayed."""
        super().__init__()
        self.model = model
        self.separate = separate
        """Whether every completion runs in a row of its own (`hidden_states.py`)."""
        self.transform = logit_transform(model.config)
        self.replay = RouterReplay(model) if replays else None
        self.ranks = ranks
        """Ranks that share every row with this one (`sequence_parallel.py`); None: it has them to itself."""
        self.copies: ComputeCopies | None = None
        """Copies of the weights in the type that it computes in; None: it computes with the weights themselves."""
        self.fused = False
        """Whether the head's sums are compiled (`fused_logprobs.py`)."""

    def forward(
        self,
        batch: PackedBatch,
        temperature: float,
        truncation: Truncation = ALL_TOKENS,
        every_entropy: bool = False,
    ) -> HeadOutput:
        """Return the completion tokens' log-probabilities in the distribution that is sampled from, and entropies.

        With `every_entropy` there is an entropy of each token, with gradient.
        """
        experts = None
        if self.replay is not None and batch.experts is not None and batch.recorded is not None:
            experts = self.replay.choices(batch.experts, batch.recorded)
        states = predicting_states(self.model.base_model, batch, self.separate, experts, self.ranks)
        head = self.model.get_output_embeddings()
        bias = getattr(head, "bias", None)
        output = token_logprobs(
            states.hidden,
            whole(head.weight),
            None if bias is None else whole(bias),
            states.own(batch.targets),
            TokenDistribution(self.transform, temperature, truncation),
            every_entropy,
            None if states.shares is None else states.shares.mine % ENTROPY_STRIDE == 0,
            fused=self.fused,
        )
        return output if states.shares is None else _of_all_tokens(output, states.shares, every_entropy)


def _of_all_tokens(output: HeadOutput, shares: TokenShares, every_entropy: bool) -> HeadOutput:
    """Return the head's results of all tokens from those of each rank's own. A collective of these ranks."""
    with_entropy = shares if every_entropy else shares.every(ENTROPY_STRIDE)
    outside = shares.whole(output.outside.byte()).bool()
    return HeadOutput(shares.whole(output.logprobs), with_entropy.whole(output.entropy), outside)


def load_policy(
    path: str,
    recomputation: Recomputation = False,
    attention: str = SHARED_PREFIX,
    replays: bool = False,
    ranks: SequenceRanks | None = None,
) -> Policy:
    """Load a Hugging Face model in fp32 (the master weights).

    Args:
        path: folder or hub id.
        recomputation: what the backward pass computes again.
        attention: see `load_model`.
        replays: whether its routers replay the experts that come with a batch (`router_replay.py`).
        ranks: the ranks that share every row; None: this one has them to itself.

    Raises:
        UserError: it cannot replay them.
        RunFailed: as `load_model`; or the model does something unknown with its logits, see `output_head.prove_head`.
    """
    model = load_model(AutoModelForCausalLM, path, recomputation, attention, ranks)
    policy = Policy(model, attention != SHARED_PREFIX, replays, ranks)
    prove_head(policy.model, policy.transform)
    return policy


def load_model(
    kind: type[Any], path: str, recomputation: Recomputation, attention: str, ranks: SequenceRanks | None = None
) -> PreTrainedModel:
    """Load a Hugging Face model in fp32, prepared for training (`in_training`).

    Args:
        kind: AutoModelForCausalLM, or AutoModel for the trunk alone.
        path: folder or hub id.
        recomputation: what the backward pass computes again.
        attention: transformers' name of the attention: `SHARED_PREFIX` for packed rows, else one of the model's own,
            for separate ones (`packing_choice.Packing.attention`).
        ranks: the ranks that share every row; None: this one has them to itself.

    Raises:
        RunFailed: the ranks cannot share the model's attention heads.
    """
    if ranks is not None:
        attention = IN_PARTS[attention]
    model: PreTrainedModel = kind.from_pretrained(path, dtype=torch.float32, attn_implementation=attention)
    if ranks is not None:
        check_heads(model.config, ranks.size)
    return in_training(model, recomputation)


def in_training(model: PreTrainedModel, recomputation: Recomputation = False) -> PreTrainedModel:
    """Prepare a model for training: it computes as in evaluation, because the policy must be the one that generated.

    So there is neither dropout nor a router's noise, whatever the family names them.
    """
    model.eval()
    set_recomputation(model, recomputation)
    return model
