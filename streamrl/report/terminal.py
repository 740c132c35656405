"""The console that commands print on, and their tables."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

PIPED_WIDTH = 140
"""Columns assumed when the output is no terminal."""


def terminal(piped_width: int = PIPED_WIDTH) -> Console:
    """Return a console; if the output is no terminal, it has `piped_width` columns."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = piped_width
    return console


def plain_table(*columns: str) -> Table:
    """Return a table without lines, with dim headings."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for column in columns:
        table.add_column(column)
    return table
