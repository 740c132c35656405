"""The console that commands print on, and their tables."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table

from streamrl.rollouts.plain_text import shown

PIPED_WIDTH = 140
"""Columns assumed when the output is no terminal."""

NARROWEST = 8
"""Columns to which a table's text is narrowed, and no further."""


class TextConsole(Console):
    """The console that commands print on: whatever a text has in it is shown, neither obeyed nor read as markup.

    Names, reasons and notes come from other processes, from models and from run folders of others. Without this, a
    terminal would obey the control characters in them, and rich would take brackets for styles, or fail on them.
    """

    def __init__(self, **options: Any) -> None:
        # an empty FORCE_COLOR asks for nothing (force-color.org), but rich takes no output for a terminal then
        if os.environ.get("FORCE_COLOR") == "" and os.environ.get("TTY_COMPATIBLE", "") not in ("0", "1"):
            options.setdefault("force_terminal", (options.get("file") or sys.stdout).isatty())
        super().__init__(markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Render into segments without control characters; a style's own are added behind this."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield segment._replace(text=shown(segment.text))


def terminal(piped_width: int = PIPED_WIDTH) -> Console:
    """Return a console; if the output is no terminal, it has `piped_width` columns."""
    console = TextConsole(highlight=False)
    if not console.file.isatty():
        console.width = piped_width
    return console


def redraws(console: Console) -> bool:
    """Return whether what is written can be replaced: on a terminal that can do that, whatever colours are wanted.

    With FORCE_COLOR, rich takes a pipe for a terminal, too.
    """
    able = console.is_terminal and console.is_interactive and not console.is_dumb_terminal
    return able and console.file.isatty()


def plain_table(*columns: str, text_columns: int | None = None) -> Table:
    """Return a table without lines, with dim headings.

    Args:
        columns: the headings.
        text_columns: so many columns from the left are text, the others numbers, and no cell is wrapped; None: all
            are text, which may be wrapped.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for index, column in enumerate(columns):
        justify: JustifyMethod = "left" if text_columns is None or index < text_columns else "right"
        table.add_column(column, justify=justify, no_wrap=text_columns is not None)
    return table


class RuledTable(Table):
    """A table with lines that breaks texts between words.

    In a narrow console the cells lose the space beside the lines first; then the widest columns of text are folded.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render with columns as wide as these options allow."""
        texts = [[str(text) for text in (column.header, *column.cells)] for column in self.columns]
        least = [max(cell_len(word) for text in some for word in text.split() or [""]) for some in texts]
        most = [max(map(cell_len, some)) for some in texts]
        room = options.max_width - len(self.columns) - 1
        spaced = sum(least) + 2 * len(self.columns) <= room
        self.padding = (0, 1) if spaced else 0
        folded = [column.justify == "left" for column in self.columns]
        widths = _widths(least, most, room - 2 * len(self.columns) * spaced, folded)
        for column, width in zip(self.columns, widths, strict=True):
            column.width = width
        return super().__rich_console__(console, options)


def _widths(least: Sequence[int], most: Sequence[int], room: int, folded: Sequence[bool]) -> list[int]:
    """Return the columns' widths.

    Args:
        least: width of each column's longest word.
        most: width of each column's longest text.
        room: width of all columns together.
        folded: whether a column is narrowed where words do not fit.
    """
    widths = list(least)
    for index in sorted(range(len(least)), key=lambda index: most[index] - least[index]):
        widths[index] += max(0, min(most[index] - least[index], room - sum(widths)))
    while sum(widths) > room:
        index = max(range(len(widths)), key=lambda index: (folded[index], widths[index]))
        if widths[index] <= NARROWEST:
            break
        widths[index] -= 1
    return widths


def ruled_table(
    title: str, columns: Sequence[str], text_columns: Collection[str], rows: Iterable[Sequence[str]] = ()
) -> Table:
    """Return a table with lines; columns that are not among `text_columns` hold numbers."""
    table = RuledTable(title=title or None, title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name in text_columns else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
