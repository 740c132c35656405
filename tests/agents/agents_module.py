"""The module of agents that a file of tests brings, in a folder of its own."""

from __future__ import annotations

from pathlib import Path

import pytest


def enter_folder_with(agents: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write agents as `mischievous_agents` into a folder, and go there; its workers find the project as well."""
    (folder / "mischievous_agents.py").write_text(agents)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
