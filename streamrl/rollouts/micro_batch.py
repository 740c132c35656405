"""How groups are cut into micro-batches, and the divisor of their summed loss."""

from __future__ import annotations

from dataclasses import replace

from streamrl.config.algorithm import AggregationKind
from streamrl.rollouts.train_groups import TrainGroup, TrainSequence


def loss_normalizer(aggregation: AggregationKind, tokens: int, sequences: int, max_tokens: int) -> float:
    """Return the divisor (at least 1) of a batch's summed loss.

    The trainer sums token losses, each weighted by 1 over its sequence's length (an episode's: of all its rows) for
    `sequence` and by 1 otherwise.

    Args:
        aggregation: token: the batch's tokens; sequence: its sequences; constant: sequences * max_tokens.
        tokens: completion tokens of the whole batch, over all ranks.
        sequences: samples of the whole batch.
        max_tokens: `sampling.max_tokens`.
    """
    match aggregation:
        case "token":
            return float(max(1, tokens))
        case "sequence":
            return float(max(1, sequences))
        case "constant":
            return float(max(1, sequences * max_tokens))


def split_into_micro_batches(groups: list[TrainGroup], max_tokens: int) -> list[list[TrainGroup]]:
    """Cut a list of groups into runs of at most `max_tokens` packed tokens, keeping their order.

    A group is split only if it alone is larger than `max_tokens`; then its sequences are cut into parts that each
    repeat the prompt. Every sequence appears exactly once. The rows of an episode that must stay together
    (`TrainGroup.trajectory`) are never cut: with more tokens they are a run of their own.
    """
    batches: list[list[TrainGroup]] = []
    current: list[TrainGroup] = []
    used = 0
    for unit in (unit for one in units_of(groups) for unit in _split_unit(one, max_tokens)):
        tokens = _tokens(unit)
        if current and used + tokens > max_tokens:
            batches.append(current)
            current, used = [], 0
        current += unit
        used += tokens
    if current:
        batches.append(current)
    return batches


def units_of(groups: list[TrainGroup]) -> list[list[TrainGroup]]:
    """Return the groups in order, those of one trajectory as one: what stays together."""
    units: list[list[TrainGroup]] = []
    for group in groups:
        if units and group.trajectory and units[-1][-1].trajectory == group.trajectory:
            units[-1].append(group)
        else:
            units.append([group])
    return units


def _tokens(groups: list[TrainGroup]) -> int:
    return sum(group.tokens for group in groups)


def _split_unit(unit: list[TrainGroup], max_tokens: int) -> list[list[TrainGroup]]:
    return [unit] if unit[0].trajectory else [[part] for part in _split_group(unit[0], max_tokens)]


def _split_group(group: TrainGroup, max_tokens: int) -> list[TrainGroup]:
    if group.tokens <= max_tokens:
        return [group]
    parts: list[TrainGroup] = []
    current: list[TrainSequence] = []
    used = len(group.prompt_tokens)
    for seq in group.sequences:
        length = len(seq.completion_tokens)
        if current and used + length > max_tokens:
            parts.append(replace(group, sequences=current))
            current, used = [], len(group.prompt_tokens)
        current.append(seq)
        used += length
    if current:
        parts.append(replace(group, sequences=current))
    return parts


def split_into_rows(groups: list[TrainGroup], max_tokens: int, padded: bool = True) -> list[list[TrainGroup]]:
    """Cut groups into runs whose completions, each in a row with its prompt, take at most `max_tokens`.

    Their order is kept, every sequence appears exactly once, and one that is longer has a run of its own, as have the
    rows of an episode that must stay together (`TrainGroup.trajectory`).

    Args:
        groups: the groups.
        max_tokens: most tokens of a run.
        padded: whether rows are as long as the longest one of their run.
    """
    batches: list[list[TrainGroup]] = []
    longest = rows = used = 0
    for unit in (unit for one in units_of(groups) for unit in _single_rows(one)):
        lengths = [len(one.prompt_tokens) + len(seq.completion_tokens) for one in unit for seq in one.sequences]
        tokens = (rows + len(lengths)) * max(longest, *lengths) if padded else used + sum(lengths)
        if not batches or tokens > max_tokens:
            batches.append([])
            longest = rows = used = 0
        batches[-1] += unit
        longest, rows, used = max(longest, *lengths), rows + len(lengths), used + sum(lengths)
    return [_joined_again(batch) for batch in batches]


def _single_rows(unit: list[TrainGroup]) -> list[list[TrainGroup]]:
    """Return what may be cut from each other: the whole of a trajectory, else each sequence of a group."""
    if unit[0].trajectory:
        return [unit]
    return [[replace(group, sequences=[seq])] for group in unit for seq in group.sequences]


def _joined_again(groups: list[TrainGroup]) -> list[TrainGroup]:
    """Join neighbours that were parts of one group."""
    found: list[TrainGroup] = []
    for group in groups:
        last = found[-1] if found else None
        if last is not None and not group.trajectory and last.prompt_tokens is group.prompt_tokens:
            found[-1] = replace(last, sequences=last.sequences + group.sequences)
        else:
            found.append(group)
    return found
