"""Samples as they travel, for the tests of batches and uplinks."""

from __future__ import annotations

from typing import Any

import numpy as np

from streamrl.generation.site import sample_batches
from streamrl.generation.site.sample_batches import Item
from streamrl.protocol.samples import TOKEN_ARRAYS
from streamrl.transport.wire import Arrays, Message, decode, encode


def item(name: str, tokens: int = 20, version: int = 3, largest: int = 49_000) -> Item:
    rng = np.random.default_rng(tokens)
    arrays = {
        "completion_tokens": rng.integers(0, largest, tokens, dtype=np.int32),
        "logprobs": -rng.exponential(1.0, tokens).astype(np.float32),
        "token_versions": np.full(tokens, version, dtype=np.int32),
    }
    return {"sample_id": name, "text": f"the answer of {name} is " * 3, "t_finished": 1.5, "error": None}, arrays


def items(count: int, tokens: int = 20) -> list[Item]:
    return [item(f"g.{number}", tokens) for number in range(count)]


def over_the_wire(body: dict[str, Any], arrays: Arrays) -> tuple[dict[str, Any], Arrays]:
    frames = encode(Message(sample_batches.KIND, "session", 1, body, dict(arrays)))
    message = decode([bytes(frame) for frame in frames])
    return message.body, message.arrays


def assert_same(found: list[Item], expected: list[Item]) -> None:
    assert [body for body, _ in found] == [body for body, _ in expected]
    for (_, got), (_, wanted) in zip(found, expected, strict=True):
        assert got.keys() == wanted.keys() == TOKEN_ARRAYS.keys()
        for name, array in got.items():
            assert array.dtype == TOKEN_ARRAYS[name] and array.tobytes() == wanted[name].tobytes()
