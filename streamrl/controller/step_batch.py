"""The batch of the current optimizer step: its groups, their advantages and its micro-batches. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import numpy as np

from streamrl.config.algorithm import PPOConfig
from streamrl.config.run import RunConfig
from streamrl.controller.value_estimation import ValueEstimation
from streamrl.rollouts.advantage import batch_advantages, group_advantages, is_flat, shaped_reward
from streamrl.rollouts.micro_batch import loss_normalizer
from streamrl.rollouts.rank_shares import deal
from streamrl.rollouts.row_parts import sample_of_row
from streamrl.rollouts.seeds import derive_seed
from streamrl.rollouts.train_groups import TrainGroup, train_groups
from streamrl.rollouts.types import FloatArray, Group, Scored


@dataclass
class StepBatch:
    """The groups of one step and the trainer's progress on them.

    A group without a gradient (all rewards equal, group-relative advantages, neither a KL term nor an entropy bonus) is
    not sent to the trainer; only its tokens count, in the batch's normalisation. Nor is one without a loss, of which
    `mask_truncated` leaves out all samples, and no tokens of it count.

    A sample with a void reward is in no mean, deviation, loss or normalisation: the step is the one that it would be
    had the sample never been drawn. A group with too few survivors is dropped, and another one takes its place.

    A step may have several optimizer updates: `batch.epochs` passes over its groups in `batch.mini_batches` parts. What
    is sent is the same in every pass: tokens, the generator's log-probabilities and advantages, and with a critic its
    values from before the first update. The order of the groups depends on the run's seed, the step and the pass alone.
    An update that is skipped is the step's last one.
    """

    run: RunConfig
    step: int
    """Number of the step, from 1."""
    groups: dict[str, Group] = field(default_factory=dict)
    """Groups taken, by id."""
    dropped: list[Group] = field(default_factory=list)
    """Complete groups that others have replaced: of equal rewards (dynamic sampling), or with too few survivors."""
    not_finite: list[Group] = field(default_factory=list)
    """Groups left out because their loss or gradient is not finite; they are not replaced."""
    trained_before: set[str] = field(default_factory=set)
    """Ids of those groups of `not_finite` that an earlier update of the step has trained; they count as trained."""
    refusal: str | None = None
    """What was not finite when the trainer refused the step, and what became of it; None: it was not refused."""
    given_up: bool = False
    """Whether the step has been refused for good, so that its gradient is discarded."""
    update: int = 0
    """Number of the optimizer update on this batch, from 0."""
    no_gradient: int = 0
    """Number of taken groups without a gradient: of equal rewards, if such groups have none, or without a loss."""
    pieces: dict[str, list[TrainGroup]] = field(default_factory=dict)
    """What the trainer gets of each group whose advantages are known; groups without a gradient have none."""
    estimation: ValueEstimation = field(default_factory=ValueEstimation)
    """The critic's estimates from before the first update, if the run needs them (`RunConfig.needs_estimates`)."""
    queue: list[TrainGroup] = field(default_factory=list)
    """Taken groups (or parts of them) of this update that have not been sent to the trainer."""
    sent_last: bool = False
    """Whether the micro-batch that closes the batch has been sent."""
    micro_batches: int = 0
    stats: list[dict[str, float]] = field(default_factory=list)
    """Statistics of every rank and micro-batch of this update."""
    first_stats: list[dict[str, float]] = field(default_factory=list)
    """Those of the step's first update, once it is done."""
    earlier_stats: list[dict[str, float]] = field(default_factory=list)
    """Those of all updates before this one."""
    earlier_normalizer: float = 0.0
    """Sum of the normalizers of all updates before this one."""
    at_trainer: list[list[TrainGroup]] = field(default_factory=list)
    """Groups of each micro-batch that the trainer has, the oldest first; one may be empty."""
    sent: list[list[list[TrainGroup]]] = field(default_factory=list)
    """Shares of every micro-batch of this update, kept until it is done in case the trainer refuses it."""
    square_cost: float = 0.0
    """Operations of a square of tokens over those of a token (`rank_shares.py`)."""

    @property
    def in_flight(self) -> bool:
        """Whether the trainer works on a micro-batch."""
        return bool(self.at_trainer)

    @property
    def full(self) -> bool:
        """Whether the step has all its groups."""
        return self.count == self.run.batch.prompts_per_step

    @property
    def count(self) -> int:
        """Number of groups that the step has taken, with those left out since."""
        return len(self.groups) + len(self.not_finite)

    @property
    def held_back(self) -> list[Group]:
        """Taken groups whose advantages depend on groups still to come, or on estimates still to be made."""
        if self._has_critic:
            return list(self.groups.values()) if self.awaits_estimates else []
        return [group for group in self.groups.values() if not group.advantages]

    @property
    def awaits_estimates(self) -> bool:
        """Whether nothing can be trained yet because the critic's estimates of the whole batch are not known."""
        return self.run.needs_estimates and not (self.full and self.estimation.complete)

    @property
    def trained(self) -> bool:
        """Whether the trainer has finished every micro-batch of this update."""
        return self.sent_last and not self.in_flight

    @property
    def samples_trained(self) -> int:
        """Number of samples whose gradient is accumulated, or that have none."""
        parts = self.run.batch.mini_batches
        ahead: list[TrainGroup] = []  # from the second pass on, all groups have been trained
        if self.awaits_estimates:
            ahead = [piece for pieces in self.pieces.values() for piece in pieces]
        elif self.update < parts:
            ahead = [*self.queue, *(group for micro in self.at_trainer for group in micro)]
            if parts > 1:
                later = set(self.groups).difference(*map(self._ids_of_update, range(self.update + 1)))
                ahead += [piece for key in later for piece in self.pieces.get(key, [])]
        waiting = {sample_of_row(one.sample_id) for group in ahead for one in group.sequences}
        return sum(group.size for group in self.groups.values()) - len(waiting)

    @property
    def groups_trained(self) -> list[Group]:
        """Groups that the step trains, or of which an update has been trained."""
        return [*self.groups.values(), *(one for one in self.not_finite if one.group_id in self.trained_before)]

    @property
    def groups_never_trained(self) -> list[Group]:
        """Groups that others have replaced, or that were left out before an update was trained on them."""
        return [*self.dropped, *(one for one in self.not_finite if one.group_id not in self.trained_before)]

    @property
    def of_update(self) -> list[Group]:
        """Groups of this update."""
        if self.run.batch.mini_batches == 1:
            return list(self.groups.values())
        return [self.groups[key] for key in self._ids_of_update(self.update) if key in self.groups]

    def _ids_of_update(self, update: int) -> list[str]:
        """Return the ids of an update's groups, those left out since too; [] while the step lacks groups."""
        parts = self.run.batch.mini_batches
        if not self.full:
            return []
        ids = sorted([*self.groups, *(group.group_id for group in self.not_finite)])
        epoch, part = divmod(update, parts)
        order = np.random.default_rng([derive_seed(self.run.seed, "order of a batch"), self.step, epoch])
        size = len(ids) // parts
        return [ids[index] for index in order.permutation(len(ids))[part * size : (part + 1) * size]]

    def next_update(self) -> bool:
        """Begin the next optimizer update on this batch; return False if the last one was the step's last.

        A skipped update is the last one: the weights are too far from those that the samples are from.
        """
        if self.given_up or self.off_policy or self.update + 1 == self.run.batch.updates:
            return False
        if self.update == 0:
            self.first_stats = self.stats
        self.earlier_stats += self.stats
        self.earlier_normalizer += self.normalizer
        self.update += 1
        self.stats, self.sent, self.sent_last = [], [], False
        self._queue_update()
        return True

    def _queue_update(self) -> None:
        """Queue what the trainer gets in this update, in its order."""
        self.queue = [piece for key in self._ids_of_update(self.update) for piece in self.pieces.get(key, [])]

    def counted(self, group: Group) -> list[Scored]:
        """Return the samples of a group that have a loss; void ones have none."""
        masked = self.run.algorithm.mask_truncated
        return [m for m in group.survivors() if not (masked and m.sample.finish_reason == "length")]

    @property
    def normalizer(self) -> float:
        """Divisor of the summed loss of this update, over all its groups."""
        counted = [m.sample for group in self.of_update for m in self.counted(group)]
        tokens = sum(sample.output_length for sample in counted)
        return loss_normalizer(self.run.algorithm.aggregation, tokens, len(counted), self.run.sampling.max_tokens)

    @property
    def off_policy(self) -> bool:
        """Whether the mean importance ratio exceeds the algorithm's bound, so that the step must be skipped."""
        bound = self.run.algorithm.max_importance_ratio
        tokens = sum(stats["tokens"] for stats in self.stats)
        return bound is not None and tokens > 0 and sum(stats["ratio_sum"] for stats in self.stats) > bound * tokens

    def rewards(self, group: Group) -> list[float]:
        """Return the survivors' rewards as training sees them, in their order."""
        lengths = [member.sample.longest_answer for member in group.survivors()]
        most, overlong = self.run.sampling.max_tokens, self.run.algorithm.overlong
        return [
            shaped_reward(reward, length, most, overlong)
            for reward, length in zip(group.rewards(), lengths, strict=True)
        ]

    def too_few_survivors(self, group: Group) -> bool:
        """Return whether a complete group has too few rewards: under 2 if its samples are compared, else none."""
        return len(group.survivors()) < (2 if self.run.algorithm.compares_siblings else 1)

    def take(self, group: Group) -> None:
        """Add a complete group to the step.

        Its advantages are computed at once, or with the last group if they are relative to the whole batch.
        """
        group.step = self.step
        self.groups[group.group_id] = group
        flat = self.run.algorithm.skips_flat_groups and is_flat(self.rewards(group))
        self.no_gradient += flat or not self.counted(group)
        kind = self.run.algorithm.advantage
        if self.run.needs_estimates:
            self._await_estimates(group)
        elif kind == "gae":
            self._queue_pieces(group)
        elif kind == "batch" or kind == "batch_group_baseline":
            groups = list(self.groups.values()) if self.full else []
            values = batch_advantages([self.rewards(one) for one in groups], kind == "batch_group_baseline")
            if kind == "batch" and groups and self.run.algorithm.by_advantage_alone and not any(map(any, values)):
                self.no_gradient = len(groups)  # all rewards of the batch are equal
            for one, advantages in zip(groups, values, strict=True):
                self._set_advantages(one, advantages)
        else:
            self._set_advantages(group, group_advantages(self.rewards(group), kind))
        if self.full and not self._streams and not self.run.needs_estimates:
            self._queue_update()

    def _await_estimates(self, group: Group) -> None:
        """Request the critic's estimates of a group, which nothing is trained without."""
        self.pieces[group.group_id] = self._pieces(group)
        self.estimation.add(self.pieces[group.group_id])
        self._use_estimates()

    def estimated(self, values: Sequence[FloatArray]) -> None:
        """Record the estimates of all ranks' shares of the request in flight; with the last one, training may begin."""
        self.estimation.done(values)
        self._use_estimates()

    def _use_estimates(self) -> None:
        """Queue the first micro-batches once the batch is complete and estimated."""
        if self.awaits_estimates:
            return
        algorithm = self.run.algorithm
        assert isinstance(algorithm, PPOConfig)
        rows = [row.sample_id for pieces in self.pieces.values() for one in pieces for row in one.sequences]
        estimates = self.estimation.of_rows(rows, algorithm.whiten_advantages)
        self.pieces = {key: self._pieces(group, estimates) for key, group in self.groups.items()}
        self._queue_update()

    def _pieces(self, group: Group, estimates: Mapping[str, FloatArray] | None = None) -> list[TrainGroup]:
        """Return what the trainer gets of a group, with the critic's estimates if they are known; []: no loss."""
        counted = {m.sample.sample_id for m in self.counted(group)}
        rewards: dict[str, float] | None = None
        if self._has_critic:
            rewards = {m.sample.sample_id: r for m, r in zip(group.survivors(), self.rewards(group), strict=True)}
        together = self.run.algorithm.needs_trajectories
        return train_groups(group, counted, together, estimates, rewards) if counted else []

    @property
    def _has_critic(self) -> bool:
        """Whether the trainer computes the advantages, with its critic, from the rewards that it gets."""
        return self.run.algorithm.advantage == "gae"

    @property
    def _streams(self) -> bool:
        """Whether groups go to the trainer as they are taken; else the update needs the whole batch, in its order."""
        return self.update == 0 and self.run.batch.mini_batches == 1

    def without(self, group_ids: Set[str]) -> StepBatch:
        """Return the same update from the start, as if these groups were not in it: for a second attempt.

        The normalizer is that of the remaining groups. So are advantages relative to the batch before the first update;
        later ones train on the advantages and estimates of the first.
        """
        out = [group for group in self.groups.values() if group.group_id in group_ids]
        left = {key: group for key, group in self.groups.items() if key not in group_ids}
        other = StepBatch(
            self.run,
            self.step,
            dropped=self.dropped,
            not_finite=[*self.not_finite, *out],
            estimation=self.estimation,
            square_cost=self.square_cost,
        )
        if self.update == 0:
            for group in left.values():
                group.advantages = {}
                other.take(group)
            return other
        before = {key for number in range(self.update) for key in self._ids_of_update(number)}
        other = replace(
            other,
            groups=left,
            trained_before=self.trained_before | (before & group_ids),
            update=self.update,
            no_gradient=self.no_gradient,
            pieces={key: pieces for key, pieces in self.pieces.items() if key in left},
            earlier_stats=self.earlier_stats,
            first_stats=self.first_stats,
            earlier_normalizer=self.earlier_normalizer,
        )
        other._queue_update()
        return other

    def _set_advantages(self, group: Group, advantages: Sequence[float]) -> None:
        """Give a group's survivors their advantages, and queue what the trainer gets of it, unless all are 0."""
        group.advantages = {m.sample.sample_id: a for m, a in zip(group.survivors(), advantages, strict=True)}
        flat = self.run.algorithm.skips_flat_groups and not any(advantages)
        if not flat:
            self._queue_pieces(group)

    def _queue_pieces(self, group: Group) -> None:
        """Make what the trainer gets of a group whose advantages are known; queue it now if groups are streamed."""
        if pieces := self._pieces(group):
            self.pieces[group.group_id] = pieces
            if self._streams:
                self.queue += pieces

    def micro_batch_done(self, stats: Sequence[dict[str, float]]) -> None:
        """Record that all ranks have finished their shares of the oldest micro-batch."""
        del self.at_trainer[0]
        self.stats += stats

    def next_micro_batch(self, max_tokens: int, ranks: int) -> tuple[list[list[TrainGroup]], bool] | None:
        """Take the next micro-batch from the queue.

        No rank gets more than `max_tokens`; every rank takes part, if need be with an empty share. If the queue is
        empty when the step has all its groups and no micro-batch has closed the batch, an empty one closes it. While
        the trainer works on another one, only a micro-batch that waiting would not make larger is taken.

        Returns:
            (groups of each rank, whether it is the update's last micro-batch); None: nothing is ready.
        """
        if self.sent_last or self.awaits_estimates:
            return None
        if not self.queue and not self.full:
            return None
        if self.in_flight and not self.full and sum(group.tokens for group in self.queue) < max_tokens * ranks:
            return None
        shares, self.queue = deal(self.queue, max_tokens, ranks, self.square_cost)
        self.at_trainer.append([group for share in shares for group in share])
        self.sent.append(shares)
        self.sent_last = self.full and not self.queue
        self.micro_batches += 1
        return shares, self.sent_last
