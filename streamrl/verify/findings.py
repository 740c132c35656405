"""What a check of a model says, and the table of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.table import Table
from rich.text import Text

Support = Literal["works", "works slower", "refused", "not checked"]

STYLES: dict[Support, str] = {"works": "green", "works slower": "yellow", "refused": "red", "not checked": "dim"}


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str
    verdict: Support
    reason: str
    """Why, with the figure that was measured."""
    optional: bool = False
    """Whether a run can do without it; what is refused then refuses a setting, not the model."""
    measured: bool = False
    """Whether vLLM has answered and its answer was compared: a verdict on the architecture, and not on this attempt."""


def table_of(model: str, findings: Sequence[Finding]) -> Table:
    """Return the findings as a table."""
    table = Table("check", "verdict", "reason", title=Text(model))
    for one in findings:
        table.add_row(one.check, Text(one.verdict, STYLES[one.verdict]), Text(one.reason))
    return table


def reasons_against(findings: Sequence[Finding]) -> list[str]:
    """Return why the model cannot be trained as it is; empty: it can."""
    return [one.reason for one in findings if one.verdict == "refused" and not one.optional]
