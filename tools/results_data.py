"""Read the results that studies keep in experiments/results/: JSON, steps of a run, and tables of their pages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "experiments" / "results"

Figure = Callable[[], str]


def named(figures: dict[str, Figure], name: str) -> Callable[[Figure], Figure]:
    """Return a decorator that keeps a function as the text of one place of a page."""

    def keep(function: Figure) -> Figure:
        if name in figures:
            raise ValueError(f"two figures are called {name!r}")
        figures[name] = function
        return function

    return keep


@cache
def read(name: str) -> Any:
    """Return the contents of `NAME.json`."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


@cache
def steps(run: str) -> list[dict[str, Any]]:
    """Return the rows of a kept run's metrics, one for each optimizer step."""
    lines = (RESULTS / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@cache
def page_rows(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading of `PAGE.md`, without the head.

    Raises:
        ValueError: the page has no such heading.
    """
    lines = (RESULTS / f"{page}.md").read_text(encoding="utf-8").splitlines()
    begin = next((number for number, line in enumerate(lines) if line.startswith("## " + heading)), None)
    if begin is None:
        raise ValueError(f"{page}.md has no heading that begins with {heading!r}")
    found: list[list[str]] = []
    for line in lines[begin + 1 :]:
        if line.startswith("|"):
            found.append([cell.strip() for cell in line.strip("|").split("|")])
        elif found or line.startswith("#"):
            break
    return found[2:]


def mean(values: Iterable[float]) -> float:
    """Return the arithmetic mean."""
    every = list(values)
    return sum(every) / len(every)


def percent(share: float, digits: int = 0) -> str:
    """Return a share as percent."""
    return f"{100 * share:.{digits}f} %"


def slashed(values: Iterable[float], form: str = ".3f") -> str:
    """Return numbers with slashes between them."""
    return " / ".join(format(value, form) for value in values)
