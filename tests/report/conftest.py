"""A synthetic run folder for the tests of what is shown of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.report.synthetic import RunMaker, write_run


@pytest.fixture
def make_run(tmp_path: Path) -> RunMaker:
    """Makes `<tmp_path>/demo` with so many steps; `rollouts` and `trace` can be left out."""

    def make(steps: int, **changes: Any) -> Path:
        write_run(tmp_path / "demo", steps, **changes)
        return tmp_path / "demo"

    return make
