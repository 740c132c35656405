"""What all tests share: nothing is fetched from a hub, nothing is reported to anyone, in subprocesses too."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ENGINES = ("test_engine.py", "test_parallel_engine.py")
"""They keep a core busy with vLLM's start, for minutes, and measure no times."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `--dist loadgroup` one worker runs engines, and the other one all else, one after the other."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group("engines" if item.path.name in ENGINES else "all else"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Whatever runs beside engines goes first."""
    if item.path.name in ENGINES and hasattr(os, "nice"):
        os.nice(19)
