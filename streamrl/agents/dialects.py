"""The forms in which agents may call the model: what each reads, and how it answers, at once or as a stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from streamrl.agents.chat_calls import chat_answer, chat_chunks, error_answer, read_chat, role_chunk
from streamrl.agents.messages_calls import (
    messages_answer,
    messages_begin,
    messages_error,
    messages_events,
    read_messages,
)
from streamrl.agents.rendering import ChatRenderer
from streamrl.agents.responses_calls import read_responses, responses_answer, responses_begin, responses_events
from streamrl.agents.turns import Call, CallError, Turn

CallBody = dict[str, Any]
"""A call as the client has written it."""


@dataclass(frozen=True)
class Dialect:
    """One form of calls and answers."""

    path: str
    """Path of its calls, behind the session."""
    read: Callable[[bytes, dict[str, str], set[str], Sequence[Turn]], tuple[Call, CallBody]]
    """Checks a body, given its headers, the model's names and the turns of the episode."""
    answer: Callable[[Turn, ChatRenderer, CallBody], CallBody]
    """Shapes a finished turn."""
    begin: Callable[[Turn], Iterable[str]]
    """What a stream sends before anything is generated."""
    end: Callable[[Turn, ChatRenderer, CallBody], Iterable[str]]
    """What it sends once the turn is finished."""
    error: Callable[[CallError], CallBody] = error_answer
    """Shapes an error."""
    failure: Callable[[CallError], str] = lambda error: _data(error_answer(error))
    """What a stream sends if the turn cannot be generated."""
    waits: str = ": waiting\n\n"
    """What a stream sends now and then while the turn is generated: a comment, which clients skip."""


def _data(values: CallBody) -> str:
    return f"data: {json.dumps(values)}\n\n"


def _named(events: Iterable[CallBody]) -> Iterator[str]:
    for event in events:
        yield f"event: {event['type']}\n{_data(event)}"


def _chunks(turn: Turn, renderer: ChatRenderer, body: CallBody) -> Iterator[str]:
    usage = bool((body.get("stream_options") or {}).get("include_usage"))
    for chunk in chat_chunks(turn, renderer, bool(body.get("logprobs")), usage):
        yield _data(chunk)
    yield "data: [DONE]\n\n"


def _failed_response(error: CallError) -> str:
    told = {"type": "error", "code": error.code, "message": str(error), "param": None, "sequence_number": 2}
    return next(_named([told]))


CHAT = Dialect(
    "/v1/chat/completions",
    lambda body, headers, models, turns: read_chat(body, headers, models),
    lambda turn, renderer, body: chat_answer(turn, renderer, bool(body.get("logprobs"))),
    lambda turn: [_data(role_chunk(turn))],
    _chunks,
)
RESPONSES = Dialect(
    "/v1/responses",
    read_responses,
    responses_answer,
    lambda turn: _named(responses_begin(turn)),
    lambda turn, renderer, body: _named(responses_events(turn, renderer, body)),
    failure=_failed_response,
)
MESSAGES = Dialect(
    "/v1/messages",
    lambda body, headers, models, turns: read_messages(body, headers, models),
    lambda turn, renderer, body: messages_answer(turn),
    lambda turn: _named(messages_begin(turn)),
    lambda turn, renderer, body: _named(messages_events(turn)),
    messages_error,
    lambda error: next(_named([messages_error(error)])),
    next(_named([{"type": "ping"}])),
)
DIALECTS = (CHAT, RESPONSES, MESSAGES)


def dialect_of(path: str) -> Dialect:
    """Return the dialect in which a path is answered, with an error too."""
    return next((one for one in DIALECTS if path.endswith(one.path)), CHAT)
