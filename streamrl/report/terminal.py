"""The console that commands print on, and their tables."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType
from rich.segment import Segment
from rich.table import Table

from streamrl.rollouts.plain_text import shown

PIPED_WIDTH = 140
"""Columns assumed when the output is no terminal."""


class TextConsole(Console):
    """The console that commands print on: whatever a text has in it is shown, neither obeyed nor read as markup.

    Names, reasons and notes come from other processes, from models and from run folders of others. Without this, a
    terminal would obey the control characters in them, and rich would take brackets for styles, or fail on them.
    """

    def __init__(self, **options: Any) -> None:
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
    if not console.is_terminal:
        console.width = piped_width
    return console


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


def ruled_table(
    title: str, columns: Sequence[str], text_columns: Collection[str], rows: Iterable[Sequence[str]] = ()
) -> Table:
    """Return a table with lines; columns that are not among `text_columns` hold numbers."""
    table = Table(title=title or None, title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name in text_columns else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
