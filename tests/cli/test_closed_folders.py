"""A folder that this user may not enter gets one line instead of a traceback, whichever option names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config.load import load_cluster, load_run, save_resolved
from tests.cli.calling import streamrl
from tests.mere_user import without_right_to

CLUSTER, RUN = "cluster_configs/local.yaml", "examples/demo.yaml"
FIRST = "reading the configuration and checking this machine\n"
"""What a dry run says at once."""


def test_a_folder_of_runs_that_is_closed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("launch", "--dry-run", "--cluster", CLUSTER, "--run", RUN, "--runs-dir", tmp_path / "closed/runs")
    (tmp_path / "closed").mkdir()
    with without_right_to(tmp_path / "closed"):
        assert streamrl(monkeypatch, *arguments) == 2
    assert capsys.readouterr().err == f"{FIRST}error: {tmp_path}/closed/runs/demo: Permission denied\n"


def test_a_run_with_a_closed_folder_is_told_when_it_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    save_resolved(tmp_path, load_cluster(CLUSTER), load_run(RUN))
    checkpoints.chmod(0o100)  # entered, but not read
    with without_right_to():
        assert streamrl(monkeypatch, "launch", "--dry-run", "--resume", tmp_path) == 2
    assert capsys.readouterr().err == f"{FIRST}error: {checkpoints}: Permission denied\n"


def test_an_error_that_names_no_file_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("streamrl.cli.main.cli", refused)
    with pytest.raises(PermissionError):
        streamrl(monkeypatch, "status", "runs/tiny")
