"""Attention over packed groups: causal inside a prompt, and completion -> (its prompt, itself).

Registered with transformers' attention interface, so any decoder model that uses it (Llama, Qwen, Mistral, ...)
runs packed without a patch. Cost is sum_i C_i (P + C_i) per group instead of the (P + sum C_i)^2 of one masked
row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from streamrl.training.packing import GroupLayout

SHARED_PREFIX = "streamrl_shared_prefix"


def shared_prefix_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a packed row (signature of transformers' attention functions).

    Args:
        module: the attention layer.
        query: [1, H, T, D].
        key: [1, H_kv, T, D]; H is a multiple of H_kv (grouped-query attention).
        value: [1, H_kv, T, D].
        attention_mask: unused, the layout says it all.
        scaling: softmax scale (default 1 / sqrt(D)).
        dropout: must be 0; RL training evaluates the policy that generated.
        kwargs: must hold `layout`, the `GroupLayout`s of the row.

    Returns:
        ([1, T, H, D], None).
    """
    layout: tuple[GroupLayout, ...] = kwargs["layout"]
    # [T, heads, D], so that rows can be taken by token
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    outputs: list[torch.Tensor] = []
    order: list[torch.Tensor] = []
    for group in layout:
        prompt = slice(group.start, group.start + group.prompt_length)
        k_prompt, v_prompt = _heads_first(k[prompt][None]), _heads_first(v[prompt][None])
        prompt_out = F.scaled_dot_product_attention(
            _heads_first(q[prompt][None]), k_prompt, v_prompt, is_causal=True, scale=scaling, enable_gqa=True
        )
        outputs.append(prompt_out[0].transpose(0, 1))
        order.append(torch.arange(prompt.start, prompt.stop, device=q.device))
        if not group.completion_lengths:
            continue
        rows, valid = _completion_rows(group, q.device)
        count = len(group.completion_lengths)
        k_all = torch.cat([k_prompt.expand(count, -1, -1, -1), _heads_first(k[rows])], dim=2)
        v_all = torch.cat([v_prompt.expand(count, -1, -1, -1), _heads_first(v[rows])], dim=2)
        # Query t sees the prompt and completion positions <= t. Padding lies behind every valid position, so
        # the causal mask hides it, and what padded queries compute is thrown away.
        longest = rows.shape[1]
        mask = torch.ones(longest, group.prompt_length + longest, dtype=torch.bool, device=q.device)
        mask = mask.tril(diagonal=group.prompt_length)
        out = F.scaled_dot_product_attention(
            _heads_first(q[rows]), k_all, v_all, attn_mask=mask, scale=scaling, enable_gqa=True
        )
        outputs.append(out.transpose(1, 2)[valid])
        order.append(rows[valid])
    inverse = torch.argsort(torch.cat(order))
    return torch.cat(outputs)[inverse][None], None


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """[B, T, H, D] -> [B, H, T, D]."""
    return x.transpose(1, 2)


def _completion_rows(group: GroupLayout, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Row indices of a group's completions, padded with the group's first row: [G, Cmax] and validity [G, Cmax]."""
    lengths = torch.tensor(group.completion_lengths, device=device)
    starts = group.start + group.prompt_length + torch.cumsum(lengths, 0) - lengths
    offsets = torch.arange(int(lengths.max()), device=device)
    valid = offsets[None, :] < lengths[:, None]
    rows = torch.where(valid, starts[:, None] + offsets[None, :], torch.full_like(starts, group.start)[:, None])
    return rows, valid


AttentionInterface.register(SHARED_PREFIX, shared_prefix_attention)
