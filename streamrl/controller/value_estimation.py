"""Advantages, returns and values of a step's groups from before its first update (ppo). Pure: no I/O.

    taken group -> estimated by the critic, in requests of at most a micro-batch
    full batch, all estimated -> advantages whitened, if wanted -> every update trains on them

The trainer keeps none of them: they are returned to the controller and sent with each micro-batch that trains on them.
So any rank may train what another has estimated, and statistics over the batch are over all ranks. Requests are sent
one at a time, before the step's first micro-batch, so all estimates are by the same weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from streamrl.rollouts.advantage import whitened
from streamrl.rollouts.rank_shares import deal
from streamrl.rollouts.train_groups import TrainGroup
from streamrl.rollouts.types import FloatArray


@dataclass
class ValueEstimation:
    """The estimates of one step."""

    waiting: list[TrainGroup] = field(default_factory=list)
    """Groups, or parts of them, in no request yet."""
    running: list[list[TrainGroup]] = field(default_factory=list)
    """Share of each rank in the request in flight; empty: no request."""
    known: dict[str, FloatArray] = field(default_factory=dict)
    """Advantage, return and value of each token with a loss, [N, 3], by row id."""

    @property
    def complete(self) -> bool:
        """Whether every group added so far is estimated."""
        return not self.waiting and not self.running

    def add(self, groups: Iterable[TrainGroup]) -> None:
        """Let groups be estimated, unless they are already: an update that is tried again uses what is known."""
        self.waiting += [one for one in groups if any(row.sample_id not in self.known for row in one.sequences)]

    def next(self, max_tokens: int, ranks: int, square_cost: float = 0.0) -> list[list[TrainGroup]] | None:
        """Return each rank's share of the next request; None: nothing waits.

        Args:
            max_tokens: limit on the packed tokens of a rank.
            ranks: number of workers of the trainer.
            square_cost: see `rank_shares.cost`.
        """
        if not self.waiting:
            return None
        self.running, self.waiting = deal(self.waiting, max_tokens, ranks, square_cost)
        return self.running

    def done(self, values: Sequence[FloatArray]) -> None:
        """Store the answers of all ranks.

        Args:
            values: estimates of each rank's share, each of shape [N, 3].

        Raises:
            ValueError: there are more or fewer values than tokens.
        """
        shares, self.running = self.running, []
        for share, rows in zip(shares, values, strict=True):
            if rows.shape != (tokens := sum(group.loss_tokens for group in share), 3):
                raise ValueError(f"estimates of shape {list(rows.shape)}, expected [{tokens}, 3]")
            start = 0
            for sequence in (sequence for group in share for sequence in group.sequences):
                self.known[sequence.sample_id] = rows[start : start + sequence.loss_tokens]
                start += sequence.loss_tokens

    def of_rows(self, rows: Iterable[str], whiten: bool) -> dict[str, FloatArray]:
        """Return the estimates to train a batch with, by row id.

        Args:
            rows: ids of the batch's rows; those without a loss have no estimates.
            whiten: whether the advantages get mean 0 and variance 1 over these rows.
        """
        found = {row: self.known[row].copy() for row in rows if row in self.known}
        if whiten:
            for one, advantages in zip(found.values(), whitened([one[:, 0] for one in found.values()]), strict=True):
                one[:, 0] = advantages
        return found
