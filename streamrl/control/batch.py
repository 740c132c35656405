"""The state of one optimizer step's batch: what was generated, scored, sent to the trainer, trained. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from streamrl.rollouts.advantage import group_advantages
from streamrl.rollouts.micro_batch import TrainGroup, balance, split_into_micro_batches, train_group
from streamrl.rollouts.types import Group, Sample, Scored


@dataclass
class Batch:
    """Groups of one step and how far each has come.

    A complete group without a gradient (all rewards equal, no KL term) is counted and not sent to the trainer: its
    loss has gradient zero, only its tokens count in the batch's normalisation.
    """

    step: int
    groups: dict[str, Group]
    issued_at: float
    skip_zero_advantage: bool = True
    received: dict[str, tuple[Sample, float]] = field(default_factory=dict)
    """Finished samples that wait for their reward, with the time of their arrival."""
    finished: int = 0
    lengths: list[int] = field(default_factory=list)
    complete: int = 0
    """Groups whose samples are all scored."""
    no_gradient: int = 0
    """Complete groups whose rewards are all equal."""
    queue: list[TrainGroup] = field(default_factory=list)
    """Complete groups (or parts of them) that the trainer has not been sent yet, in order of completion."""
    sent_last: bool = False
    """The micro-batch that closes the batch is sent."""
    micro_batches: int = 0
    in_flight: int = 0
    """Micro-batches at the trainer."""
    stats: list[dict[str, Any]] = field(default_factory=list)
    at_trainer: list[TrainGroup] = field(default_factory=list)
    """Groups of the micro-batch that is being worked on."""

    @property
    def total_samples(self) -> int:
        """Samples in the batch."""
        return sum(group.size for group in self.groups.values())

    @property
    def loss_tokens(self) -> int:
        """Completion tokens of the whole batch."""
        return sum(group.completion_tokens for group in self.groups.values())

    @property
    def predicted_lengths(self) -> list[int]:
        """What was predicted of each sample, tokens; empty without predictions."""
        return [
            round(group.predicted_length)
            for group in self.groups.values()
            if group.predicted_length is not None
            for _ in range(group.size)
        ]

    @property
    def samples_trained(self) -> int:
        """Samples whose gradient is in, or that have none."""
        return sum(group.size for group in self.groups.values() if group.complete) - sum(
            len(group.sequences) for group in (*self.queue, *self.at_trainer)
        )

    @property
    def trained(self) -> bool:
        """Whether every micro-batch has been worked on, the last included."""
        return self.sent_last and self.in_flight == 0

    def finish(self, sample: Sample, now: float) -> None:
        """A sample has arrived and is committed."""
        self.received[sample.sample_id] = (sample, now)
        self.finished += 1
        self.lengths.append(sample.output_length)

    def micro_batch_done(self, stats: dict[str, Any]) -> None:
        """A rank has finished its share of the micro-batch."""
        self.in_flight -= 1
        self.stats.append(stats)
        if self.in_flight == 0:
            self.at_trainer = []

    def score(self, sample_id: str, reward: float, error: str | None, normalize_by_std: bool) -> Scored:
        """A reward has arrived; completes the group with the last one.

        Raises:
            KeyError: no such sample waits for a reward.
        """
        sample, received_at = self.received.pop(sample_id)
        group = self.groups[sample.group_id]
        group.scored[sample_id] = scored = Scored(sample, reward, error, received_at)
        if group.complete:
            self.complete += 1
            members = group.members()
            values = group_advantages([m.reward for m in members], normalize_by_std)
            group.advantages = {m.sample.sample_id: value for m, value in zip(members, values, strict=True)}
            flat = not any(values)
            self.no_gradient += flat
            if not (flat and self.skip_zero_advantage):
                self.queue.append(train_group(group))
        return scored

    def next_micro_batch(self, max_tokens: int, ranks: int) -> tuple[list[list[TrainGroup]], bool] | None:
        """Takes the next micro-batch from the queue: (groups of each rank, is it the batch's last), or None if
        nothing is ready. No rank gets more than `max_tokens`, and every rank takes part, if with nothing.

        When the whole batch is complete and nothing is left, one empty micro-batch closes it.
        """
        if self.sent_last:
            return None
        pieces = split_into_micro_batches(self.queue, max_tokens)
        whole = self.complete == len(self.groups)
        if not pieces and not whole:
            return None
        if len(pieces) < ranks:
            shares, self.queue = balance(self.queue, ranks), []
        else:
            shares, self.queue = pieces[:ranks], [group for piece in pieces[ranks:] for group in piece]
        self.at_trainer = [group for share in shares for group in share]
        self.in_flight = ranks
        self.sent_last = whole and not self.queue
        self.micro_batches += 1
        return shares, self.sent_last
