"""The newest rows of a `metrics.jsonl` that may still grow, with the sums that a view needs of all of them.

A run may take hundreds of thousands of steps: whoever shows one while it lasts may neither hold all rows nor walk them
at each look.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from streamrl.run_dir import layout
from streamrl.run_dir.metrics import MetricsRow
from streamrl.run_dir.priced_rows import PricedRows


@dataclass
class StepSums:
    """What is told of all steps of a run, or of those in a row that are known."""

    first: int = 1
    """The first of these steps."""
    usd: float = 0.0
    """USD of these steps; those without a price count as free."""
    refused: int = 0
    last_refused: MetricsRow | None = None
    """The newest step that was refused."""

    @classmethod
    def of(cls, rows: Sequence[MetricsRow]) -> Self:
        """Return the sums over some rows."""
        sums = cls(rows[0].step if rows else 1)
        for row in rows:
            sums.add(row)
        return sums

    def add(self, row: MetricsRow) -> None:
        """Add the row of the next step."""
        self.usd += row.usd or 0.0
        if row.step_refused:
            self.refused += 1
            self.last_refused = row


class NewestSteps(PricedRows):
    """The rows that came since the last `keep_newest`, those that it kept, and the sums over all.

    A reader of `rows` sees each of them; `since` and `cursor` are for readers of all rows, and not for these.
    """

    def __init__(self, run_dir: Path, largest: int | None = layout.LARGEST_ROWS) -> None:
        """Take what `PricedRows` takes."""
        self.sums: StepSums | None = None
        """Sums over all rows; None: there are none."""
        super().__init__(run_dir, largest)

    def forget(self) -> None:
        """Forget the sums with the rows."""
        super().forget()
        self.sums = None

    def hold(self, row: MetricsRow) -> MetricsRow:
        """Add a new row to the sums."""
        held = super().hold(row)
        self.sums = self.sums or StepSums(held.step)
        self.sums.add(held)
        return held

    def keep_newest(self, most: int) -> None:
        """Drop all rows but the last `most`."""
        del self.rows[:-most]
