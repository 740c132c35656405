"""No test sleeps in order to wait: what it waits for may take longer on another machine (tests/waiting.py waits)."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
MAY = {TESTS / "waiting.py", TESTS / "leaks.py"}
REASON = "# sleeps: "
"""Begins a comment on the line of a sleep that is not for waiting, and is followed by what it is for."""
CLOCKS = {"time", "asyncio"}


@cache
def nodes_of(source: str) -> list[ast.AST]:
    """The syntax tree of a text; two tests look at each file."""
    return list(ast.walk(ast.parse(source)))


def sleeps(source: str) -> list[int]:
    """Lines of the sleeps without a reason. `asyncio.sleep(0)` lets others go first; other processes' code is text."""
    nodes, lines = nodes_of(source), source.splitlines()
    imported = {
        name.asname or name.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module in CLOCKS
        for name in node.names
        if name.name == "sleep"
    }
    modules = {
        name.asname or name.name
        for node in nodes
        if isinstance(node, ast.Import)
        for name in node.names
        if name.name in CLOCKS
    }
    found = []
    for node in nodes:
        match node:
            case ast.Attribute(value=ast.Name(id=module), attr="sleep") if module in modules:
                found.append(node)
            case ast.Name(id=name) if name in imported:
                found.append(node)
    calls = [node for node in nodes if isinstance(node, ast.Call) and node.args]
    zero = {id(call.func) for call in calls if isinstance(call.args[0], ast.Constant) and call.args[0].value == 0}
    left = [node.lineno for node in found if id(node) not in zero]
    return sorted(line for line in left if not lines[line - 1].partition(REASON)[2].strip())


def found_in(files: list[Path], lines: Callable[[str], list[int]]) -> list[str]:
    """Places of what is found in these files by a function of their text."""
    texts = {path: text for path in files if "sleep" in (text := path.read_text())}
    return [f"{path.relative_to(TESTS)}:{line}" for path, text in texts.items() for line in lines(text)]


def test_no_test_sleeps_in_order_to_wait() -> None:
    files = sorted(set(TESTS.rglob("*.py")) - MAY)
    assert len(files) > 100
    found = found_in(files, sleeps)
    assert not found, "wait for a fact with tests.waiting, or say what the sleep is for: " + ", ".join(found)


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import time\ntime.sleep(1)", [2]),
        ("import time as clock\nclock.sleep(1)", [2]),
        ("from time import sleep\nsleep(1)", [2]),
        ("from asyncio import sleep as nap\nawait nap(0.1)", [2]),
        ("import asyncio\nasync def f():\n    await asyncio.sleep(0.1)", [3]),
        ("import asyncio\nasync def f():\n    await asyncio.sleep(0)", []),
        ("import time\nThread(target=time.sleep)", [2]),
        ("import time\ntime.sleep(1)  # sleeps:", [2]),
        ("import time\ntime.sleep(1)  # sleeps: it is what is measured", []),
        ("code = 'import time; time.sleep(60)'", []),
        ("engine.sleep()", []),
    ],
)
def test_what_counts_as_a_sleep(source: str, lines: list[int]) -> None:
    assert sleeps(source) == lines


def replaced_for_all(source: str) -> list[int]:
    """Lines of calls that replace `time.sleep` for every thread of the process, in place of one module's `time`."""
    found = []
    for node in nodes_of(source):
        match node:
            case ast.Call(args=[ast.Name(id="time") | ast.Attribute(attr="time"), ast.Constant(value="sleep"), *_]):
                found.append(node.lineno)
            case ast.Call(args=[ast.Constant(value=str(name)), *_]) if name.endswith("time.sleep"):
                found.append(node.lineno)
    return found


def test_no_test_replaces_the_sleep_of_all_threads() -> None:
    """Threads that earlier tests or libraries have left sleep, too, and would be counted."""
    found = found_in(sorted(set(TESTS.rglob("*.py")) - {Path(__file__)}), replaced_for_all)
    assert not found, "replace the `time` of the module that sleeps: " + ", ".join(found)


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("patch.setattr(time, 'sleep', f)", [1]),
        ("patch.setattr(module.time, 'sleep', f)", [1]),
        ("patch.setattr('time.sleep', f)", [1]),
        ("patch.setattr('streamrl.module.time.sleep', f)", [1]),
        ("patch.setattr(module, 'time', SimpleNamespace(sleep=f))", []),
    ],
)
def test_what_counts_as_replacing_it_for_all(source: str, lines: list[int]) -> None:
    assert replaced_for_all(source) == lines
