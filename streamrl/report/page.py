"""Building blocks of the report's sections, and its style sheet: one column, printable, light or dark as the reader's
system is set.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from streamrl.report import plots


def section(title: str, *parts: str) -> str:
    """Return a section with a heading; '' when all its parts are empty."""
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>" if any(parts) else ""


def figure(drawn: plots.Figure, name: str, caption: str) -> str:
    """Return a plot with its caption; `name` (letters, digits, hyphens) must be unique on the page."""
    svg = plots.to_svg(drawn, name)
    return f'<figure id="plot-{name}">{svg}<figcaption>{escape(caption)}</figcaption></figure>'


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of text cells."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def note(text: str) -> str:
    """Return a small explanatory paragraph."""
    return f'<p class="note">{escape(text)}</p>'


def warning_box(text: str) -> str:
    """Return a framed warning."""
    return f'<p class="bad box"><strong>{escape(text)}</strong></p>'


CSS = """
:root { color-scheme: light dark; --ink: #1d2129; --page: #ffffff; --soft: #f3f5f8; --grid: #d7dbe2;
  --dim: #667080; --bad: #b3261e; --accent: #2f7ed8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7ec; --page: #14171c; --soft: #1e232b; --grid: #3a414c; --dim: #98a2b3; --bad: #ff8a80; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 980px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { margin: 0; font-size: 28px; }
h2 { margin: 40px 0 10px; padding-bottom: 4px; font-size: 20px; border-bottom: 1px solid var(--grid); }
h3 { margin: 22px 0 6px; font-size: 16px; }
p { margin: 6px 0; }
.facts, .note, figcaption { color: var(--dim); }
.note, figcaption { font-size: 13.5px; }
.bad { color: var(--bad); }
.box { padding: 10px 14px; border: 1px solid var(--bad); border-left-width: 5px; border-radius: 8px; }
.cards { display: grid; grid-template-columns: repeat(3, 1fr); gap: 10px; margin: 18px 0 0; }
.cards div { padding: 10px 14px; background: var(--soft); border-radius: 8px; }
.cards dt { color: var(--dim); font-size: 13px; }
.cards dd { margin: 0; font-size: 16px; font-weight: 600; font-variant-numeric: tabular-nums; }
figure { margin: 14px 0 22px; }
figure svg { display: block; width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { width: 100%; margin: 10px 0; border-collapse: collapse; font-size: 14px;
  font-variant-numeric: tabular-nums; }
th, td { padding: 5px 12px 5px 0; border-bottom: 1px solid var(--grid); text-align: left;
  vertical-align: top; }
th { color: var(--dim); font-weight: 500; }
details { margin: 8px 0; padding: 8px 12px; background: var(--soft); border-radius: 8px; }
summary { cursor: pointer; }
pre { margin: 8px 0 0; font: 13px/1.45 ui-monospace, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; }
pre.prompt { padding-left: 10px; color: var(--dim); border-left: 3px solid var(--accent); }
@media (max-width: 700px) { .cards { grid-template-columns: 1fr; } }
@media print { details { break-inside: avoid; } }
"""
