"""Reference log-probabilities computed ahead: an idle trainer computes them for groups that wait. Pure: no I/O.

    sync, one_step_off: complete groups wait in the pool until the last one is complete
    batch advantages:   taken groups wait in the batch for its last reward

The reference never changes, so any rank may compute its log-probabilities at any time. They are returned to the
controller, kept with the group, and sent with the micro-batch that trains on it. So the trainer keeps no state between
the two, and other ranks may train on the samples than those that computed them.

A request covers at most a micro-batch, so that the trainer is soon free for training. Only one request is in flight at
a time, and its result is stored before the next one is chosen, so nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from streamrl.controller.group_pool import GroupPool
from streamrl.controller.step_batch import StepBatch
from streamrl.rollouts.rank_shares import deal
from streamrl.rollouts.row_parts import group_rows
from streamrl.rollouts.train_groups import TrainGroup, TrainSequence
from streamrl.rollouts.types import FloatArray, Group


@dataclass(frozen=True, kw_only=True)
class _PendingSequence(TrainSequence):
    """A sequence with its group; its advantage is set to 0, since it may not be known yet."""

    group: Group


@dataclass
class ReferencePrecompute:
    """The reference log-probabilities of groups that wait for training, requested before these are due."""

    running: list[list[TrainGroup]] = field(default_factory=list)
    """Share of each rank in the request in flight; empty: no request."""

    def next(self, batch: StepBatch, pool: GroupPool, max_tokens: int, ranks: int) -> list[list[TrainGroup]] | None:
        """Return each rank's share of the next request; None if nothing is missing or the algorithm has no reference.

        Groups come in the order in which they will be trained, without samples that have no loss.

        Args:
            batch: batch of the current step; its queue is empty.
            pool: groups that no step has taken.
            max_tokens: limit on the packed tokens of a rank.
            ranks: number of workers of the trainer.
        """
        if not batch.run.algorithm.needs_reference:
            return None
        waiting = [part for group in (*batch.held_back, *pool.waiting) for part in _missing(batch, group)]
        if not waiting:
            return None
        self.running, _ = deal(waiting, max_tokens, ranks, batch.square_cost)
        return self.running

    def done(self, values: Sequence[FloatArray]) -> None:
        """Store the answers of all ranks with their groups.

        Args:
            values: log-probabilities of the completion tokens of each rank's share, each of shape [N].

        Raises:
            ValueError: there are more or fewer values than tokens.
        """
        shares, self.running = self.running, []
        for share, row in zip(shares, values, strict=True):
            if len(row) != (tokens := sum(group.loss_tokens for group in share)):
                raise ValueError(f"{len(row)} reference log-probabilities for {tokens} tokens")
            start = 0
            for sequence in (sequence for group in share for sequence in group.sequences):
                assert isinstance(sequence, _PendingSequence)
                end = start + sequence.loss_tokens
                sequence.group.reference_logprobs[sequence.sample_id] = row[start:end]
                start = end


def _missing(batch: StepBatch, group: Group) -> list[TrainGroup]:
    """Return the parts of a complete group that have a loss and no reference log-probabilities."""
    if not group.agent and len(group.reference_logprobs) == group.size:  # the usual case; this function runs often
        return []
    found = []
    for prompt, parts in group_rows(group, [m.sample for m in batch.counted(group)]):
        sequences: list[TrainSequence] = [
            _PendingSequence(
                completion_tokens=part.tokens,
                logprobs=part.logprobs,
                advantage=0.0,
                sample_id=part.row_id,
                mask=part.mask,
                group=group,
            )
            for part in parts
            if part.row_id not in group.reference_logprobs and part.sampled
        ]
        if sequences:
            found.append(TrainGroup(group.group_id, prompt, sequences))
    return found
