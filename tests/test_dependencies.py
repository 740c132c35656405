"""The order of imports of docs/explanation/architecture.md, what a light start must not load, studies' imports."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from streamrl.cli.main import COMMANDS
from tests.waiting import scaled

ROOT = Path(__file__).parents[1]
SCHEDULER_MAY = {"scheduler", "numpy"}
RANKER_MAY = {"ranker", "numpy", "lightgbm", "pyarrow", "scheduler"}
RANKER_OF_SCHEDULER = ("scheduler.cost.length_forecast", "scheduler.cost.survival")
"""The ranker and the scheduler share what a length forecast is, and nothing else."""
HEAVY = {"torch", "vllm", "transformers", "numpy", "pyarrow", "pandas", "matplotlib", "lightgbm", "datasets"}
HEAVY |= {"ray", "scipy", "pydantic", "yaml", "rich", "psutil", "zmq", "msgpack", "msgspec", "blake3", "pebble"}
"""Packages that would make a start slow; the help of a command needs none of them."""


def imports(path: Path) -> tuple[str, ...]:
    """Dotted names of everything a file imports, inside functions too; relative imports made absolute."""
    return imports_of(path, path.relative_to(ROOT).with_suffix("").parts[:-1])


@cache
def imports_of(path: Path, package: tuple[str, ...]) -> tuple[str, ...]:
    """What a file of a package imports. Several tests look at each file."""
    return tuple(import_names(path, package))


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements below a node; expressions, most of a tree, hold none."""
    for block in ("body", "handlers", "cases", "orelse", "finalbody"):
        for one in getattr(node, block, ()):
            yield one
            yield from statements(one)


def import_names(path: Path, package: tuple[str, ...]) -> Iterator[str]:
    for node in statements(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def files(folder: str) -> list[Path]:
    found = sorted((ROOT / folder).rglob("*.py"))
    assert found, f"{folder} holds no modules: the rule would be checked on nothing"
    return found


def offenders(folder: str, allowed: set[str]) -> list[str]:
    ok = allowed | set(sys.stdlib_module_names)
    return [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files(folder)
        for name in imports(path)
        if name.split(".")[0] not in ok
    ]


def test_scheduler_needs_nothing_but_numpy() -> None:
    assert offenders("scheduler", SCHEDULER_MAY) == []


def test_ranker_needs_nothing_of_the_running_system() -> None:
    assert offenders("ranker", RANKER_MAY) == []
    shared = [name for path in files("ranker") for name in imports(path) if name.startswith("scheduler")]
    assert shared and all(name.startswith(RANKER_OF_SCHEDULER) for name in shared)


def test_nothing_imports_the_command_line() -> None:
    rest = [path for path in files("streamrl") if "cli" not in path.relative_to(ROOT).parts]
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in [*rest, *files("ranker"), *files("scheduler")]
        for name in imports(path)
        if (name + ".").startswith("streamrl.cli.")
    ]
    assert found == []


ORDERS = {
    "streamrl": [
        {"errors", "atomic_files", "imports"},
        {"plain_files", "scratch_folders", "surrogates", "finite_float", "given_options", "output_files", "byte_parts"},
        {"config", "transport", "emulation"},
        {"machine", "rollouts"},
        {"run_dir", "protocol"},
        {"runtime"},
        {"weights", "tasks", "environments"},
        {"training", "generation", "agents"},
        {"controller"},
        {"report", "diagnose", "verify", "trackers", "exporter"},
        {"launcher", "planning", "dashboard", "scaffold"},
        {"chaos"},
        {"cli"},
    ],
    "scheduler": [{"cost"}, {"dispatch", "schedule"}, {"sites", "simulation"}, {"capacity"}],
}
"""Rooms of both packages, the lowest first. A room may import itself, and rooms of the rows above its own row here."""


def rooms(package: str) -> set[str]:
    found = (ROOT / package).iterdir()
    return {path.stem for path in found if path.suffix == ".py" or (path / "__init__.py").exists()} - {"__init__"}


def arrows_against_the_order(package: str) -> list[str]:
    """Imports of a room that is not below the importing one; those inside functions count."""
    row = {room: number for number, these in enumerate(ORDERS[package]) for room in these}
    found = []
    for path in files(package):
        own = path.relative_to(ROOT / package).with_suffix("").parts[0]
        for name in imports(path):
            parts = name.split(".")
            elsewhere = parts[0] == package and len(parts) > 1 and parts[1] != own
            if elsewhere and own != "__init__" and row[parts[1]] >= row[own]:
                found.append(f"{path.relative_to(ROOT)}: {name}")
    return found


@pytest.mark.parametrize("package", ORDERS)
def test_every_room_imports_only_those_below_it(package: str) -> None:
    assert rooms(package) == set.union(*ORDERS[package])
    assert arrows_against_the_order(package) == []


def test_an_arrow_upwards_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    module = tmp_path / "streamrl" / "weights" / "x.py"
    module.parent.mkdir(parents=True)
    module.write_text("from streamrl.runtime import a\ndef f():\n    from streamrl.tasks import b\n")
    found = arrows_against_the_order("streamrl")
    assert found == [f"streamrl/weights/x.py: streamrl.{name}" for name in ("tasks", "tasks.b")]


def in_circles(package: str) -> set[str]:
    """The files that import each other, or lie above such files; imports inside functions and for types count."""
    module_of = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in files(package)}
    below = {module: {name for name in imports(path) if name in module_of} for module, path in module_of.items()}
    while loose := [module for module, needed in below.items() if not needed]:
        for module in loose:
            del below[module]
        below = {module: needed - set(loose) for module, needed in below.items()}
    return set(below)


@pytest.mark.parametrize("package", ["streamrl", "scheduler", "ranker"])
def test_no_files_import_each_other(package: str) -> None:
    assert in_circles(package) == set()


def test_a_circle_is_found_and_also_one_of_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    (tmp_path / "ranker").mkdir()
    (tmp_path / "ranker" / "a.py").write_text("import json\nfrom ranker import b\n")
    (tmp_path / "ranker" / "b.py").write_text("from ranker.c import D\n")
    (tmp_path / "ranker" / "c.py").write_text("if TYPE_CHECKING:\n    from ranker.a import x\n")
    (tmp_path / "ranker" / "d.py").write_text("import json\n")
    assert in_circles("ranker") == {"ranker.a", "ranker.b", "ranker.c"}


def test_config_needs_neither_torch_nor_vllm() -> None:
    own = {"streamrl", "scheduler", "pydantic", "yaml"}
    assert offenders("streamrl/config", own) == []


def test_the_import_scan_sees_relative_and_nested_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    module = tmp_path / "streamrl" / "control" / "x.py"
    module.parent.mkdir(parents=True)
    module.write_text("def f():\n    import torch\n    from ..cli import main\n    from . import batch\n")
    assert set(imports(module)) == {
        "torch",
        "streamrl.cli",
        "streamrl.cli.main",
        "streamrl.control",
        "streamrl.control.batch",
    }


def defined(statements: Iterable[ast.stmt]) -> Iterator[str]:
    """Names that statements of a module's top level bring, those under a condition too."""
    for one in statements:
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield one.name
        elif isinstance(one, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in one.names)
        elif isinstance(one, ast.If | ast.Try):
            yield from defined(child for child in ast.iter_child_nodes(one) if isinstance(child, ast.stmt))
        else:
            yield from (
                node.id for node in ast.walk(one) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            )


@cache
def names_in(module: Path) -> frozenset[str]:
    """What a module's top level defines."""
    return frozenset(defined(ast.parse(module.read_text(encoding="utf-8")).body))


def is_there(name: str) -> bool:
    """Whether a dotted name is a folder, a module, or what a module or a folder's `__init__.py` has."""
    place, last = (ROOT / name.replace(".", "/")), name.rpartition(".")[2]
    if place.is_dir() or place.with_suffix(".py").exists():
        return True
    module = place.parent / "__init__.py" if place.parent.is_dir() else place.parent.with_suffix(".py")
    return module.exists() and last in names_in(module)


def lost(folder: str) -> list[str]:
    ours = ("streamrl", "ranker", "scheduler")
    return [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files(folder)
        for name in sorted(set(imports(path)))
        if name.partition(".")[0] in ours and not is_there(name)
    ]


# Nothing else in the suite loads most of the studies.
@pytest.mark.parametrize("folder", ["experiments", "tools"])
def test_studies_and_tools_import_what_exists(folder: str) -> None:
    assert lost(folder) == []


def test_what_moved_or_went_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    for folder in ("streamrl/room", "experiments"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "streamrl" / "__init__.py").write_text("first = 1\n")
    (tmp_path / "streamrl" / "room" / "a.py").write_text("if True:\n    x: int = 1\n\ndef f():\n    inside = 2\n")
    (tmp_path / "experiments" / "study.py").write_text(
        "import json, streamrl.room.gone\nfrom streamrl import first, room, second\n"
        "from streamrl.room.a import f, inside, x\nfrom streamrl.moved import y\n"
    )
    names = ["streamrl.moved", "streamrl.moved.y", "streamrl.room.a.inside", "streamrl.room.gone", "streamrl.second"]
    assert lost("experiments") == [f"experiments/study.py: {name}" for name in names]


def test_help_loads_no_heavy_package() -> None:
    """All in one process: what is loaded by one help is still there after the last."""
    calls = [["--help"], *([name, "--help"] for name in COMMANDS)]
    code = (
        "import json, sys, streamrl, streamrl.cli.main as m\n"
        f"for arguments in {calls!r}:\n"
        "    sys.argv = ['streamrl', *arguments]\n"
        "    try:\n        m.main()\n    except SystemExit as end:\n        assert not end.code, end.code\n"
        "    modules = sorted({name.split('.')[0] for name in sys.modules})\n"
        "    print('MODULES', json.dumps([arguments, modules]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=scaled(60), cwd=ROOT, check=True
    )
    shown = re.findall(r"(.*?)^MODULES (.*?)$", done.stdout, re.MULTILINE | re.DOTALL)
    assert [json.loads(after)[0] for _, after in shown] == calls
    assert all("Usage:" in help_text for help_text, _ in shown)
    assert {" ".join(call): HEAVY & set(modules) for call, modules in (json.loads(after) for _, after in shown)} == {
        " ".join(call): set() for call in calls
    }


def test_reading_configuration_loads_neither_torch_nor_vllm() -> None:
    code = (
        "import sys; from streamrl.config.load import load_cluster, load_run\n"
        "load_cluster('cluster_configs/local.yaml'); load_run('examples/demo.yaml')\n"
        "print(sorted({'torch', 'vllm', 'transformers'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=scaled(60), cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[]"
