"""The experts of a mixture on a CPU where vLLM's own router for CPUs leaves out what a model asks for.

Without groups of experts vLLM's `CPURouter` takes the softmax of the logits and nothing else: a bias that corrects the
choice and a factor of the weights are dropped silently, and other scores fail an assertion. Its routers for GPUs have
all three.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

SCORES = {"softmax": lambda logits: torch.softmax(logits, -1), "sigmoid": torch.sigmoid}
"""Function that makes scores of logits, by vLLM's name for it."""

_routing = CPURouter._compute_routing


def _is_dropped(router: CPURouter) -> bool:
    """Return whether vLLM's way would not compute what the router was made for."""
    if router.use_grouped_topk or router.custom_routing_function is not None or router.scoring_func not in SCORES:
        return False
    return (
        router.e_score_correction_bias is not None
        or router.routed_scaling_factor != 1.0
        or router.scoring_func != "softmax"
    )


def chosen_experts(
    logits: torch.Tensor, top_k: int, scores: str, renormalize: bool, factor: float, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights (float32) and the ids (int32) of each token's experts, both [tokens, top_k].

    Args:
        logits: the router's, [tokens, experts].
        top_k: experts of a token.
        scores: name in `SCORES`.
        renormalize: whether the weights of a token add up to `factor`.
        factor: factor of the weights.
        bias: what is added to the scores for the choice alone, [experts].
    """
    every = SCORES[scores](logits.float())
    ids = torch.topk(every if bias is None else every + bias, top_k, dim=-1, sorted=False).indices
    weights = every.gather(-1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return (weights * factor).contiguous(), ids.to(torch.int32).contiguous()


def compute_routing(
    self: CPURouter, hidden_states: torch.Tensor, router_logits: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do the work of `CPURouter._compute_routing`."""
    if not _is_dropped(self):
        return _routing(self, hidden_states, router_logits, *args, **kwargs)
    return chosen_experts(
        router_logits,
        self.top_k,
        self.scoring_func,
        self.renormalize,
        self.routed_scaling_factor,
        self.e_score_correction_bias,
    )


def install() -> None:
    """Replace vLLM's way in this process."""
    setattr(CPURouter, "_compute_routing", compute_routing)  # noqa: B010  # mypy refuses to assign a method
