"""The installer's own modules, as fixtures."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture(autouse=True)
def tools_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(TOOLS)


@pytest.fixture
def checks() -> ModuleType:
    return importlib.import_module("install_checks")


@pytest.fixture
def run() -> ModuleType:
    return importlib.import_module("install_run")


@pytest.fixture
def install() -> ModuleType:
    return importlib.import_module("install")


@pytest.fixture
def lock() -> ModuleType:
    return importlib.import_module("lock")
