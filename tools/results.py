"""Write every figure of README.md and docs/results.md that a study has measured from that study's result files.

A page marks the places that this command writes; nothing else in it changes:

    <!-- figure: NAME -->text<!-- end -->          in a line or in the cell of a table
    <!-- figure: NAME -->                          a table of its own
    text
    <!-- end -->

`FIGURES` has the text of each name, from `results_training.py`, `results_dispatch.py`, `results_agents.py` and
`results_system.py`. `make docs` runs this; `--check` only compares.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import results_agents
import results_dispatch
import results_system
import results_training
from written_files import write_files

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "results.md")
FIGURES: dict[str, Callable[[], str]] = {
    **results_training.FIGURES,
    **results_dispatch.FIGURES,
    **results_agents.FIGURES,
    **results_system.FIGURES,
}
"""Name -> what makes its text."""
PLACE = re.compile(r"(<!-- figure: (?P<name>[\w-]+) -->)(?P<text>.*?)(<!-- end -->)", re.DOTALL)


def names(page: str) -> list[str]:
    """Return the names of the places of a page, in its order."""
    return [place["name"] for place in PLACE.finditer(page)]


def filled(page: str, figures: Mapping[str, Callable[[], str]] | None = None) -> str:
    """Return a page with the text of all its places made anew.

    Raises:
        KeyError: there is no figure of a place's name; the message has it.
    """
    known = FIGURES if figures is None else figures

    def text_of(place: re.Match[str]) -> str:
        if place["name"] not in known:
            raise KeyError(f"no figure is called {place['name']!r}; known: {', '.join(known)}")
        text = known[place["name"]]()
        own_lines = place["text"].startswith("\n")
        return f"{place[1]}\n{text}\n{place[4]}" if own_lines else f"{place[1]}{text}{place[4]}"

    return PLACE.sub(text_of, page)


def main(arguments: Sequence[str]) -> int:
    """Write the places of all pages, or compare them with the result files (`--check`)."""
    return write_files(
        {path: filled(path.read_text(encoding="utf-8")) for path in PAGES}, "the result files", arguments
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
