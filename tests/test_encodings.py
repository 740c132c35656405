"""Text files are UTF-8 whatever the locale is: without a named encoding, Python takes the locale's."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import scaled

ROOT = Path(__file__).parents[1]
PACKAGES = ("streamrl", "ranker", "scheduler")
MODES = set("rwaxbt+")
OPENING = ("open", "read_text", "write_text")
"""Parts of the names of all that is called to open a text file; a file without any of them is not parsed."""


def unnamed(source: str) -> list[int]:
    """Lines that open a file as text, or read or write one, without an encoding.

    What else is named `open` is known by its arguments: it gets no mode.
    """
    if not any(name in source for name in OPENING):
        return []
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return sorted(node.lineno for node in calls if "encoding" not in {key.arg for key in node.keywords} and texts(node))


def texts(call: ast.Call) -> bool:
    """Whether a call that names no encoding needs one."""
    match call.func:
        case ast.Attribute(attr="read_text"):
            return not call.args
        case ast.Attribute(attr="write_text"):
            return len(call.args) < 2
        case ast.Name(id="open"):
            return "b" not in mode(call, 1, "r")
        case ast.Attribute(value=ast.Name(id="os"), attr="fdopen"):
            return "b" not in mode(call, 1, "r")
        case ast.Attribute(value=ast.Name(id="os"), attr="open"):
            return False
        case ast.Attribute(attr="open"):
            return "b" not in mode(call, 0, "b")
    return False


def mode(call: ast.Call, place: int, default: str) -> str:
    """The mode of a call; the default if none is written there."""
    given = [*call.args[place : place + 1], *(key.value for key in call.keywords if key.arg == "mode")]
    written = [one.value for one in given if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    found = written[0] if written else "b" if given else default
    return found if set(found) <= MODES else "b"


def files() -> Iterator[Path]:
    for package in PACKAGES:
        found = sorted((ROOT / package).rglob("*.py"))
        assert found, f"{package} holds no modules: the rule would be checked on nothing"
        yield from found


def test_every_text_file_is_opened_with_an_encoding() -> None:
    found = [f"{path.relative_to(ROOT)}:{line}" for path in files() for line in unnamed(path.read_text("utf-8"))]
    assert found == [], "without encoding= (JSON: json.loads(path.read_bytes()))"


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("path.read_text()", [1]),
        ('path.read_text(errors="replace")', [1]),
        ('path.read_text(encoding="utf-8")', []),
        ('path.read_text("utf-8")', []),
        ("path.write_text(text)", [1]),
        ('path.write_text(text, encoding="utf-8")', []),
        ("open(path)", [1]),
        ('open(path, "wb")', []),
        ('open(path, mode="a")', [1]),
        ('os.fdopen(number, "w")', [1]),
        ("os.open(path, flags)", []),
        ('path.open("w")', [1]),
        ('path.open("rb")', []),
        ("store.open(number)", []),
        ("store.open()", []),
    ],
)
def test_what_needs_an_encoding(source: str, lines: list[int]) -> None:
    assert unnamed(source) == lines


LOOKS_AT_A_MODEL = """
import locale, sys
from streamrl.machine.model_files import resolve_model

assert locale.getencoding().lower() != "utf-8", "the locale's encoding is UTF-8, the test would prove nothing"
resolve_model(sys.argv[1])
"""


def test_a_model_with_other_letters_is_taken_under_a_locale_without_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"author": "山田"}, ensure_ascii=False), encoding="utf-8")
    for name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_bytes(b"{}")
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}  # Python takes C for UTF-8 otherwise
    done = subprocess.run(
        [sys.executable, "-c", LOOKS_AT_A_MODEL, str(tmp_path)],
        cwd=ROOT,
        env=os.environ | plain,
        capture_output=True,
        timeout=scaled(60),
    )
    assert done.returncode == 0, done.stderr.decode()
