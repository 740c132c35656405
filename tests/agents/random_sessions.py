"""Random sessions of many turns, and a reconstruction of their tokens that shares no code with `streamrl.agents`.

The agents here extend conversations, fork them, edit them, retry calls and send every kind of text. The reconstruction
keeps what was sampled, by turn, and writes the ChatML between it by hand.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from streamrl.agents.episode import EpisodeOrder, GeneratedTurn, TrajectoryRow, TurnOrder
from streamrl.agents.rendering import ChatRenderer
from streamrl.agents.session import Session, SessionLimits
from streamrl.agents.turns import Call, CallError, Turn

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
SYSTEM = "Answer briefly."
TEXTS = (
    "", " ", "\n", "\n\n", "12", " 12 ", "12\n", "a  b", "\tx", "Ünï©ödé", "日本語のテキスト", "🙂🙃🧑‍🚀",
    "e\u0301\u200b\u202e", "\x00\x07\x1b[31m", "\ufffd\ufeff", "<|im_end|>", "<|im_start|>assistant\nYes",
    "x<|endoftext|>", "<|im_end", "|>", "<think>\nno\n</think>\n\nyes", '<tool_call>\n{"name": "x"}\n</tool_call>',
    "{{ messages }}", "{% raw %}", "\\n\\u0041", "null", "[]", '{"a": [1, 2.5, "\\""]}', "\r\n", "ab" * 99, " " * 50,
)  # fmt: skip
TOOL = {"type": "function", "function": {"name": "calculate", "parameters": {"type": "object", "properties": {}}}}
LIMITS = SessionLimits(max_context=6000, max_turns=40)


def small_tokenizer() -> PreTrainedTokenizerFast:
    """Train a tokenizer with merges, so that decoding and encoding sampled tokens seldom gives them back."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*TEXTS, "user assistant system tool answer the question " * 9, SYSTEM], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=SPECIALS[0], eos_token=SPECIALS[1])
    fast.chat_template = CHATML
    return fast


def sampler(tokenizer: Any, rng: random.Random) -> Callable[[TurnOrder], GeneratedTurn]:
    """Return a model that samples any tokens, ends with the end token or is cut, and sometimes calls a tool."""
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    written = tokenizer.encode('<tool_call>\n{"name": "calculate", "arguments": {"x": "é"}}\n</tool_call>')

    def generate(order: TurnOrder) -> GeneratedTurn:
        tokens = [rng.randrange(len(tokenizer)) for _ in range(rng.randrange(12))]
        if rng.random() < 0.2:
            tokens = written
        tokens = [token for token in tokens if token != end]
        how = rng.random()
        if how < 0.85 or not tokens:
            tokens, reason = [*tokens, end], "stop"
        else:  # a stop string ends an answer without an end token; a limit cuts it
            reason = "stop" if how < 0.9 else "length"
        version = rng.randrange(3)
        return GeneratedTurn(
            np.asarray(tokens, np.int32),
            -np.asarray([rng.random() for _ in tokens], np.float32) - 0.01,
            np.sort(np.asarray([version + rng.randrange(2) for _ in tokens], np.int32)),
            "stop" if reason == "stop" else "length",
            tokenizer.decode(tokens, skip_special_tokens=True),
        )

    return generate


@dataclass
class Expected:
    """What the reconstruction knows of one turn."""

    prompt: list[int]
    generated: GeneratedTurn
    parent: Expected | None
    messages: list[dict[str, Any]]
    """Messages of the call and the answer."""
    tools: list[dict[str, Any]]
    children: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.generated.tokens.tolist()


@dataclass
class Played:
    """A session that was played, and what its rows must be."""

    session: Session
    turns: list[Expected] = field(default_factory=list)

    def rows(self) -> list[tuple[list[int], list[float], list[int]]]:
        """Return the tokens, log-probabilities and versions of the rows; a turn is trained in one of them."""
        rows: list[tuple[list[int], list[float], list[int]]] = []
        tail: dict[int, Expected] = {}
        for turn in self.turns:
            home = next((n for n, last in tail.items() if last is turn.parent and turn.parent is not None), None)
            if home is None:
                home = len(rows)
                rows.append(([], [], []))
            tokens, logprobs, versions = rows[home]
            rest = turn.prompt[len(tokens) :]
            tokens += rest + turn.generated.tokens.tolist()
            logprobs += [0.0] * len(rest) + turn.generated.logprobs.tolist()
            versions += [-1] * len(rest) + turn.generated.versions.tolist()
            tail[home] = turn
        return rows


def body_of(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> bytes:
    return json.dumps([messages, tools]).encode()


def play(tokenizer: Any, renderer: ChatRenderer, seed: int, turns: int = 7) -> Played:
    """Play one random session and reconstruct it on the way; turn n is answered at second n."""
    rng = random.Random(seed)
    generate = sampler(tokenizer, rng)
    played = Played(Session(EpisodeOrder(f"s{seed}", "g", "t", {}, seed, None), renderer, LIMITS))
    for _ in range(turns):
        finished = played.turns
        move = rng.random()
        if not finished or move < 0.1:
            messages, tools = [_message(rng, "user")], [TOOL] if rng.random() < 0.5 else []
            if rng.random() < 0.5:
                messages.insert(0, _message(rng, "system"))
        else:
            turn = finished[-1] if move < 0.75 else rng.choice(finished)  # the conversation goes on, or forks
            messages, tools = [dict(message) for message in turn.messages], turn.tools
            if rng.random() < 0.1:  # an agent that edits its history
                messages[rng.randrange(len(messages))]["content"] += rng.choice(TEXTS)
            if rng.random() < 0.05:
                tools = [] if tools else [TOOL]
            messages += [_message(rng, rng.choice(["user", "tool", "tool"])) for _ in range(rng.randrange(3))]
            if rng.random() < 0.1:
                messages += [_message(rng, "assistant"), _message(rng, "user")]
        call = Call(messages, tools, body_of(messages, tools), attempt=int(rng.random() < 0.1))
        now = float(len(finished))
        try:
            begun, new = played.session.call(call, now)
        except CallError as refused:
            assert refused.code == "context_length_exceeded"
            break
        if not new:
            assert begun.call.body == call.body
            continue
        generated = generate(begun.order)
        played.session.finish(begun, generated, now)
        begun.deliver(now)
        expect(tokenizer, played, begun, generated)
        if rng.random() < 0.1:  # the answer is asked for again
            again = Call(messages, tools, call.body, attempt=call.attempt + 1)
            assert played.session.call(again, now) == (begun, False)
    return played


def _message(rng: random.Random, role: str) -> dict[str, Any]:
    text = "".join(rng.choice(TEXTS) for _ in range(rng.randrange(1, 4)))
    return {"role": role, "content": text, **({"tool_call_id": "c"} if role == "tool" else {})}


def expect(tokenizer: Any, played: Played, turn: Turn, generated: GeneratedTurn) -> None:
    """Reconstruct the prompt of a turn from what was sampled and the messages between."""
    messages, tools = turn.call.messages, turn.call.tools
    parent, covered = None, 0
    for earlier in played.turns:  # the first one with the longest conversation that this one continues
        known = len(earlier.messages)
        same = earlier.tools == tools and earlier.messages == messages[:known]
        if same and known > covered and earlier.generated.finish_reason == "stop":
            parent, covered = earlier, known
    written: list[Any] = []
    if parent is not None and not (len(parent.generated.tokens) and parent.generated.tokens[-1] == end_id(tokenizer)):
        written.append("<|im_end|>")
    written += ["\n"] if parent is not None else []
    rest = messages[covered:]
    if parent is None:
        own = rest[0]["content"] if rest and rest[0]["role"] == "system" else None
        rest = rest[1:] if own is not None else rest
        own = SYSTEM if own is None else own
        if tools:
            own = "\n\n".join(part for part in (own, tool_text(tools)) if part)
        written += ["<|im_start|>", "system\n", ("text", own), "<|im_end|>", "\n"]
    said: list[tuple[str, str]] = []
    for message in rest:
        text, role = message["content"], message["role"]
        if role == "tool":
            role, text = "user", f"<tool_response>\n{text}\n</tool_response>"
        for call in message.get("tool_calls", ()):
            function = {"name": call["function"]["name"], "arguments": json.loads(call["function"]["arguments"])}
            text += ("\n" if text else "") + f"<tool_call>\n{json.dumps(function, ensure_ascii=False)}\n</tool_call>"
        if said and said[-1][0] == role == "user":
            said[-1] = (role, f"{said[-1][1]}\n{text}")
        else:
            said.append((role, text))
    for role, text in said:
        written += ["<|im_start|>", role + "\n", ("text", text), "<|im_end|>", "\n"]
    written += ["<|im_start|>", "assistant\n"]
    prompt = (parent.tokens if parent else []) + encode(tokenizer, written)
    played.turns.append(Expected(prompt, generated, parent, [*messages, turn.answer], tools))


def end_id(tokenizer: Any) -> int:
    return int(tokenizer.convert_tokens_to_ids("<|im_end|>"))


def tool_text(tools: list[dict[str, Any]]) -> str:
    return (
        "You can use the tools below. To call one, write its name and arguments like this:\n<tool_call>\n"
        '{"name": "tool_name", "arguments": {"argument": "value"}}\n</tool_call>\n'
        "The result comes with the next message. The tools:\n" + "\n".join(json.dumps(t["function"]) for t in tools)
    )


def encode(tokenizer: Any, parts: list[Any]) -> list[int]:
    """Encode ChatML: strings with their control tokens, and texts of others, in which there are none."""
    ids: list[int] = []
    run = ""

    def flush() -> None:
        nonlocal run
        if run:
            ids.extend(tokenizer.encode(run, add_special_tokens=False, split_special_tokens=True))
        run = ""

    for part in parts:
        if isinstance(part, str) and part in SPECIALS:
            flush()
            ids.append(tokenizer.convert_tokens_to_ids(part))
            continue
        text = part if isinstance(part, str) else part[1]
        while found := [(text.find(special), special) for special in SPECIALS if special in text]:
            at, special = min(found)
            run += text[:at]
            flush()
            ids.extend(tokenizer.encode(special[:1], add_special_tokens=False))
            ids.extend(tokenizer.encode(special[1:], add_special_tokens=False))
            text = text[at + len(special) :]
        run += text
    flush()
    return ids


def same_rows(rows: list[TrajectoryRow], expected: list[tuple[list[int], list[float], list[int]]]) -> bool:
    """Return whether rows are the reconstructed ones: tokens, log-probabilities and versions."""
    return len(rows) == len(expected) and all(
        row.tokens.tolist() == tokens
        and row.versions.tolist() == versions
        and np.array_equal(row.logprobs, np.asarray(logprobs, np.float32))
        and row.prompt_length == next((n for n, version in enumerate(versions) if version >= 0), len(tokens))
        for row, (tokens, logprobs, versions) in zip(rows, expected, strict=True)
    )
