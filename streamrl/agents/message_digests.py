"""When two conversations are the same: digests of what counts in their messages, however a client writes them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from streamrl.agents.rendering import ChatMessage
from streamrl.agents.tool_calls import THOUGHT_BEGIN, THOUGHT_END

CALLS = 2
"""Place of the calls of tools in what counts in a message (`meaning`)."""


def digests(messages: Sequence[ChatMessage], tools: list[dict[str, Any]]) -> list[bytes]:
    """Return digests of the first 0, 1, ... messages under these tools, the same however a client writes them."""
    digest = hashlib.sha256(json.dumps(tools, sort_keys=True).encode()).digest()
    found = [digest]
    for message in messages:
        digest = digest_with(digest, meaning(message))
        found.append(digest)
    return found


def digest_with(digest: bytes, more: list[Any]) -> bytes:
    """Return the digest of what a digest stands for and of what follows."""
    return hashlib.sha256(digest + json.dumps(more, sort_keys=True).encode()).digest()


def meaning(message: ChatMessage) -> list[Any]:
    """Return what counts in a message: libraries drop, add and reorder fields that say nothing."""
    name = None if message["role"] == "assistant" else message.get("name")
    told = [message["role"], message["content"], _calls(message), message.get("tool_call_id"), name]
    return [*told, message.get("reasoning_content")]


def digest_of_split(digest: bytes, answer: ChatMessage) -> bytes:
    """Return the digest of an answer behind messages, the same whether or not its reasoning is split off.

    Libraries disagree about the line breaks around the two parts.
    """
    reasoning, _, rest = _with_reasoning(answer).rpartition(THOUGHT_END)
    return digest_with(digest, [reasoning.strip().removeprefix(THOUGHT_BEGIN).strip(), rest.strip(), _calls(answer)])


def has_reasoning(message: ChatMessage) -> bool:
    """Whether a message has the reasoning of an answer, in a field or in its text."""
    return message["role"] == "assistant" and bool(
        message.get("reasoning_content") or THOUGHT_END in message["content"]
    )


def distance(one: ChatMessage, other: ChatMessage) -> tuple[bool, bool]:
    """Return how far two forms of an answer are from each other; next to equal ones, one splits the other's text."""
    texts = [_with_reasoning(message).removeprefix(THOUGHT_BEGIN) for message in (one, other)]
    return meaning(one) != meaning(other), texts[0] != texts[1]


def _with_reasoning(answer: ChatMessage) -> str:
    """Return the text of an answer, behind its reasoning where that is in a field of its own."""
    text = str(answer["content"])
    return f"{answer['reasoning_content']}{THOUGHT_END}{text}" if answer.get("reasoning_content") else text


def _calls(message: ChatMessage) -> list[Any]:
    return [
        [call.get("id"), call["function"]["name"], _object(call["function"]["arguments"])]
        for call in message.get("tool_calls") or ()
    ]


def _object(arguments: Any) -> Any:
    if isinstance(arguments, str):
        try:
            return json.loads(arguments)
        except (ValueError, RecursionError):
            pass
    return arguments
