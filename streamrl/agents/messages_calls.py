"""Bodies of Anthropic's Messages API, as far as text and functions go: read as chat completions, and answered.

A conversation is the same one however a client writes it, so turns are extended as those of chat completions are. A
message of the user with results of tools becomes one message for each result and one for the rest of its text. What is
not text and no call of a function (images, documents, thinking, tools that a server runs) is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from streamrl.agents.chat_calls import bad, call_of, error_type, head_id, list_of, object_of, text_of_parts
from streamrl.agents.episode import POLICY
from streamrl.agents.turns import Call, CallError, Turn

USED = {"model", "messages", "system", "tools", "tool_choice", "stream", "max_tokens", "metadata", "service_tier"}
REFUSED = {
    "output_config": "answers are text; ask for JSON in the prompt, or describe a tool",
    "output_format": "answers are text; ask for JSON in the prompt, or describe a tool",
    "mcp_servers": "connect to it in the agent, and describe its tools",
    "container": "there is none",
}
CHOICES = {"auto": "auto", "none": "none", "any": "required", "tool": "required"}


def read_messages(body: bytes, headers: dict[str, str], models: set[str]) -> tuple[Call, dict[str, Any]]:
    """Check the body of a call of `/v1/messages`.

    Args:
        body: the body as it came.
        headers: its headers, their names in lower case.
        models: names that the policy goes by.

    Returns:
        The call, and the body as an object.

    Raises:
        CallError: the body is not what it must be, or asks for something that is not there.
    """
    values = object_of(body)
    for name, instead in REFUSED.items():
        if values.get(name) is not None:
            raise bad(f"{name}: {instead}")
    if not values.get("messages"):
        raise bad("messages: expected a list with at least one message")
    messages: list[dict[str, Any]] = []
    if values.get("system"):
        messages.append({"role": "system", "content": _text(values["system"], "system")})
    for number, message in enumerate(list_of(values, "messages")):
        messages += _messages(message, f"messages[{number}]")
    choice = values.get("tool_choice") or {"type": "auto"}
    if not isinstance(choice, dict) or choice.get("type") not in [*CHOICES]:
        raise bad(f"tool_choice.type: expected one of {', '.join(CHOICES)}")
    chat = {name: value for name, value in values.items() if name not in USED}
    if values.get("thinking") == {"type": "disabled"}:
        chat.pop("thinking", None)
    chat |= {
        "model": values.get("model"),
        "messages": messages,
        "tools": [_tool(tool, f"tools[{number}]") for number, tool in enumerate(list_of(values, "tools"))],
        "tool_choice": CHOICES[choice["type"]],
    }
    call = call_of(chat, values, headers, models)
    if call.messages[-1]["role"] == "assistant":
        raise bad("messages: the last one is the assistant's, but an answer cannot be begun for the model")
    return call, values


def messages_answer(turn: Turn) -> dict[str, Any]:
    """Shape a finished turn as a `message`."""
    return {**_message(turn), "content": _blocks(turn), "stop_reason": _reason(turn), "usage": _usage(turn)}


def messages_begin(turn: Turn) -> Iterator[dict[str, Any]]:
    """Return the events of a stream that can be sent before anything is generated."""
    yield {"type": "message_start", "message": _message(turn)}


def messages_events(turn: Turn) -> Iterator[dict[str, Any]]:
    """Shape a finished turn as the further events of a stream."""
    for index, block in enumerate(_blocks(turn)):
        if block["type"] == "text":
            begin: dict[str, Any] = {"type": "text", "text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            begin = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
        yield {"type": "content_block_start", "index": index, "content_block": begin}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ended = {"stop_reason": _reason(turn), "stop_sequence": None}
    yield {"type": "message_delta", "delta": ended, "usage": _usage(turn)}
    yield {"type": "message_stop"}


def messages_error(error: CallError) -> dict[str, Any]:
    """Shape an error as Anthropic does, with the code of this endpoint."""
    kind = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
    told = kind.get(error.status, "api_error" if error.status >= 500 else error_type(error))
    return {"type": "error", "error": {"type": told, "message": str(error), "code": error.code}}


def _messages(message: Any, where: str) -> list[dict[str, Any]]:
    """Return a message as those of chat completions."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant", "system"):
        raise bad(f"{where}.role: expected user, assistant or system, got {role!r:.99}")
    content = message.get("content")
    if not isinstance(content, list):
        return [{"role": role, "content": _text(content, f"{where}.content")}]
    found: list[dict[str, Any]] = []
    texts, calls = [], []
    for number, block in enumerate(content):
        place = f"{where}.content[{number}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            texts.append(block)
        elif kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": str(block.get("id", "")), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            result = _text(block.get("content") or "", f"{place}.content")
            found.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": result})
        else:
            raise bad(f"{place}: the model reads text and results of tools only, not {kind!r:.99}")
    if texts or calls or not found:
        found.append({"role": role, "content": text_of_parts(texts, f"{where}.content")})
    if calls:
        found[-1]["tool_calls"] = calls
    return found


def _text(content: Any, where: str) -> str:
    if not isinstance(content, str | list):
        raise bad(f"{where}: expected a text or a list of blocks")
    return text_of_parts(content, where)


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type", "custom") not in ("custom", None):
        raise bad(f"{where}: the agent has to call its tools itself; expected one with name and input_schema")
    parameters = tool.get("input_schema")
    if not isinstance(tool.get("name"), str) or not isinstance(parameters, dict):
        raise bad(f"{where}: expected a name and an input_schema")
    described = {"name": tool["name"], "description": tool.get("description") or "", "parameters": parameters}
    return {"type": "function", "function": described}


def _message(turn: Turn) -> dict[str, Any]:
    usage = {"input_tokens": len(turn.order.prompt_tokens), "output_tokens": 0}
    told = {"id": f"msg_{head_id(turn)}", "type": "message", "role": "assistant", "model": POLICY, "content": []}
    return {**told, "stop_reason": None, "stop_sequence": None, "usage": usage}


def _blocks(turn: Turn) -> list[dict[str, Any]]:
    """Return the blocks of an answer; a text of nothing is none, as a client could not send it back."""
    text, blocks = turn.answer["content"], []
    if text:
        blocks.append({"type": "text", "text": text})
    for call in turn.answer.get("tool_calls", ()):
        function = call["function"]
        given = json.loads(function["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": given})
    return blocks


def _reason(turn: Turn) -> str:
    assert turn.generated is not None
    if turn.answer.get("tool_calls"):
        return "tool_use"
    return "max_tokens" if turn.generated.finish_reason == "length" else "end_turn"


def _usage(turn: Turn) -> dict[str, int]:
    assert turn.generated is not None
    cached = turn.generated.cached_tokens
    prompt, completion = len(turn.order.prompt_tokens), len(turn.generated.tokens)
    return {"input_tokens": prompt - cached, "cache_read_input_tokens": cached, "output_tokens": completion}
