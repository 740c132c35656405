"""Division of items into parts of limited size: messages of work, row groups of a file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def parts_of(items: Iterable[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Divide items, in order, into parts of at most `most` bytes, but at least one item.

    Args:
        items: what is divided; only the items of one part are held.
        size: returns the bytes of an item; called once for each.
        most: bytes of a part.
    """
    part: list[T] = []
    total = 0
    for item in items:
        own = size(item)
        if part and total + own > most:
            yield part
            part, total = [], 0
        part.append(item)
        total += own
    if part:
        yield part
