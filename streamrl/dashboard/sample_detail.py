"""One sample, or all samples of a group, with texts, tokens and the reason why a sample was not trained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from streamrl.config.algorithm import Algorithm
from streamrl.dashboard.sample_table import SampleFilter, SampleTable
from streamrl.report.run_decoder import Decoder
from streamrl.rollouts.parquet_files import open_parquet
from streamrl.rollouts.rollout_store import SCHEMA
from streamrl.rollouts.trajectory import NOT_SAMPLED

TEXTS = {"prompt", "completion", "conversation"}
SINGLE = tuple(one.name for one in SCHEMA if one.name not in TEXTS and not pa.types.is_nested(one.type))
"""Columns that are one number or a short text."""
MOST_TOKENS = 4_000
"""Tokens of a row that are sent unless all are asked for."""
MOST_CHARACTERS = 20_000
"""Characters of each text in a group's view, and of each message of a conversation."""
MOST_MEMBERS = 64
"""Samples of a group that are shown side by side."""
BATCH = 64
"""Rows that are decoded at once when a file is read for one sample."""


class Shortener:
    """Cuts texts that are too long, says so where they end, and remembers whether it has cut any."""

    def __init__(self, everything: bool) -> None:
        """Cut nothing if everything is wanted."""
        self._everything = everything
        self.has_cut = False

    def text(self, text: str) -> str:
        """Return a text, or its first `MOST_CHARACTERS`."""
        more = len(text) - MOST_CHARACTERS
        return text[:MOST_CHARACTERS] + self._mark(more, "characters") if self._cuts(more) else text

    def decoded(self, tokens: list[int], decode: Decoder) -> str:
        """Return the text of tokens, or of the first `MOST_TOKENS` of them."""
        more = len(tokens) - MOST_TOKENS
        return decode(tokens[:MOST_TOKENS]) + self._mark(more, "tokens") if self._cuts(more) else decode(tokens)

    def _cuts(self, more: int) -> bool:
        cuts = more > 0 and not self._everything
        self.has_cut |= cuts
        return cuts

    @staticmethod
    def _mark(more: int, what: str) -> str:
        return f"\n[... {more:,} more {what}]"


def read_rows_at(path: Path, first: int, sample_id: str) -> list[dict[str, Any]]:
    """Return all rows of a sample: the one with this number, and those of the same episode that follow it.

    Only the row groups that have them are read, a few rows at a time.

    Raises:
        OSError, pa.ArrowException: the file cannot be read, or is gone.
    """
    found: list[dict[str, Any]] = []
    with open_parquet(path, path.parents[1]) as file:
        begin, groups = 0, list[int]()
        for number in range(file.num_row_groups):
            rows = file.metadata.row_group(number).num_rows
            if groups or begin + rows > first:
                groups.append(number)
            else:
                begin += rows
        for batch in file.iter_batches(batch_size=BATCH, row_groups=groups):
            skip = max(0, first - begin)
            begin += len(batch)
            for record in batch.slice(skip).to_pylist() if skip < len(batch) else ():
                if found and record.get("trajectory_id") != found[0].get("trajectory_id", sample_id):
                    return found
                found.append(record)
                if record.get("trajectory_id") is None:  # an older file: one row is one sample
                    return found
    return found


def sample_view(
    table: SampleTable, sample_id: str, decode: Decoder | None, everything: bool, algorithm: Algorithm | None
) -> dict[str, Any] | None:
    """Return a sample with its tokens or its conversation, ready for JSON; None: there is no such sample.

    Args:
        table: the run's samples, looked at before.
        sample_id: its id.
        decode: from token ids to text; None: ids are all there is.
        everything: all tokens and whole texts, not only the first `MOST_TOKENS` of a row and `MOST_CHARACTERS`.
        algorithm: the run's; None: it cannot be read.

    Raises:
        OSError, pa.ArrowException: its file cannot be read.
    """
    index = table.find(sample_id)
    if index is None:
        return None
    records = read_rows_at(*table.place(index), sample_id)
    if not records:
        return None
    first = records[0]
    light = _light(first, sample_id, table.outcome(index))
    shorten = Shortener(everything)
    told, odd = _conversation(first.get("conversation"), shorten)
    return light | {
        "prompt": _text(first, "prompt", decode, shorten),
        "completion": _text(first, "completion", decode, shorten),
        "cut": shorten.has_cut,
        "messages": told.get("messages") if told else None,
        "steps": told.get("steps") if told else None,
        "rows": [token_columns(record, decode, None if everything else MOST_TOKENS) for record in records],
        "why": why_not_trained(light, _rewarded(table, light["group_id"]), algorithm),
        "notes": [odd] if odd else [],
    }


def _light(record: dict[str, Any], sample_id: str, outcome: str) -> dict[str, Any]:
    """Return the columns of a row that are one number or text; None for those that an older file lacks."""
    return {name: record.get(name) for name in SINGLE} | {"sample_id": sample_id, "outcome": outcome}


def _rewarded(table: SampleTable, group_id: str) -> list[tuple[float, float | None]]:
    """Return (reward, advantage) of the samples of a group that have a reward."""
    members = table.of_group(group_id, ("reward", "advantage"))
    return [(one["reward"], one["advantage"]) for one in members if one["reward"] is not None]


def group_view(
    table: SampleTable, group_id: str, decode: Decoder | None, algorithm: Algorithm | None
) -> dict[str, Any] | None:
    """Return the samples of a group with their texts, ready for JSON; None: there is no such group.

    The last arguments are those of `sample_view`.

    Raises:
        OSError, pa.ArrowException: a file cannot be read.
    """
    every = table.select(SampleFilter(group_id=group_id, sort="step", descending=False))
    chosen = every[:MOST_MEMBERS]
    if not len(chosen):
        return None
    members = []
    prompt: str | None = None
    rewarded = _rewarded(table, group_id)
    shorten = Shortener(everything=False)
    for index in map(int, chosen):
        sample_id = table.sample_id(index)
        first = (read_rows_at(*table.place(index), sample_id) or [{}])[0]
        light = _light(first, sample_id, table.outcome(index))
        prompt = prompt or _text(first, "prompt", decode, shorten)
        told, _ = _conversation(first.get("conversation"), shorten)
        text = _last_answer(told) if told else _text(first, "completion", decode, shorten)
        members.append(light | {"text": text, "why": why_not_trained(light, rewarded, algorithm)})
    others = table.groups_beside(int(chosen[0]))
    view = {"group_id": group_id, "step": members[0]["step"], "samples": len(every)}
    return view | {"prompt": prompt, "members": members, "others": others}


def token_columns(record: dict[str, Any], decode: Decoder | None, most: int | None) -> dict[str, Any]:
    """Return what is known of each completion token of a row, as columns of equal length.

    `sampled` is false for tokens that no policy drew (a tool's result, a template); they carry no loss.
    """
    ids = list(record.get("completion_tokens") or ())
    total = len(ids)
    ids = ids[:most]
    count = len(ids)
    versions = _column(record.get("weight_versions"), count, total)
    mask = _column(record.get("mask"), count, total)
    return {
        "row_id": record.get("sample_id"),
        "prompt_tokens": len(record.get("prompt_tokens") or ()),
        "total": total,
        "ids": ids,
        "texts": None if decode is None else token_texts(ids, decode),
        "logprobs": _column(record.get("logprobs"), count, total),
        "versions": [None if one == NOT_SAMPLED else one for one in versions],
        "sampled": [one is not False for one in mask],
    }


def token_texts(ids: Sequence[int], decode: Decoder) -> list[str]:
    """Return the text of each token, with the leading spaces that some decoders leave out where a text begins."""

    @cache
    def text(one: int) -> str:
        alone = decode([one])
        second = decode([one, one]).removeprefix(alone)
        # they differ in more where the token is a part of a character, or where two make another text
        return second if second.lstrip(" ") == alone.lstrip(" ") else alone

    return [text(one) for one in ids]


def _column(values: Sequence[Any] | None, count: int, total: int) -> list[Any]:
    """Return `count` values: an older file has one for all tokens, or none."""
    if values is None or (len(values) != total and len(values) != 1):
        return [None] * count
    return [values[0]] * count if len(values) == 1 else list(values[:count])


def why_not_trained(
    sample: dict[str, Any], rewarded: Sequence[tuple[float, float | None]], algorithm: Algorithm | None
) -> str:
    """Say why a sample was not trained, or what is special about its gradient; '' if it was trained as usual.

    Args:
        sample: its columns, `outcome` among them.
        rewarded: (reward, advantage) of the samples of its group that have a reward; None: no advantage is known.
        algorithm: as of `sample_view`.
    """
    equal = len(rewarded) > 1 and len({reward for reward, _ in rewarded}) == 1
    skips_flat = algorithm is not None and algorithm.skips_flat_groups
    # a group of a step has advantages, unless the trainer computes them; where samples are not compared within their
    # group, another takes its place only if it has no reward
    in_step = any(advantage is not None for _, advantage in rewarded)
    in_step |= algorithm is not None and not algorithm.compares_siblings
    match sample["outcome"]:
        case "void":
            cause = sample.get("void_cause") or "no reward"
            return f"void ({cause}): {sample.get('reward_error') or 'no message'}"
        case "masked":
            return "not trained: it was cut by the token limit, and algorithm.mask_truncated leaves it out of the loss"
        case "skipped":
            return "not trained: its step was refused as not finite, or too far off-policy, and changed no weights"
        case "dropped" if in_step:
            return "dropped: the loss or the gradient of its group was not finite"
        case "dropped" if len(rewarded) < 2:
            return "dropped: too few samples of its group have a reward, so another group took its place"
        case "dropped" if equal:
            return "dropped: all rewards of its group are equal, so another group took its place"
        case "dropped":
            return "dropped: the loss or the gradient of its group was not finite"
        case _ if equal and skips_flat and all(advantage == 0.0 for _, advantage in rewarded):
            return "trained, but all rewards of its group are equal: its gradient is zero"
        case _ if equal:  # a penalty, a critic, other groups, a KL term or an entropy bonus make a gradient
            return "trained; all rewards of its group are equal"
    return ""


def _conversation(text: str | None, shorten: Shortener) -> tuple[dict[str, Any] | None, str]:
    """Return an episode's messages and steps, and what is odd about them."""
    if not text:
        return None, ""
    try:
        told = json.loads(text)
        messages = [
            {
                "role": str(one["role"]),
                "content": shorten.text(_content(one.get("content"))),
                "calls": [
                    f"{call['function']['name']}({call['function']['arguments']})"
                    for call in one.get("tool_calls") or ()
                ],
            }
            for one in told["messages"]
        ]
        steps = [
            {key: step.get(key) for key in ("kind", "name", "started", "finished", "detail", "tokens")}
            for step in told["steps"]
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None, "The conversation of this sample cannot be read."
    return {"messages": messages, "steps": steps}, ""


def _content(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)


def _last_answer(told: dict[str, Any]) -> str | None:
    answers = [one for one in told["messages"] if one["role"] == "assistant"]
    return "\n".join([answers[-1]["content"], *answers[-1]["calls"]]).strip() if answers else None


def _text(record: dict[str, Any], name: str, decode: Decoder | None, shorten: Shortener) -> str | None:
    if record.get(name) is not None:
        return shorten.text(str(record[name]))
    tokens = record.get(f"{name}_tokens")
    return None if tokens is None or decode is None else shorten.decoded(tokens, decode)
