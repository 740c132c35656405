"""The program in a model's answer: the last of its fenced blocks that holds Python."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from textwrap import dedent

TICKS = "```"
TAGS = ("python", "python3", "py")
TAG = re.compile(r"[\w+#.{}-]*[\w}]")
"""What directly follows a fence that opens a block, and no text does."""
BEHIND_CODE = re.compile(r"[ \t\r]*(?:[.,;:!?]*[ \t\r]*|</.*)")
"""What may follow a fence that ends a block at the end of its last line of code; after anything else it is a part of
the code."""
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
    first_deep: int | None = None
    """Number of the first line that is a bare fence, but indented too far; None: there is none."""

    def program(self, closed: bool) -> str | None:
        """Return the program in it; None: it holds something else.

        A fence without a tag and an end may as well be one that ends nothing.
        """
        if self.tag not in TAGS and (self.tag or not closed):
            return None
        program = "".join(f"{line}\n" for line in (self.lines if closed else self.lines[: self.first_deep]))
        return dedent(program) if program.lstrip("\n")[:1].isspace() else program  # in a list, for example


def code_of(completion: str) -> str:
    """Return the program in a completion: its last fenced block of Python, or all of it if there is none.

    A block holds Python if it has the tag python, python3 or py in upper or lower case, or none. One with such a tag
    that has no end goes on to the end of the text, or to the fence that opens another block.

    >>> code_of("Use this:\\n```python\\nx = 1\\n```\\nwith\\n```bash\\npip install x\\n```\\nDone.")
    'x = 1\\n'
    """
    found = [block.program(closed) for block, closed in _blocks(completion)]
    return next((program for program in reversed(found) if program is not None), completion)


def _blocks(text: str) -> Iterator[tuple[_Block, bool]]:
    """Yield the fenced blocks of a text in order, each with whether a fence ends it; in time linear in its length."""
    block: _Block | None = None
    for line in text.split("\n"):  # not `splitlines`, which also ends lines within Python's texts
        if block is None:
            block = _opened(line)
            continue
        ticks, blank, after = _fence_at_start(line)
        deep = blank > block.indent + MOST_INDENT
        if ticks >= block.ticks and not deep:
            opens = TAG.fullmatch(after.rstrip()) is not None
            yield block, not opens
            block = _opened(line) if opens else None
        elif not ticks and (code := _before_end(line, block)) is not None:
            block.lines.append(code)
            yield block, True
            block = None
        else:
            if ticks >= block.ticks and not after.strip() and block.first_deep is None:
                block.first_deep = len(block.lines)
            block.lines.append(line[min(blank, block.indent) :])
    if block is not None:
        yield block, False


def _fence_at_start(line: str) -> tuple[int, int, str]:
    """Return the backticks with which a line begins (0: fewer than three), the blanks before and the text after."""
    text = line.lstrip(" \t")
    after = text.lstrip("`")
    ticks = len(text) - len(after)
    return (ticks if ticks >= len(TICKS) else 0), len(line) - len(text), after


def _fence_at_end(line: str) -> tuple[str, int, str] | None:
    """Return what is before the only fence of a line that begins with text, its backticks, and what is after it."""
    end = line.rfind(TICKS) + len(TICKS)
    before = line[:end].rstrip("`")
    if end < len(TICKS) or TICKS in before or "`" in line[end:]:
        return None
    return before, end - len(before), line[end:]


def _opened(line: str) -> _Block | None:
    """Return the block that a line opens; None: it opens none."""
    ticks, blank, after = _fence_at_start(line)
    if ticks:
        words = after.split()
        return None if "`" in after else _Block(words[0].lower() if words else "", ticks, blank)
    fence = _fence_at_end(line)  # models write "Answer: ```python", too
    if fence is None or len(words := fence[2].split()) > 1:
        return None
    return _Block(words[0].lower() if words else "", fence[1], 0)


def _before_end(line: str, block: _Block) -> str | None:
    """Return the code of a line at whose end a fence ends the block; None: there is no such fence."""
    fence = _fence_at_end(line)
    if fence is None or fence[1] < block.ticks or not BEHIND_CODE.fullmatch(fence[2]):
        return None
    return fence[0]
