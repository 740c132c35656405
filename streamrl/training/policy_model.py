"""The policy: a Hugging Face causal LM that returns log-probabilities of completion tokens only."""

from __future__ import annotations

import logging
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from streamrl.config.optimizer import Recomputation
from streamrl.config.run import MODEL_KEY
from streamrl.errors import ErrorCode, RunFailed
from streamrl.machine.model_files import NotInSlices
from streamrl.training.attention import SHARED_PREFIX
from streamrl.training.attention_in_parts import IN_PARTS
from streamrl.training.compute_copies import ComputeCopies
from streamrl.training.decoder_layers import trunk_of
from streamrl.training.hidden_states import predicting_states
from streamrl.training.output_head import logit_transform, prove_head
from streamrl.training.packing import PackedBatch
from streamrl.training.recomputation import set_recomputation
from streamrl.training.router_replay import RouterReplay
from streamrl.training.sequence_parallel import SequenceRanks, TokenShares, check_heads
from streamrl.training.sliced_loading import empty_model, empty_twin, fill, is_empty
from streamrl.training.small_config import GROUPED_UNITS
from streamrl.training.tensor_parallel import plain_tensor
from streamrl.training.token_logprobs import HeadOutput, TokenDistribution, marked, measured_tokens, token_logprobs
from streamrl.training.truncation import ALL_TOKENS, Truncation

log = logging.getLogger(__name__)


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
        """Whether the head takes kernels where there are some (`fused_logprobs.py`)."""

    @torch.no_grad()
    def fill(self, device: torch.device) -> None:
        """Read this rank's part of an empty model's weights, and prove its head. A collective.

        Args:
            device: this rank's device.

        Raises:
            RunFailed: see `load_policy`.
        """
        fill(self.model, device)
        prove_head(_whole_head(self.model, device), self.transform)

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
        states = predicting_states(trunk_of(self.model), batch, self.separate, experts, self.ranks)
        head = self.model.get_output_embeddings()
        bias = getattr(head, "bias", None)
        measured = None
        if states.shares is not None and not every_entropy:
            measured = marked(measured_tokens(batch.targets), len(batch.targets))
        output = token_logprobs(
            states.hidden,
            plain_tensor(head.weight),
            None if bias is None else plain_tensor(bias),
            states.own(batch.targets),
            TokenDistribution(self.transform, temperature, truncation),
            every_entropy,
            None if measured is None else states.own(measured),
            fused=self.fused,
        )
        return output if states.shares is None else _of_all_tokens(output, states.shares, measured)


def _of_all_tokens(output: HeadOutput, shares: TokenShares, measured: torch.Tensor | None) -> HeadOutput:
    """Return the head's results of all tokens from those of each rank's own. A collective of these ranks.

    With `measured`, bool [N], there are entropies of these tokens alone.
    """
    with_entropy = shares if measured is None else shares.some(measured)
    outside = shares.whole(output.outside.byte()).bool()
    return HeadOutput(shares.whole(output.logprobs), with_entropy.whole(output.entropy), outside)


def _whole_head(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Return a model that has all of a divided one's weights outside its trunk, in fp32, and none inside."""
    twin = empty_twin(model)
    trunk = trunk_of(twin)
    inside = set(trunk.modules()) if trunk is not twin else set()
    for name, module in twin.named_modules():
        if module in inside:
            continue
        own = model.get_submodule(name)
        for key, weight in own.named_parameters(recurse=False):
            full = weight.full_tensor() if isinstance(weight, DTensor) else weight
            setattr(module, key, nn.Parameter(full.float(), requires_grad=False))
        for key, buffer in own.named_buffers(recurse=False):
            setattr(module, key, buffer.to(device))
    return twin


def load_policy(
    path: str,
    recomputation: Recomputation = False,
    attention: str = SHARED_PREFIX,
    replays: bool = False,
    ranks: SequenceRanks | None = None,
    shards: int | None = None,
    resumed: bool = False,
) -> Policy:
    """Load a Hugging Face model in fp32 (the master weights).

    Args:
        path: folder or hub id.
        recomputation: what the backward pass computes again.
        attention: see `load_model`.
        replays: whether its routers replay the experts that come with a batch (`router_replay.py`).
        ranks: the ranks that share every row; None: this one has them to itself.
        shards: see `load_model`.
        resumed: see `load_model`.

    Raises:
        UserError: it cannot replay them.
        RunFailed: as `load_model`; or the model does something unknown with its logits, see `output_head.prove_head`.
            `Policy.fill` finds it of a model that is empty now.
    """
    model = load_model(AutoModelForCausalLM, path, recomputation, attention, ranks, shards, resumed=resumed)
    policy = Policy(model, attention != SHARED_PREFIX, replays, ranks)
    if not is_empty(model):
        prove_head(policy.model, policy.transform)
    return policy


def load_model(
    kind: type[Any],
    path: str,
    recomputation: Recomputation,
    attention: str,
    ranks: SequenceRanks | None = None,
    shards: int | None = None,
    key: str = MODEL_KEY,
    resumed: bool = False,
) -> PreTrainedModel:
    """Load a Hugging Face model in fp32, prepared for training (`in_training`).

    Args:
        kind: AutoModelForCausalLM, or AutoModel for the trunk alone.
        path: folder or hub id.
        recomputation: what the backward pass computes again.
        attention: transformers' name of the attention: `SHARED_PREFIX` for packed rows, else one of the model's own,
            for separate ones (`packing_choice.Packing.attention`).
        ranks: the ranks that share every row; None: this one has them to itself.
        shards: number of shards into which `learner.shard` will divide each weight. Where the files allow it, the model
            is empty until then, and each rank reads its own slices (`sliced_loading.py`). None: it is loaded whole now.
        key: the model's key in the run file, for errors.
        resumed: only warn of weights that the files lack, as a checkpoint follows: earlier versions began such runs.

    Raises:
        RunFailed: a file of weights is damaged, the files lack weights, or the ranks cannot share the model's attention
            heads.
    """
    if ranks is not None:
        attention = IN_PARTS[attention]
    try:
        model, lacking = _read(kind, path, attention, shards)
    except SafetensorError as error:
        raise RunFailed(ErrorCode.MODEL.refer(f"{key}: the weights of {path} cannot be read: {error}")) from error
    if lacking:
        first = ", ".join(lacking[:3]) + (", ..." if len(lacking) > 3 else "")
        told = f"{key}: the files of {path} lack {len(lacking)} of its tensors, which get initial values: {first}"
        # buffers begin the same on every rank, and earlier checkpoints lack some
        if not resumed and any(name in lacking for name, _ in model.named_parameters(remove_duplicate=False)):
            raise RunFailed(ErrorCode.MODEL.refer(told))
        log.warning("%s", told)
    if ranks is not None:
        check_heads(model.config, ranks.size)
    return in_training(model, recomputation)


def _read(kind: type[Any], path: str, attention: str, shards: int | None) -> tuple[PreTrainedModel, list[str]]:
    """Return a model, and the names of its tensors that the files lack and that it does not make itself."""
    if shards is not None:
        try:
            return empty_model(kind, path, attention, shards), []
        except NotInSlices as reason:
            log.warning("every rank loads the whole of %s into host memory, as %s", path, reason)
    model, found = kind.from_pretrained(
        path, dtype=torch.float32, attn_implementation=attention, output_loading_info=True
    )
    return model, sorted(found["missing_keys"])


def in_training(model: PreTrainedModel, recomputation: Recomputation = False) -> PreTrainedModel:
    """Prepare a model for training: it computes as in evaluation, because the policy must be the one that generated.

    So there is neither dropout nor a router's noise, whatever the family names them.
    """
    model.eval()
    if not _takes_grouped_products(model):
        model.set_experts_implementation("eager")
    set_recomputation(model, recomputation)
    return model


def _takes_grouped_products(model: PreTrainedModel) -> bool:
    """Return whether torch's grouped products, which transformers has for experts, take a model's experts in bf16.

    Their rows have to begin at multiples of 16 bytes.
    """
    experts = (module for module in model.modules() if hasattr(module, "_is_expert_parallel"))
    stacks = (weights for module in experts for weights in module.parameters(recurse=False) if weights.ndim == 3)
    return not any(size % GROUPED_UNITS for weights in stacks for size in weights.shape[1:])
