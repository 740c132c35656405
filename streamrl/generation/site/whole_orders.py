"""An order of the controller that may take several messages, and is carried out once the last of them has come."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class WholeOrder(Generic[T]):
    """What the messages of one order have named so far."""

    def __init__(self) -> None:
        self._gathered: list[T] = []

    def with_part(self, part: Iterable[T], more: bool) -> list[T] | None:
        """Add what a message names.

        Args:
            part: what it names.
            more: whether another message of the same order follows.

        Returns:
            All that the order names; None: its last message has not come yet.
        """
        self._gathered += part
        if more:
            return None
        whole, self._gathered = self._gathered, []
        return whole
