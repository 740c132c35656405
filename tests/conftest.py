"""What all tests share: nothing is fetched from a hub, nothing is reported to anyone, in subprocesses too."""

from __future__ import annotations

import os

import pytest

from tests.leaks import Leaks
from tests.waiting import scaled, slowness

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ENGINES = ("test_engine.py", "test_parallel_engine.py")
"""They keep a core busy with vLLM's start, for minutes, and measure no times."""


def pytest_configure(config: pytest.Config) -> None:
    """Has it looked after each test whether its processes are gone."""
    config.pluginmanager.register(Leaks(), "leaks")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Measures how slow the machine is, once, before xdist's workers start: their environment hands it on."""
    factor = slowness()
    if (reporter := session.config.pluginmanager.get_plugin("terminalreporter")) is not None:
        reporter.write_line(f"deadlines of tests: {factor:g} x those of an idle machine")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Scales pytest-timeout's limits. With `--dist loadgroup` one worker runs engines, and the other one all else, one
    after the other."""
    general = float(config.getoption("timeout", None) or config.getini("timeout") or 0)
    for item in items:
        mark = item.get_closest_marker("timeout")
        seconds = float((*mark.args, mark.kwargs.get("timeout", general))[0]) if mark is not None else general
        if seconds:
            item.add_marker(pytest.mark.timeout(scaled(seconds)), append=False)
        item.add_marker(pytest.mark.xdist_group("engines" if item.path.name in ENGINES else "all else"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Whatever runs beside engines goes first."""
    if item.path.name in ENGINES and hasattr(os, "nice"):
        os.nice(19)
