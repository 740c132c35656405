"""Work on weights that have been received, in threads that their caller always sees the end of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from streamrl.weights.codec.delta import decode_tensor
from streamrl.weights.version import Manifest, Stream, bytes_of

DECODING_THREADS = 2
"""Threads that decode a version."""

T = TypeVar("T")


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Run a function in a thread. A caller that is cancelled meanwhile still waits for the thread to end."""
    work = asyncio.ensure_future(asyncio.to_thread(function, *args))
    cancelled: asyncio.CancelledError | None = None
    try:
        while not work.done():
            try:
                await asyncio.wait([work])
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            work.exception()  # it has been seen
            raise cancelled
        return work.result()
    finally:
        # the error's traceback refers to this frame: if the frame refers to the error, `args` live until the next
        # garbage collection
        del work, cancelled


def corrupt_payloads(
    incoming: list[Stream], todo: list[tuple[int, tuple[int, ...]]]
) -> list[tuple[int, tuple[int, ...]]]:
    """Return those of the payloads in `todo`, given as (part, tensors), that do not match their checksums."""
    found = [(i, incoming[i][0].corrupt(incoming[i][1], indexes)) for i, indexes in todo]
    return [(i, indexes) for i, indexes in found if indexes]


def decode_parts(manifest: Manifest, target: np.ndarray, streams: list[Stream]) -> None:
    """Apply coded parts in order to a buffer (uint8 [nbytes]) that holds the base of the first one.

    Raises:
        CorruptDelta: a payload cannot be decoded.
    """
    buffer = np.asarray(target)

    def one(index: int) -> None:
        t = manifest.tensors[index]
        for part, stream in streams:
            decode_tensor(bytes_of(part.payloads[index], stream), bytes_of(t, buffer), t.dtype)

    with ThreadPoolExecutor(DECODING_THREADS) as pool:
        list(pool.map(one, range(len(manifest.tensors))))
