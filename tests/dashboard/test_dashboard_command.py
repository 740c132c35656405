"""`streamrl dashboard` as a process: its address, its port, its end; and the one beside a run."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from streamrl.cli import launch
from streamrl.dashboard import web_server
from streamrl.errors import UserError
from streamrl.launcher import supervisor
from tests.cli.calling import streamrl
from tests.report.synthetic import write_run
from tests.security.endless_requests import ENDLESS, ENOUGH, taken
from tests.waiting import scaled


def runs_at(address: str) -> list[str]:
    with urllib.request.urlopen(f"{address.partition('#')[0]}api/runs", timeout=scaled(60)) as answer:
        return [run["id"] for run in json.load(answer)["runs"]]


def test_the_command_says_where_it_is_serves_and_stops(tmp_path: Path) -> None:
    write_run(tmp_path / "demo", 1)
    command = [sys.executable, "-m", "streamrl.cli.main", "dashboard", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            found = re.search(r"http://127\.0\.0\.1:(\d+)/", process.stdout.readline())
            assert found is not None
            assert runs_at(found.group()) == ["demo"]
            for kind in ENDLESS:
                assert taken("127.0.0.1", int(found.group(1)), kind) < ENOUGH, kind
            with pytest.raises(
                UserError, match=rf"port {found.group(1)} .*in use, perhaps by another dashboard.*--port"
            ):
                web_server.bind("127.0.0.1", int(found.group(1)))
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(60) in (0, 130)


def test_beside_a_run_it_serves_a_run_that_comes_later_and_ends_with_the_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = web_server.bind("127.0.0.1", 0)
    monkeypatch.setattr(web_server, "PORT", taken.getsockname()[1])  # another dashboard has the usual port
    with taken, web_server.beside_run(tmp_path / "demo") as address:
        assert address.endswith("/#/run/demo")
        assert runs_at(address) == []
        write_run(tmp_path / "demo", 1)
        assert runs_at(address) == ["demo"]
    with pytest.raises(OSError):
        runs_at(address)
    assert capsys.readouterr().err == ""


def test_launch_serves_the_run_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []

    def run(*arguments: object) -> None:
        found = re.search(r"dashboard at (http://127\.0\.0\.1:\d+/)#/run/run ", capsys.readouterr().out)
        assert found is not None
        (tmp_path / "run").rmdir()  # it is there, and empty
        write_run(tmp_path / "run", 1)
        shown.extend([found.group(1), *runs_at(found.group(1))])

    monkeypatch.setattr(supervisor, "run", run)
    monkeypatch.setattr(launch, "_check", lambda *arguments: None)  # of the machine and the model, which is not there
    monkeypatch.setattr(launch, "_packing", lambda run: "shared")
    cluster = Path(__file__).parents[2] / "cluster_configs" / "local.yaml"
    assert streamrl(monkeypatch, "launch", "--cluster", cluster, "--runs-dir", tmp_path, "--dashboard") == 0
    assert shown[1:] == ["run"]
    with pytest.raises(OSError):
        runs_at(shown[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["none"], "no such folder"), ([], "no such folder: runs"), ([".", "--host", "203.0.113.1"], "holds no run")],
)
def test_bad_input_is_said_in_one_message(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert streamrl(monkeypatch, "dashboard", *arguments) == 2
    assert message in capsys.readouterr().err


def test_an_address_of_another_machine_cannot_be_listened_at() -> None:
    with pytest.raises(UserError, match=r"cannot listen at 203\.0\.113\.1.*--host"):
        web_server.bind("203.0.113.1", 0)


def test_missing_packages_are_named_with_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "plotly" else object())
    with pytest.raises(UserError, match=r"needs plotly: pip install 'streamrl\[dashboard\]'"):
        web_server.check_installed()


def test_the_link_names_the_token_the_run_and_a_host_that_others_can_reach() -> None:
    with web_server.bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert web_server.link(listener, "127.0.0.1", None, "a b/c") == f"http://127.0.0.1:{port}/#/run/a%20b%2Fc"
        assert web_server.link(listener, "::1", "x") == f"http://[::1]:{port}/?token=x"
        assert "0.0.0.0" not in web_server.link(listener, "0.0.0.0", "x")
    assert len({web_server.new_token() for _ in range(3)}) == 3


def test_the_chart_library_is_in_the_package_plotly() -> None:
    assert web_server.chart_library().stat().st_size > 1_000_000
