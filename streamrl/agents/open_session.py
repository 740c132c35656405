"""A session whose episode runs: the turns that are being generated, who waits for them, and what it waits for."""

from __future__ import annotations

import asyncio
import contextlib
import select
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from starlette.requests import Request

from streamrl.agents.episode import EpisodeOrder
from streamrl.agents.session import Session
from streamrl.agents.turns import Turn
from streamrl.rollouts.trajectory import EpisodeStep

TRANSPORT = "transport"
"""Name of the connection of a request in its `state`, where the server puts it."""
HUNG_UP = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR
"""Events of a connection whose client has closed it; POLLRDHUP, which only Linux has, comes first."""


@dataclass(frozen=True)
class EpisodeWait:
    """What an open episode waits for."""

    order: EpisodeOrder
    kind: Literal["model", "tool", "agent"]
    """'model': a turn is being generated; 'tool': the last answer called tools; 'agent': anything else."""
    name: str
    """The turn's id, or the tools that the last answer called; empty: it is not known."""
    since: float
    """Unix seconds."""


@dataclass
class OpenSession:
    """A session whose episode runs."""

    id: str
    session: Session
    opened: float
    """Unix seconds."""
    steps: list[EpisodeStep] = field(default_factory=list)
    tasks: dict[Turn, asyncio.Task[None]] = field(default_factory=dict)
    """What generates the turns, or has generated them."""
    clients: dict[Turn, list[Request]] = field(default_factory=dict)
    """Calls that wait for a turn at this moment."""
    calls: int = 0
    said: set[str] = field(default_factory=set)
    """Parameters of which a step says already that they are ignored."""
    unshown: set[str] = field(default_factory=set)
    """Fields of messages of which a step says already that the model is not shown them."""
    _zero: float = field(default_factory=lambda: time.time() - time.monotonic())
    """Unix seconds at which `time.monotonic` was 0."""

    def now(self) -> float:
        """Return unix seconds by a clock that nobody sets meanwhile, so that it tells what came first."""
        return self.at(time.monotonic())

    def at(self, monotonic: float) -> float:
        """Return what `now` said, in this process, when `time.monotonic` said something in any of this machine."""
        return self._zero + monotonic

    @contextlib.contextmanager
    def client(self, turn: Turn, request: Request) -> Iterator[None]:
        """Count a client that waits for a turn inside."""
        waiting = self.clients.setdefault(turn, [])
        waiting.append(request)
        turn.clients = len(waiting)
        try:
            yield
        finally:
            waiting.remove(request)
            turn.clients = len(waiting)

    def count_clients(self) -> None:
        """Leave out of the clients of all turns those that have gone, also if the event loop has not noticed it yet."""
        for turn, waiting in self.clients.items():
            turn.clients = sum(not hung_up(request) for request in waiting)

    def wait(self) -> EpisodeWait:
        """Return what the episode waits for."""
        order = self.session.order
        if running := [turn for turn, task in self.tasks.items() if not task.done()]:
            oldest = min(running, key=lambda turn: turn.started)
            return EpisodeWait(order, "model", oldest.order.turn_id, oldest.started)
        done = [turn for turn in self.session.turns if turn.finished is not None]
        if not done:
            return EpisodeWait(order, "agent", "", self.opened)
        last = max(done, key=lambda turn: turn.finished or 0.0)
        tools = [call["function"]["name"] for call in last.answer.get("tool_calls", ())]
        return EpisodeWait(order, "tool" if tools else "agent", ", ".join(tools), last.finished or 0.0)


def hung_up(request: Request) -> bool:
    """Whether a client has closed its connection, which the system knows before the event loop reads it."""
    transport = request.scope.get("state", {}).get(TRANSPORT)
    if transport is None:
        return False
    if transport.is_closing():
        return True
    connection = select.poll()
    connection.register(transport.get_extra_info("socket").fileno(), HUNG_UP)
    return bool(connection.poll(0))
