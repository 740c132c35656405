"""Where a model has its decoder layers: families name the list differently (`layers`, `h`, `blocks`, `decoder.layers`).

Sharding makes each of them a unit, router replay and the proof of packing watch them.
"""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from streamrl.errors import RunFailed


def trunk_of(model: PreTrainedModel) -> nn.Module:
    """Return a model without its head; a trunk is returned as it is.

    transformers finds it by a name, which some models do not have (Llama 4's text model).
    """
    trunk: nn.Module = model.base_model
    if trunk is model:
        trunk = next((part for part in model.children() if isinstance(part, PreTrainedModel)), model)
    return trunk


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """Return the part of a model that computes text: its trunk, or that of a model that also reads images."""
    decoder: nn.Module = model.get_decoder()
    return trunk_of(model) if decoder is model else decoder


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the list of a model's decoder layers: the one with the most weights.

    Args:
        model: a causal language model, or its trunk.

    Raises:
        RunFailed: the model has no list of modules.
    """
    lists = [module for module in decoder_of(model).modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise RunFailed(
            f"the trainer cannot divide {type(model).__name__}: it has no list of decoder layers; expected "
            "model.dtype: float32 and one rank, or another model"
        )
    return max(lists, key=_weights)  # of equal ones the outer one, which comes first


def _weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
