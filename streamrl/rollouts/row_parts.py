"""A group as prompts and what follows them: single completions, or the rows of episodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from streamrl.rollouts.trajectory import NOT_SAMPLED
from streamrl.rollouts.types import BoolArray, ByteArray, FloatArray, Group, IntArray, Sample


@dataclass(frozen=True)
class RowPart:
    """The tokens that follow a prompt in one row."""

    sample_id: str
    row_id: str
    """Id of the row: its sample's, with '#' and its number from an episode's second row on."""
    tokens: IntArray
    """Shape [C]."""
    logprobs: FloatArray
    """Shape [C]; 0 where not sampled."""
    versions: IntArray
    """Shape [C]; `NOT_SAMPLED` where not sampled."""
    mask: BoolArray | None
    """Which tokens were sampled, shape [C]; None: all."""
    experts: ByteArray | None = None
    """`Sample.experts` of a single completion; None: not recorded, as of episodes."""

    @property
    def sampled(self) -> int:
        """Number of sampled tokens."""
        return len(self.tokens) if self.mask is None else int(np.count_nonzero(self.mask))


def episode_rows(sample: Sample) -> list[tuple[IntArray, RowPart]]:
    """Return (prompt, what follows it) of each row of an episode; a single completion has none."""
    return [
        (sample.completion_tokens[start:begin], _part(sample, number, begin, stop))
        for number, start, begin, stop in _places(sample)
    ]


def group_rows(group: Group, samples: Sequence[Sample]) -> list[tuple[IntArray, list[RowPart]]]:
    """Return the rows of some of a group's samples as (shared prompt, what follows it in each row).

    Single completions share the group's prompt. The rows of episodes share what they can: each is under the shortest
    prompt that its own begins with, so that packing computes it once for them.
    """
    if not group.agent:
        parts = [
            RowPart(
                one.sample_id,
                one.sample_id,
                one.completion_tokens,
                one.logprobs,
                one.token_versions,
                None,
                one.experts,
            )
            for one in samples
        ]
        return [(group.prompt_tokens, parts)]
    rows = [(sample, *where) for sample in samples for where in _places(sample)]
    prompts = {sample.completion_tokens[start:begin].tobytes() for sample, _, start, begin, _ in rows}
    shortest_first = sorted(prompts, key=lambda prompt: (len(prompt), prompt))
    shared: dict[bytes, list[RowPart]] = {}
    for sample, number, start, begin, stop in rows:
        own = sample.completion_tokens[start:begin].tobytes()
        prompt = next(one for one in shortest_first if own.startswith(one))
        after = start + len(prompt) // np.dtype(np.int32).itemsize
        shared.setdefault(prompt, []).append(_part(sample, number, after, stop))
    return [(np.frombuffer(prompt, dtype=np.int32), parts) for prompt, parts in shared.items()]


def sample_of_row(row_id: str) -> str:
    """Return the id of the sample that a row belongs to."""
    return row_id.partition("#")[0]


def _places(sample: Sample) -> list[tuple[int, int, int, int]]:
    """Return (number, start, end of the prompt, stop) of each row among the tokens of an episode."""
    found, start = [], 0
    for number, row in enumerate(sample.trajectory.rows if sample.trajectory is not None else ()):
        found.append((number, start, start + row.prompt, start + row.tokens))
        start += row.tokens
    return found


def _part(sample: Sample, number: int, start: int, stop: int) -> RowPart:
    versions = sample.token_versions[start:stop]
    return RowPart(
        sample.sample_id,
        f"{sample.sample_id}#{number}" if number else sample.sample_id,
        sample.completion_tokens[start:stop],
        sample.logprobs[start:stop],
        versions,
        versions != NOT_SAMPLED,
    )
