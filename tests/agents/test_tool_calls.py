"""Calls in sampled answers: reasoning holds none, arguments have either key, and messages of the user are joined."""

from __future__ import annotations

import json
from typing import Any

import pytest

from streamrl.agents.tool_calls import (
    NOT_FINITE,
    TOOL_FAMILIES,
    UNENDED,
    ParsedAnswer,
    parse_hermes,
    parse_llama3,
    to_text_protocol,
)

FAMILIES = {family.name: family for family in TOOL_FAMILIES}
CALLS = {
    "hermes": '<tool_call>\n{{"name": "f", "arguments": {{"x": {}}}}}\n</tool_call>',
    "llama3": '{{"name": "f", "parameters": {{"x": {}}}}}',
    "qwen_xml": "<tool_call>\n<function=f>\n<parameter=x>\n{}\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
}
"""A call of `f` as each family writes it, without its argument `x`."""
TAGGED = [name for name in CALLS if name != "llama3"]


def called(parsed: ParsedAnswer) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in parsed.calls]


@pytest.mark.parametrize("opened", ["<think>", ""], ids=["answer opens", "prompt opens"])
@pytest.mark.parametrize(
    "thought",
    [
        "One and two.",
        "I must answer within <tool_call></tool_call> tags.",
        "A call begins with <tool_call> and",
        "A call ends with </tool_call> and",
        "Maybe {draft} but no.",
        "Maybe {draft}</think>, no, again:",
    ],
)
@pytest.mark.parametrize("name", CALLS)
def test_calls_are_those_behind_the_reasoning_which_stays_in_the_content(name: str, thought: str, opened: str) -> None:
    reasoning = f"{opened}\n{thought.replace('{draft}', CALLS[name].format(7))}\n</think>"
    parsed = FAMILIES[name].parse(f"{reasoning}\n\n{CALLS[name].format(1)}\n")
    assert called(parsed) == [("f", {"x": 1})]
    assert (parsed.content, parsed.malformed) == (reasoning.strip(), "")
    said = f"{reasoning}\n\nIt is twelve.\n"
    assert FAMILIES[name].parse(said) == ParsedAnswer(said)


@pytest.mark.parametrize("before", ["", "<think>\nOne.\n</think>\n\n"])
@pytest.mark.parametrize("name", TAGGED)
def test_reasoning_that_does_not_end_has_no_calls_and_a_remark_says_so(name: str, before: str) -> None:
    text = f"{before}<think>\nMaybe {CALLS[name].format(7)}"
    assert FAMILIES[name].parse(text) == ParsedAnswer(
        text, malformed="the call is in reasoning that does not end: no </think>"
    )
    for harmless in (f"{before}<think>\nMaybe", f"{before}<think>\nMaybe {CALLS['llama3'].format(7)}"):
        assert FAMILIES[name].parse(harmless) == ParsedAnswer(harmless)
        assert FAMILIES["llama3"].parse(harmless) == ParsedAnswer(harmless)


@pytest.mark.parametrize("argument", ["<think>", "</think>", "<think>a</think> b"])
@pytest.mark.parametrize("name", CALLS)
def test_tags_of_reasoning_in_an_argument_are_text(name: str, argument: str) -> None:
    quoted = json.dumps(argument) if name in ("hermes", "llama3") else argument
    for before in ("", "<think>One.</think>") if name in TAGGED else ("",):
        parsed = FAMILIES[name].parse(before + CALLS[name].format(quoted))
        assert called(parsed) == [("f", {"x": argument})] and parsed.content == before


@pytest.mark.parametrize("key", ["arguments", "parameters"])
@pytest.mark.parametrize("value", [{"x": 1}, '{"x": 1}', {}])
def test_arguments_have_the_key_of_either_family(key: str, value: Any) -> None:
    body = json.dumps({"name": "f", key: value})
    arguments = json.loads(value) if isinstance(value, str) else value
    for parsed in (parse_hermes(f"<tool_call>{body}</tool_call>"), parse_llama3(body)):
        assert called(parsed) == [("f", arguments)] and parsed.content == ""
    wrong = json.dumps({"name": "f", key: [1]})
    for parsed in (parse_hermes(f"<tool_call>{wrong}</tool_call>"), parse_llama3(wrong)):
        assert not parsed.calls and parsed.malformed == f'"{key}" of a call is a JSON object'


@pytest.mark.parametrize(
    "text",
    [
        '{"type": "function", "name": "f", "parameters": {"x": 1}}',
        ' {"parameters": {"x": 1}, "name": "f"}\n',
        '{"name": "f", "arguments": {"x": 1}, "type": "function"}',
    ],
)
def test_a_call_of_llama_is_any_object_with_a_name_and_arguments(text: str) -> None:
    assert called(parse_llama3(text)) == [("f", {"x": 1})]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Paris", "population": 2100000}',
        '{"name": 3, "parameters": {}}',
        '{"parameters": {"x": 1}}',
        '{"type": "city", "name": "Paris", "parameters": {"x": 1}}',
        '{"answer": 12}',
        '{"answer": 12',
        '[{"name": "f", "parameters": {}}]',
        'It is {"name": "f", "parameters": {}}',
        "{12}",
    ],
)
def test_an_answer_of_llama_that_is_other_json_is_text(text: str) -> None:
    assert parse_llama3(text) == ParsedAnswer(text)


def test_a_call_of_llama_without_arguments_is_one_if_there_is_such_a_tool() -> None:
    assert called(parse_llama3('{"name": "now"}', [{"type": "function", "function": {"name": "now"}}])) == [("now", {})]


@pytest.mark.parametrize("text", ['{"name": "f", "parameters": {', '{"type": "function", "name": "f", "parameters": }'])
def test_a_broken_call_of_llama_is_explained(text: str) -> None:
    parsed = parse_llama3(text)
    assert (parsed.content, parsed.calls) == (text, ()) and parsed.malformed


@pytest.mark.parametrize("name", ["hermes", "llama3"])
def test_halves_of_surrogate_pairs_in_a_call_are_replaced(name: str) -> None:
    text = CALLS[name].format('{"\\ud83d": ["\\ude00", "\\ud83d\\ude00"]}').replace('"f"', '"f\\ud83d"')
    (call,) = FAMILIES[name].parse(text).calls
    assert (call.name, json.loads(call.arguments)) == ("f\ufffd", {"x": {"\ufffd": ["\ufffd", "\U0001f600"]}})
    call.arguments.encode()


@pytest.mark.parametrize("number", ["NaN", "[-Infinity]", '{"y": 1e999}'])
@pytest.mark.parametrize("name", CALLS)
def test_a_number_that_is_not_finite_is_no_json(name: str, number: str) -> None:
    text = CALLS[name].format(number)
    parsed = FAMILIES[name].parse(text)
    if name in ("hermes", "llama3") or "999" in number:
        assert parsed == ParsedAnswer(text, malformed=NOT_FINITE)
    else:  # an argument between tags that is no JSON is a text
        assert called(parsed) == [("f", {"x": number})]


TEXT, NUMBER, NONE = {"type": "string"}, {"type": "integer"}, {"type": "null"}
KIND = {"$defs": {"Kind": {"enum": ["1", "2"]}, "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, TEXT]}}}


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (TEXT, ["12345", "null"]),
        ({"anyOf": [TEXT, NONE]}, ["12345", None]),
        ({"type": ["string", "null"]}, ["12345", None]),
        ({"enum": ["1", "2"]}, ["12345", "null"]),
        ({"$ref": "#/$defs/Kind"}, ["12345", "null"]),
        ({"anyOf": [{"$ref": "#/$defs/Kind"}, NONE]}, ["12345", None]),
        ({"oneOf": [TEXT, NUMBER]}, [12345, None]),
        ({"anyOf": [TEXT, {}]}, [12345, None]),
        ({"enum": ["1", 2]}, [12345, None]),
        ({"$ref": "#/$defs/Loop"}, [12345, None]),
        ({"$ref": "#/$defs/Unknown"}, [12345, None]),
        (NUMBER, [12345, None]),
        ({}, [12345, None]),
        (True, [12345, None]),
    ],
)
@pytest.mark.parametrize("name", ["qwen_xml", "glm"])
def test_an_argument_between_tags_is_a_text_where_its_tool_takes_nothing_else(
    name: str, kind: Any, values: list[Any]
) -> None:
    tool = {"function": {"name": "f", "parameters": {"type": "object", "properties": {"x": kind}, **KIND}}}
    for written, value in zip(["12345", "null"], values, strict=True):
        assert called(FAMILIES[name].parse(CALLS[name].format(written), [tool])) == [("f", {"x": value})]
    for odd in (None, "x", {"properties": ["x"]}):
        parsed = FAMILIES[name].parse(CALLS[name].format("1"), [{"function": {"name": "f", "parameters": odd}}])
        assert called(parsed) == [("f", {"x": 1})]


@pytest.mark.parametrize("name", CALLS)
def test_reasoning_that_the_prompt_has_begun_has_no_calls_before_it_ends(name: str) -> None:
    call = CALLS[name].format(7)
    for draft in [call] if name == "llama3" else [call, f"Maybe {call}, but"]:
        assert FAMILIES[name].parse(draft, thinks=True) == ParsedAnswer(draft, malformed=UNENDED)
        assert called(FAMILIES[name].parse(f"Maybe {draft}\n</think>\n{call}", thinks=True)) == [("f", {"x": 7})]
    assert FAMILIES[name].parse("It is twelve.", thinks=True) == ParsedAnswer("It is twelve.")


def test_messages_of_the_user_that_follow_each_other_are_joined_and_no_others() -> None:
    def message(role: str, content: str) -> dict[str, Any]:
        return {"role": role, "content": content}

    asked = [message("user", "1"), message("assistant", "2"), message("assistant", "3")]
    given = [*asked, message("tool", "4"), message("tool", "5"), message("user", "6"), message("assistant", "7")]
    responses = "<tool_response>\n4\n</tool_response>\n<tool_response>\n5\n</tool_response>\n6"
    assert to_text_protocol(given, []) == [*asked, message("user", responses), message("assistant", "7")]
    assert given[3] == message("tool", "4")
    described = to_text_protocol([message("user", "1"), message("user", "2")], [{"name": "f"}], role="user")
    assert len(described) == 1 and described[0]["content"].endswith('{"name": "f"}\n\n1\n2')
