"""The experts of a sample as vLLM gives them, cut to what the sample's part carries. Pure.

vLLM returns a row for each position that it computed, from a first one on that the request names. The row of a position
belongs to the token that is drawn there, so a part of a sample has the rows of its tokens; the first part has those of
the prompt before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from streamrl.machine.router_shape import RouterShape
from streamrl.rollouts.types import ByteArray, PartialSample, SampleRequest


def first_row(request: SampleRequest) -> int:
    """Return the first position whose experts a request needs: that of its next token, if those before are known."""
    kept, prompt = request.kept, len(request.prompt_tokens)
    if kept is None or not (tokens := len(kept.completion_tokens)):
        return 0
    known = kept.experts is not None and len(kept.experts) == prompt + tokens - 1
    return prompt + tokens - 1 if known else 0


def rows_of(routers: RouterShape, chosen: Any, positions: int) -> ByteArray:
    """Return the rows of so many positions.

    Args:
        routers: the model's routers.
        chosen: what vLLM has returned, [positions, all layers, top_k] of integers; None: nothing.
        positions: number of positions, 0 if no token was drawn.

    Raises:
        RuntimeError: vLLM has returned something else.
    """
    if positions == 0:
        return np.zeros((0, routers.row_bytes), dtype=np.uint8)
    shape = None if chosen is None else np.shape(chosen)
    if shape is None or shape[0] != positions or shape[1] <= routers.layers[-1] or shape[2] != routers.top_k:
        raise RuntimeError(f"vLLM returned experts of shape {shape}, expected those of {positions} positions")
    return routers.to_rows(chosen[:, list(routers.layers)])


def with_experts(
    routers: RouterShape, request: SampleRequest, part: PartialSample, chosen: Any
) -> tuple[PartialSample | None, PartialSample]:
    """Return what a request had before and what it has produced now, both with their experts.

    If those of what it had before are not known, they are of the pass that computed it again.

    Args:
        routers: the model's routers.
        request: the request.
        part: its new tokens.
        chosen: see `rows_of`, from `first_row(request)` on.

    Raises:
        RuntimeError: as `rows_of`.
    """
    kept, begin = request.kept, first_row(request)
    before = len(request.prompt_tokens) + (0 if kept is None else len(kept.completion_tokens)) - 1
    tokens = len(part.completion_tokens)
    rows = rows_of(routers, chosen, before + tokens - begin if tokens else 0)
    if kept is not None and len(kept.completion_tokens) and begin == 0 and tokens:
        return replace(kept, experts=rows[:before]), replace(part, experts=rows[before:])
    return kept, replace(part, experts=rows)


def rows_since(
    routers: RouterShape, chunks: Sequence[Any], begin: int, prompt: int, tokens: tuple[int, int]
) -> ByteArray | None:
    """Return the rows of a running request's tokens.

    Args:
        routers: the model's routers.
        chunks: what vLLM has collected so far, in order.
        begin: position of its first row.
        prompt: number of prompt tokens.
        tokens: the first token and the one after the last, of the whole completion.

    Returns:
        The rows; None: vLLM has not got them.
    """
    first, stop = tokens
    start = prompt + first - 1 if first else 0
    if not chunks or start < begin:
        return None
    found = np.concatenate(chunks)[start - begin : prompt + stop - 1 - begin]
    expected = prompt + stop - 1 - start
    return rows_of(routers, found, expected) if len(found) == expected else None
