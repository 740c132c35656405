"""Tables with lines: in a narrow console they break between words."""

from __future__ import annotations

import io

import pytest
from rich.table import Table

from streamrl.report.terminal import TextConsole, ruled_table

TITLES = ("schedule", "policy", "step", "bubble", "trainer", "samples/s", "staleness", "USD/1k")
ROWS = [
    ("one_step_off", "least-loaded", "243.0 s", "39.3%", "81.0%", "4.21", "0: 128, 1: 384", "-"),
    ("sync", "skew-aware", "225.3 s", "29.7%", "79.5%", "4.54", "0: 512", "-"),
]


def lines(table: Table, width: int) -> list[str]:
    console = TextConsole(file=io.StringIO(), width=width)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def columns(shown: list[str]) -> list[str]:
    """The text of each column, from top to bottom."""
    cells = [line.replace("┃", "│").split("│")[1:-1] for line in shown if line[0] in "┃│"]
    return [" ".join(" ".join(column).split()) for column in zip(*cells, strict=True)]


@pytest.mark.parametrize("width", [80, 100, 140])
def test_no_word_is_broken_where_the_longest_of_each_column_have_room(width: int) -> None:
    table = ruled_table("", TITLES, TITLES[:2], ROWS)
    shown = lines(table, width)
    assert max(map(len, shown)) <= width
    assert columns(shown) == [" ".join(column) for column in zip(TITLES, *ROWS, strict=True)]
    assert ("│ one_step_off │" in "\n".join(shown)) == (width > 80)


def test_a_table_is_laid_out_for_each_console_anew() -> None:
    table = ruled_table("", TITLES, TITLES[:2], ROWS)
    wide = lines(table, 140)
    lines(table, 80)
    assert lines(table, 140) == wide and len(wide) == 6


@pytest.mark.parametrize("width", [40, 60])
def test_a_long_name_is_folded_and_nothing_is_cut(width: int) -> None:
    name = "a-very-long-site-with-a-name-of-its-own-regular-0"
    shown = lines(ruled_table("", ("process", "USD/h"), ("process",), [(name, "24 x 1.00")]), width)
    assert max(map(len, shown)) <= width and "…" not in "".join(shown)
    assert columns(shown)[0].replace(" ", "") == f"process{name}"
    assert columns(shown)[1] == "USD/h 24 x 1.00"
