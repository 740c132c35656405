"""What `make test-quick` leaves out is what it says: the tests with vLLM, whole runs, Ray clusters, TRL and ranks."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.conftest import SLOW, TESTS

STARTERS = (
    *("vllm", "trl", "ray.cluster_utils", "streamrl.generation.instance.engine.Engine"),
    *("tests.end_to_end.project", "tests.warm", "tests.training.conftest.run_ranks"),
)
"""Modules with which a test starts what takes long."""
MARKED = set(SLOW)


def imported(path: Path) -> set[str]:
    """Modules that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
    return found


def is_slow(path: Path) -> bool:
    text = path.read_text()
    if not any(all(part in text for part in one.split(".")) for one in STARTERS):  # parsing takes long
        return False
    return any(name == one or name.startswith(f"{one}.") for name in imported(path) for one in STARTERS)


def test_every_file_that_starts_what_takes_long_is_marked() -> None:
    slow = {path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py") if is_slow(path)}
    assert slow <= MARKED
    assert len(slow) > 5  # else nothing was looked at


def test_marked_files_exist_and_are_named_once() -> None:
    assert all((TESTS / file).is_file() for file in MARKED)
    assert len(SLOW) == len(MARKED)


def test_the_mark_is_given_by_file(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("slow") is None
    for item in request.session.items:
        marked = item.path.relative_to(TESTS).as_posix() in MARKED
        assert (item.get_closest_marker("slow") is not None) == marked
