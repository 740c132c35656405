"""Make the README's pictures from a run's folder: the live view, and the report's timeline.

    python tools/pictures.py runs/demo [--what live|report]

The live view is what `streamrl status` shows at this moment, so make it while the run is going; the report exists when
it has ended. Both are written to docs/pictures/ as SVG.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path

from rich.console import Console

from streamrl.report.panels import render
from streamrl.run_dir import layout
from streamrl.run_dir.evaluations import read_evaluations
from streamrl.run_dir.metrics import read_metrics
from streamrl.run_dir.start_stages import read_stages
from streamrl.run_dir.status import read_status

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
WIDTH = 110
FIGURE = "timeline-0"
INK, GRID = "#333333", "#cccccc"
"""Colours of lines and text, which in the report follow the reader's theme."""


def live_view(run_dir: Path) -> str:
    """Return the live view of a run, as it is now, as SVG."""
    console = Console(record=True, width=WIDTH, file=sys.stderr, force_terminal=True)
    evaluated = read_evaluations(run_dir / layout.EVALUATIONS)
    metrics = read_metrics(run_dir / layout.METRICS)
    console.print(render(read_status(run_dir), metrics, time.time(), evaluated, read_stages(run_dir)))
    svg = console.export_svg(title=f"streamrl launch: {run_dir.name}")
    svg = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # they would come from a web server
    return svg.replace("Fira Code, monospace", "monospace")


def figure(run_dir: Path, name: str) -> str:
    """Return a figure of a run's report as a picture of its own.

    Raises:
        LookupError: the report has no such figure.
    """
    page = (run_dir / layout.REPORT).read_text(encoding="utf-8")
    found = re.search(rf'<figure id="plot-{name}">(<svg.*?</svg>)', page, re.DOTALL)
    if found is None:
        names = ", ".join(re.findall(r'<figure id="plot-([\w-]+)"', page))
        raise LookupError(f"{run_dir / layout.REPORT} has no figure {name!r}; it has: {names}")
    svg = found[1].replace("currentColor", INK).replace("var(--grid)", GRID)
    if "xmlns=" not in svg.partition(">")[0]:
        svg = svg.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    return svg


def main() -> None:
    """Write the picture that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--what", choices=["live", "report"], default="live")
    args = parser.parse_args()
    PICTURES.mkdir(parents=True, exist_ok=True)
    if args.what == "live":
        (PICTURES / "live_view.svg").write_text(live_view(args.run_dir))
    else:
        (PICTURES / "report_timeline.svg").write_text(figure(args.run_dir, FIGURE))


if __name__ == "__main__":
    main()
