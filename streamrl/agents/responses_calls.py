"""Bodies of OpenAI's Responses API, as far as text and functions go: read as chat completions, and answered.

A conversation is the same one however a client writes it, so turns are extended as those of chat completions are. A
client sends all items again, or names the response that it continues (`previous_response_id`): every response of an
episode is kept while the episode runs. Reasoning, images, files and tools that a server runs are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from typing import Any

from streamrl.agents.chat_calls import bad, call_of, head_id, list_of, logprobs_of, object_of, text_of_parts
from streamrl.agents.episode import POLICY
from streamrl.agents.rendering import ChatRenderer
from streamrl.agents.turns import Call, Turn

USED = {"model", "input", "instructions", "tools", "tool_choice", "stream", "previous_response_id", "text"}
SAYS_NOTHING = {"include", "truncation", "max_tool_calls", "stream_options", "prompt_cache_retention"}
LOGPROBS = "message.output_text.logprobs"
"""What `include` may have here; other things, such as encrypted reasoning, no answer has."""
REFUSED = {
    "background": "answers are awaited",
    "conversation": "send the items, or previous_response_id",
    "prompt": "there are no stored prompts",
}
TEXTS = ("input_text", "output_text", "text")
PREFIX = "resp_"


def read_responses(
    body: bytes, headers: dict[str, str], models: set[str], turns: Sequence[Turn]
) -> tuple[Call, dict[str, Any]]:
    """Check the body of a call of `/v1/responses`.

    Args:
        body: the body as it came.
        headers: its headers, their names in lower case.
        models: names that the policy goes by.
        turns: the episode's turns, which `previous_response_id` may name.

    Returns:
        The call, and the body as an object.

    Raises:
        CallError: the body is not what it must be, or asks for something that is not there.
    """
    values = object_of(body)
    for name, instead in REFUSED.items():
        if values.get(name):
            raise bad(f"{name}: {instead}")
    form = values.get("text") or {}
    if not isinstance(form, dict) or form.get("format", {"type": "text"}) not in (None, {"type": "text"}):
        raise bad("text.format: only text is generated; ask for JSON in the prompt, or describe a tool")
    instructions = values.get("instructions")
    messages = _before(values.get("previous_response_id"), turns)
    if instructions is not None:
        messages.insert(0, {"role": "system", "content": text_of_parts(instructions, "instructions")})
    given = values.get("input")
    if not given or not isinstance(given, str | list):
        raise bad("input: expected a text or a list with at least one item")
    alone = {
        call["id"]
        for turn in turns
        if turn.answer and not turn.answer["content"]
        for call in turn.answer.get("tool_calls", ())
    }
    for number, item in enumerate([{"role": "user", "content": given}] if isinstance(given, str) else given):
        _append(messages, item, f"input[{number}]", alone)
    chat = {name: value for name, value in values.items() if name not in USED | SAYS_NOTHING}
    chat |= {
        "model": values.get("model"),
        "messages": messages,
        "tools": [_tool(tool, f"tools[{number}]") for number, tool in enumerate(list_of(values, "tools"))],
        "tool_choice": values.get("tool_choice"),
    }
    ignored = [f"include {name!s:.99}" for name in list_of(values, "include") if name != LOGPROBS]
    if values.get("truncation") not in (None, "disabled"):
        ignored.append("truncation")
    call = call_of(chat, values, headers, models, int(instructions is not None), SAYS_NOTHING)
    return replace(call, ignored=(*call.ignored, *ignored)), values


def responses_answer(turn: Turn, renderer: ChatRenderer, body: dict[str, Any]) -> dict[str, Any]:
    """Shape a finished turn as a `response`."""
    assert turn.generated is not None
    cut = turn.generated.finish_reason == "length"
    prompt, completion = len(turn.order.prompt_tokens), len(turn.generated.tokens)
    usage = {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": turn.generated.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + completion,
    }
    return {
        **_response(turn, "incomplete" if cut else "completed"),
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _items(turn, renderer, body),
        "usage": usage,
    }


def responses_begin(turn: Turn) -> Iterator[dict[str, Any]]:
    """Return the events of a stream that can be sent before anything is generated."""
    for number, kind in enumerate(("created", "in_progress")):
        yield {"type": f"response.{kind}", "sequence_number": number, "response": _response(turn, "in_progress")}


def responses_events(turn: Turn, renderer: ChatRenderer, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Shape a finished turn as the further events of a stream."""
    events: list[dict[str, Any]] = []
    for index, item in enumerate(_items(turn, renderer, body)):
        place = {"item_id": item["id"], "output_index": index}
        if item["type"] == "message":
            (part,) = item["content"]
            logprobs = part["logprobs"]
            begin = {**item, "status": "in_progress", "content": []}
            part_at = {**place, "content_index": 0}
            inside = [
                {"type": "response.content_part.added", **part_at, "part": {**part, "text": "", "logprobs": []}},
                {"type": "response.output_text.delta", **part_at, "delta": part["text"], "logprobs": logprobs},
                {"type": "response.output_text.done", **part_at, "text": part["text"], "logprobs": logprobs},
                {"type": "response.content_part.done", **part_at, "part": part},
            ]
        else:
            begin = {**item, "status": "in_progress", "arguments": ""}
            kind, arguments = "response.function_call_arguments", item["arguments"]
            inside = [
                {"type": f"{kind}.delta", **place, "delta": arguments},
                {"type": f"{kind}.done", **place, "name": item["name"], "arguments": arguments},
            ]
        events.append({"type": "response.output_item.added", "output_index": index, "item": begin})
        events += [*inside, {"type": "response.output_item.done", "output_index": index, "item": item}]
    answer = responses_answer(turn, renderer, body)
    events.append({"type": f"response.{answer['status']}", "response": answer})
    for number, event in enumerate(events, start=2):
        yield {**event, "sequence_number": number}


def _before(name: Any, turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Return the messages of an earlier response, without its instructions, which do not carry over."""
    if name is None:
        return []
    for turn in turns:
        if turn.answer and name == PREFIX + head_id(turn):
            return [*turn.call.messages[turn.call.instructions :], turn.answer]
    raise bad(f"previous_response_id: this episode has no response {name!r:.99}")


def _append(messages: list[dict[str, Any]], item: Any, where: str, alone: Set[str]) -> None:
    """Append an item to the messages of chat completions.

    A call of a function belongs to the text before it, unless it is one of `alone`: ids of calls of answers that have
    no text.
    """
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message":
        messages.append({"role": item.get("role"), "content": _text(item.get("content"), f"{where}.content")})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": str(item.get("call_id", "")), "type": "function", "function": function}
        last = messages[-1] if messages else {}
        if last.get("role") != "assistant" or (last["content"] and call["id"] in alone):
            messages.append({"role": "assistant", "content": ""})
        messages[-1] = {**messages[-1], "tool_calls": [*messages[-1].get("tool_calls", ()), call]}
    elif kind == "function_call_output":
        text, call_id = _text(item.get("output"), f"{where}.output"), str(item.get("call_id", ""))
        messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
    else:
        raise bad(f"{where}: the model reads messages, calls of functions and their output only, not {kind!r:.99}")


def _text(content: Any, where: str) -> str:
    """Return the text of parts, which have several kinds of text here."""
    if isinstance(content, list):
        content = [{**p, "type": "text"} if isinstance(p, dict) and p.get("type") in TEXTS else p for p in content]
    return text_of_parts(content, where)


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise bad(f'{where}: the agent has to call its tools itself; expected {{"type": "function", "name": ...}}')
    described = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": described}


def _response(turn: Turn, status: str) -> dict[str, Any]:
    return {
        "id": PREFIX + head_id(turn),
        "object": "response",
        "created_at": int(turn.started),
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": POLICY,
        "output": [],
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
    }


def _items(turn: Turn, renderer: ChatRenderer, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the items of an answer; its text has the log-probabilities of all tokens, if asked for."""
    text, calls, name = turn.answer["content"], turn.answer.get("tool_calls", ()), head_id(turn)
    items: list[dict[str, Any]] = []
    if text or not calls:
        asked = LOGPROBS in list_of(body, "include")
        logprobs = logprobs_of(turn, renderer) if asked else []
        given = [{**one, "bytes": one["bytes"] or []} for one in logprobs]  # a list always, here
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": given}
        told = {"id": f"msg_{name}", "type": "message", "role": "assistant", "status": "completed"}
        items.append({**told, "content": [part]})
    for number, call in enumerate(calls):
        told = {"id": f"fc_{name}_{number}", "type": "function_call", "call_id": call["id"], "status": "completed"}
        items.append({**told, **call["function"]})
    return items
