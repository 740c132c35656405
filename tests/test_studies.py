"""Command lines of the studies: what they take, and which files they write."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from click.testing import CliRunner

sys.path.append(str(Path(__file__).parents[1] / "experiments"))
import schedules
from running import HERE

RESULTS = HERE / "results"


def test_a_summary_of_schedules_keeps_the_window_of_steps_of_its_file(tmp_path: Path) -> None:
    shutil.copy(RESULTS / "schedules.json", tmp_path)
    plots = []
    for _ in range(2):
        assert CliRunner().invoke(schedules.main, ["--summary-only", "--out", str(tmp_path)]).exit_code == 0
        plots.append((tmp_path / "schedules.svg").read_text())
    for name in ("schedules.json", "schedules.md"):
        assert (tmp_path / name).read_text() == (RESULTS / name).read_text()
    assert plots[0] == plots[1]


def test_a_summary_of_schedules_takes_no_other_window(tmp_path: Path) -> None:
    refused = CliRunner().invoke(schedules.main, ["--summary-only", "--warmup", "1", "--out", str(tmp_path)])
    assert refused.exit_code == 2 and "--warmup does not go with --summary-only" in refused.output
