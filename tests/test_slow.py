"""What `make test-quick` leaves out is what it says: the tests with vLLM, whole runs, Ray clusters, TRL and ranks, and
those that a list says to take long."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.conftest import LONG, SLOW, TESTS
from tests.loaded_tool import loaded_tool

long_tests = loaded_tool("long_tests")

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


def test_long_tests_exist_and_are_not_slow() -> None:
    for name in LONG:
        file, _, function = name.partition("::")
        assert file not in MARKED and f"def {function}(" in (TESTS / file).read_text(), name


def test_marks_are_given_by_file_and_function(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("slow") is None
    for item in request.session.items:
        file = item.path.relative_to(TESTS).as_posix()
        assert (item.get_closest_marker("slow") is not None) == (file in MARKED)
        assert (item.get_closest_marker("long") is not None) == (f"{file}::{item.name.split('[')[0]}" in LONG)


@pytest.mark.parametrize(
    ("report", "found"),
    [
        ([("tests/a/test_b.py", "test_c[1]", 0.2), ("tests/a/test_b.py", "test_c[2]", 0.4)], ["a/test_b.py::test_c"]),
        ([("tests/a/test_b.py", "test_c[1]", 0.2), ("tests/a/test_b.py", "test_c[2]", 0.3)], []),
        ([("tests/test_b.py", "test_d", 1.0), ("tests/test_a.py", "test_d", 0.0)], ["test_b.py::test_d"]),
    ],
)
def test_a_function_is_long_by_the_mean_of_its_tests(
    tmp_path: Path, report: list[tuple[str, str, float]], found: list[str]
) -> None:
    tests = "".join(f'<testcase file="{file}" name="{name}" time="{time}" />' for file, name, time in report)
    (tmp_path / "report.xml").write_text(f"<testsuites><testsuite>{tests}</testsuite></testsuites>")
    assert long_tests.long_functions(tmp_path / "report.xml") == found
