"""What tests of exported job files share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launcher.job_export import Export


@pytest.fixture
def export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Export:
    monkeypatch.chdir(tmp_path)  # where runs/ is
    return Export(tmp_path, monkeypatch, capsys)
