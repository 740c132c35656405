"""What is found before a new run: scripts of agents that are not there, and a file in the place of the runs' folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.launcher.folder_check import check_database_paths, check_folder
from streamrl.launcher.program_check import check_scripts

CLUSTER = {
    "hardware": "cpu",
    "sites": {"here": {"port": 5000, "trainer": {}}, "there": {"generation": [{}]}},
    "links": [{"between": ["here", "there"], "bandwidth_gbit_s": 1, "rtt_ms": 1}],
}


def problems(command: list[str], site: str | None = None) -> list[str]:
    task = {"kind": "agent", "name": "mine", "command": command, "path": "rows.jsonl"}
    run = RunConfig.model_validate({"tasks": [task]})
    return list(check_scripts(ClusterConfig.model_validate(CLUSTER), run, site))


@pytest.mark.parametrize("program", ["python", "/usr/bin/python3.12", "bash", "node"])
def test_a_script_that_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.chdir(tmp_path)
    said = f"tasks.0.command: there is no file 'agent.py' for {program} in this folder"
    assert problems([program, "agent.py", "--fast"]) == problems([program, "agent.py"], "there") == [said]
    assert problems([program, "agent.py"], "here") == []  # no agents run at this site
    (tmp_path / "agent.py").touch()
    assert problems([program, "agent.py", "--fast"]) == problems([program, str(tmp_path / "agent.py")]) == []


@pytest.mark.parametrize("command", [["in_container", "agent.py"], ["python", "-m", "agent.py"], ["python"], ["a.py"]])
def test_arguments_of_other_kinds_are_not_looked_for(command: list[str]) -> None:
    assert problems(command) == []


def test_a_file_in_the_place_of_the_runs_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    says = f"{tmp_path}/runs is a file, expected a folder"
    assert list(check_folder(tmp_path / "runs")) == [f"--runs-dir {tmp_path}/runs: {says}"]
    assert list(check_folder(tmp_path / "runs" / "mine")) == [f"--runs-dir {tmp_path}/runs/mine: {says}"]
    assert list(check_folder(tmp_path / "new")) == []


@pytest.mark.parametrize("target", ["runs", "gone"])
@pytest.mark.parametrize("below", ["", "mine"])
def test_a_link_that_leads_nowhere_in_the_place_of_the_runs_folder_is_told(
    tmp_path: Path, target: str, below: str
) -> None:
    (tmp_path / "runs").symlink_to(target)
    root = tmp_path / "runs" / below
    says = f"--runs-dir {root}: {tmp_path}/runs is a link that leads nowhere, expected a folder"
    assert list(check_folder(root)) == [says]
    assert list(check_database_paths(RunConfig(), root)) == []
    (tmp_path / "gone").mkdir()
    assert list(check_folder(root)) == ([says] if target == "runs" else [])
