"""Bodies of chat completions and of vLLM's generate: checked when they come in, and shaped as OpenAI and vLLM do.

The run decides how tokens are sampled, since the trainer has to know the distribution. What a client says about that
is ignored, and it is told so (`Call.ignored`). What would change the meaning of an answer, and cannot be given, is
refused.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Set
from typing import Any

import numpy as np

from streamrl.agents.episode import POLICY
from streamrl.agents.rendering import ChatMessage, ChatRenderer
from streamrl.agents.tool_calls import THOUGHT_END
from streamrl.agents.turns import Call, CallError, Turn
from streamrl.rollouts.plain_text import plain_text

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
USED = {"model", "messages", "tools", "stream", "stream_options", "n", "logprobs", "token_ids"}
SAYS_NOTHING = {"user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier", "request_id"}
SAYS_NOTHING |= {"cache_salt", "output_mode", "return_token_ids"}
"""Parameters without an effect on tokens: dropped without a word, and calls that differ in them alone are the same."""
HARMLESS = {
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
}
"""Values of parameters that ask for what is done anyway."""
_FORM = "only text is generated; ask for the form in the prompt, or describe a tool"
REFUSED = {
    **dict.fromkeys(("guided_json", "guided_choice", "guided_regex", "guided_grammar", "structured_outputs"), _FORM),
    "documents": "put them into the messages",
    "chat_template": "the run renders prompts with the model's own",
    "functions": "use tools",
    "function_call": "use tools",
    "audio": "answers are text",
    "web_search_options": "there is no web search",
    "prediction": "there is no predicted output",
    "features": "prompts are tokens",
    "content_parts": "prompts are tokens",
}
"""Parameters that cannot be given and whose absence would change what an answer means."""
ASK_NOTHING_IF_EMPTY = {"documents", "structured_outputs"}
"""Those of them that libraries send empty where nothing is asked for."""

REASONING = ("reasoning_content", "reasoning")
"""Names under which libraries send the reasoning of an answer that they have split off its text."""
READ_OF_ANSWERS = {"role", "content", "name", "tool_call_id", "tool_calls", "function_call", *REASONING}
SAYS_NOTHING_OF_ANSWERS = {"id", "index", "type", "status", "object"}


def read_chat(body: bytes, headers: dict[str, str], models: set[str]) -> tuple[Call, dict[str, Any]]:
    """Check the body of a call of `/v1/chat/completions`.

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
    return call_of(values, values, headers, models), values


def call_of(
    values: dict[str, Any],
    given: dict[str, Any],
    headers: dict[str, str],
    models: set[str],
    instructions: int = 0,
    says_nothing: Set[str] = frozenset(),
) -> Call:
    """Check a call that has the form of a chat completion.

    Args:
        values: the call in this form.
        given: the body that it was made of.
        headers: its headers, their names in lower case.
        models: names that the policy goes by.
        instructions: messages at its beginning that belong to this call alone.
        says_nothing: further parameters of the body without an effect on tokens.

    Raises:
        CallError: it is not what it must be, or asks for something that is not there.
    """
    _check_common(values, models)
    if values.get("response_format", {"type": "text"}) not in (None, {"type": "text"}):
        raise bad("response_format: only text is generated; ask for JSON in the prompt, or describe a tool")
    if not values.get("messages") or not isinstance(values["messages"], list):
        raise bad("messages: expected a list with at least one message")
    messages = [_message(message, f"messages[{n}]") for n, message in enumerate(values["messages"])]
    tools = [_tool(tool, f"tools[{n}]") for n, tool in enumerate(list_of(values, "tools"))]
    choice = values.get("tool_choice")
    ignored = [name for name in values if name not in USED | SAYS_NOTHING and values[name] is not None]
    harmless = [name for name, plain in HARMLESS.items() if values.get(name) in plain]
    drop = {*harmless, *ASK_NOTHING_IF_EMPTY, "top_logprobs", "response_format", "modalities", "chat_template_kwargs"}
    return Call(
        messages,
        tools,
        _digest(given, says_nothing),
        idempotency_key=headers.get("idempotency-key"),
        attempt=_attempt(headers),
        ignored=tuple(sorted(set(ignored) - drop)),
        unread=tuple(sorted({name for message in values["messages"] for name in _unread(message)})),
        reads_calls=choice != "none",
        instructions=instructions,
    )


def read_generate(
    body: bytes, headers: dict[str, str], models: set[str], vocabulary: int
) -> tuple[Call, dict[str, Any]]:
    """Check the body of a call of `/inference/v1/generate`, as vLLM has it: tokens in, tokens out.

    Args:
        body: the body as it came.
        headers: its headers, their names in lower case.
        models: names that the policy goes by.
        vocabulary: number of tokens of the tokenizer.

    Returns:
        The call, and the body as an object.

    Raises:
        CallError: the body is not what it must be, or asks for something that is not there.
    """
    values = object_of(body)
    _check_common({"model": POLICY, **{k: v for k, v in values.items() if v is not None}}, models)
    if values.get("stream"):
        raise bad("stream: /inference/v1/generate does not stream here")
    ids = values.get("token_ids")
    if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < vocabulary for i in ids):
        raise bad(f"token_ids: expected a list of token ids from 0 to {vocabulary - 1}, with at least one")
    sampling = values.get("sampling_params") or {}
    if not isinstance(sampling, dict) or (sampling.get("n") or 1) != 1:
        raise bad("sampling_params: expected an object, without n or with n = 1")
    _check_given(sampling)
    ignored = sorted({*sampling, *values} - USED - SAYS_NOTHING - {"sampling_params"})
    tokens = np.asarray(ids, dtype=np.int32)
    key, attempt = headers.get("idempotency-key"), _attempt(headers)
    return Call([], [], _digest(values), tokens, key, attempt, tuple(ignored)), values


def chat_answer(turn: Turn, renderer: ChatRenderer, with_logprobs: bool) -> dict[str, Any]:
    """Shape a finished turn as a `chat.completion`."""
    choice = {"index": 0, "message": {"refusal": None, **_message_of(turn)}, "finish_reason": _reason(turn)}
    choice["logprobs"] = {"content": logprobs_of(turn, renderer)} if with_logprobs else None
    return {**_head(turn, "chat.completion"), "choices": [choice], "usage": _usage(turn)}


def chat_chunks(turn: Turn, renderer: ChatRenderer, with_logprobs: bool, with_usage: bool) -> Iterator[dict[str, Any]]:
    """Shape a finished turn as the chunks of a stream, the first one (the role) left out."""
    message = _message_of(turn)
    delta: dict[str, Any] = {"content": message["content"]}
    if message.get("tool_calls"):
        delta["tool_calls"] = [{"index": n, **call} for n, call in enumerate(message["tool_calls"])]
    head = _head(turn, "chat.completion.chunk")
    logprobs = {"content": logprobs_of(turn, renderer)} if with_logprobs else None
    yield {**head, "choices": [{"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": None}]}
    yield {**head, "choices": [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": _reason(turn)}]}
    if with_usage:
        yield {**head, "choices": [], "usage": _usage(turn)}


def role_chunk(turn: Turn) -> dict[str, Any]:
    """Return the first chunk of a stream, which can be sent before anything is generated."""
    delta = {"role": "assistant", "content": ""}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    return {**_head(turn, "chat.completion.chunk"), "choices": [choice]}


def generate_answer(turn: Turn, renderer: ChatRenderer) -> dict[str, Any]:
    """Shape a finished turn as vLLM's `/inference/v1/generate` does."""
    assert turn.generated is not None
    choice = {
        "index": 0,
        "token_ids": turn.generated.tokens.tolist(),
        "logprobs": {"content": logprobs_of(turn, renderer)},
        "finish_reason": turn.generated.finish_reason,
    }
    return {"request_id": turn.order.turn_id, "output_mode": "tokens", "model": POLICY, "choices": [choice]}


def error_answer(error: CallError) -> dict[str, Any]:
    """Shape an error as OpenAI does."""
    return {"error": {"message": str(error), "type": error_type(error), "param": None, "code": error.code}}


def error_type(error: CallError) -> str:
    """Return what OpenAI calls the kind of an error."""
    return "invalid_request_error" if error.status < 500 else "server_error"


def bad(text: str) -> CallError:
    """Return the error of a body that is wrong."""
    return CallError(400, "invalid_request", text)


def object_of(body: bytes) -> dict[str, Any]:
    """Return a body that is a JSON object.

    Raises:
        CallError: it is something else.
    """
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):
        raise bad("the body is not JSON") from None
    if not isinstance(values, dict):
        raise bad("the body is not a JSON object")
    return values


def list_of(values: dict[str, Any], name: str) -> list[Any]:
    """Return a list of a body; one that is missing is empty.

    Raises:
        CallError: it is something else.
    """
    found = values.get(name)
    if found is not None and not isinstance(found, list):
        raise bad(f"{name}: expected a list")
    return found or []


def check_model(name: Any, models: set[str]) -> None:
    """Check the name of a model.

    Raises:
        CallError: the policy does not go by it.
    """
    if name not in [*models]:  # it may be anything, also what cannot be in a set
        names = " or ".join(repr(one) for one in sorted(models))
        text = f"there is no model {name!r:.99} here; the model that is trained is called {names}"
        raise CallError(404, "model_not_found", text)


def _check_common(values: dict[str, Any], models: set[str]) -> None:
    check_model(values.get("model"), models)
    if (values.get("n") or 1) != 1:
        raise bad("n: one answer per call; call again for another one")
    _check_given(values)
    if values.get("modalities") not in (None, ["text"]):
        raise bad("modalities: answers are text")
    if not isinstance(values.get("stream_options") or {}, dict):
        raise bad("stream_options: expected an object")
    if values.get("continue_final_message") or values.get("add_generation_prompt") is False:
        raise bad("continue_final_message: every answer is a message of its own, which cannot be begun for the model")
    if values.get("top_logprobs"):
        raise bad("top_logprobs: only the log-probabilities of the sampled tokens are known")


def _check_given(values: dict[str, Any]) -> None:
    for name, instead in REFUSED.items():
        value = values.get(name)
        if value is not None and (value or name not in ASK_NOTHING_IF_EMPTY):
            raise bad(f"{name}: {instead}")


def check_variables(values: dict[str, Any], variables: Mapping[str, Any]) -> None:
    """Check that a body has no other variables of the chat template than the run, under which everything is rendered.

    Args:
        values: the body.
        variables: those of the run (`model.chat_template_kwargs`).

    Raises:
        CallError: it has some.
    """
    given = values.get("chat_template_kwargs") or {}
    same = isinstance(given, dict) and all(name in variables and variables[name] == given[name] for name in given)
    if not same:
        raise bad("chat_template_kwargs: the run decides them; give them as model.chat_template_kwargs of the run file")


def _message(message: Any, where: str) -> ChatMessage:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in ROLES:
        raise bad(f"{where}.role: expected one of {', '.join(ROLES)}, got {role!r:.99}")
    found: ChatMessage = {"role": ROLES[role], "content": text_of_parts(message.get("content"), f"{where}.content")}
    for name in ("name", "tool_call_id"):
        if isinstance(message.get(name), str):
            found[name] = plain_text(message[name])
    if role == "assistant" and message.get("function_call"):
        raise bad(f"{where}.function_call: use tool_calls")
    if role == "assistant" and (reasoning := next(filter(None, map(message.get, REASONING)), None)):
        text = text_of_parts(reasoning, f"{where}.reasoning_content")
        if THOUGHT_END not in found["content"]:  # else its text has the reasoning already
            found["reasoning_content"] = text
    if role == "assistant" and message.get("tool_calls"):
        calls = list_of(message, "tool_calls")
        found["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(calls)]
    return found


def _unread(message: dict[str, Any]) -> Iterator[str]:
    """Yield the fields of a message of the assistant that say something, but are not shown to the model."""
    for name in message if message["role"] == "assistant" else ():
        value = message[name]
        says = any(value.values()) if isinstance(value, dict) else bool(value)
        if says and name not in READ_OF_ANSWERS | SAYS_NOTHING_OF_ANSWERS:
            yield plain_text(name)


def text_of_parts(content: Any, where: str) -> str:
    """Return the text of a message.

    Raises:
        CallError: a part of it is no text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return plain_text(content)
    if not isinstance(content, list):
        raise bad(f"{where}: expected a text or a list of parts")
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise bad(f"{where}: the model reads text only, not {kind!r:.99}")
    return "".join(plain_text(part["text"]) for part in content)


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    name, arguments = (function.get("name"), function.get("arguments")) if isinstance(function, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise bad(f"{where}: expected a function with a name and arguments, both texts")
    names = {"name": plain_text(name), "arguments": plain_text(arguments)}
    return {"id": plain_text(str(call.get("id", ""))), "type": "function", "function": names}


def _tool(tool: Any, where: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad(f'{where}: expected {{"type": "function", "function": {{"name": ...}}}}')
    cleaned: dict[str, Any] = json.loads(plain_text(json.dumps(tool, ensure_ascii=False)))
    return cleaned


def _digest(values: dict[str, Any], says_nothing: Set[str] = frozenset()) -> bytes:
    left_out = {"stream", "stream_options", *SAYS_NOTHING, *says_nothing}
    same = {name: value for name, value in values.items() if name not in left_out}
    return hashlib.sha256(json.dumps(same, sort_keys=True).encode()).digest()


def _attempt(headers: dict[str, str]) -> int:
    """Return how many times the packages openai and anthropic have tried the call before; others do not say."""
    count = headers.get("x-stainless-retry-count", "0")
    return int(count) if re.fullmatch("[0-9]{1,9}", count) else 0


def head_id(turn: Turn) -> str:
    """Return the turn's id in answers; clients write some ids into paths, so it has no slash."""
    return turn.order.turn_id.replace("/", "-")


def _head(turn: Turn, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{head_id(turn)}", "object": kind, "created": int(turn.started), "model": POLICY}


def _message_of(turn: Turn) -> ChatMessage:
    """Return the answer as OpenAI writes it: no content where there are only calls of tools."""
    message = dict(turn.answer)
    if message.get("tool_calls") and not message["content"]:
        message["content"] = None
    return message


def _reason(turn: Turn) -> str:
    assert turn.generated is not None
    return "tool_calls" if turn.answer.get("tool_calls") else turn.generated.finish_reason


def _usage(turn: Turn) -> dict[str, int]:
    assert turn.generated is not None
    prompt, completion = len(turn.order.prompt_tokens), len(turn.generated.tokens)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def logprobs_of(turn: Turn, renderer: ChatRenderer) -> list[dict[str, Any]]:
    """Return the sampled tokens of a finished turn with their log-probabilities."""
    assert turn.generated is not None
    tokens, values = turn.generated.tokens, turn.generated.logprobs.tolist()
    return [
        {"token": text, "logprob": value, "bytes": None if held is None else list(held), "top_logprobs": []}
        for text, held, value in zip(renderer.token_texts(tokens), renderer.token_bytes(tokens), values, strict=True)
    ]
