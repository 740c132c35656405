"""What docs/explanation/security.md promises is held by tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/explanation/security.md"


def test_every_test_that_the_page_names_exists() -> None:
    named = set(re.findall(r"\btests?_\w+", PAGE.read_text())) - {"tests"}
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    files = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    assert len(named & defined) > 40
    assert not named - defined - files
