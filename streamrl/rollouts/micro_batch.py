"""The trainer's input: groups with their advantages, cut into micro-batches. numpy only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from streamrl.config.algorithm import AggregationKind
from streamrl.rollouts.row_parts import RowPart, group_rows
from streamrl.rollouts.types import BoolArray, ByteArray, FloatArray, Group, IntArray
from streamrl.transport.wire import Arrays

BY_SEQUENCE = "advantages", "has_reference", "has_estimates", "has_mask", "trajectory_tokens"
"""Fields of a micro-batch's message that have a value for each sequence."""


@dataclass(frozen=True)
class TrainSequence:
    """One completion to train on."""

    completion_tokens: IntArray
    """Shape [C]."""
    logprobs: FloatArray
    """Log-probabilities under the generator, shape [C]."""
    advantage: float
    """Advantage of every token of the completion.

    With `advantage: gae` it is the sequence's (shaped) reward, from which the trainer computes advantages with the
    critic's values."""
    reference_logprobs: FloatArray | None = None
    """Log-probabilities of the tokens with a loss under the frozen reference; None: not computed yet."""
    estimates: FloatArray | None = None
    """Advantage, return and value of each token with a loss, from before the step's first update, shape [N, 3] (ppo);
    None: the trainer computes them as it trains."""
    sample_id: str = ""
    """Id of the sample, or of one of its rows; it stays with the controller (a trainer's sequences have '')."""
    mask: BoolArray | None = None
    """Which tokens were sampled and have a loss, shape [C]; None: all of them."""
    trajectory_tokens: int | None = None
    """Tokens with a loss of the episode that it is a row of, all rows together; None: it is its only row."""
    experts: ByteArray | None = None
    """Recorded experts of each token but the last, which predicts nothing, uint8 [max(C - 1, 0), row bytes]
    (`machine.router_shape`); None: not recorded."""

    @property
    def loss_tokens(self) -> int:
        """Number of tokens with a loss."""
        return len(self.completion_tokens) if self.mask is None else int(np.count_nonzero(self.mask))


@dataclass(frozen=True)
class TrainGroup:
    """One prompt and its completions."""

    group_id: str
    prompt_tokens: IntArray
    """Shape [P]."""
    sequences: list[TrainSequence]
    trajectory: str = ""
    """Id of the episode whose rows these are, if they have one ratio with its other rows: its groups, one after the
    other, stay in one micro-batch. '': each sequence has its own ratio."""
    prompt_experts: ByteArray | None = None
    """Recorded experts of the prompt, uint8 [P, row bytes]; None: those of the group are not recorded. They are those
    of its first sample, whatever parts it is cut into, as all share one prompt."""

    @property
    def tokens(self) -> int:
        """Number of tokens that the group takes in a packed row."""
        return len(self.prompt_tokens) + sum(len(seq.completion_tokens) for seq in self.sequences)

    @property
    def loss_tokens(self) -> int:
        """Number of tokens with a loss."""
        return sum(seq.loss_tokens for seq in self.sequences)

    @property
    def squares(self) -> int:
        """Twice the token pairs that causal attention multiplies in a packed row: P^2, and C^2 + 2 P C for each C."""
        prompt, answers = len(self.prompt_tokens), [len(one.completion_tokens) for one in self.sequences]
        return prompt**2 + sum(length * (length + 2 * prompt) for length in answers)

    @property
    def has_reference(self) -> bool:
        """Whether every token with a loss has its reference log-probability."""
        return all(seq.reference_logprobs is not None for seq in self.sequences if seq.loss_tokens)

    @property
    def has_estimates(self) -> bool:
        """Whether every token with a loss has its advantage, return and value."""
        return all(seq.estimates is not None for seq in self.sequences if seq.loss_tokens)


def train_groups(
    group: Group,
    kept: Set[str] | None = None,
    trajectories: bool = False,
    estimates: Mapping[str, FloatArray] | None = None,
    rewards: Mapping[str, float] | None = None,
) -> list[TrainGroup]:
    """Convert a complete group to the trainer's form; samples are in the order of their ids.

    Args:
        group: group in which every sample has its advantage, unless `rewards` are given.
        kept: ids of the samples that are trained on; None: all.
        trajectories: whether the rows of an episode must stay together (`Algorithm.needs_trajectories`); those of
            episodes with several then share prompts among each other only.
        estimates: `TrainSequence.estimates` by row id; None: none are known.
        rewards: by sample id, from which the trainer computes advantages; None: those of the group are trained on.

    Returns:
        One group of single completions; of episodes, one for each prompt that some rows share.
    """
    members = [m.sample for m in group.members() if kept is None or m.sample.sample_id in kept]
    several = {one.sample_id: one for one in members if one.trajectory is not None and len(one.trajectory.rows) > 1}
    together = list(several.values()) if trajectories else []
    apart = [one for one in members if not trajectories or one.sample_id not in several]

    values = group.advantages if rewards is None else rewards

    def sequence(part: RowPart) -> TrainSequence:
        return TrainSequence(
            part.tokens,
            part.logprobs,
            values[part.sample_id],
            group.reference_logprobs.get(part.row_id),
            None if estimates is None else estimates.get(part.row_id),
            part.row_id,
            part.mask,
            several[part.sample_id].output_length if part.sample_id in several else None,
            None if part.experts is None else part.experts[len(group.prompt_tokens) :],
        )

    experts = group_experts(group)
    return [
        TrainGroup(group.group_id, prompt, [sequence(part) for part in parts], trajectory, experts)
        for trajectory, some in [("", apart), *((one.sample_id, [one]) for one in together)]
        for prompt, parts in (group_rows(group, some) if some else [])
    ]


def group_experts(group: Group) -> ByteArray | None:
    """Return the experts of a group's prompt, [P, row bytes], by its first sample with tokens; None: not recorded.

    Void samples count as well, so that it does not matter which of them are trained on.
    """
    found = (m.sample for m in group.members() if len(m.sample.completion_tokens))
    first = next(found, None)
    return None if first is None or first.experts is None else first.experts[: len(group.prompt_tokens)]


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
    longest = rows = 0
    used = 0
    for unit in (unit for one in units_of(groups) for unit in _single_rows(one)):
        lengths = [len(one.prompt_tokens) + len(seq.completion_tokens) for one in unit for seq in one.sequences]
        tokens = (rows + len(lengths)) * max(longest, *lengths) if padded else used + sum(lengths)
        if not batches or tokens > max_tokens:
            batches.append([])
            longest = rows = 0
            used = 0
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


def to_wire(groups: list[TrainGroup]) -> tuple[dict[str, Any], Arrays]:
    """Convert a micro-batch to (body, arrays)."""
    sequences = [seq for group in groups for seq in group.sequences]
    body = {
        "groups": [[g.group_id, len(g.prompt_tokens), [len(s.completion_tokens) for s in g.sequences]] for g in groups],
        "advantages": [seq.advantage for seq in sequences],
        "has_reference": [seq.reference_logprobs is not None for seq in sequences],
        "has_estimates": [seq.estimates is not None for seq in sequences],
        "has_mask": [seq.mask is not None for seq in sequences],
        "trajectories": [group.trajectory for group in groups],
        "trajectory_tokens": [seq.trajectory_tokens for seq in sequences],
        "has_experts": [has_experts(group) for group in groups],
    }
    masks = [seq.mask for seq in sequences if seq.mask is not None]
    known = [seq.reference_logprobs for seq in sequences if seq.reference_logprobs is not None]
    arrays = {
        "prompts": _joined([g.prompt_tokens for g in groups], np.int32),
        "completions": _joined([s.completion_tokens for s in sequences], np.int32),
        "logprobs": _joined([s.logprobs for s in sequences], np.float32),
        "reference_logprobs": _joined(known, np.float32),
        "estimates": _joined(
            [np.zeros((0, 3)), *(s.estimates for s in sequences if s.estimates is not None)], np.float32
        ),
        "masks": _joined(masks, np.uint8),
        "experts": _experts_to_wire(groups),
    }
    return body, arrays


def from_wire(body: dict[str, Any], arrays: Arrays) -> list[TrainGroup]:
    """Return a micro-batch from its wire form; the inverse of `to_wire`.

    Raises:
        ValueError, KeyError, TypeError: it is not a micro-batch.
    """
    _check(body, arrays)
    columns = _Columns(arrays)
    by_sequence = zip(*(body[key] for key in BY_SEQUENCE), strict=True)
    groups = []
    for (group_id, prompt_length, lengths), trajectory, recorded in zip(
        body["groups"], body["trajectories"], body["has_experts"], strict=True
    ):
        prompt = columns.take("prompts", prompt_length)
        prompt_experts = columns.take("experts", prompt_length) if recorded else None
        sequences = [_sequence(columns, length, recorded, *next(by_sequence)) for length in lengths]
        groups.append(TrainGroup(group_id, prompt, sequences, trajectory, prompt_experts))
    if arrays["reference_logprobs"].shape != (columns.taken["reference_logprobs"],):
        raise ValueError("reference log-probabilities in a micro-batch are not those of its tokens with a loss")
    if arrays["estimates"].shape != (columns.taken["estimates"], 3):
        raise ValueError("estimates in a micro-batch are not those of its tokens with a loss")
    if len(arrays["experts"]) != columns.taken["experts"]:
        raise ValueError("experts in a micro-batch are not those of its tokens")
    return groups


class _Columns:
    """The arrays of a micro-batch, each read from its beginning."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays
        self.taken = Counter[str]()
        """Number of rows read, by array."""

    def take(self, name: str, rows: int) -> Any:
        """Return the next rows of an array."""
        start = self.taken[name]
        self.taken[name] += rows
        return self._arrays[name][start : start + rows]


def _sequence(
    columns: _Columns,
    length: int,
    recorded: bool,
    advantage: float,
    has_reference: bool,
    has_estimates: bool,
    has_mask: bool,
    trajectory_tokens: int | None,
) -> TrainSequence:
    """Return the next sequence; the last five arguments are its values of `BY_SEQUENCE`.

    Args:
        columns: the arrays that it is read from.
        length: number of its tokens.
        recorded: whether its experts are there.
    """
    mask = columns.take("masks", length).astype(bool) if has_mask else None
    loss_tokens = length if mask is None else int(mask.sum())
    return TrainSequence(
        columns.take("completions", length),
        columns.take("logprobs", length),
        advantage,
        columns.take("reference_logprobs", loss_tokens) if has_reference else None,
        columns.take("estimates", loss_tokens) if has_estimates else None,
        mask=mask,
        trajectory_tokens=trajectory_tokens,
        experts=columns.take("experts", max(0, length - 1)) if recorded else None,
    )


def has_experts(group: TrainGroup) -> bool:
    """Return whether the experts of a group are recorded, of its prompt and of each completion."""
    return group.prompt_experts is not None and all(seq.experts is not None for seq in group.sequences)


def _experts_to_wire(groups: list[TrainGroup]) -> ByteArray:
    """Return the rows of the groups that have some, each prompt's before its completions'."""
    rows = [
        part
        for group in groups
        if has_experts(group)
        for part in (group.prompt_experts, *(seq.experts for seq in group.sequences))
        if part is not None
    ]
    return np.concatenate(rows) if rows else np.zeros((0, 0), dtype=np.uint8)


def _check(body: dict[str, Any], arrays: Arrays) -> None:
    prompts, lengths = [n for _, n, _ in body["groups"]], [n for _, _, lengths in body["groups"] for n in lengths]
    masked = [n for n, has_mask in zip(lengths, body["has_mask"], strict=True) if has_mask]
    totals = {"prompts": prompts, "completions": lengths, "logprobs": lengths, "masks": masked}
    counts = {len(lengths), *(len(body[key]) for key in BY_SEQUENCE)}
    if len(counts) != 1 or any(n < 0 for n in (*prompts, *lengths)):
        raise ValueError("a micro-batch has one advantage for each of its sequences")
    if arrays["experts"].dtype != np.uint8 or arrays["experts"].ndim != 2:
        raise ValueError("experts in a micro-batch are rows of bytes")
    if any(arrays[name].shape != (sum(parts),) for name, parts in totals.items()):
        raise ValueError("lengths in a micro-batch do not add up to its arrays")


def _joined(parts: list[Any], dtype: type) -> Any:
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype=dtype)
