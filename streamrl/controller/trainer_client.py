"""The trainer's ranks behind one interface: a command goes to all and is done when all have answered.

A micro-batch may follow one that is not done, so that a rank prepares it while it computes; all else goes alone.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamrl.errors import RestartNeeded
from streamrl.protocol.controller_trainer import Estimate, Examine, MicroBatch, Precompute, Train
from streamrl.protocol.message import TypedMessage, wire
from streamrl.rollouts.micro_batch_wire import to_wire
from streamrl.rollouts.train_groups import TrainGroup
from streamrl.runtime.process_plan import rank_name
from streamrl.transport.deadlines import WaitRegistry, never
from streamrl.transport.endpoint import Delivery, Hub
from streamrl.transport.wire import Arrays

TRAIN = "train"
"""Kind of the command with a micro-batch."""
WAIT = "trainer"
"""Name of the wait for the answers to a command."""


MOST_MICRO_BATCHES = 2
"""Most micro-batches in flight: the one that is computed and the next."""


@dataclass
class _Command:
    """A command that some rank has yet to answer."""

    kind: str
    answers: dict[str, Delivery] = field(default_factory=dict)


class Trainers:
    """The ranks of the trainer; they get one command at a time, or two micro-batches."""

    def __init__(
        self,
        hub: Hub,
        waits: WaitRegistry,
        ranks: int,
        limit_s: float,
        sharing: int = 1,
        limits_s: Mapping[str, float] | None = None,
    ) -> None:
        """
        Args:
            hub: the hub that the ranks connect to.
            waits: registry of the waits for their answers.
            ranks: number of ranks.
            limit_s: seconds for all ranks to answer a command.
            sharing: number of adjacent ranks that share layers or rows (tensor or sequence parallelism) and get the
                same groups.
            limits_s: seconds for commands of a kind that have a limit of their own.
        """
        self.names = [rank_name(rank) for rank in range(ranks)]
        self.workers = self.names[::sharing]
        """First rank of each set of ranks that share layers or rows; its answer stands for the whole set."""
        self._sharing = sharing
        self._hub, self._waits, self._limit_s, self._limits_s = hub, waits, limit_s, dict(limits_s or {})
        self.progress: dict[str, Callable[[], float]] = {}
        """Functions that return the seconds since the latest sign of progress, by kind of command (`WaitRegistry`)."""
        self._commands: deque[_Command] = deque()
        """Commands in flight, in their order."""

    @property
    def busy(self) -> bool:
        """Whether a command is in flight."""
        return bool(self._commands)

    @property
    def takes_micro_batch(self) -> bool:
        """Whether a micro-batch may be sent: nothing but a smaller number of micro-batches is in flight."""
        return len(self._commands) < MOST_MICRO_BATCHES and all(one.kind == TRAIN for one in self._commands)

    async def ask(self, command: TypedMessage) -> None:
        """Send every rank a command."""
        kind, body = wire(command)
        self._begin_wait(kind)
        for name in self.names:
            await self._send(name, kind, body)

    async def train(self, shares: Sequence[list[TrainGroup]], is_last: bool) -> None:
        """Send every worker its share of a micro-batch.

        The ranks use the groups' reference log-probabilities only if every group of every share has them: computing
        them is a collective, which all ranks enter or none.
        """
        await self._deal(functools.partial(Train, is_last=is_last, reference_given=_given(shares)), shares)

    async def estimate(self, shares: Sequence[list[TrainGroup]]) -> None:
        """Have every worker compute its share's advantages, returns and values, answered as `estimates`."""
        await self._deal(functools.partial(Estimate, reference_given=_given(shares)), shares)

    async def examine(self, shares: Sequence[list[TrainGroup]]) -> None:
        """Have every worker examine its share of a micro-batch of a refused step."""
        await self._deal(functools.partial(Examine, reference_given=_given(shares)), shares)

    async def precompute_reference(self, shares: Sequence[list[TrainGroup]]) -> None:
        """Have every worker compute its share's reference log-probabilities, answered as `reference_logprobs`."""
        await self._deal(Precompute, shares)

    async def _deal(self, command: Callable[..., MicroBatch], shares: Sequence[list[TrainGroup]]) -> None:
        if len(shares) != len(self.workers):
            raise ValueError(f"{len(shares)} shares for {len(self.workers)} workers")
        messages = [(*wire(command(**body)), arrays) for body, arrays in map(to_wire, shares)]
        self._begin_wait(messages[0][0])
        for rank, name in enumerate(self.names):
            await self._send(name, *messages[rank // self._sharing])

    async def _send(self, name: str, command: str, body: dict[str, Any], arrays: Arrays | None = None) -> None:
        """Send one rank a command.

        Raises:
            RestartNeeded: the rank is not connected.
        """
        try:
            await self._hub.send(name, command, body, arrays)
        except KeyError:
            raise RestartNeeded(f"{name} has disconnected") from None

    def awaits(self, delivery: Delivery) -> bool:
        """Return whether this rank owes this answer to a command in flight; it answers them in their order."""
        owed = self._owed(delivery.peer)
        return owed is not None and delivery.kind == f"{owed.kind}_done"

    def _owed(self, name: str) -> _Command | None:
        """Return the oldest command that a rank has not answered; None: it has answered all."""
        return next((one for one in self._commands if name in self.names and name not in one.answers), None)

    def answered(self, delivery: Delivery) -> list[Delivery] | None:
        """Record a rank's answer; with the last one to a command, return the workers' answers, rank 0's first."""
        owed = self._owed(delivery.peer)
        assert owed is not None
        owed.answers[delivery.peer] = delivery
        if len(owed.answers) < len(self.names):
            return None
        self._commands.popleft()
        self._waits.end(WAIT)
        if self._commands:
            self._wait_for(self._commands[0].kind)
        return [owed.answers[name] for name in self.workers]

    def _begin_wait(self, command: str) -> None:
        self._commands.append(_Command(command))
        if len(self._commands) == 1:
            self._wait_for(command)

    def _wait_for(self, command: str) -> None:
        progress = self.progress.get(command, never)
        limit_s = self._limits_s.get(command, self._limit_s)
        self._waits.begin(WAIT, f"{', '.join(self.names)} to answer {command!r}", limit_s, progress)


def _given(shares: Sequence[list[TrainGroup]]) -> bool:
    """Return whether every group of every share brings its reference log-probabilities."""
    return all(group.has_reference for share in shares for group in share)
