"""Conversations as tokens: the model's chat template, applied so that what was sampled is never encoded again.

A prompt that begins a row is rendered whole. A prompt that extends a row is the row's tokens, as they are, and a
suffix: what the template adds behind the sampled answer (the rest of its turn, the new messages, the beginning of the
next answer). The suffix is a difference of two rendered texts. In both, each sampled answer is replaced by a
stand-in, so the difference does not depend on what was sampled. If the longer text does not begin with the shorter
one, then the template rewrites history (many drop the reasoning of earlier answers), and the prompt begins a row of
its own.

ChatML, which SmolLM2 uses, as an example. The model samples `It is 12.<|im_end|>`. The template closes a turn with
`<|im_end|>` and a newline; the end token was sampled, so the suffix is the newline, the next message and
`<|im_start|>assistant` with a newline.

Text of special tokens inside of messages (a tool's result that contains `<|im_end|>`) is encoded as plain text: no
message can end its turn or begin another one.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamrl.agents.tool_calls import (
    TEXT_PROTOCOL,
    THOUGHT_BEGIN,
    THOUGHT_END,
    TOOL_FAMILIES,
    ToolFamily,
    to_text_protocol,
)
from streamrl.rollouts.types import IntArray
from streamrl.tasks.chat_template import ChatTemplate

ChatMessage = dict[str, Any]
"""A message of the chat API; `content` is a text, `role` is never 'developer'."""
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Probe.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
    },
}
PROBE_CALL = {"id": "call_0", "type": "function", "function": {"name": "probe_tool", "arguments": {"x": "probe value"}}}
RESULT: ChatMessage = {
    "role": "tool",
    "content": "probe result",
    "tool_call_id": "call_0",
    "name": "probe_tool",
}
ANSWER = "It is twelve."
PART = "\ufffd"
"""What the bytes of a part of a character are decoded to."""
REASONED = "<think>\nSeven and five.\n</think>\n\n" + ANSWER


class TemplateError(ValueError):
    """The chat template does not accept these messages; the text says what it objects to."""


class HistoryRewritten(Exception):
    """The template renders earlier turns differently now; the prompt must begin a row of its own."""


@dataclass(frozen=True)
class Rendered:
    """A rendered prompt, or its suffix."""

    text: str
    """The whole prompt as the template rendered it, with stand-ins for sampled answers."""
    tokens: IntArray
    """Token ids of the whole prompt, or of the suffix, shape [P]."""


@dataclass(frozen=True)
class ReasoningForm:
    """One way in which templates write an answer with reasoning."""

    begin: str
    """What precedes the reasoning, in the answer or at the end of the prompt."""
    end: str
    """What is between reasoning and answer."""
    field: bool = False
    """Whether the template takes the reasoning as `reasoning_content` of the message, not from its content."""


REASONING_FORMS = (
    ReasoningForm("<think>\n", "\n</think>\n\n"),  # Qwen 3 to 3.6
    ReasoningForm("<think>\n", "\n</think>\n\n", field=True),  # Qwen 3.8
    ReasoningForm("<think>\n", "\n</think>\n", field=True),  # Nemotron 3
    ReasoningForm("\n<think>", "</think>\n"),  # GLM 4.5
    ReasoningForm("<think>\n", "</think>"),  # DeepSeek R1
)
"""Forms that are tried at start; the first whose turns can be extended counts."""


@dataclass(frozen=True)
class AnswerStandIn:
    """What stands for a sampled answer when suffixes are rendered."""

    message: ChatMessage
    """What the template is given."""
    text: str
    """What it has to make of it, behind the prompt."""


class ChatRenderer:
    """Renders conversations with one model's chat template and tokenizer."""

    def __init__(
        self, tokenizer: Any, system_prompt: str | None = None, variables: Mapping[str, Any] | None = None
    ) -> None:
        """Examine the template.

        Args:
            tokenizer: tokenizer of `transformers`.
            system_prompt: system message of conversations that have none of their own; None: none is added.
            variables: variables of the template (`model.chat_template_kwargs`).

        Raises:
            TemplateError: there is no chat template, or it cannot render one user message.
            UserError: the template does not use some variable.
        """
        self._chat = ChatTemplate(tokenizer, variables)
        self.variables = dict(variables or {})
        """Variables of the template."""
        if not self._chat.exists:
            raise TemplateError("the tokenizer has no chat template, which agents need: their calls are conversations")
        self._tokenizer, self._system_prompt = tokenizer, system_prompt
        self._added = set(tokenizer.added_tokens_decoder)
        self._nonce = secrets.token_hex(6)
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._specials = sorted(special.union(tokenizer.all_special_tokens), key=len, reverse=True)
        self._special = re.compile("|".join(re.escape(token) for token in self._specials) or r"(?!)")
        self._guarded = re.compile(f"G{self._nonce}n(\\d+)z")
        self._stand_in = f"A{self._nonce}z"
        self._tools_in = "system"
        self._form = REASONING_FORMS[0]
        self._takes_reasoning = self._renders_reasoning()
        self.notes: list[str] = []
        """What a user should know about this template, one sentence each."""
        self.tools = self._find_family()
        """How the model writes calls of tools; `TEXT_PROTOCOL`: its template knows no tools."""
        self.row_per_turn = ""
        """Why no prompt can extend a row, so that each turn has a row of its own; empty: prompts extend rows."""
        self._examine_turns()

    def whole(self, messages: list[ChatMessage], tools: list[dict[str, Any]]) -> Rendered:
        """Render a prompt that begins a row.

        Args:
            messages: the conversation, in which every message is text of others or counts as such.
            tools: tools as in the chat API.

        Raises:
            TemplateError: the template does not accept the messages.
        """
        text = self._text(messages, tools)
        return Rendered(text, self._encode(text))

    def extend(
        self,
        before: Rendered,
        history: list[ChatMessage],
        answer: AnswerStandIn,
        appended: list[ChatMessage],
        tools: list[dict[str, Any]],
        end: str,
    ) -> Rendered:
        """Render what follows a sampled answer.

        Args:
            before: the prompt that the answer was sampled after.
            history: its messages, with stand-ins for earlier answers.
            answer: what stands for the sampled answer.
            appended: messages after the answer.
            tools: tools as in the chat API, the same as before.
            end: text of the answer's last token if it is an end token, else empty.

        Returns:
            The whole text, and the tokens of the suffix alone.

        Raises:
            HistoryRewritten: the template changes earlier turns, or the end token is not encoded as itself.
            TemplateError: the template does not accept the messages.
        """
        if self.row_per_turn:
            raise HistoryRewritten(self.row_per_turn)
        text = self._text([*history, answer.message, *appended], tools)
        suffix = _after(text, before.text + answer.text)
        return Rendered(text, self._encode_after(suffix, end))

    def stand_in(self, answer: str) -> AnswerStandIn:
        """Return what stands for a sampled answer; one that only ends its reasoning was begun by the prompt."""
        head, thought, _ = answer.rpartition("</think>")
        message: ChatMessage = {"role": "assistant", "content": self._stand_in}
        if not thought:
            return AnswerStandIn(message, self._stand_in)
        form = self._form
        text = f"{form.begin if '<think>' in head else ''}{self._stand_in}{form.end}{self._stand_in}"
        message |= {"reasoning_content": self._stand_in} if form.field else {"content": text}
        return AnswerStandIn(message, text)

    def begins_reasoning(self, prompt: Rendered) -> bool:
        """Whether a prompt ends with the begin of reasoning; False, too, if its end is no text of an answer."""
        return prompt.text.rstrip().endswith(THOUGHT_BEGIN) and THOUGHT_END not in self._specials

    def end_text(self, answer: IntArray) -> str:
        """Return the text of the end token with which sampled tokens of shape [C] end; empty: they end with another."""
        if len(answer) == 0 or int(answer[-1]) not in self._added:
            return ""
        return str(self._tokenizer.decode([int(answer[-1])], skip_special_tokens=False))

    def token_texts(self, tokens: IntArray) -> list[str]:
        """Return the text of each of the tokens, shape [C], special ones too."""
        return [str(self._tokenizer.decode([int(token)], skip_special_tokens=False)) for token in tokens]

    def token_bytes(self, tokens: IntArray) -> list[bytes | None]:
        """Return the bytes of each of the tokens, shape [C]; one that is part of a character has no text of its own.

        None: the vocabulary does not say which bytes those are.
        """
        texts = self.token_texts(tokens)
        pieces = self._tokenizer.convert_ids_to_tokens(tokens.tolist())
        return [
            text.encode() if PART not in text else _bytes_of(piece) for text, piece in zip(texts, pieces, strict=True)
        ]

    def _text(self, messages: list[ChatMessage], tools: list[dict[str, Any]], *, asks: bool = True) -> str:
        if self._system_prompt is not None and not (messages and messages[0]["role"] == "system"):
            messages = [{"role": "system", "content": self._system_prompt}, *messages]
        messages = [_with_arguments(self._with_reasoning(message)) for message in messages]
        if self.tools is TEXT_PROTOCOL:
            messages, tools = to_text_protocol(messages, tools, role=self._tools_in), []
        return self._template(self._guard(messages), self._guard(tools), asks)

    def _with_reasoning(self, message: ChatMessage) -> ChatMessage:
        """Return a message with its reasoning where the template shows it: in a field, or before the text."""
        reasoning = message.get("reasoning_content")
        if not reasoning or self._takes_reasoning:
            return message
        text = f"{self._form.begin}{reasoning.strip(chr(10))}{self._form.end}{message['content'].lstrip(chr(10))}"
        return {**{name: value for name, value in message.items() if name != "reasoning_content"}, "content": text}

    def _renders_reasoning(self) -> bool:
        """Whether the template shows the `reasoning_content` of a message."""
        reasoned = {"role": "assistant", "content": ANSWER, "reasoning_content": self._stand_in}
        try:
            return self._stand_in in self._template([USER, reasoned], [], asks=False)
        except TemplateError:
            return False

    def _template(self, messages: Any, tools: Any, asks: bool = True) -> str:
        try:
            return self._chat.text(messages, tools, asks)
        except Exception as error:  # templates raise whatever their authors chose
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise TemplateError(f"the model's chat template does not accept these messages: {reason}") from error

    def _guard(self, value: Any) -> Any:
        """Replace texts of special tokens, at any depth, by words that `_encode` encodes as plain text."""
        if isinstance(value, str):
            return self._special.sub(lambda found: f"G{self._nonce}n{self._specials.index(found[0])}z", value)
        if isinstance(value, list):
            return [self._guard(one) for one in value]
        if isinstance(value, dict):
            return {self._guard(key): self._guard(one) for key, one in value.items()}
        return value

    def _encode(self, text: str) -> IntArray:
        """Encode rendered text, shape [P]."""
        ids: list[int] = []
        for number, piece in enumerate(self._guarded.split(text)):
            if number % 2 == 0:
                ids += self._ids(piece)
            else:  # the text of a special token, cut in two so that it is not taken for the token
                plain = self._specials[int(piece)]
                ids += self._ids(plain[:1]) + self._ids(plain[1:])
        return np.asarray(ids, dtype=np.int32)

    def _encode_after(self, suffix: str, end: str) -> IntArray:
        """Encode a suffix without the end token that was sampled, shape [P].

        It is encoded together with that token and then cut: some tokenizers encode text differently where a text
        begins (they put a space before it) or drop the spaces and newlines behind a special token.

        Raises:
            HistoryRewritten: the text of the end token is not encoded as that token.
        """
        ids = self._encode(suffix)
        if not end or not suffix.startswith(end):
            return ids
        if ids[:1].tolist() != [self._tokenizer.convert_tokens_to_ids(end)]:
            raise HistoryRewritten(f"the tokenizer does not encode {end!r}, which ends a turn, as one token")
        return ids[1:]

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False)) if text else []

    def _find_family(self) -> ToolFamily:
        """Find how the template writes calls, by having it render one."""
        self.tools = TOOL_FAMILIES[0]  # any but the text protocol: the template itself is to render the tools
        try:
            call: ChatMessage = {"role": "assistant", "content": "", "tool_calls": [PROBE_CALL]}
            asked = self._text([USER], [PROBE_TOOL])
            called = self._text([USER, call], [PROBE_TOOL], asks=False)
            answered = self._text([USER, call, RESULT], [PROBE_TOOL])
        except TemplateError as error:
            self._text_protocol(str(error))
            return TEXT_PROTOCOL
        if "probe_tool" not in asked or "probe result" not in answered:
            self._text_protocol("the template does not render tools")
            return TEXT_PROTOCOL
        shared = len(_common(asked, called))
        sampled = self._tokenizer.decode(self._encode(called[shared:]), skip_special_tokens=True)
        for family in TOOL_FAMILIES:
            found = family.parse(sampled)
            if [(c.name, json.loads(c.arguments)) for c in found.calls] == [("probe_tool", {"x": "probe value"})]:
                return family
        self._text_protocol("the template writes calls in a way that is not known here")
        return TEXT_PROTOCOL

    def _text_protocol(self, why: str) -> None:
        try:
            self._template([{"role": "system", "content": "Be brief."}, USER], [])
        except TemplateError:
            self._tools_in = "user"
        where = "system message" if self._tools_in == "system" else "first message of the user"
        self.notes.append(f"tools are described in the {where}, and their results come as user messages: {why}")

    def _examine_turns(self) -> None:
        """Find which turns can be extended, and note which cannot and why."""
        reasoned = [REASONED, REASONED.removeprefix("<think>\n")]  # the prompt may begin the reasoning
        for form in REASONING_FORMS:
            self._form = form
            if not self._why_not_extended(reasoned, RESULT):
                break
        else:
            self._form = REASONING_FORMS[0]
        kinds = {"a turn": [ANSWER], "a turn with reasoning": reasoned}
        followers = {"a message of the user": USER, "the result of a tool": RESULT}
        found = {
            (kind, follower): self._why_not_extended(answers, message)
            for kind, answers in kinds.items()
            for follower, message in followers.items()
        }
        if all(found.values()):
            self.row_per_turn = found["a turn", "a message of the user"]
            self.notes.append(f"every turn begins a new row: {self.row_per_turn}")
            return
        for (kind, follower), why in found.items():
            if why:
                self.notes.append(f"{kind} is not extended by {follower}: {why}")

    def _why_not_extended(self, answers: list[str], following: ChatMessage) -> str:
        """Say why none of some answers can be extended by a message; empty: one can."""
        why = ""
        tools = [PROBE_TOOL] if following is RESULT else []
        for answer in answers:
            try:
                asked = self._text([USER], tools)
                stand_in = self.stand_in(answer)
                whole = self._text([USER, stand_in.message, following], tools)
            except TemplateError as error:
                why = why or str(error)
                continue
            beginning = asked + stand_in.text
            if not whole.startswith(beginning):
                why = why or str(_rewritten(*(text.replace(self._stand_in, ANSWER) for text in (whole, beginning))))
                continue
            suffix = whole[len(beginning) :]
            try:
                self._encode_after(suffix, self._added_at_start(suffix))
            except HistoryRewritten as error:
                why = why or str(error)
                continue
            tokens = self._encode(suffix)  # with the end token: it is no part of answers that were cut
            if np.array_equal(tokens, self._encode(whole)[-len(tokens) :]):
                return ""
            why = why or "the tokenizer encodes a turn differently when other turns precede it"
        return why

    def _added_at_start(self, text: str) -> str:
        """Return the text of the longest added token that a text begins with; empty: it begins with none."""
        added = (token.content for token in self._tokenizer.added_tokens_decoder.values())
        return max((token for token in added if text.startswith(token)), key=len, default="")


USER: ChatMessage = {"role": "user", "content": "What is 7 + 5?"}


@functools.cache
def _bytes_of_letters() -> dict[str, int]:
    """Return the byte that each letter of byte-level BPE stands for."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode  # loaded already, with the tokenizer

    return {letter: byte for byte, letter in bytes_to_unicode().items()}


def _bytes_of(piece: str) -> bytes | None:
    """Return the bytes of an entry of a vocabulary: byte-level BPE writes them as letters, others a byte as hex."""
    if found := re.fullmatch("<0x([0-9A-F]{2})>", piece):
        return bytes.fromhex(found[1])
    letters = _bytes_of_letters()
    return bytes(letters[letter] for letter in piece) if letters.keys() >= set(piece) else None


def _with_arguments(message: ChatMessage) -> ChatMessage:
    """Return the message with the arguments of its tool calls as objects, which is what templates expect."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        if isinstance(function["arguments"], str):
            with contextlib.suppress(ValueError, RecursionError):  # some templates take a text, and others object
                function["arguments"] = json.loads(function["arguments"])
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def _common(one: str, other: str) -> str:
    at = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:at]


def _after(text: str, beginning: str) -> str:
    """Return what follows `beginning` in `text`.

    Raises:
        HistoryRewritten: `text` does not begin so.
    """
    if text.startswith(beginning):
        return text[len(beginning) :]
    raise _rewritten(text, beginning)


def _rewritten(text: str, beginning: str) -> HistoryRewritten:
    at = len(_common(text, beginning))
    was, now = beginning[at : at + 24], text[at : at + 24]
    return HistoryRewritten(f"the template rewrites history: {was!r} becomes {now!r} in the next turn")
