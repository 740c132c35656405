"""Micro-batches dealt to the trainer's ranks so that all are done at about the same time. Pure.

Ranks wait for each other at every layer, so a micro-batch takes as long as its largest share. A share's size is its
operations, in tokens: attention multiplies every token with those before it, so that one answer of 16k tokens takes
longer than sixteen of 1k. What a square of tokens takes, beside a token, depends on the model (`square_cost`).
"""

from __future__ import annotations

from dataclasses import replace

from streamrl.rollouts.micro_batch import split_into_micro_batches, units_of
from streamrl.rollouts.train_groups import TrainGroup


def cost(groups: list[TrainGroup], square_cost: float) -> float:
    """Return the operations of a pass over packed groups, as a number of tokens.

    Args:
        groups: what is packed into one row.
        square_cost: operations of one square of tokens over those of one token, apart from attention.
    """
    return sum(group.tokens + square_cost * group.squares for group in groups)


def balance(groups: list[TrainGroup], ranks: int, square_cost: float = 0.0) -> list[list[TrainGroup]]:
    """Deal groups to ranks so that their operations are about equal: the largest first, each to the emptiest rank.

    Groups of one trajectory (`TrainGroup.trajectory`) go to the same rank.

    Args:
        groups: groups, none of them cut.
        ranks: number of shares.
        square_cost: see `cost`.
    """
    shares: list[list[TrainGroup]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for unit in sorted(units_of(groups), key=lambda unit: -cost(unit, square_cost)):
        rank = loads.index(min(loads))
        shares[rank] += unit
        loads[rank] += cost(unit, square_cost)
    return shares


def deal(
    groups: list[TrainGroup], max_tokens: int, ranks: int, square_cost: float = 0.0
) -> tuple[list[list[TrainGroup]], list[TrainGroup]]:
    """Return the next micro-batch, with a (possibly empty) share for every rank.

    It has the first runs of the list, one per rank, dealt again if that makes the largest share smaller. If there are
    fewer runs than ranks, groups are cut in halves, which repeat the prompt, as long as a rank has nothing to do, and
    the smallest of the largest shares is taken.

    Args:
        groups: waiting groups, in order.
        max_tokens: most packed tokens of a rank; only a single sequence that is longer may exceed it, or the rows of
            an episode that must stay together.
        ranks: number of the trainer's ranks.
        square_cost: see `cost`.

    Returns:
        (shares, remaining groups in order).
    """
    pieces = split_into_micro_batches(groups, max_tokens)
    runs, rest = pieces[:ranks], [part for piece in pieces[ranks:] for part in piece]
    shares = runs + [[] for _ in range(ranks - len(runs))]
    parts = [part for piece in runs for part in piece]
    while True:
        dealt = balance(parts, ranks, square_cost)
        if _largest(dealt, square_cost) < _largest(shares, square_cost) and _fit(dealt, max_tokens):
            shares = dealt
        if all(dealt) or (halves := _halved(parts, square_cost)) is None:
            return shares, rest
        parts = halves


def _largest(shares: list[list[TrainGroup]], square_cost: float) -> float:
    return max(cost(share, square_cost) for share in shares)


def _fit(shares: list[list[TrainGroup]], max_tokens: int) -> bool:
    return all(sum(group.tokens for group in share) <= max_tokens for share in shares)


def _halved(groups: list[TrainGroup], square_cost: float) -> list[TrainGroup] | None:
    """Return the groups with the largest one in two parts; None: no group can be cut."""
    possible = [group for group in groups if len(group.sequences) > 1 and not group.trajectory]
    if not possible:
        return None
    largest = max(possible, key=lambda group: cost([group], square_cost))
    alone = [replace(largest, sequences=[one]) for one in largest.sequences]
    found = [
        replace(largest, sequences=[one for part in half for one in part.sequences])
        for half in balance(alone, 2, square_cost)
    ]
    return [part for group in groups for part in (found if group is largest else [group])]
