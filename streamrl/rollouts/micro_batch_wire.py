"""A micro-batch as a message to the trainer, and back. numpy only."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from streamrl.rollouts.train_groups import TrainGroup, TrainSequence, has_experts
from streamrl.rollouts.types import ByteArray
from streamrl.transport.wire import Arrays

BY_SEQUENCE = "advantages", "has_reference", "has_estimates", "has_mask", "trajectory_tokens"
"""Fields of a micro-batch's message that have a value for each sequence."""


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
