"""The figures of README.md and docs/results.md are those of the result files, and no row of a table has others."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.loaded_tool import loaded_tool

ROOT = Path(__file__).parents[1]
results = loaded_tool("results")

PAGE = "a <!-- figure: share -->12 %<!-- end --> b\n<!-- figure: rows -->\nold\n<!-- end -->\n"


@pytest.mark.parametrize("path", results.PAGES, ids=lambda path: path.name)
def test_a_page_has_the_figures_of_the_result_files(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    assert page == results.filled(page), "run: make docs"


def test_every_figure_has_a_place() -> None:
    placed = {name for path in results.PAGES for name in results.names(path.read_text(encoding="utf-8"))}
    assert placed == set(results.FIGURES)


def test_only_the_places_of_a_page_are_written() -> None:
    made = results.filled(PAGE, {"share": lambda: "13 %", "rows": lambda: "| 1 |\n| 2 |"})
    assert made == "a <!-- figure: share -->13 %<!-- end --> b\n<!-- figure: rows -->\n| 1 |\n| 2 |\n<!-- end -->\n"


def test_a_place_of_an_unknown_figure_is_refused() -> None:
    with pytest.raises(KeyError, match="no figure is called 'rows'"):
        results.filled(PAGE, {"share": str})


def figure_cells(page: str) -> list[str]:
    """Second cells of the rows of tables whose second column is headed "figure"."""
    found, inside = [], False
    for line in page.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        inside = len(cells) > 2 and (inside or cells[1] == "figure")
        found += [cells[1]] if inside and cells[1] != "figure" and set(cells[1]) != {"-"} else []
    return found


@pytest.mark.parametrize("path", results.PAGES, ids=lambda path: path.name)
def test_every_figure_of_a_table_is_written_from_a_file_or_says_that_it_was_read_by_hand(path: Path) -> None:
    cells = figure_cells(path.read_text(encoding="utf-8"))
    assert len(cells) >= 5
    assert [cell for cell in cells if "<!-- figure:" not in cell and not cell.startswith("by hand, ")] == []


def test_the_cells_of_a_row_of_results_are_found() -> None:
    assert figure_cells("|what|figure|x|\n|---|---|---|\n|a|1|b|\n\n|c|2|d|") == ["1"]


def test_the_published_7b_times_are_shown_over_all_cells_of_the_study(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [dict.fromkeys(("ours, true lengths", "Algorithm 2, forecasts", "Algorithm 2, true lengths"), 1.0)] * 2
    kept = [{**row, "ours, forecasts": ratio} for row, ratio in zip(rows, (0.5, 1.0), strict=True)]
    published = {"forecasts": 0.9, "true lengths": 0.815}
    module = sys.modules["results_dispatch"]
    monkeypatch.setattr(module, "read", lambda name: {"rows": kept, "published": published})
    assert "mean of 2 cells (range): with forecasts of the paper's recall ours 0.750 (0.50 to 1.00)" in (
        results.FIGURES["paper-7b"]()
    )


def test_a_table_of_a_study_is_read_below_its_heading() -> None:
    data = sys.modules["results_data"]
    rows = data.page_rows("two_sites", "A version of the weights")
    assert [row[0] for row in rows] == ["raw", "raw, 2 instances", "delta", "delta, 2 instances"]
    with pytest.raises(ValueError, match="no heading"):
        data.page_rows("two_sites", "Nowhere")
