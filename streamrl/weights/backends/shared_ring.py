"""The slots through which one process hands chunks of bytes to others, and who may touch which. Pure: numbers alone.

Chunk n, counted from 0, goes through slot n % slots. The writer fills a slot, then announces the chunk; each reader
waits for the announcement, copies the chunk out, then says so. A slot is free for chunk n once every reader has copied
chunk n - slots, which was in it before. With 2 slots and the readers 1 and 2:

    writer fills 0, 1        both slots are full: chunk 2 waits for [1, 2]
    1 copies 0, 1            chunk 2 waits for [2] alone, which may still be reading chunk 0 in slot 0
    2 copies 0               slot 0 is free: the writer fills it with chunk 2, while 2 copies chunk 1

The writer waits for nothing but copies of chunks that it has announced, and a reader for nothing but the next
announcement. So neither can wait for something that the other does only later, and no two readers wait for each other.
What must not happen: that the writer fills a slot out of which somebody may still be reading.
"""

from __future__ import annotations

from collections.abc import Iterable


class Ring:
    """What the writer knows of its slots."""

    def __init__(self, slots: int, readers: Iterable[int]) -> None:
        self._slots = slots
        self._written = 0
        """Chunks that the writer has filled slots with."""
        self._copied = dict.fromkeys(readers, 0)
        """Chunks that each reader has copied out."""

    @property
    def chunk(self) -> int:
        """Number of the next chunk."""
        return self._written

    @property
    def slot(self) -> int:
        """Where the next chunk goes."""
        return self._written % self._slots

    @property
    def waits_for(self) -> list[int]:
        """The readers that have not copied what is in the slot of the next chunk; []: it is free."""
        return [reader for reader, copied in self._copied.items() if self._written - copied >= self._slots]

    def filled(self) -> None:
        """Record that the next chunk is in its slot.

        Raises:
            ValueError: the slot was not free.
        """
        if self.waits_for:
            raise ValueError(f"chunk {self._written} overwrites what {self.waits_for} have not copied")
        self._written += 1

    def copied(self, reader: int, chunk: int) -> None:
        """Record that a reader has copied a chunk.

        Raises:
            ValueError: it is not the one that this reader copies next.
        """
        if chunk != self._copied[reader] or chunk >= self._written:
            raise ValueError(
                f"reader {reader} says that it has copied chunk {chunk}; expected {self._copied[reader]}, "
                f"of {self._written} written"
            )
        self._copied[reader] += 1
