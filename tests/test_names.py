"""A name is one thing: no two public classes share one, and no two files, unless they mirror each other on purpose."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("streamrl", "scheduler", "ranker")
MIRRORED = {
    "errors": "the ranker stands alone, and has an error of its own",
    "status": "`streamrl status` shows what `run_dir/status.py` reads",
}


def modules() -> Iterator[Path]:
    for package in PACKAGES:
        yield from (path for path in sorted((ROOT / package).rglob("*.py")) if path.stem != "__init__")


def public_types(path: Path) -> Iterator[str]:
    """Classes of a module, and its aliases of types (names in CamelCase)."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            names = [name for name in names if name[0].isupper() and not name.isupper()]
        else:
            continue
        yield from (name for name in names if not name.startswith("_"))


def test_no_two_public_types_have_one_name() -> None:
    found = defaultdict(list)
    for path in modules():
        for name in public_types(path):
            if not (len(name) <= 2 and name.isupper()):  # type variables
                found[name].append(str(path.relative_to(ROOT)))
    assert len(found) > 300
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


def test_no_two_files_have_one_name_unless_they_mirror_each_other() -> None:
    found = defaultdict(list)
    for path in modules():
        found[path.stem].append(str(path.relative_to(ROOT)))
    twice = {stem: paths for stem, paths in found.items() if len(paths) > 1}
    assert set(twice) == set(MIRRORED), twice
