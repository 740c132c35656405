"""Chat templates of real model families: how each writes calls of tools, and which of its turns can be extended.

The templates are those that TRL ships (optional: `pip install trl==1.16.0`).
"""

from __future__ import annotations

import datetime
import re
from importlib.resources import files
from typing import Any

import numpy as np
import pytest

from streamrl.agents.episode import EpisodeOrder, GeneratedTurn
from streamrl.agents.rendering import PROBE_TOOL, ChatRenderer
from streamrl.agents.session import Session, SessionLimits
from streamrl.agents.turns import Call, Turn
from streamrl.tasks.chat_template import DAY
from tests.agents.random_sessions import small_tokenizer

pytest.importorskip("trl")

SPECIAL = r"<[|\uff5c][^|\uff5c<>\s{}]+[|\uff5c]>|<\|turn>|<turn\|>|<(?:start_of_turn|end_of_turn|bos|eos)>|</?s>"
USER = {"role": "user", "content": "What is 7 + 5?"}
CALL = {"id": "call_0", "type": "function", "function": {"name": "probe_tool", "arguments": {"x": "12"}}}
TURN, THOUGHT = "a turn", "a turn with reasoning"
BY_USER, BY_TOOL = "a message of the user", "the result of a tool"
EACH_TURN: list[tuple[str, str]] = [(kind, follower) for kind in (TURN, THOUGHT) for follower in (BY_USER, BY_TOOL)]
ONLY_TOOLS = [(TURN, BY_USER), (TURN, BY_TOOL), (THOUGHT, BY_USER)]

FAMILIES: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "cohere2": ("text protocol", []),
    "deepseek_r1_distill": ("text protocol", EACH_TURN),
    "deepseekv3": ("text protocol", EACH_TURN),
    "gemma": ("text protocol", []),
    "gemma3": ("text protocol", []),
    "gemma4": ("text protocol", []),
    "glm4moe": ("glm", ONLY_TOOLS),
    "gptoss": ("text protocol", EACH_TURN),
    "lfm2": ("text protocol", []),
    "llama3": ("text protocol", []),
    "llama3_1": ("llama3", []),
    "llama3_2": ("llama3", []),
    "nemotron_3_nano": ("qwen_xml", ONLY_TOOLS),
    "nemotron_3_super": ("qwen_xml", ONLY_TOOLS),
    "phi3": ("text protocol", []),
    "qwen2_5": ("hermes", []),
    "qwen3": ("hermes", [(THOUGHT, BY_USER)]),
    "qwen3_5_think": ("qwen_xml", ONLY_TOOLS),
    "qwen3_6": ("qwen_xml", ONLY_TOOLS),
    "qwen3_8": ("qwen_xml", [(TURN, BY_USER), (TURN, BY_TOOL)]),
    "qwen3_instruct_2507": ("hermes", []),
    "qwen3_vl": ("hermes", []),
}
"""Family of calls, and what is not extended by what, as the notes say it."""


def tokenizer_of(name: str) -> Any:
    """Return a small tokenizer with the template and the special tokens of a family; TRL ships the templates."""
    tokenizer = small_tokenizer()
    tokenizer.chat_template = files("trl").joinpath("chat_templates", f"{name}.jinja").read_text()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": sorted(set(re.findall(SPECIAL, tokenizer.chat_template)))}
    )
    return tokenizer


def rendered(tokenizer: Any, messages: list[dict[str, Any]], *, asks: bool, tools: bool = True) -> str:
    """Render with transformers alone."""
    more = {"tools": [PROBE_TOOL] if tools else None, "strftime_now": datetime.datetime.fromisoformat(DAY).strftime}
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks, **more))


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_extended_is_found_at_start_and_what_is_not_is_said(name: str) -> None:
    chat = ChatRenderer(tokenizer_of(name))
    family, refused = FAMILIES[name]
    assert chat.tools.name == family
    notes = [note for note in chat.notes if "tools are described" not in note]
    if refused == EACH_TURN:
        assert len(notes) == 1 and notes[0].startswith("every turn begins a new row: the template rewrites history: ")
        return
    assert not chat.row_per_turn
    assert [note.partition(":")[0] for note in notes] == [
        f"{kind} is not extended by {follower}" for kind, follower in refused
    ]
    assert all(re.search(r"'.*' becomes '.*' in the next turn", note) for note in notes)


class Conversation:
    """A session whose model samples given texts."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        order = EpisodeOrder("g.0", "g", "task", {}, 0, None)
        self.session = Session(order, ChatRenderer(tokenizer), SessionLimits(100_000, 10))
        self.messages: list[dict[str, Any]] = []

    def turn(self, appended: list[dict[str, Any]], answer: str, *, tools: bool) -> Turn:
        """Make a call, have it answered with a text and its end token, and return the turn."""
        self.messages += appended
        shown = [PROBE_TOOL] if tools else []
        turn, _ = self.session.call(Call(list(self.messages), shown, repr(self.messages).encode()), 0.0)
        ids = np.asarray(self.tokenizer.encode(answer, add_special_tokens=False), np.int32)
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        zeros = np.zeros(len(ids))
        self.session.finish(
            turn, GeneratedTurn(ids, zeros.astype(np.float32), zeros.astype(np.int32), "stop", text), 1.0
        )
        turn.deliver(1.0)
        self.messages.append(turn.answer)
        return turn


NATIVE = [name for name, (family, refused) in FAMILIES.items() if family != "text protocol" and refused != EACH_TURN]


@pytest.mark.parametrize("name", NATIVE)
def test_a_call_and_its_result_are_one_row_that_reads_as_the_template_writes_it(name: str) -> None:
    tokenizer = tokenizer_of(name)
    thinks = bool(FAMILIES[name][1])
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    if thinks:
        called["reasoning_content"] = "Seven and five."
    asked = rendered(tokenizer, [USER], asks=True)
    whole = rendered(tokenizer, [USER, called], asks=False)
    assert whole.startswith(asked)
    end = max(whole.rfind(mark) + len(mark) for mark in ("</tool_call>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>"))
    said = Conversation(tokenizer)
    first = said.turn([USER], whole[len(asked) : end], tools=True)
    (call,) = first.answer["tool_calls"]
    assert call["function"] == {"name": "probe_tool", "arguments": '{"x": "12"}'}  # a text, as the tool has it
    result = {"role": "tool", "content": "12", "tool_call_id": call["id"], "name": "probe_tool"}
    second = said.turn([result], "It is twelve.", tools=True)
    assert second.parent is first and len(said.session.rows()) == 1
    expected = rendered(tokenizer, [USER, called, result], asks=True)
    assert tokenizer.decode(second.order.prompt_tokens) == expected


PLAIN = [name for name, (_, refused) in FAMILIES.items() if (TURN, BY_USER) not in refused]


@pytest.mark.parametrize("name", PLAIN)
def test_turns_without_tools_are_one_row_that_reads_as_the_template_writes_it(name: str) -> None:
    tokenizer = tokenizer_of(name)
    said = Conversation(tokenizer)
    turns = [said.turn([{"role": "user", "content": f"Question {n}?"}], f"Answer {n}.", tools=False) for n in range(4)]
    assert len(said.session.rows()) == 1
    expected = rendered(tokenizer, said.messages[:-1], asks=True, tools=False)
    assert tokenizer.decode(turns[-1].order.prompt_tokens) == expected


@pytest.mark.parametrize("name", ["qwen3", "qwen3_6", "deepseek_r1_distill"])
def test_a_turn_whose_reasoning_the_template_drops_begins_a_row_which_says_why(name: str) -> None:
    tokenizer = tokenizer_of(name)
    said = Conversation(tokenizer)
    asked = rendered(tokenizer, [USER], asks=True, tools=False)
    opened = "" if asked.endswith("<think>\n") else "<think>\n"
    said.turn([USER], f"{opened}Seven and five.\n</think>\n\nIt is twelve.", tools=False)
    second = said.turn([{"role": "user", "content": "Sure?"}], "Yes.", tools=False)
    assert second.parent is None and "rewrites history" in second.note
    assert "Seven and five" not in tokenizer.decode(second.order.prompt_tokens)
    assert len(said.session.rows()) == 2


@pytest.mark.parametrize("name", ["qwen3", "qwen3_6"])
def test_a_call_drafted_in_the_reasoning_is_not_made_and_its_turn_is_extended(name: str) -> None:
    tokenizer = tokenizer_of(name)
    asked = rendered(tokenizer, [USER], asks=True)
    written = rendered(tokenizer, [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}], asks=False)
    call = written[written.rindex("<tool_call>") : written.rindex("</tool_call>") + len("</tool_call>")]
    thought = f"Maybe {call.replace('12', '7')}, or no."
    opened = "" if asked.endswith("<think>\n") else "<think>\n"
    said = Conversation(tokenizer)
    first = said.turn([USER], f"{opened}{thought}\n</think>\n\n{call}", tools=True)
    assert [one["function"]["arguments"] for one in first.answer["tool_calls"]] == ['{"x": "12"}']
    assert thought in first.answer["content"]
    result = {"role": "tool", "content": "12", "tool_call_id": first.answer["tool_calls"][0]["id"]}
    second = said.turn([result], "It is twelve.", tools=True)
    assert second.parent is first and len(said.session.rows()) == 1


@pytest.mark.parametrize("name", ["gemma", "gemma3"])
def test_results_and_a_question_after_them_are_one_message_where_roles_have_to_alternate(name: str) -> None:
    tokenizer = tokenizer_of(name)
    said = Conversation(tokenizer)
    written = '<tool_call>\n{"name": "probe_tool", "arguments": {"x": "a"}}\n</tool_call>'
    first = said.turn([USER], f"{written}\n{written}", tools=True)
    results = [
        {"role": "tool", "content": str(number), "tool_call_id": call["id"]}
        for number, call in enumerate(first.answer["tool_calls"], 12)
    ]
    second = said.turn([*results, {"role": "user", "content": "Sure?"}], written, tools=True)
    assert second.parent is first
    assert tokenizer.decode(second.order.prompt_tokens[len(first.tokens) :]) == (
        "<end_of_turn>\n<start_of_turn>user\n<tool_response>\n12\n</tool_response>\n<tool_response>\n13\n</tool_response>"
        "\nSure?<end_of_turn>\n<start_of_turn>model\n"
    )
    result = {"role": "tool", "content": "14", "tool_call_id": second.answer["tool_calls"][0]["id"]}
    third = said.turn([result], "It is twelve.", tools=True)
    assert third.parent is second and len(said.session.rows()) == 1
    again = Conversation(tokenizer)  # a history that no session knows is rendered whole
    whole = again.turn(said.messages[:-1], "It is twelve.", tools=True)
    assert "</tool_response>\nSure?<end_of_turn>\n" in tokenizer.decode(whole.order.prompt_tokens)


def test_tools_are_described_to_a_template_without_a_system_message_in_the_first_question() -> None:
    tokenizer = tokenizer_of("gemma")
    said = Conversation(tokenizer)
    written = '<tool_call>\n{"name": "probe_tool", "arguments": {"x": "a b"}}\n</tool_call>'
    first = said.turn([USER], written, tools=True)
    prompt = tokenizer.decode(first.order.prompt_tokens)
    assert "<start_of_turn>user\nYou can use the tools below." in prompt
    assert prompt.index("probe_tool") < prompt.index("What is 7 + 5?")
    (call,) = first.answer["tool_calls"]
    second = said.turn([{"role": "tool", "content": "12", "tool_call_id": call["id"]}], "It is twelve.", tools=True)
    assert second.parent is first
    assert tokenizer.decode(second.order.prompt_tokens[len(first.tokens) :]) == (
        "<end_of_turn>\n<start_of_turn>user\n<tool_response>\n12\n</tool_response><end_of_turn>\n<start_of_turn>model\n"
    )
