"""The trainer's ranks as one: a command goes to all, and is done when all have answered."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from streamrl.errors import StartAgain
from streamrl.protocol.controller_trainer import MicroBatch, Prepare, Train
from streamrl.protocol.message import TypedMessage, kind_of, wire
from streamrl.rollouts.micro_batch import TrainGroup, to_wire
from streamrl.transport.deadlines import WaitRegistry
from streamrl.transport.endpoint import Delivery, Hub
from streamrl.transport.wire import Arrays

WAIT = "trainer"


class Trainers:
    """Sends commands, one at a time."""

    def __init__(self, hub: Hub, waits: WaitRegistry, ranks: int, limit_s: float, sharing: int = 1) -> None:
        """
        Args:
            hub: to send them by.
            waits: for their answers.
            ranks: of the trainer.
            limit_s: for each answer.
            sharing: adjacent ranks that share each layer (tensor parallel): they get the same groups.
        """
        self.names = [f"trainer-{rank}" for rank in range(ranks)]
        self.workers = self.names[::sharing]
        """One of each such set; what it answers stands for all of them."""
        self._sharing = sharing
        self._hub, self._waits, self._limit_s = hub, waits, limit_s
        self._answers: dict[str, Delivery] = {}
        self._doing: str | None = None

    @property
    def busy(self) -> bool:
        """Whether a command is being worked on."""
        return self._doing is not None

    async def ask(self, command: TypedMessage) -> None:
        """Sends every rank a command."""
        kind, body = wire(command)
        self._expect(kind)
        for name in self.names:
            await self._send(name, kind, body)

    async def train(self, shares: Sequence[list[TrainGroup]], is_last: bool) -> None:
        """Sends every worker its share of a micro-batch.

        The reference's log-probabilities are taken from the groups if every one has them, on all ranks or on none:
        computing them is a collective.
        """
        given = all(group.has_reference for share in shares for group in share)
        await self._deal(functools.partial(Train, is_last=is_last, reference_given=given), shares)

    async def prepare(self, shares: Sequence[list[TrainGroup]]) -> None:
        """Asks every worker for the reference's log-probabilities of its share, to be answered as
        `reference_logprobs`."""
        await self._deal(Prepare, shares)

    async def _deal(self, command: Callable[..., MicroBatch], shares: Sequence[list[TrainGroup]]) -> None:
        if len(shares) != len(self.workers):
            raise ValueError(f"{len(shares)} shares for {len(self.workers)} workers")
        micro = [to_wire(share) for share in shares]
        self._expect(kind_of(command(groups=[], advantages=[], has_reference=[])))
        for rank, name in enumerate(self.names):
            body, arrays = micro[rank // self._sharing]
            await self._send(name, *wire(command(**body)), arrays)

    async def _send(self, name: str, command: str, body: dict[str, Any], arrays: Arrays | None = None) -> None:
        """
        Raises:
            StartAgain: the rank has gone.
        """
        try:
            await self._hub.send(name, command, body, arrays)
        except KeyError:
            raise StartAgain(f"{name} has gone") from None

    def answered(self, delivery: Delivery) -> list[Delivery] | None:
        """A rank has answered; with the last one, the workers' answers, rank 0's first."""
        self._answers[delivery.peer] = delivery
        if len(self._answers) < len(self.names):
            return None
        self._doing = None
        self._waits.end(WAIT)
        return [self._answers[name] for name in self.workers]

    def _expect(self, command: str) -> None:
        self._answers, self._doing = {}, command
        self._waits.begin(WAIT, f"{', '.join(self.names)} to answer {command!r}", self._limit_s)
