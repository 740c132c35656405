"""Structured starting weights: look-back heads and copying heads, which small models are slow to find.

A plain random start spends most of a few minutes of training on discovering how to copy a text of the
prompt. Here the first layer starts with heads that look 1, 2, 3, ... tokens back, and the second with two
"induction" heads that look for the place where the last one or two tokens occurred before, and copy what
came next. All weights are trained afterwards; the architecture is a plain Llama.
"""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM

CONSTANT = 0.1  # value of channel 0 in every embedding: a bias for queries and keys
WRITE = 0.06  # scale at which look-back heads write to the residual stream


def _basis(rows: int, columns: int) -> torch.Tensor:
    """Random orthonormal rows, zero on channel 0; shape (rows, columns)."""
    square = torch.linalg.qr(torch.randn(columns - 1, columns - 1)).Q
    return torch.cat([torch.zeros(rows, 1), square[:rows]], dim=1)


@torch.no_grad()
def structured_start(model: LlamaForCausalLM, theta: float, sharpness: float = 6.0) -> None:
    """Set look-back heads in layer 0 and copying heads in layer 1, in place.

    ``theta`` is the RoPE base, ``sharpness`` the lead of the wanted position in attention logits.
    """
    config = model.config
    width, size = config.hidden_size, config.head_dim
    half = size // 2
    embedding = model.model.embed_tokens.weight
    embedding[:, 0] = CONSTANT
    constant = CONSTANT / embedding.pow(2).mean(-1).sqrt().mean()
    angle = theta ** (-torch.arange(half) / half)  # radians per token, of each pair of channels
    first, second = (model.model.layers[index].self_attn for index in (0, 1))

    fast = (angle > 0.08).float()
    power = fast * sharpness * size**0.5 / (fast * (1 - angle.cos())).sum()
    for head in range(config.num_attention_heads):
        rows = slice(head * size, (head + 1) * size)
        turn = angle * (head + 1)
        query = torch.cat([power.sqrt() * turn.cos(), -power.sqrt() * turn.sin()])
        first.q_proj.weight[rows, 0] = query / constant
        first.k_proj.weight[rows, 0] = torch.cat([power.sqrt(), torch.zeros(half)]) / constant

    quarter = half // 2
    slow = torch.cat([torch.arange(quarter, half), torch.arange(half + quarter, size)])  # size/2 channels
    reads = _basis(half, width)  # what is compared of a token
    spaces = _basis(size, width)  # where the look-back heads write it
    for back in (0, 1):
        rows = torch.arange(half) + back * size
        first.v_proj.weight[rows] = reads
        first.o_proj.weight[:, rows] = WRITE * spaces[back * half : (back + 1) * half].mT
    one_back, two_back = spaces[:half], spaces[half:]
    scale = (sharpness * size**0.5 / (half * WRITE / 0.025)) ** 0.5
    second.q_proj.weight[slow] = scale * reads
    second.k_proj.weight[slow] = scale * one_back
    pair = torch.cat([torch.arange(0, half, 2), torch.arange(0, half, 2)])
    old = torch.arange(half) >= half // 2
    second.q_proj.weight[slow + size] = scale * torch.where(old[:, None], one_back[pair] * 0.5, reads[pair])
    second.k_proj.weight[slow + size] = scale * torch.where(old[:, None], two_back[pair], one_back[pair])
    copies = _basis(size, width)
    for head in (0, 1):
        rows = slice(head * size, (head + 1) * size)
        second.v_proj.weight[rows] = copies
        second.o_proj.weight[:, rows] = 0.02 * copies.mT
