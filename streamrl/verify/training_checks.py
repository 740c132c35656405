"""The model in the trainer: its packing, and which precisions and divisions among ranks work."""

from __future__ import annotations

import copy
import re

import torch
from transformers import PretrainedConfig, PreTrainedModel

from scheduler.cost.model_shapes import undivided_heads
from streamrl.config.optimizer import Recomputation
from streamrl.errors import RunFailed, UserError
from streamrl.training.checkpoint_writing import kept_in_fp32
from streamrl.training.decoder_layers import decoder_layers, decoder_of
from streamrl.training.layer_kernels import take_kernels
from streamrl.training.packing import PackedBatch, pack
from streamrl.training.packing_choice import Packing, choose_packing
from streamrl.training.packing_proof import proof_groups, small_model, vocabulary_of
from streamrl.training.packing_ways import PackingProof
from streamrl.training.policy_model import Policy, in_training
from streamrl.training.tensor_parallel import plan_of
from streamrl.verify.findings import Finding

PACKING = "packing"
LAYER = re.compile(r"\.\d+\.")
"""A layer's number within the name of a parameter."""
SHARING = range(2, 9)
"""Numbers of ranks of a machine that may share rows."""
ROUNDING = 0.5
"""Largest mean difference of log-probabilities in bf16, in nats, that counts as rounding in a small random model."""


def check_packing(proof: PackingProof) -> tuple[Finding, Packing | None]:
    """Check shared prompts and separate rows against lone sequences; returns the packing that a run takes as well."""
    try:
        packing = choose_packing("auto", proof, 0)
    except UserError as error:
        return Finding(PACKING, "refused", str(error)), None
    return Finding(PACKING, "works" if packing.kind == "shared" else "works slower", str(packing)), packing


def check_settings(config: PretrainedConfig, packing: Packing) -> list[Finding]:
    """Check the settings of a run that depend on the model, with its architecture made small.

    Args:
        config: configuration of the full model.
        packing: how the trainer packs it.
    """
    model = small_model(config, attention=packing.attention)
    policy = Policy(model, packing.kind == "separate")
    take_kernels(policy)  # as a trainer on a CPU, where these checks run
    batch = pack(proof_groups(vocabulary_of(model)))
    logprobs, gradient = _passed(policy, batch)
    with torch.no_grad():
        rounded = copy.deepcopy(policy).to(torch.bfloat16)(batch, 1.0)[0]
    mean = float((rounded - logprobs).abs().mean())
    kept = {LAYER.sub(".*.", name) for name in kept_in_fp32(model, torch.bfloat16)}
    also = f"; {', '.join(sorted(kept))} rounded as well, which transformers keeps in float32" if kept else ""
    return [
        Finding("precision float32", "works", "the type of the other checks", optional=True),
        Finding(
            "precision bfloat16",
            "works" if mean <= ROUNDING else "refused",
            f"log-probabilities differ from float32 by {mean:.1g} nats on average{also}",
            optional=True,
        ),
        _checkpointing(model, policy, batch, gradient),
        _sharding(model),
        _tensor_parallel(model),
        _sequence_parallel(config, packing),
    ]


def _passed(policy: Policy, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities [N], and the gradient of their sum with respect to all parameters, [all]."""
    policy.zero_grad()
    logprobs = policy(batch, 1.0)[0]
    logprobs.sum().backward()
    return logprobs.detach(), torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


def _checkpointing(model: PreTrainedModel, policy: Policy, batch: PackedBatch, gradient: torch.Tensor) -> Finding:
    name = "gradient checkpointing"
    ways: tuple[Recomputation, ...] = (True, "selective")
    largest = 0.0
    try:
        for recomputation in ways:
            in_training(model, recomputation)
            largest = max(largest, float((_passed(policy, batch)[1] - gradient).norm() / gradient.norm()))
    except (RunFailed, ValueError, RuntimeError) as error:
        return Finding(name, "refused", str(error).splitlines()[0], optional=True)
    works = largest < 1e-4
    return Finding(name, "works" if works else "refused", f"gradients within {largest:.0e}", optional=True)


def _sharding(model: PreTrainedModel) -> Finding:
    try:
        decoder_layers(model)
    except RunFailed as error:
        return Finding("sharding (FSDP)", "refused", str(error), optional=True)
    return Finding("sharding (FSDP)", "works", "each decoder layer is a unit", optional=True)


def _tensor_parallel(model: PreTrainedModel) -> Finding:
    try:
        plan = plan_of(decoder_of(model), 1)
    except RunFailed as error:
        return Finding("tensor parallel", "refused", str(error), optional=True)
    return Finding("tensor parallel", "works", f"{len(plan)} kinds of modules are shared by its plan", optional=True)


def _sequence_parallel(config: PretrainedConfig, packing: Packing) -> Finding:
    name, text = "sequence parallel", config.get_text_config()
    if packing.undivided:
        return Finding(name, "refused", packing.undivided, optional=True)
    heads, kv_heads = text.num_attention_heads, getattr(text, "num_key_value_heads", None)
    possible = [str(ranks) for ranks in SHARING if not undivided_heads(heads, kv_heads, ranks)]
    if not possible:
        return Finding(name, "refused", f"its {heads} attention heads cannot be divided by 2 to 8 ranks", optional=True)
    return Finding(name, "works", f"its heads can be divided by {', '.join(possible)} ranks", optional=True)
