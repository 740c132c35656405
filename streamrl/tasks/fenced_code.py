"""The program in a model's answer: the last of its fenced blocks that holds Python."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

FENCE = re.compile(r"([^`]*)(`{3,})([^`]*)")
"""A line with a fence: what is before it, its backticks, and what follows; no other backticks."""
TAGS = ("python", "python3", "py")
MOST_INDENT = 3
"""Columns by which a fence inside a block may be indented beyond the one that opened it; others are text, such as those
of an example in a docstring.
"""


@dataclass
class _Block:
    """A fenced block."""

    tag: str
    """The first word after the opening fence, in lower case; '': there is none."""
    ticks: int
    """Backticks of the opening fence."""
    indent: int
    """Characters before the opening fence, if they are all blank; else 0."""
    lines: list[str] = field(default_factory=list)

    def is_program(self, closed: bool) -> bool:
        """Whether it is to be run; a fence without a tag and an end may as well be one that ends nothing."""
        return self.tag in TAGS or (closed and not self.tag)


def code_of(completion: str) -> str:
    """Return the program in a completion: its last fenced block of Python, or all of it if there is none.

    A block holds Python if it has the tag python, python3 or py in upper or lower case, or none. One with such a tag
    that has no end goes on to the end of the text, or to the fence that opens another block.

    >>> code_of("Use this:\\n```python\\nx = 1\\n```\\nwith\\n```bash\\npip install x\\n```\\nDone.")
    'x = 1\\n'
    """
    programs = [block for block, closed in _blocks(completion) if block.is_program(closed)]
    return "".join(f"{line}\n" for line in programs[-1].lines) if programs else completion


def _blocks(text: str) -> Iterator[tuple[_Block, bool]]:
    """Yield the fenced blocks of a text in order, each with whether a fence ends it; in time linear in its length."""
    block: _Block | None = None
    for line in text.split("\n"):  # not `splitlines`, which also ends lines within Python's texts
        fence = FENCE.fullmatch(line)
        before, ticks, after = fence.groups() if fence else (line, "", "")
        words, alone = after.split(), not before.strip()
        if block is None:
            if ticks and (alone or len(words) < 2):  # models write "Answer: ```python", too
                block = _opened(before, ticks, words)
        elif len(ticks) >= block.ticks and (len(before) <= block.indent + MOST_INDENT if alone else not words):
            if not alone:
                block.lines.append(before)
            yield block, not words
            block = _opened(before, ticks, words) if words else None
        else:
            blank = len(line) - len(line.lstrip(" \t"))
            block.lines.append(line[min(blank, block.indent) :])
    if block is not None:
        yield block, False


def _opened(before: str, ticks: str, words: list[str]) -> _Block:
    """Return the block that a fence opens."""
    return _Block(words[0].lower() if words else "", len(ticks), 0 if before.strip() else len(before))
