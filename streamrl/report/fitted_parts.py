"""Parts of a picture one below the other, of which a window that is too low shows what matters most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text


@dataclass(frozen=True)
class PicturePart:
    """A part of a picture, of which fewer lines can be shown."""

    name: str
    lines: int
    """Lines that can be left out, one by one."""
    make: Callable[[int], RenderableType]
    """Function that returns the part with so many of these lines, at least one."""
    says: bool = False
    """Whether the part itself says what of it is left out."""

    @classmethod
    def of(cls, name: str, whole: RenderableType) -> Self:
        """Return a part that is shown as a whole or not at all."""
        return cls(name, 1, lambda lines: whole)


SPACE = "space"
"""Name of empty lines between parts: nothing says that they are left out."""


class FittedParts:
    """Parts of a picture that take at most a number of lines; what is left out is named below them."""

    def __init__(self, parts: Sequence[PicturePart], cuts: Sequence[tuple[str, int]], height: int | None) -> None:
        """Take the parts, which are rendered when the width is known.

        Args:
            parts: from top to bottom; several may have a name in common.
            cuts: (name, lines that are left) of what to leave out, in this order, until the rest fits.
            height: most lines; None: any number.
        """
        self._parts, self._cuts, self._height = parts, cuts, height

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render what fits into these options' width and the height."""
        if self._height is None:
            yield from (part.make(part.lines) for part in self._parts)
        else:
            without = options.update(height=None)
            yield from self._cut(self._height, lambda one: len(console.render_lines(one, without, pad=False)))

    def _cut(self, height: int, height_of: Callable[[RenderableType], int]) -> list[RenderableType]:
        """Return the parts, shortened or left out until they fit, and a line that names those.

        Args:
            height: most lines.
            height_of: function that returns the lines that something takes.
        """
        # no more is made of a long part than could be shown
        lines = [min(part.lines, max(1, height)) if part.says else part.lines for part in self._parts]
        shown: list[RenderableType | None] = [part.make(left) for part, left in zip(self._parts, lines, strict=True)]
        heights = [0 if one is None else height_of(one) for one in shown]
        words: dict[str, str] = {}
        """What is said of each part that is left out."""
        for name, left in self._cuts:
            for index, part in enumerate(self._parts):
                over = sum(heights) + bool(words) - height
                if over <= 0:
                    break
                if part.name != name or lines[index] <= left:
                    continue
                silent = part.says or name == SPACE
                lines[index] = max(left, lines[index] - over - (not silent and not words))
                one = shown[index] = part.make(lines[index]) if lines[index] else None
                heights[index] = 0 if one is None else height_of(one)
                if not lines[index] and name != SPACE:
                    words[name] = name
                elif not silent:
                    words[name] = f"more {name}"
        if words:
            told = f"no room for: {', '.join(words.values())}"
            shown.append(Text(told, style="dim", no_wrap=True, overflow="ellipsis"))
        return [one for one in shown if one is not None]
