"""The tokenizer of a model: its chat template, the tokens that end a turn, and the size of its vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streamrl.errors import UserError
from streamrl.machine.model_files import end_tokens, read_tokenizer
from streamrl.tasks.chat_template import ChatTemplate
from streamrl.verify.findings import Finding

TEMPLATE, STOPS, VOCABULARY = "chat template keeps history", "stop tokens", "vocabulary"
FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
"""Files of which a folder with a tokenizer has at least one."""
ANSWER = "<think>\nSeven and five.\n</think>\n\nIt is twelve."
"""An assistant's turn of the kind that templates rewrite: it has its reasoning in it."""
TURNS = (
    {"role": "user", "content": "What is 7 + 5?"},
    {"role": "assistant", "content": ANSWER},
    {"role": "user", "content": "And 8 + 5?"},
)


def check_tokenizer(folder: Path, vocabulary: int, variables: Mapping[str, Any] | None = None) -> list[Finding]:
    """Check the tokenizer of a model's folder.

    Args:
        folder: the model in HF format, with or without a tokenizer.
        vocabulary: rows of the model's embedding.
        variables: variables of the chat template (`model.chat_template_kwargs`).
    """
    try:
        if not any((folder / name).exists() for name in FILES):  # transformers makes empty ones of some families then
            raise OSError(f"expected one of {', '.join(FILES)}")
        tokenizer = read_tokenizer(folder)
    except Exception as error:  # the libraries raise whatever their authors chose
        reason = f"no tokenizer in {folder}: {_first_line(error)}"
        return [Finding(name, "not checked", reason) for name in (TEMPLATE, STOPS, VOCABULARY)]
    template = None
    try:
        template = ChatTemplate(tokenizer, variables)
        history = check_template(template)
    except UserError as error:
        history = Finding(TEMPLATE, "refused", str(error))
    try:
        ends = check_stops(tokenizer, end_tokens(str(folder), tokenizer), template)
    except (OSError, ValueError) as error:
        ends = Finding(STOPS, "not checked", f"transformers cannot read the model's end tokens: {_first_line(error)}")
    return [history, ends, check_vocabulary(len(tokenizer), vocabulary)]


def check_template(template: ChatTemplate) -> Finding:
    """Check that a chat template only appends: what a turn was generated from is what later turns are preceded by."""
    if not template.exists:
        return Finding(TEMPLATE, "refused", "the tokenizer has no chat template")
    try:
        asked, longer = template.text([TURNS[0]]), template.text(TURNS)
    except Exception as error:  # templates raise whatever their authors chose
        return Finding(TEMPLATE, "refused", f"the chat template fails: {_first_line(error)}")
    before = asked + ANSWER
    if longer.startswith(before):
        return Finding(TEMPLATE, "works", "a later turn begins with the earlier ones as they were generated")
    at = next(n for n in range(len(before)) if longer[n : n + 1] != before[n])
    was, now = before[at : at + 24], longer[at : at + 24]
    return Finding(TEMPLATE, "refused", f"the template rewrites history: {was!r} becomes {now!r} in the next turn")


def check_stops(tokenizer: Any, stops: list[int], template: ChatTemplate | None = None) -> Finding:
    """Check that an assistant's turn ends with a token at which the generator stops.

    Args:
        tokenizer: the tokenizer.
        stops: ids at which the generator stops.
        template: its chat template; None: without variables.
    """
    names = ", ".join(f"{tokenizer.convert_ids_to_tokens(stop)} ({stop})" for stop in stops)
    if not stops:
        return Finding(STOPS, "refused", "neither the tokenizer nor a config of the model names an end token")
    template = template or ChatTemplate(tokenizer)
    if not template.exists:
        return Finding(STOPS, "works", names)
    try:
        text = template.text(TURNS[:2], asks=False)
    except Exception as error:  # as in check_template
        return Finding(STOPS, "not checked", f"the chat template fails: {_first_line(error)}")
    tail = tokenizer(text[text.rfind("twelve.") :], add_special_tokens=False)["input_ids"]
    if set(tail) & set(stops):
        return Finding(STOPS, "works", f"an answer ends with {names}")
    return Finding(STOPS, "refused", f"no answer of the chat template ends with a stop token: {names}")


def _first_line(error: Exception) -> str:
    """Return what an error says first, or its kind if it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def check_vocabulary(tokens: int, rows: int) -> Finding:
    """Check that every token has a row in the embedding; more rows are padding.

    Args:
        tokens: tokens of the tokenizer.
        rows: rows of the model's embedding.
    """
    if tokens > rows:
        return Finding(VOCABULARY, "refused", f"the tokenizer has {tokens} tokens, the model only {rows} rows")
    padding = f", {rows - tokens} of padding, which trainer and generator both count" if rows > tokens else ""
    return Finding(VOCABULARY, "works", f"{tokens} tokens in {rows} rows{padding}")
