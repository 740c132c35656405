"""Groups in the trainer's form: prompts, and completions with their advantages. numpy only."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

import numpy as np

from streamrl.rollouts.row_parts import RowPart, group_rows
from streamrl.rollouts.types import BoolArray, ByteArray, FloatArray, Group, IntArray


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


def has_experts(group: TrainGroup) -> bool:
    """Return whether the experts of a group are recorded, of its prompt and of each completion."""
    return group.prompt_experts is not None and all(seq.experts is not None for seq in group.sequences)
