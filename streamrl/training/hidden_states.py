"""Hidden states that predict the completion tokens of a batch, by one of two ways that give the same numbers.

    shared      one packed row: a prompt is computed once for all its completions (`attention.py`). Right only for
                layers that let the attention function decide what a token sees
    separate    a padded row for each completion, its prompt included, through the model's own attention: right for any
                causal language model, also with recurrent layers, but a prompt is computed once per completion

`packing_proof.py` decides which one a model gets.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from streamrl.training.packing import GroupLayout, PackedBatch
from streamrl.training.router_replay import EXPERTS


@dataclass(frozen=True)
class PaddedRows:
    """The completions of a batch as rows of their own, padded on the right: B rows, the longest has L tokens.

    A completion's last token predicts nothing and is left out.
    """

    places: torch.Tensor
    """Position in the packed row of each token, [B, L] int64; padding repeats the row's first token."""
    mask: torch.Tensor
    """1 for tokens, 0 for padding, [B, L] int64."""
    sources: torch.Tensor
    """Place in [B L] of the hidden state before each completion token, with a loss or without, [all of them] int64."""


@lru_cache(maxsize=4)  # the policy, the reference, the critic pass over the same batch
def padded_rows(layout: tuple[GroupLayout, ...]) -> PaddedRows:
    """Return the rows of a packed batch; at least one, so that a batch without completions runs as well."""
    rows: list[tuple[torch.Tensor, int]] = []
    for group in layout:
        prompt = torch.arange(group.start, group.start + group.prompt_length)
        ends = accumulate(group.completion_lengths, initial=group.start + group.prompt_length)
        for begin, length in zip(ends, group.completion_lengths, strict=False):
            rows.append((torch.cat([prompt, torch.arange(begin, begin + length - 1)]), length))
    rows = rows or [(torch.zeros(1, dtype=torch.int64), 0)]
    longest = max(len(places) for places, _ in rows)
    places = torch.stack([torch.cat([row, row[:1].expand(longest - len(row))]) for row, _ in rows])
    mask = torch.stack([(torch.arange(longest) < len(row)).long() for row, _ in rows])
    sources = [torch.arange(len(row) - count, len(row)) + at * longest for at, (row, count) in enumerate(rows)]
    return PaddedRows(places, mask, torch.cat(sources))


def predicting_states(
    trunk: nn.Module, batch: PackedBatch, separate: bool, experts: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the trunk's last hidden state before each token with a loss, [N, d].

    Args:
        trunk: the model without its head; with `separate: False` it has the attention of `attention.py`.
        batch: the packed batch.
        separate: run every completion in a row of its own.
        experts: recorded experts of each token of the packed row (`router_replay.EXPERTS`); None: routers choose. The
            trunk must have been prepared by `RouterReplay`.
    """
    replayed: dict[str, Any] = {}
    if not separate:
        if experts is not None:
            replayed[EXPERTS] = experts
        packed: torch.Tensor = trunk(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            layout=batch.layout,
            **replayed,
        ).last_hidden_state
        return packed[0, batch.source_index]
    rows, device = padded_rows(batch.layout), batch.input_ids.device
    places = rows.places.to(device)
    if experts is not None:
        replayed[EXPERTS] = experts[places.flatten()]
    hidden: torch.Tensor = trunk(
        input_ids=batch.input_ids[0, places],
        attention_mask=rows.mask.to(device),
        position_ids=torch.arange(places.shape[1], device=device).expand(places.shape),
        use_cache=False,
        **replayed,
    ).last_hidden_state
    sources = rows.sources.to(device)
    return hidden.flatten(0, 1)[sources if batch.with_loss is None else sources[batch.with_loss]]
