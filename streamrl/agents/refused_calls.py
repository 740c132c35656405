"""Conversations of an episode that ended by rule: calls that were refused because context or turns are used up.

A refusal counts until its conversation goes on all the same, as with an agent that shortens its messages and calls
again. Which calls are of one conversation is told by the turns that they extend, or else by what is said in them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from streamrl.agents.rendering import ChatMessage
from streamrl.agents.turns import Call, Turn

NO_ROOM, NO_TURNS = "context_length_exceeded", "max_turns_exceeded"
"""Codes of the refusals that end a conversation by rule."""
MOST_REFUSALS = 64
"""Refusals that a session remembers."""
LEAST_SHARED = 32
"""Characters with which two messages have to begin alike if one of them is to be the other, shortened."""


@dataclass(frozen=True, eq=False)
class _Refusal:
    """A call that was refused because context or turns are used up."""

    code: str
    call: Call
    parent: Turn | None
    """The turn that it would have extended; None: it would have begun a row, or that is not known."""
    at: float
    """Unix seconds."""
    goes_on: bool = False
    """Whether a turn with its first message preceded it: others may begin with that message, too."""

    def taken_back_by(self, turn: Turn) -> bool:
        """Whether a turn that began later is of the same conversation, so that its agent has got over the refusal.

        It is if one of the two extends what the other does, or else if they have the same system messages and share a
        message of the user or of a tool, which may be shortened. Sub-agents may begin alike, in any order of their
        calls: the first message counts only if the refused call was the first with it.
        """
        if self.parent is not None and turn.parent is not None:
            return turn.parent in _path(self.parent) or self.parent in _path(turn.parent)
        if not self.call.messages or not turn.call.messages:  # tokens
            return self.call.messages == turn.call.messages
        if _systems(self.call.messages) != _systems(turn.call.messages):
            return False
        ours, theirs = _told(self.call.messages)[int(self.goes_on) :], _told(turn.call.messages)
        return any(role == other and _shared(text, more) for role, text in ours for other, more in theirs)


class RefusedCalls:
    """The calls of a session that were refused because context or turns are used up, and that no later turn has taken
    back."""

    def __init__(self) -> None:
        self._refusals: list[_Refusal] = []

    @property
    def no_room(self) -> bool:
        """Whether context is used up in a conversation that did not go on since."""
        return any(refusal.code == NO_ROOM for refusal in self._refusals)

    def __bool__(self) -> bool:
        """Whether context or turns are used up in a conversation that did not go on since."""
        return bool(self._refusals)

    def add(self, code: str, call: Call, parent: Turn | None, now: float, turns: Iterable[Turn]) -> None:
        """Record a refusal.

        Args:
            code: `NO_ROOM` or `NO_TURNS`.
            call: the call.
            parent: the turn that it would have extended; None: it would have begun a row, or that is not known.
            now: unix seconds.
            turns: all turns of the session.
        """
        others = [one for one in self._refusals if one.call.body != call.body]
        first = _told(call.messages)[:1]
        goes_on = any(_told(turn.call.messages)[:1] == first for turn in turns)
        self._refusals = [*others, _Refusal(code, call, parent, now, goes_on)][-MOST_REFUSALS:]

    def begins(self, turn: Turn) -> None:
        """Take back the refusals of a conversation that goes on with a turn."""
        self._refusals = [refusal for refusal in self._refusals if not refusal.taken_back_by(turn)]

    def end(self, at: float) -> None:
        """Forget the refusals that came after the end of the agent, in unix seconds."""
        self._refusals = [refusal for refusal in self._refusals if refusal.at <= at]


def _path(turn: Turn | None) -> list[Turn]:
    """Return a turn and those that it goes on from."""
    found = []
    while turn is not None:
        found.append(turn)
        turn = turn.parent
    return found


def _told(messages: list[ChatMessage]) -> list[tuple[str, str]]:
    """Return role and text of what others than the model have said in a conversation."""
    return [(one["role"], one["content"]) for one in messages if one["role"] in ("user", "tool") and one["content"]]


def _systems(messages: list[ChatMessage]) -> list[str]:
    return [one["content"] for one in messages if one["role"] == "system"]


def _shared(one: str, other: str) -> bool:
    """Whether two texts are the same message, of which one may be shortened."""
    short, long = sorted((one, other), key=len)
    return short == long or (len(short) >= LEAST_SHARED and long.startswith(short))
