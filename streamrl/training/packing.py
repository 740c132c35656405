"""Pack whole groups into one token row in which siblings share their prompt.

A group of one prompt (P tokens) and G completions (C_1 .. C_G tokens) becomes P + sum(C_i) tokens instead of
the G * P + sum(C_i) of separate sequences: the prompt is computed once. Nothing is padded. Attention (see
`attention.py`) lets each completion see only the prompt and itself, so the result equals that of separate sequences.

    tokens     [prompt | completion 1 | completion 2 | ... ] [next group ...]
    positions   0..P-1   P..P+C_1-1     P..P+C_2-1

A row is filled up to a multiple of `ROW_MULTIPLE` by tokens at its end, which nothing else sees and which have no loss:
oneDNN makes a kernel for every shape of bf16 products on a CPU, and tensor cores want multiples of 8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from streamrl.rollouts.train_groups import TrainGroup, TrainSequence, has_experts
from streamrl.rollouts.types import BoolArray, ByteArray

ROW_MULTIPLE = 16
"""Every row has a multiple of this many tokens, which costs 8 on average. oneDNN takes milliseconds to make a kernel
for a new shape, and keeps 1,024 of them with about a megabyte each."""


@dataclass(frozen=True)
class GroupLayout:
    """The place of one group in the row."""

    start: int
    prompt_length: int
    completion_lengths: tuple[int, ...]

    @property
    def stop(self) -> int:
        """Position after the group's last token."""
        return self.start + self.prompt_length + sum(self.completion_lengths)

    @property
    def positions(self) -> np.ndarray:
        """Positions of the group's tokens for the model; each completion continues the prompt's."""
        ends = (self.prompt_length + length for length in self.completion_lengths)
        return np.concatenate([np.arange(self.prompt_length), *(np.arange(self.prompt_length, end) for end in ends)])


@lru_cache(maxsize=4)
def numbers_of(layout: tuple[GroupLayout, ...]) -> torch.Tensor:
    """Return a layout as numbers, int64, in host memory.

    As such it passes through a model to its attention. torch compiles layers for any tensor, but looks at a tuple that
    passes through, and would compile them for each layout anew.

        [start, prompt length, number of completions, lengths of the completions ..., start of the next group, ...]
    """
    groups = ((one.start, one.prompt_length, len(one.completion_lengths), *one.completion_lengths) for one in layout)
    with _disable_current_modes():  # numbers also where a step's graph is traced by tensors without any
        return torch.tensor([number for group in groups for number in group], dtype=torch.int64)


@lru_cache(maxsize=16)  # each layer asks
def layout_of(numbers: tuple[int, ...]) -> tuple[GroupLayout, ...]:
    """Return the layout whose numbers these are."""
    groups, at = [], 0
    while at < len(numbers):
        start, prompt, count = numbers[at : at + 3]
        groups.append(GroupLayout(start, prompt, numbers[at + 3 : at + 3 + count]))
        at += 3 + count
    return tuple(groups)


@dataclass(frozen=True)
class PackedBatch:
    """Tokens of one forward and backward pass: T tokens in the row, N of them with a loss."""

    input_ids: torch.Tensor
    """Token ids, [1, T] int64."""
    position_ids: torch.Tensor
    """Positions, [1, T] int64; each completion continues its prompt's positions."""
    layout: tuple[GroupLayout, ...]
    source_index: torch.Tensor
    """Position in the row whose hidden state predicts the n-th token with a loss, [N] int64."""
    targets: torch.Tensor
    """Completion tokens with a loss, [N] int64: all, but for those that a sequence's mask leaves out."""
    generator_logprobs: torch.Tensor
    """Log-probabilities under the generator, [N] float32."""
    advantages: torch.Tensor
    """Each sequence's advantage (with a critic: its reward), repeated for its tokens, [N] float32."""
    sequence_ids: torch.Tensor
    """Number of the sequence that a token belongs to: 0, 0, 1, 1, 1, ... (empty ones have none), [N] int64. All rows of
    a trajectory (`TrainGroup.trajectory`) are one sequence; its rows need not follow one another."""
    row_ids: torch.Tensor
    """Number of the row that a token belongs to, ascending, [N] int64."""
    sequence_tokens: torch.Tensor
    """Tokens with a loss of the whole sequence or episode that a token belongs to, here and elsewhere, [N] int64."""
    reference_logprobs: torch.Tensor | None
    """Reference log-probabilities that came with the groups, [N] float32; None: some sequence has none."""
    estimates: torch.Tensor | None = None
    """Advantages, returns and values that came with the groups, [N, 3] float32; None: some sequence has none."""
    with_loss: torch.Tensor | None = None
    """Number of each token with a loss among all completion tokens, [N] int64; None: all have one."""
    experts: torch.Tensor | None = None
    """Recorded experts of each token of the row, [T, row bytes] uint8 (`machine.router_shape`); None: some group has
    none."""
    recorded: torch.Tensor | None = None
    """Whether a token's experts are recorded, [T] bool: neither of a completion's last token nor of the filling. None
    where `experts` is."""

    @property
    def loss_tokens(self) -> int:
        """Completion tokens with a loss (N)."""
        return int(self.targets.numel())

    def row_tokens(self, separate: bool) -> int:
        """Tokens that a pass computes: those of the packed row, or of a row per completion without its last token."""
        if not separate:
            return self.input_ids.numel()
        return sum(one.prompt_length + length - 1 for one in self.layout for length in one.completion_lengths)

    def squares(self, separate: bool, pairs: Callable[[int], float] = lambda tokens: tokens**2) -> float:
        """Twice the token pairs that causal attention multiplies.

        Packed: P^2 for a prompt, (P + C)^2 - P^2 for each completion; separate: (P + C - 1)^2 for each completion.

        Args:
            separate: whether each completion is a row of its own.
            pairs: what stands for the square of a length: `Transformer.pairs`.
        """
        rows = [(one.prompt_length, length) for one in self.layout for length in one.completion_lengths]
        if separate:
            return sum(pairs(prompt + length - 1) for prompt, length in rows)
        prompts = sum(pairs(one.prompt_length) for one in self.layout)
        return prompts + sum(pairs(prompt + length) - pairs(prompt) for prompt, length in rows)

    @property
    def sequences(self) -> int:
        """Number of sequences in the batch that have a loss."""
        return len(torch.unique(self.sequence_ids))

    def to(self, device: torch.device) -> PackedBatch:
        """Return the batch on another device; copies to a GPU are only begun, from pinned memory."""
        if device.type == "cpu":
            return self
        there = self.tensors
        if device.type == "cuda":
            there = {name: value.pin_memory() for name, value in there.items()}
        moved: dict[str, Any] = {name: value.to(device, non_blocking=True) for name, value in there.items()}
        return replace(self, **moved)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The batch's tensors, by field."""
        return {name: value for name, value in self.__dict__.items() if isinstance(value, torch.Tensor)}


@dataclass(frozen=True)
class PackedShare:
    """A rank's share of a micro-batch, on its way to the device."""

    batches: tuple[PackedBatch, ...]
    """What one pass takes, each; (): the rank has no work."""
    copied: torch.cuda.Event | None = None
    """Event of the copies' end; None: they need not be waited for."""

    def arrived(self) -> tuple[PackedBatch, ...]:
        """Return the batches; what the current stream does from now on finds them complete."""
        if self.copied is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(self.copied)
            for tensor in (tensor for batch in self.batches for tensor in batch.tensors.values()):
                tensor.record_stream(stream)  # its memory is not given to others before this stream is done with it
        return self.batches


def pack_share(parts: list[list[TrainGroup]], device: torch.device, copies: torch.cuda.Stream | None) -> PackedShare:
    """Pack the parts of a share and begin to move them; nothing waits, so another thread may compute meanwhile.

    Args:
        parts: what one pass takes, each.
        device: where they go.
        copies: the stream of the copies to a GPU; None: the device is the CPU.
    """
    if copies is None:
        return PackedShare(tuple(pack(part).to(device) for part in parts))
    # its device first: each thread has a current one of its own, and on leaving a stream of another device torch sets
    # it again, which makes a context of several hundred MB on GPU 0 if the thread has chosen none
    with torch.cuda.device(device), torch.cuda.stream(copies):
        batches = tuple(pack(part).to(device) for part in parts)
        copied = torch.cuda.Event()
        copied.record(copies)
    return PackedShare(batches, copied)


def pack(groups: list[TrainGroup]) -> PackedBatch:
    """Pack groups one after the other.

    A completion's first token is predicted from the prompt's last position, its token t from token t - 1. Tokens that
    were not sampled (`TrainSequence.mask`) are context without a loss. Empty completions take no room.

    Raises:
        ValueError: a group has no prompt token, so nothing could predict its first token.
    """
    filler = -sum(group.tokens for group in groups) % ROW_MULTIPLE
    layout = _layout(groups, filler)
    ids = [part for group in groups for part in (group.prompt_tokens, *(s.completion_tokens for s in group.sequences))]
    ids.append(np.zeros(filler, dtype=np.int32))
    rows: list[TrainSequence] = []
    """Sequences with tokens; the index of one is its row id."""
    columns: list[dict[str, np.ndarray]] = []
    """Values of each row's tokens with a loss, by field of the batch."""
    numbers: dict[str | int, int] = {}
    """Sequence number of each trajectory, and of each row that is of none."""
    for group, place in zip(groups, layout, strict=False):  # the layout ends with what fills the row up
        cursor = place.start + place.prompt_length
        for seq in (seq for seq in group.sequences if len(seq.completion_tokens)):
            source = np.arange(len(seq.completion_tokens)) + cursor - 1
            source[0] = place.start + place.prompt_length - 1
            number = numbers.setdefault(group.trajectory or len(rows), len(numbers))
            columns.append(_loss_columns(seq, source, number, len(rows)))
            rows.append(seq)
            cursor += len(seq.completion_tokens)

    def joined(parts: list[Any], dtype: type) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype=dtype))

    def column(name: str, dtype: type) -> torch.Tensor:
        return joined([one[name] for one in columns], dtype)

    reference = [seq.reference_logprobs for seq in rows if seq.reference_logprobs is not None]
    estimates = [np.zeros((0, 3), dtype=np.float32), *(seq.estimates for seq in rows if seq.estimates is not None)]
    chosen = np.concatenate([np.ones(0, dtype=bool), *map(_loss_mask, rows)])
    experts, recorded = _packed_experts(groups, filler)
    return PackedBatch(
        input_ids=joined(ids, np.int64)[None],
        position_ids=joined([place.positions for place in layout], np.int64)[None],
        layout=tuple(layout),
        source_index=column("source_index", np.int64),
        targets=column("targets", np.int64),
        generator_logprobs=column("generator_logprobs", np.float32),
        advantages=column("advantages", np.float32),
        sequence_ids=column("sequence_ids", np.int64),
        row_ids=column("row_ids", np.int64),
        sequence_tokens=column("sequence_tokens", np.int64),
        reference_logprobs=joined(reference, np.float32) if all(group.has_reference for group in groups) else None,
        estimates=joined(estimates, np.float32) if all(group.has_estimates for group in groups) else None,
        with_loss=None if bool(chosen.all()) else joined([np.flatnonzero(chosen)], np.int64),
        experts=experts,
        recorded=recorded,
    )


def _layout(groups: list[TrainGroup], filler: int) -> list[GroupLayout]:
    """Return the places of groups one after the other, then that of what fills the row up: a prompt of its own.

    Raises:
        ValueError: a group has no prompt token.
    """
    layout: list[GroupLayout] = []
    cursor = 0
    for group in groups:
        if not len(group.prompt_tokens):
            raise ValueError(f"group {group.group_id} has an empty prompt")
        lengths = [len(seq.completion_tokens) for seq in group.sequences]
        layout.append(GroupLayout(cursor, len(group.prompt_tokens), tuple(filter(None, lengths))))
        cursor = layout[-1].stop
    if filler:
        layout.append(GroupLayout(cursor, filler, ()))
    return layout


def _loss_columns(seq: TrainSequence, source: np.ndarray, number: int, row: int) -> dict[str, np.ndarray]:
    """Return what a batch has of each of a sequence's tokens with a loss, by field of `PackedBatch`, each [N].

    Args:
        seq: a sequence with tokens.
        source: position in the packed row that predicts each of its tokens, [C].
        number: its `sequence_ids`.
        row: its `row_ids`.
    """
    loss, tokens = _loss_mask(seq), seq.loss_tokens
    return {
        "source_index": source[loss],
        "targets": seq.completion_tokens[loss],
        "generator_logprobs": seq.logprobs[loss],
        "advantages": np.full(tokens, seq.advantage),
        "sequence_ids": np.full(tokens, number),
        "row_ids": np.full(tokens, row),
        "sequence_tokens": np.full(tokens, seq.trajectory_tokens or tokens),
    }


def _loss_mask(seq: TrainSequence) -> BoolArray:
    """Return which of a sequence's tokens have a loss, [C]."""
    return np.ones(len(seq.completion_tokens), dtype=bool) if seq.mask is None else seq.mask


def _packed_experts(groups: list[TrainGroup], filler: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return `PackedBatch.experts` and `recorded` of a row that ends with `filler` tokens that fill it up.

    Raises:
        ValueError: a group does not have one row of experts for each of its tokens.
    """
    if not groups or not all(map(has_experts, groups)):
        return None, None
    parts: list[tuple[ByteArray, int]] = []
    """Rows, and the number of tokens after them that have none."""
    for group in groups:
        assert group.prompt_experts is not None
        if len(group.prompt_experts) != len(group.prompt_tokens):
            raise ValueError(f"group {group.group_id} lacks the experts of its prompt, or has others")
        parts.append((group.prompt_experts, 0))
        for seq in group.sequences:
            if length := len(seq.completion_tokens):
                assert seq.experts is not None
                if len(seq.experts) != length - 1:
                    raise ValueError(f"group {group.group_id} lacks the experts of a completion, or has others")
                parts.append((seq.experts, 1))
    parts.append((parts[0][0][:0], filler))
    width = parts[0][0].shape[1]
    rows = [part for some, none in parts for part in (some, np.zeros((none, width), dtype=np.uint8))]
    known = [part for some, none in parts for part in (np.ones(len(some), dtype=bool), np.zeros(none, dtype=bool))]
    return torch.from_numpy(np.concatenate(rows)), torch.from_numpy(np.concatenate(known))


def filled_rows(x: torch.Tensor) -> torch.Tensor:
    """Fill x [n, k] up to a multiple of `ROW_MULTIPLE` rows with zeros, where a kernel is made for every shape."""
    if x.device.type != "cpu" or x.dtype == torch.float32:
        return x
    return torch.nn.functional.pad(x, (0, 0, 0, -len(x) % ROW_MULTIPLE))
