"""Hidden states that predict the completion tokens of a batch, by one of three ways that give the same numbers.

    shared      one packed row: a prompt is computed once for all its completions (`attention.py`). Right only for
                layers that let the attention function decide what a token sees
    separate    a prompt is computed once per completion
      own rows  every completion with its prompt is a sequence of one row without padding, by the same attention
      padded    a padded row for each, through the model's own attention: right for any causal language model, also
                with recurrent layers

`packing_proof.py` decides which one a model gets. Either way, several ranks may share the rows: then each has the
tokens of its part (`sequence_parallel.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import pad

from streamrl.training.attention import OWN_ROWS
from streamrl.training.attention_in_parts import IN_PARTS, RANKS
from streamrl.training.packing import GroupLayout, PackedBatch, numbers_of
from streamrl.training.router_replay import EXPERTS
from streamrl.training.sequence_parallel import SequenceRanks, TokenShares, filled, local_places


@dataclass(frozen=True)
class PaddedRows:
    """The completions of a batch as rows of their own, padded on the right: B rows of L places.

    A completion's last token predicts nothing and is left out.
    """

    places: torch.Tensor
    """Position in the packed row of each token, [B, L] int64; padding repeats the row's first token."""
    mask: torch.Tensor
    """1 for tokens, 0 for padding, [B, L] int64."""
    sources: torch.Tensor
    """Place in [B L] of the hidden state before each completion token, with a loss or without, [all of them] int64."""
    longest: int
    """Tokens of the longest row."""


@lru_cache(maxsize=4)  # the policy, the reference, the critic pass over the same batch
def padded_rows(layout: tuple[GroupLayout, ...], multiple: int = 1) -> PaddedRows:
    """Return the rows of a packed batch; at least one, so that a batch without completions runs as well.

    Args:
        layout: layout of the batch.
        multiple: what the length of the rows, L, is a multiple of.
    """
    rows: list[tuple[torch.Tensor, int]] = []
    for group in layout:
        prompt = torch.arange(group.start, group.start + group.prompt_length)
        ends = accumulate(group.completion_lengths, initial=group.start + group.prompt_length)
        for begin, length in zip(ends, group.completion_lengths, strict=False):
            rows.append((torch.cat([prompt, torch.arange(begin, begin + length - 1)]), length))
    rows = rows or [(torch.zeros(1, dtype=torch.int64), 0)]
    longest = max(len(places) for places, _ in rows)
    columns = longest + -longest % multiple
    places = torch.stack([torch.cat([row, row[:1].expand(columns - len(row))]) for row, _ in rows])
    mask = torch.stack([(torch.arange(columns) < len(row)).long() for row, _ in rows])
    sources = [torch.arange(len(row) - count, len(row)) + at * columns for at, (row, count) in enumerate(rows)]
    return PaddedRows(places, mask, torch.cat(sources), longest)


@dataclass(frozen=True)
class OwnRows:
    """The completions of a batch, each with its prompt, as sequences of one row of L places without padding.

    A completion's last token predicts nothing and is left out.
    """

    places: torch.Tensor
    """Position in the packed row of each token, [L] int64; what fills the row up repeats the first token."""
    positions: torch.Tensor
    """Position of each token in its sequence, [L] int64."""
    sources: torch.Tensor
    """Place in [L] of the hidden state before each completion token, with a loss or without, [all of them] int64."""
    layout: tuple[GroupLayout, ...]
    """The sequences, as prompts without completions."""


@lru_cache(maxsize=4)
def own_rows(layout: tuple[GroupLayout, ...], parts: int = 1) -> OwnRows:
    """Return the sequences of a packed batch; at least one, so that a batch without completions runs as well.

    Args:
        layout: layout of the batch.
        parts: number of equal parts that the row is filled up to.
    """
    rows = padded_rows(layout)
    lengths = rows.mask.sum(1)
    ends = lengths.cumsum(0)
    sequences = tuple(
        GroupLayout(end - length, length, ()) for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)
    )
    filled_up, total = filled(sequences, int(ends[-1]), parts)
    there = rows.mask.bool()
    column = torch.arange(rows.places.shape[1])
    fill = total - int(ends[-1])
    places = torch.cat([rows.places[there], rows.places[:1, 0].expand(fill)])
    positions = torch.cat([column.expand(there.shape)[there], torch.arange(fill)])
    row, at = rows.sources // len(column), rows.sources % len(column)
    return OwnRows(places, positions, (ends - lengths)[row] + at, filled_up)


class PredictingStates(NamedTuple):
    """The last hidden states before the tokens with a loss that this rank computes."""

    hidden: torch.Tensor
    """[n, d]."""
    shares: TokenShares | None
    """Which tokens each rank computes; None: this one computes all, n = N."""

    def own(self, values: torch.Tensor) -> torch.Tensor:
        """Return those of all tokens' values, [N], that belong to the hidden states, [n]."""
        return values if self.shares is None else values[self.shares.mine]


def predicting_states(
    trunk: nn.Module,
    batch: PackedBatch,
    separate: bool,
    experts: torch.Tensor | None,
    ranks: SequenceRanks | None,
) -> PredictingStates:
    """Return the trunk's last hidden state before each token with a loss.

    Args:
        trunk: the model without its head; with `separate: False` it has the attention of `attention.py`, with `ranks`
            that of `attention_in_parts.py`.
        batch: the packed batch.
        separate: run every completion in a row of its own: without padding if the trunk has the attention `OWN_ROWS`.
        experts: recorded experts of each token of the packed row (`router_replay.EXPERTS`); None: routers choose. The
            trunk must have been prepared by `RouterReplay`.
        ranks: the ranks that share the rows; None: this one has them to itself. Not together with `experts`.
    """
    rows = (_own_rows if has_own_rows(trunk) else _padded_rows) if separate else _packed_row
    inputs, sources = rows(batch, experts, 1 if ranks is None else ranks.size)
    columns = inputs["input_ids"].shape[1]
    shares = None
    if ranks is not None:
        owners, sources = local_places(sources, columns, ranks.size)
        shares = TokenShares.of(ranks, owners)
        sources = sources[shares.mine]
        inputs |= {name: ranks.part(inputs[name], 1) for name in ("input_ids", "position_ids")} | {RANKS: ranks}
    hidden: torch.Tensor = trunk(use_cache=False, **inputs).last_hidden_state
    return PredictingStates(hidden.flatten(0, 1)[sources], shares)


def _packed_row(batch: PackedBatch, experts: torch.Tensor | None, parts: int) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the trunk's arguments for the packed row, and the place before each token with a loss, [N].

    With several parts the row is filled up until these are equal.
    """
    inputs: dict[str, Any] = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
    inputs["layout"] = numbers_of(batch.layout)
    if parts > 1:
        tokens = batch.input_ids.shape[1]
        layout, columns = filled(batch.layout, tokens, parts)
        inputs = {name: pad(inputs[name], (0, columns - tokens)) for name in ("input_ids", "position_ids")}
        inputs["layout"] = numbers_of(layout)
    if experts is not None:
        inputs[EXPERTS] = experts
    return inputs, batch.source_index


def has_own_rows(trunk: nn.Module) -> bool:
    """Return whether completions that repeat their prompts are computed without padding."""
    name = getattr(getattr(trunk, "config", None), "_attn_implementation", "")
    return name in (OWN_ROWS, IN_PARTS[OWN_ROWS])


def _own_rows(batch: PackedBatch, experts: torch.Tensor | None, parts: int) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the trunk's arguments for sequences of their own, and the place in [L] before each token with a loss.

    With several parts the row is filled up until these are equal.
    """
    rows, device = own_rows(batch.layout, parts), batch.input_ids.device
    places = rows.places.to(device)
    inputs: dict[str, Any] = {
        "input_ids": batch.input_ids[:, places],
        "position_ids": rows.positions[None].to(device),
        "layout": numbers_of(rows.layout),
    }
    if experts is not None:
        inputs[EXPERTS] = experts[places]
    return inputs, _with_loss(rows.sources, batch)


def _padded_rows(batch: PackedBatch, experts: torch.Tensor | None, parts: int) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the trunk's arguments for the padded rows, and the place in [B L] before each token with a loss, [N].

    With several parts the rows are filled up until these are equal.
    """
    rows, device = padded_rows(batch.layout, parts), batch.input_ids.device
    places = rows.places.to(device)
    columns = places.shape[1]
    inputs: dict[str, Any] = {
        "input_ids": batch.input_ids[0, places],
        "attention_mask": rows.mask.to(device),
        "position_ids": torch.arange(columns, device=device).clamp(max=rows.longest - 1).expand(places.shape),
    }
    if experts is not None:
        inputs[EXPERTS] = experts[places.flatten()]
    return inputs, _with_loss(rows.sources, batch)


def _with_loss(sources: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """Return those of all completion tokens' values that belong to tokens with a loss, on the batch's device, [N]."""
    sources = sources.to(batch.input_ids.device)
    return sources if batch.with_loss is None else sources[batch.with_loss]
