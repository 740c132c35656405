"""Router replay: a model's forward pass with the experts that the generator chose (R3, rollout routing replay).

Trainer and generator compute router logits by their own numerics, so that a few tokens go to other experts and their
probabilities are not quite those that they were drawn from. With replay a router's choice is the recorded one. Its
weights are still computed from the trainer's own logits, at the recorded experts, so it learns as without.

The choices go through the trunk as an argument of its layers. So a layer that is computed again in the backward pass
gets those of the forward pass that it belongs to, whatever has run in between.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from streamrl.errors import RunFailed
from streamrl.machine.router_shape import RouterShape, shape_of
from streamrl.training.decoder_layers import decoder_layers

EXPERTS = "replayed_experts"
"""Argument of a trunk and its layers: the recorded choices, [positions, layers with experts, top_k] int64; -1 where
nothing is recorded and a router chooses itself."""

Weigh = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]


def _weigh_qwen3_moe(router: Any, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return the weights [positions, top_k] of chosen experts, as `Qwen3MoeTopKRouter` computes them."""
    weights = torch.softmax(logits, dim=-1, dtype=torch.float).gather(-1, chosen)
    if router.norm_topk_prob:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(logits.dtype)


def _weigh_gpt_oss(_router: Any, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return the weights [positions, top_k] of chosen experts, as `GptOssTopKRouter` computes them."""
    return torch.softmax(logits.gather(-1, chosen), dim=-1, dtype=logits.dtype)


ROUTERS: dict[str, tuple[str, Weigh]] = {
    "qwen3_moe": ("mlp.gate", _weigh_qwen3_moe),
    "gpt_oss": ("mlp.router", _weigh_gpt_oss),
}
"""Name of the router in a layer, and its weights, by the type of model. A router returns (logits, weights, chosen)."""


class RouterReplay:
    """The replay in one model: hooks on its layers and routers, and the form that recorded choices take for them."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Prepare a model; without recorded choices it computes as before.

        Raises:
            UserError: as `shape_of`.
            RunFailed: the model's layers with experts are not those that its configuration describes.
        """
        self.shape: RouterShape = shape_of(model.config.to_dict())
        name, weigh = ROUTERS[self.shape.kind]
        layers: list[nn.Module] = list(decoder_layers(model))
        found = tuple(number for number, layer in enumerate(layers) if _has(layer, name))
        if found != self.shape.layers:
            raise RunFailed(
                f"algorithm.router_replay: layers {found} of {type(model).__name__} have experts, its configuration "
                f"says {self.shape.layers}"
            )
        for number, layer in enumerate(layers):
            at = self.shape.layers.index(number) if number in self.shape.layers else None
            held: list[torch.Tensor] = []
            layer.register_forward_pre_hook(partial(_take, held, at), with_kwargs=True)
            if at is not None:
                layer.get_submodule(name).register_forward_hook(partial(_replay, held, weigh))

    def choices(self, rows: torch.Tensor, recorded: torch.Tensor) -> torch.Tensor:
        """Return recorded choices in the form of `EXPERTS`.

        Args:
            rows: bytes of each position (`RouterShape`), [positions, row_bytes] uint8.
            recorded: whether a position's are known, [positions] bool.

        Raises:
            ValueError: they are of another model.
        """
        shape = self.shape
        if rows.ndim != 2 or rows.shape[1] != shape.row_bytes:
            raise ValueError(f"experts of {tuple(rows.shape)} bytes, expected {shape.row_bytes} for each position")
        numbers = rows.to(torch.int64)
        if shape.dtype != np.uint8:  # little-endian
            numbers = numbers[:, 0::2] + 256 * numbers[:, 1::2]
        chosen = numbers.view(len(rows), len(shape.layers), shape.top_k)
        return chosen.masked_fill(~recorded[:, None, None], -1)


def _has(layer: nn.Module, name: str) -> bool:
    return name in dict(layer.named_modules())


def _take(
    held: list[torch.Tensor], at: int | None, _layer: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Hold a layer's choices for its router; the rest of the layer does not see them."""
    rest = dict(kwargs)
    given = rest.pop(EXPERTS, None)
    held.clear()
    if at is not None and given is not None:
        held.append(given[:, at])
    return args, rest


def _replay(held: list[torch.Tensor], weigh: Weigh, router: nn.Module, _args: Any, output: Any) -> Any:
    """Replace a router's choice by the recorded one, where there is one, and its weights by those of that choice.

    Raises:
        ValueError: there are choices for more or fewer positions than the router has computed.
    """
    if not held:
        return output
    logits, _, own = output
    recorded = held.pop()
    if recorded.shape != own.shape:
        raise ValueError(f"{tuple(recorded.shape)} experts are recorded, the router chooses {tuple(own.shape)}")
    chosen = torch.where(recorded < 0, own, recorded)
    return logits, weigh(router, logits, chosen), chosen
