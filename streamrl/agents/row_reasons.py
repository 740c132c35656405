"""Why a call begins a row, or a branch of one: where it differs from the turn that it has most in common with."""

from __future__ import annotations

from streamrl.agents.message_digests import CALLS, digests, meaning
from streamrl.agents.rendering import ChatMessage
from streamrl.agents.turns import Call, Turn

NEWEST = 64
"""Turns with which a call is compared."""


class RowReasons:
    """Finds out why calls of a session begin rows.

    Messages are compared by digests, which are made once for each turn, and not before a second row begins.
    """

    def __init__(self) -> None:
        self._digests: dict[Turn, list[bytes]] = {}

    def why(self, call: Call, turns: list[Turn]) -> str:
        """Return why a call does not go on from the turn that it is nearest to; empty: it is near to none.

        Args:
            call: the call, with messages.
            turns: the turns before it.
        """
        found = digests(call.messages, [])
        recent = [turn for turn in turns[-NEWEST:] if turn.call.messages]
        shared = {turn: _shared(found, self._of(turn)) for turn in recent}
        near = max(recent, key=lambda turn: (shared[turn], _explains(call, turn, shared[turn])), default=None)
        if near is None:
            return ""
        if not (common := shared[near]):
            other = next((turn for turn in reversed(recent) if _only_system_differs(call, turn)), None)
            return f"another system text than turn {other.number}" if other is not None else ""
        which, before = f"turn {near.number}", len(near.call.messages)
        if common > before:
            if call.tools != near.call.tools:
                return f"other tools than {which}"
            return f"the answer of {which} was cut" if _was_cut(near) else ""
        if common == len(call.messages):
            return f"the messages of {which} once more" if common == before else f"fewer messages than {which}"
        if common < before:
            return f"messages[{common}] differs from that of {which}"
        if near.generated is None:
            return f"{which} had no answer yet"
        return f"messages[{common}] {_difference(call.messages[common], near)}"

    def _of(self, turn: Turn) -> list[bytes]:
        """Return digests of the first 0, 1, ... messages of a turn, its answer included once it is there."""
        found = self._digests.get(turn)
        whole = [*turn.call.messages, turn.answer] if turn.answer else turn.call.messages
        if found is None or len(found) <= len(whole):
            found = self._digests[turn] = digests(whole, [])
        return found


def _shared(some: list[bytes], others: list[bytes]) -> int:
    """Return how many messages two conversations begin with alike, by digests of their beginnings."""
    return max(n for n, (one, other) in enumerate(zip(some, others, strict=False)) if one == other)


def _explains(call: Call, turn: Turn, shared: int) -> int:
    """Return how well a turn explains a row, of those that share as many messages with its call."""
    if shared <= len(turn.call.messages):
        return 1
    return 2 if call.tools != turn.call.tools or _was_cut(turn) else 0  # 0: the call goes on from it


def _was_cut(turn: Turn) -> bool:
    return turn.generated is not None and turn.generated.finish_reason == "length"


def _only_system_differs(call: Call, turn: Turn) -> bool:
    """Whether two conversations begin alike but for a first system message, which either may lack."""
    first, second = (_without_system(messages) for messages in (call.messages, turn.call.messages))
    return bool(first and second) and meaning(first[0]) == meaning(second[0])


def _without_system(messages: list[ChatMessage]) -> list[ChatMessage]:
    return messages[1:] if messages and messages[0]["role"] == "system" else messages


def _difference(message: ChatMessage, turn: Turn) -> str:
    """Say how a message differs from the answer of the turn whose messages are before it."""
    answer = turn.answer
    if message["role"] != "assistant":
        return f"is not the answer of turn {turn.number}, which is missing"
    if message["content"] == answer["content"]:
        calls = meaning(message)[CALLS] != meaning(answer)[CALLS]
        return f"differs from the answer of turn {turn.number} in its {'calls of tools' if calls else 'reasoning'}"
    if answer["content"] and message["content"].startswith(answer["content"]):
        return f"is the answer of turn {turn.number} with text appended"
    return f"differs from the answer of turn {turn.number} in its text"
