"""What an idle trainer works out ahead: the frozen reference's log-probabilities of groups that have to wait. Pure.

    sync, one_step_off: complete groups wait in the pool until the last one is there
    batch advantages:   taken groups wait in the batch for its last reward

The reference never changes, so its log-probabilities may be computed at any time, by any rank. They come back here, are
kept with the group, and travel with the micro-batch that trains on it. So the trainer holds no state between the two,
and how the samples are dealt to ranks then need not be how they are dealt now.

What is asked for at once is at most a micro-batch: the trainer is soon free again when there is something to train. One
request is under way at a time; what it covers is kept before the next is chosen, so nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from streamrl.controller.group_pool import GroupPool
from streamrl.controller.step_batch import StepBatch
from streamrl.rollouts.micro_batch import TrainGroup, TrainSequence, deal
from streamrl.rollouts.types import FloatArray, Group


@dataclass(frozen=True, kw_only=True)
class _Asked(TrainSequence):
    """A sequence that remembers whose it is; its advantage is 0, it may not be known yet."""

    group: Group
    sample_id: str


@dataclass
class Preparation:
    """See the module's text."""

    under_way: list[list[TrainGroup]] = field(default_factory=list)
    """What each rank works on; empty: nothing."""

    def next(self, batch: StepBatch, pool: GroupPool, max_tokens: int, ranks: int) -> list[list[TrainGroup]] | None:
        """What each rank is to prepare now; None if nothing waits unprepared, or the algorithm has no reference.

        Groups come in the order in which they will be trained, without samples that have no loss.

        Args:
            batch: of the step under way; nothing in its queue.
            pool: groups that no step has taken.
            max_tokens: packed tokens that a rank may get.
            ranks: of the trainer.
        """
        if not batch.run.algorithm.needs_reference:
            return None
        waiting = [missing for group in (*batch.held_back, *pool.waiting) if (missing := _missing(batch, group))]
        if not waiting:
            return None
        self.under_way, _ = deal(waiting, max_tokens, ranks)
        return self.under_way

    def done(self, values: Sequence[FloatArray]) -> None:
        """All ranks have answered.

        Args:
            values: of each rank, the log-probabilities of its share's completion tokens, [N].

        Raises:
            ValueError: there are more or fewer values than tokens.
        """
        shares, self.under_way = self.under_way, []
        for share, row in zip(shares, values, strict=True):
            if len(row) != (tokens := sum(group.completion_tokens for group in share)):
                raise ValueError(f"{len(row)} reference log-probabilities for {tokens} tokens")
            start = 0
            for sequence in (sequence for group in share for sequence in group.sequences):
                assert isinstance(sequence, _Asked)
                end = start + len(sequence.completion_tokens)
                sequence.group.reference_logprobs[sequence.sample_id] = row[start:end]
                start = end


def _missing(batch: StepBatch, group: Group) -> TrainGroup | None:
    """The part of a complete group that has a loss and no reference log-probabilities."""
    if len(group.reference_logprobs) == group.size:  # the usual case, and this is asked often
        return None
    sequences: list[TrainSequence] = [
        _Asked(
            completion_tokens=m.sample.completion_tokens,
            logprobs=m.sample.logprobs,
            advantage=0.0,
            group=group,
            sample_id=m.sample.sample_id,
        )
        for m in batch.counted(group)
        if m.sample.sample_id not in group.reference_logprobs and m.sample.output_length
    ]
    return TrainGroup(group.group_id, group.prompt_tokens, sequences) if sequences else None
