"""Tool calls in sampled text: how they are found, and how tools are described to a model whose template knows none.

A family is one way to write calls. `TOOL_FAMILIES` lists those that are known; another one is one more entry. Which
family a model uses is found by having its template render a call and reading that back (`ChatRenderer`), so nothing
is assumed from a model's name. A model whose template renders no tools, or renders calls that no family reads, gets
the text protocol: tools are described in the system message, calls are written as in the Hermes family, results come
as user messages.

Calls are looked for behind the reasoning only: what a model drafts there, or says there about calls, is none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from streamrl.rollouts.plain_text import plain_text

CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
THOUGHT_BEGIN, THOUGHT_END = "<think>", "</think>"
ARGUMENT_KEYS = ("arguments", "parameters")
"""Where a JSON call has its arguments: each family has one of them, and models write the other one, too."""
INSTRUCTIONS = f"""You can use the tools below. To call one, write its name and arguments like this:
{CALL_BEGIN}
{{"name": "tool_name", "arguments": {{"argument": "value"}}}}
{CALL_END}
The result comes with the next message. The tools:
"""

MOST_NESTING = 100
"""Most levels of the arguments of a call; whoever reads them back may have less of a stack than is left here."""
UNENDED = f"the call is in reasoning that does not end: no {THOUGHT_END}"
TOO_DEEP = "the call is nested too deeply"
NOT_FINITE = "the call has a number that JSON has not: NaN or infinity"
ANY = "any"
"""Type of a parameter that may be anything."""
WRONG_FORM = "the call does not have the form that the model's template writes"

Tools = Sequence[Mapping[str, Any]]
"""Tools as in the chat API."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool that the model has written."""

    name: str
    arguments: str
    """The arguments: a JSON object as text."""


@dataclass(frozen=True)
class ParsedAnswer:
    """An answer taken apart: the text outside of the calls, and the calls."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    malformed: str = ""
    """Why the answer was left as it is although it begins a call; empty: nothing is wrong."""


def _load(text: str) -> Any:
    """Read JSON.

    Raises:
        ValueError: the text is no JSON, or nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None


def _json_call(value: Any) -> ToolCall:
    """Return the call that a JSON value is.

    Raises:
        ValueError: it is not an object with a name and an object of arguments.
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise ValueError('a call is a JSON object with "name" and "arguments"')
    key = next((key for key in ARGUMENT_KEYS if key in value), "")
    arguments = value[key] if key else {}
    if isinstance(arguments, str):  # some models write the arguments as JSON in JSON, as the API of OpenAI has it
        arguments = _load(arguments)
    if not isinstance(arguments, dict):
        raise ValueError(f'"{key}" of a call is a JSON object')
    return _call(value["name"], arguments)


def _call(name: str, arguments: dict[str, Any]) -> ToolCall:
    """Return a call with its arguments as JSON, both fit to be sent: `"\\ud83d"` in JSON is half a character.

    Raises:
        ValueError: they are nested too deeply, or have a number that is not finite.
    """
    level: list[Any] = [arguments]
    for _ in range(MOST_NESTING):
        inside = [one.values() if isinstance(one, dict) else one for one in level]
        if not (level := [one for values in inside for one in values if isinstance(one, dict | list)]):
            break
    else:
        raise ValueError(TOO_DEEP)
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise ValueError(NOT_FINITE) from None
    return ToolCall(plain_text(name), plain_text(written))


def _after_reasoning(text: str) -> tuple[str, str]:
    """Cut an answer behind its last `THOUGHT_END`; where the prompt began the reasoning, the answer only ends it.

    One that stands in a call, with the call's end as the next tag behind it, is text of an argument.
    """
    outside = end = 0
    for tag in re.finditer(f"{THOUGHT_END}|{CALL_BEGIN}|{CALL_END}", text):
        if tag[0] == THOUGHT_END:
            end = tag.end()
        elif tag[0] == CALL_BEGIN:
            outside = end
        else:
            end = outside
    return text[:end], text[end:]


def parse_hermes(text: str) -> ParsedAnswer:
    """Find calls of the form `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen 2.5 and 3)."""
    return _parse_between_tags(text, lambda body: _json_call(_load(body)))


def _parse_between_tags(text: str, read: Callable[[str], ToolCall]) -> ParsedAnswer:
    """Find the calls between `CALL_BEGIN` and `CALL_END`, each read by `read` (ValueError: it is malformed)."""
    thought, answer = _after_reasoning(text)
    if CALL_BEGIN not in answer:
        return ParsedAnswer(text)
    if answer.lstrip().startswith(THOUGHT_BEGIN):  # a draft may be in it, so the model has to say what it wants
        return ParsedAnswer(text, malformed=UNENDED)
    content, *parts = answer.split(CALL_BEGIN)
    content = thought + content
    calls = []
    for part in parts:
        body, end, after = part.partition(CALL_END)
        if not end:
            return ParsedAnswer(text, malformed=f"{CALL_BEGIN} without {CALL_END}")
        try:
            calls.append(read(body))
        except ValueError as error:
            return ParsedAnswer(text, malformed=str(error))
        content += after
    return ParsedAnswer(content.strip(), tuple(calls))


def parse_llama3(text: str, tools: Tools = ()) -> ParsedAnswer:
    """Find a call of the form `{"name": ..., "parameters": {...}}` that is the whole answer (Llama 3.1 and later)."""
    # an answer that begins with JSON has no reasoning; what would end it is text of an argument
    thought, answer = ("", text) if text.lstrip().startswith("{") else _after_reasoning(text)
    whole = answer.strip()
    if not whole.startswith("{"):
        return ParsedAnswer(text)
    meant = re.match(r'\{\s*("type"\s*:\s*"function"\s*,\s*)?"name"\s*:', whole) is not None
    try:
        value = _load(whole)
        meant = _means_call(value, tools)
        if meant:
            return ParsedAnswer(thought.strip(), (_json_call(value),))
    except ValueError as error:
        return ParsedAnswer(text, malformed=str(error) if meant else "")
    return ParsedAnswer(text)


def _means_call(value: dict[str, Any], tools: Tools) -> bool:
    """Return whether an object is a call; without tags around it, it may as well be an answer that is JSON."""
    if not isinstance(value.get("name"), str) or value.get("type", "function") != "function":
        return False
    return any(key in value for key in ARGUMENT_KEYS) or value["name"] in [
        _function(tool).get("name") for tool in tools
    ]


def parse_qwen_xml(text: str, tools: Tools = ()) -> ParsedAnswer:
    """Find calls of the form `<tool_call><function=name><parameter=x>value</parameter></function></tool_call>`
    (Qwen 3 Coder, Qwen 3.5 and later, Nemotron 3)."""
    form = r"<function=([^>\s]+)>(.*)</function>", r"\s*<parameter=([^>\s]+)>\n?", r"\n?</parameter>"
    return _parse_tagged(text, *form, tools)


def parse_glm(text: str, tools: Tools = ()) -> ParsedAnswer:
    """Find calls of the form `<tool_call>name<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>` (GLM 4.5)."""
    form = r"([^<\s]+)\s*(.*)", r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>", r"</arg_value>"
    return _parse_tagged(text, *form, tools)


def _parse_tagged(text: str, call: str, begin: str, end: str, tools: Tools) -> ParsedAnswer:
    """Find calls whose arguments have tags. An argument that is JSON counts as its value, unless its tool takes a text.

    Args:
        text: the sampled answer.
        call: pattern of what is between the tags of a call: its name, and its arguments.
        begin: pattern of what is before the value of an argument, with its name.
        end: pattern of what is after it.
        tools: as in the chat API.
    """

    def read(body: str) -> ToolCall:
        found = re.fullmatch(call, body.strip(), re.DOTALL)
        if found is None:
            raise ValueError(WRONG_FORM)
        types = _types(found[1], tools)
        written = _values_between(found[2].strip(), re.compile(begin, re.DOTALL), re.compile(end))
        return _call(found[1], {name: _tagged_value(value, types.get(name, set())) for name, value in written})

    return _parse_between_tags(text, read)


def _values_between(text: str, begin: re.Pattern[str], end: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """Yield names and values one after the other, each read once: a model may write thousands that never end.

    Raises:
        ValueError: there is something else between them.
    """
    at = 0
    while at < len(text):
        begun = begin.match(text, at)
        ended = end.search(text, begun.end()) if begun else None
        if begun is None or ended is None:
            raise ValueError(WRONG_FORM)
        yield begun[1], text[begun.end() : ended.start()]
        at = ended.end()


def _types(name: str, tools: Tools) -> dict[str, set[str]]:
    """Return the types that the parameters of a tool may have, as JSON schema calls them; of some nothing is known."""
    schemas = [_dict(_function(tool).get("parameters")) for tool in tools if _function(tool).get("name") == name]
    fields = [(schema, *field) for schema in schemas for field in _dict(schema.get("properties")).items()]
    return {field: _types_of(kind, _dict(schema.get("$defs")), {}) for schema, field, kind in fields}


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _types_of(kind: Any, definitions: dict[str, Any], known: dict[str, set[str]], depth: int = 0) -> set[str]:
    """Return the types of a part of a schema.

    Args:
        kind: the part.
        definitions: what the part may refer to, by name.
        known: types of the definitions that were looked at; they are added here.
        depth: levels of the schema above the part.
    """
    if not isinstance(kind, dict) or depth > MOST_NESTING:
        return set()
    if isinstance(where := kind.get("$ref"), str):
        if (name := where.removeprefix("#/$defs/")) not in known:
            known[name] = set()  # until it is known: a definition may refer to itself
            known[name] = _types_of(definitions.get(name), definitions, known, depth + 1)
        return known[name]
    told, values = kind.get("type"), kind.get("enum")
    found = {one for one in (told if isinstance(told, list) else [told]) if isinstance(one, str)}
    for key in ("anyOf", "oneOf"):
        for one in kind[key] if isinstance(kind.get(key), list) else ():
            found |= _types_of(one, definitions, known, depth + 1) or {ANY}
    if not found and isinstance(values, list):
        found = {"string" if isinstance(one, str) else "null" if one is None else ANY for one in values}
    return found


def _tagged_value(text: str, types: set[str]) -> Any:
    """Return the value of an argument between tags; of these types, of which none is known if there are none."""
    if "string" in types and types <= {"string", "null"}:
        return None if text == "null" and "null" in types else text
    try:
        value = json.loads(text, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, str) else value


def _no_json(name: str) -> Any:
    raise ValueError(name)  # NaN and Infinity, which Python reads


@dataclass(frozen=True)
class ToolFamily:
    """One way in which models write calls of tools."""

    name: str
    read: Callable[[str, Tools], ParsedAnswer]

    def parse(self, text: str, tools: Tools = (), thinks: bool = False) -> ParsedAnswer:
        """Find the calls in an answer.

        Args:
            text: the sampled answer.
            tools: those that the model was told of, as in the chat API.
            thinks: whether the prompt has begun reasoning, which the answer has to end before it calls anything.
        """
        found = self.read(text, tools)
        if thinks and found.calls and not _after_reasoning(text)[0]:
            return ParsedAnswer(text, malformed=UNENDED)
        return found


TEXT_PROTOCOL = ToolFamily("text protocol", lambda text, _: parse_hermes(text))
TOOL_FAMILIES = (
    ToolFamily("hermes", lambda text, _: parse_hermes(text)),
    ToolFamily("llama3", parse_llama3),
    ToolFamily("qwen_xml", parse_qwen_xml),
    ToolFamily("glm", parse_glm),
)


def _function(tool: Mapping[str, Any]) -> Any:
    return tool.get("function", tool)


def to_text_protocol(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], *, role: str = "system"
) -> list[dict[str, Any]]:
    """Rewrite messages for a template that knows neither tools nor their results.

    Messages of the user that follow each other become one, joined by line breaks: results of tools are such messages,
    and some templates (Gemma) take only one between two answers.

    Args:
        messages: messages of the chat API, each content a text.
        tools: the tools of the call as in the chat API.
        role: in whose first message they are described; 'user' for a template that has no system message.
    """
    result: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            result.append({"role": "user", "content": text})
        elif message.get("tool_calls"):
            calls = [
                {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
                for call in message["tool_calls"]
            ]
            written = [f"{CALL_BEGIN}\n{json.dumps(call, ensure_ascii=False)}\n{CALL_END}" for call in calls]
            kept = {name: value for name, value in message.items() if name in ("role", "reasoning_content")}
            result.append({**kept, "content": "\n".join(filter(None, [message["content"], *written]))})
        else:
            result.append(message)
    if tools:
        described = "\n".join(json.dumps(_function(tool), ensure_ascii=False) for tool in tools)
        own = result.pop(0)["content"] if result and result[0]["role"] == role else ""
        parts = [own, INSTRUCTIONS + described] if role == "system" else [INSTRUCTIONS + described, own]
        result.insert(0, {"role": role, "content": "\n\n".join(filter(None, parts))})
    return _user_messages_joined(result)


def _user_messages_joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    joined: list[dict[str, Any]] = []
    for role, group in groupby(messages, lambda message: message["role"]):
        same = list(group)
        if role == "user":
            same = [{**same[0], "content": "\n".join(message["content"] for message in same)}]
        joined += same
    return joined
