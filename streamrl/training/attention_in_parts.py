"""Attention of rows whose tokens several ranks share (`sequence_parallel.py`), around the functions of one rank.

    streamrl_shared_prefix_in_parts        packed rows, by `attention.py`
    streamrl_shared_prefix_long_in_parts   the same, as GPUs and long rows compute it
    streamrl_own_rows_in_parts             the same for completions that repeat their prompts
    streamrl_sdpa_in_parts                 padded rows, by transformers' `sdpa`, with the model's own mask

They are registered with transformers' attention interface, as the functions that they call.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from streamrl.training.attention import OWN_ROWS, SHARED_PREFIX, SHARED_PREFIX_LONG, shared_prefix_attention
from streamrl.training.sequence_parallel import SequenceRanks

RANKS = "sequence_ranks"
"""Argument of a trunk and its layers: the `SequenceRanks` that share its rows."""

SDPA = "sdpa"
IN_PARTS = {name: f"{name}_in_parts" for name in (SHARED_PREFIX, SHARED_PREFIX_LONG, OWN_ROWS)} | {
    SDPA: "streamrl_sdpa_in_parts"
}
"""Name of the attention of shared rows, by that of rows which a rank has to itself."""


def _in_parts(
    attention: Any,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute this rank's heads of whole rows by another attention function.

    Args:
        attention: that function, with the signature of transformers' attention functions.
        module: the attention layer.
        query: this rank's part of the rows, [B, H, L / N, D].
        key: likewise, [B, H_kv, L / N, D].
        value: likewise, [B, H_kv, L / N, D_v].
        attention_mask: mask of whole rows for all heads, [B, 1, L, L], or None.
        s_aux: attention sinks of all heads, [H]; None: none.
        kwargs: further arguments of the function; must hold `sequence_ranks`.

    Returns:
        (this rank's part of the rows, with all heads: [B, L / N, H, D_v], None).

    Raises:
        ValueError: the layer is not told of the ranks by its model, or brings a mask of something else than whole rows.
    """
    name = type(module).__name__
    ranks: SequenceRanks | None = kwargs.pop(RANKS, None)
    if ranks is None:
        raise ValueError(f"{name} is not told by its model which ranks share its rows")
    columns = query.shape[2] * ranks.size
    if attention_mask is not None and attention_mask.shape[1:] != (1, columns, columns):
        shape = tuple(attention_mask.shape)
        raise ValueError(f"{name} brings a mask of {shape}, expected one for all heads and {columns} tokens")
    if ranks.size > key.shape[1]:  # several ranks have queries of the same key-value head
        key, value = (x.repeat_interleave(ranks.size // x.shape[1], dim=1) for x in (key, value))
    query, key, value = (ranks.exchange(x, split=1, join=2) for x in (query, key, value))
    if s_aux is not None:
        kwargs["s_aux"] = ranks.part(s_aux, 0)
    out: torch.Tensor = attention(module, query, key, value, attention_mask, **kwargs)[0]
    return ranks.exchange(out, split=1, join=2), None


def _sdpa(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Call transformers' `sdpa` with a stand-in for the layer that has as many heads per key-value head as are here."""
    groups = query.shape[1] // key.shape[1]
    layer: Any = SimpleNamespace(num_key_value_groups=groups, is_causal=getattr(module, "is_causal", True))
    return sdpa_attention_forward(layer, query, key, value, *args, **kwargs)


def _mask_of_whole_rows(
    batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0, **kwargs: Any
) -> torch.Tensor | None:
    """Return `sdpa_mask` of whole rows [B, 1, L, L], where the trunk has [B, L] of padding and a part of the tokens."""
    return sdpa_mask(batch_size, kv_length, kv_length, q_offset, kv_offset, **kwargs)


AttentionInterface.register(IN_PARTS[SHARED_PREFIX], partial(_in_parts, shared_prefix_attention))
AttentionInterface.register(IN_PARTS[OWN_ROWS], partial(_in_parts, shared_prefix_attention))
AttentionInterface.register(
    IN_PARTS[SHARED_PREFIX_LONG], partial(_in_parts, partial(shared_prefix_attention, plain_scores=0))
)
AttentionInterface.register(IN_PARTS[SDPA], partial(_in_parts, _sdpa))
AttentionMaskInterface.register(IN_PARTS[SDPA], _mask_of_whole_rows)
