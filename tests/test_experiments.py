"""Studies import what exists: nothing else in the suite loads most of them."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OURS = ("streamrl", "ranker", "scheduler")


def names_of(module: Path) -> set[str]:
    """Return what a module has at its top level, whatever statement brings it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text())):
        match node:
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found |= {(one.asname or one.name).partition(".")[0] for one in names}
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
    return found


def missing(source: str, root: Path) -> list[str]:
    """Return the imports from our packages that a source has and that lead nowhere."""
    lost = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ImportFrom) or (node.module or "").partition(".")[0] not in OURS:
            continue
        there = root / str(node.module).replace(".", "/")
        module = there / "__init__.py" if there.is_dir() else there.with_suffix(".py")
        known = names_of(module) if module.exists() else set()
        for one in node.names:
            beside = there.is_dir() and ((there / one.name).is_dir() or (there / f"{one.name}.py").exists())
            if one.name not in known and not beside:
                lost.append(f"{node.module}: {one.name}")
    return lost


def test_every_study_and_tool_imports_what_exists() -> None:
    files = [*(ROOT / "experiments").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
    assert len(files) > 40
    lost = {str(file.relative_to(ROOT)): missing(file.read_text(), ROOT) for file in files}
    assert not {file: names for file, names in lost.items() if names}


def test_what_moved_or_went_is_found() -> None:
    source = (
        "from streamrl.runtime.interfaces import free_ports, gone\n"
        "from streamrl.no_such_room import anything\n"
        "from streamrl import runtime, errors, nothing_here\n"
    )
    assert missing(source, ROOT) == [
        "streamrl.runtime.interfaces: gone",
        "streamrl.no_such_room: anything",
        "streamrl: nothing_here",
    ]
