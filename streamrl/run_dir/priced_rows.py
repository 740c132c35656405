"""All rows of a `metrics.jsonl` that may still grow, with the sums of what they say that processes have cost.

The costs by process are most of a row of a large fleet, and only their sums over all steps are shown: they are added up
as a row is read, and not held.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from streamrl.run_dir import layout
from streamrl.run_dir.appended_lines import AppendedRows
from streamrl.run_dir.metrics import MetricsRow


class PricedRows(AppendedRows[MetricsRow]):
    """The rows of a run's finished steps; the `usd_by_process` of those that are held is empty."""

    def __init__(self, run_dir: Path, largest: int | None = layout.LARGEST_ROWS) -> None:
        """Take the run's folder, and the most bytes that the file may have (see `AppendedLines`)."""
        super().__init__(run_dir / layout.METRICS, MetricsRow, largest)
        self.forget()

    def forget(self) -> None:
        """Forget the sums with the rows."""
        super().forget()
        self.usd: float | None = None
        """USD of all steps; None: no step has a price."""
        self.usd_by_process: defaultdict[tuple[str, str], float] = defaultdict(float)
        """USD of all steps by site and process, or the link to the site."""

    def hold(self, row: MetricsRow) -> MetricsRow:
        """Add up a new row's costs, and return the row without those by process."""
        if row.usd is not None:
            self.usd = (self.usd or 0.0) + row.usd
        for site, processes in row.usd_by_process.items():
            for process, usd in processes.items():
                self.usd_by_process[site, process] += usd
        row.usd_by_process.clear()  # it is this reader's own
        return row
