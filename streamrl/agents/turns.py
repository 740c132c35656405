"""A call of the model, and the turn that answers it: what sessions and the endpoint's dialects exchange."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from streamrl.agents.episode import GeneratedTurn, TurnOrder
from streamrl.agents.rendering import ChatMessage, Rendered
from streamrl.agents.tool_calls import ParsedAnswer
from streamrl.rollouts.types import IntArray


class CallError(Exception):
    """A call that gets an error as its answer."""

    def __init__(self, status: int, code: str, text: str) -> None:
        super().__init__(text)
        self.status, self.code = status, code


@dataclass(frozen=True)
class Call:
    """A call of the model, as checked by the endpoint."""

    messages: list[ChatMessage]
    tools: list[dict[str, Any]]
    body: bytes
    """What makes two calls the same: a digest of everything that counts in them."""
    prompt_tokens: IntArray | None = None
    """Tokens in place of messages, shape [P] (`/inference/v1/generate`)."""
    idempotency_key: str | None = None
    attempt: int = 0
    """How many times the client says that it has tried the call before."""
    ignored: tuple[str, ...] = ()
    """Parameters of the client that the run decides."""
    unread: tuple[str, ...] = ()
    """Fields of the assistant's messages that the model is not shown."""
    reads_calls: bool = True
    """Whether calls of tools are looked for in the answer."""
    instructions: int = 0
    """Messages at its beginning that later calls do not go on from."""


@dataclass(eq=False)
class Turn:
    """One call of the model and its answer."""

    number: int
    """Position among the session's turns, from 0."""
    order: TurnOrder
    call: Call
    parent: Turn | None
    """The turn that it extends; None: it begins a row."""
    rendered: Rendered | None
    """Its prompt as text with stand-ins; None: the call gave tokens."""
    history: list[ChatMessage]
    """Messages of its prompt, with stand-ins for sampled answers."""
    started: float
    """Unix seconds."""
    note: str = ""
    """Why it begins a row, or a branch of one, in place of going on from an earlier turn; empty: nothing to say."""
    generated: GeneratedTurn | None = None
    answer: ChatMessage = field(default_factory=dict)
    """The assistant's message that the agent gets; empty while the turn runs."""
    parsed: ParsedAnswer | None = None
    finished: float | None = None
    """Unix seconds; None: it runs."""
    keys: set[str] = field(default_factory=set)
    """Idempotency keys of the calls that asked for it."""
    attempts: list[int] = field(default_factory=list)
    """Number of the latest attempt of each call without a key that asked for it."""
    clients: int = 0
    """Clients that wait for its answer at this moment."""
    delivered: bool = False
    """Whether a client got its answer."""
    known: float | None = None
    """Unix seconds from which an agent may know its answer: some of it was sent, or a call goes on from it; None: no
    agent does."""

    @property
    def counts(self) -> bool:
        """Whether it is part of the episode: it is finished, and an agent may know its answer."""
        return self.generated is not None and self.known is not None

    def become_known(self, now: float) -> None:
        """Note that an agent may know its answer from now on."""
        self.known = now if self.known is None else self.known

    def deliver(self, now: float) -> None:
        """Note that a client gets all of its answer."""
        self.become_known(now)
        self.delivered = True

    @property
    def tokens(self) -> IntArray:
        """Return prompt and output, shape [T]; the turn must be finished."""
        assert self.generated is not None
        return np.concatenate([self.order.prompt_tokens, self.generated.tokens])
