"""Sequence parallelism: a few ranks share every row of tokens (DeepSpeed-Ulysses, arXiv 2309.14509).

    outside of attention   a rank computes its own contiguous part of the row, with all heads
    in attention           a rank computes the whole row, with its own part of the heads

An all-to-all turns queries, keys and values from the former into the latter, and another one turns the output back:

    [B, H, L/N, D]  ->  [B, H/N, L, D]        attention of one rank        [B, L, H/N, D]  ->  [B, L/N, H, D]

So attention sees whole rows, and its kernels and masks are those of one rank. Rows are filled up until all parts are
equally long. A token's log-probability is computed where the hidden state before it is; its id comes from the batch,
which every rank has, so nothing is lost at the borders between parts. All ranks then get all log-probabilities, and
compute the same loss.

A rank's gradient of the weights is that of its own tokens, so the gradient is the sum over the ranks: they are part of
FSDP's shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives
from transformers import PretrainedConfig

from scheduler.cost.model_shapes import undivided_heads
from streamrl.errors import RunFailed
from streamrl.training.packing import ROW_MULTIPLE, GroupLayout


def divided(x: torch.Tensor, dim: int, parts: int) -> torch.Tensor:
    """Divide a dimension into equal consecutive parts, which become the first dimension: [..] -> [parts, ..]."""
    return x.unflatten(dim, (parts, -1)).movedim(dim, 0).contiguous()


def joined(parts: torch.Tensor, dim: int) -> torch.Tensor:
    """Join the parts in the first dimension along a dimension of the rest: the inverse of `divided`."""
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def filled(layout: tuple[GroupLayout, ...], tokens: int, parts: int) -> tuple[tuple[GroupLayout, ...], int]:
    """Return the layout of a packed row that is filled up so that its parts are equal, and its number of tokens.

    Each part has a multiple of `ROW_MULTIPLE` tokens, for the reason that the row has. What fills it up is a prompt
    without completions, as in `packing.pack`.

    Args:
        layout: layout of the row.
        tokens: tokens in the row.
        parts: number of parts.
    """
    missing = -tokens % (parts * ROW_MULTIPLE)
    return (*layout, *([GroupLayout(tokens, missing, ())] if missing else [])), tokens + missing


def local_places(places: torch.Tensor, columns: int, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Find places in rows of tokens again in parts of them, which are divided by columns.

    Args:
        places: places in [B L], int64 [N].
        columns: length of a row, L, a multiple of `parts`.
        parts: number of parts.

    Returns:
        Number of the part that each place is in, and its place there, in [B L / parts]; int64 [N] each.
    """
    rows, column = places // columns, places % columns
    each = columns // parts
    return column // each, rows * each + column % each


def check_heads(config: PretrainedConfig, ranks: int) -> None:
    """Check that ranks can share a model's attention heads.

    Raises:
        RunFailed: they cannot (`undivided_heads`).
    """
    text = config.get_text_config()
    if problem := undivided_heads(text.num_attention_heads, getattr(text, "num_key_value_heads", None), ranks):
        raise RunFailed(f"trainer.sequence_parallel is {ranks}: {problem} of {text.model_type}")


class SequenceRanks:
    """The ranks that share rows with this one, and what they exchange. Its methods are collectives of these ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    @classmethod
    def of(cls, size: int) -> SequenceRanks | None:
        """Divide all ranks into sets of adjacent ones, and return this rank's. A collective of all ranks.

        Args:
            size: ranks that share rows; must divide their number.

        Returns:
            None for a size of 1: a rank has its rows to itself.
        """
        if size == 1:
            return None
        group, _ = dist.new_subgroups(size)
        return cls(group)

    def part(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's part of a dimension whose size the ranks divide. No collective."""
        return x.chunk(self.size, dim)[self.rank]

    def exchange(self, x: torch.Tensor, split: int, join: int) -> torch.Tensor:
        """Give each rank its part of dimension `split`, and join what all have along `join`; with its gradient.

        [.., S, .., J, ..] -> [.., S / N, .., J N, ..]. The backward pass is the opposite exchange.
        """
        received = collectives.all_to_all_single_autograd(divided(x, split, self.size), None, None, self.group)
        return joined(collectives.wait_tensor(received), join)


@dataclass(frozen=True)
class TokenShares:
    """Which of a batch's N tokens each rank computes, by where the hidden state before a token is."""

    ranks: SequenceRanks
    numbers: tuple[torch.Tensor, ...]
    """Numbers of each rank's tokens, ascending, int64 [n] each; together they are 0 .. N - 1."""

    @classmethod
    def of(cls, ranks: SequenceRanks, owners: torch.Tensor) -> TokenShares:
        """Return the shares of tokens with these owners, int64 [N]."""
        return cls(ranks, tuple(torch.nonzero(owners == rank)[:, 0] for rank in range(ranks.size)))

    @property
    def mine(self) -> torch.Tensor:
        """Numbers of this rank's tokens, int64 [n]."""
        return self.numbers[self.ranks.rank]

    def some(self, chosen: torch.Tensor) -> TokenShares:
        """Return the shares of the chosen tokens alone, bool [N], numbered 0, 1, 2, .."""
        places = chosen.cumsum(0) - 1
        return TokenShares(self.ranks, tuple(places[one[chosen[one]]] for one in self.numbers))

    def whole(self, own: torch.Tensor) -> torch.Tensor:
        """Return the values of all tokens from those of each rank's own. A collective.

        All ranks compute the same loss of them, so each takes the gradient of its own values from its own loss.

        Args:
            own: values of this rank's tokens, [n].

        Returns:
            [N], equal on all ranks.
        """
        values: torch.Tensor = _Whole.apply(own, self)
        return values


class _Whole(torch.autograd.Function):
    """The autograd function behind `TokenShares.whole`."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, shares: TokenShares) -> torch.Tensor:
        """Gather [n] -> [N]; what is sent is filled up to the largest share."""
        ctx.shares = shares
        most = max(map(len, shares.numbers))
        sent = torch.nn.functional.pad(own, (0, most - len(own)))
        received = sent.new_empty(shares.ranks.size * most)
        dist.all_gather_single(received, sent, shares.ranks.group)
        return in_order(received.view(shares.ranks.size, most).unbind(), shares.numbers)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Take the gradients of this rank's tokens."""
        return grads[0][ctx.shares.mine], None


def in_order(parts: Sequence[torch.Tensor], numbers: Sequence[torch.Tensor]) -> torch.Tensor:
    """Put values in the order of their numbers.

    Args:
        parts: values, [n or more] each; those beyond the n-th are left out.
        numbers: number of each value, int64 [n] each; together 0 .. N - 1.

    Returns:
        [N].
    """
    values = torch.cat([part[: len(number)] for part, number in zip(parts, numbers, strict=True)])
    return torch.empty_like(values).index_copy_(0, torch.cat(list(numbers)), values)
