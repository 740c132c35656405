"""What the layers of a trained model keep for the backward pass, and what they compute again.

    false       keep every result
    selective   keep the results of matrix products and of attention; compute norms, rotations and activations again,
                which costs memory traffic and hardly any operations
    true        keep each layer's input; compute the layer again, one more forward pass

All give the same gradients (`optimizer.gradient_checkpointing`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from streamrl.config.optimizer import Recomputation
from streamrl.errors import RunFailed
from streamrl.training.flash_kernels import NEWER_FORWARD

aten = torch.ops.aten

KEPT_NAMES = (
    "mm",
    "addmm",
    "_grouped_mm",
    "_flash_attention_forward",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
KEPT = frozenset([*(getattr(aten, name).default for name in KEPT_NAMES if hasattr(aten, name)), NEWER_FORWARD])
"""Operations whose results `selective` keeps; not batched products, by which short rows compute their scores."""
OF_EXPERTS = frozenset({aten._grouped_mm.default})
"""The products of experts among these, to which transformers adds a bias in place: a kept result would be changed."""
OF_LINEAR_LAYERS = frozenset({aten.mm.default, aten.addmm.default})
"""Those of linear layers, of which some families clamp queries, keys and values in place: computed again from a kept
result, the clamp would find nothing outside its bounds, and let all gradients pass."""


def set_recomputation(model: PreTrainedModel, recomputation: Recomputation) -> None:
    """Let the layers of a model compute parts of themselves again in the backward pass.

    Layers that do ask for training mode before they compute, and only then are they in it: some (OPT, XGLM) drop out
    in their own `forward`.

    Args:
        model: a model in evaluation mode.
        recomputation: what is computed again.

    Raises:
        RunFailed: no layer of the model can compute anything again.
    """
    if recomputation is False:
        return
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers or not model.supports_gradient_checkpointing:
        raise RunFailed(
            f"optimizer.gradient_checkpointing: no layer of {type(model).__name__} can recompute its activations; "
            "expected false for this model"
        )
    options: dict[str, Any] = {"use_reentrant": False}
    if recomputation == "selective":
        kept = KEPT
        if any(getattr(module, "has_bias", False) for module in model.modules()):  # gpt-oss
            kept -= OF_EXPERTS
        if getattr(model.config.get_text_config(), "clip_qkv", None) is not None:  # OLMo, OLMoE
            kept -= OF_LINEAR_LAYERS
        options["context_fn"] = partial(create_selective_checkpoint_contexts, partial(_policy, kept))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    for layer in layers:
        layer.training = True
        layer.register_forward_pre_hook(_compute_as_in_evaluation)
        layer.register_forward_hook(_checkpoint_again, always_call=True)


def _compute_as_in_evaluation(layer: nn.Module, _inputs: Any) -> None:
    layer.training = False


def _checkpoint_again(layer: nn.Module, _inputs: Any, _output: Any) -> None:
    layer.training = True


def _policy(kept: frozenset[Any], context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.PREFER_RECOMPUTE
