"""A run of several sites is continued at the site that trains, in that site's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config.load import load_cluster, load_run, save_resolved
from streamrl.rollouts.ledger import Ledger
from streamrl.run_dir import layout
from streamrl.runtime.process_context import Addresses
from tests.cli.test_commands import SEVERAL, Terminal
from tests.cli.test_commands import model as model
from tests.cli.test_commands import terminal as terminal


@pytest.mark.parametrize(
    ("site", "has_ledger", "options", "says"),
    [
        ("home", True, ("--site", "there"), "--site there only generates: it begins from nothing, in a new folder"),
        ("there", False, ("--site", "there"), "the run itself is continued with --site home"),
        ("there", False, ("--site", "home"), "runs/a is the folder of site there, which only generates"),
        ("there", False, ("--emulate",), "expected the folder of site home (see docs: E1009)"),
        ("there", False, (), "expected the folder of site home (see docs: E1009)"),
        ("there", False, ("--cluster", "other.yaml"), "expected the folder of site home (see docs: E1009)"),
        ("home", True, (), ""),
        ("home", False, (), ""),  # killed before the controller has begun
        ("there", True, (), ""),  # an earlier version has started another site there
        ("", False, (), ""),
    ],
)
def test_a_site_that_only_generates_is_not_resumed_nor_its_folder(
    terminal: Terminal, site: str, has_ledger: bool, options: tuple[str, ...], says: str
) -> None:
    (terminal.folder / "cluster.yaml").write_text(SEVERAL)
    (terminal.folder / "other.yaml").write_text(SEVERAL.replace("there", "elsewhere"))
    terminal.monkeypatch.setattr("streamrl.cli.launch._check", lambda *arguments: None)
    run_dir = Path("runs/a")
    save_resolved(run_dir, load_cluster("cluster.yaml"), load_run("run.yaml"))
    if site:
        Addresses("", "", {site: ""}).save(run_dir)
    if has_ledger:
        Ledger(run_dir / layout.LEDGER).close()
    result = terminal("launch", "--resume", str(run_dir), "--dry-run", *options)
    assert (result.code, says in result.err) == (2 if says else 0, True), result.err
