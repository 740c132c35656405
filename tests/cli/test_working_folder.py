"""A shell whose working folder has been deleted gets one line instead of a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.calling import streamrl


@pytest.mark.parametrize("arguments", [("launch", "--dry-run"), ("status", "runs/tiny")])
def test_a_working_folder_that_is_gone_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert streamrl(monkeypatch, *arguments) == 2
    told = "error: the working folder of this shell has been deleted; change to another one (cd)\n"
    assert capsys.readouterr().err == told
    assert streamrl(monkeypatch, "--help") == 0
