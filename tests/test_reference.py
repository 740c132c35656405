"""The reference pages are what the code says, every link leads somewhere, and every example is a valid run."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from streamrl.config.load import load_run
from tests.loaded_tool import loaded_tool

ROOT = Path(__file__).parents[1]
reference = loaded_tool("reference")

LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def documents() -> list[Path]:
    """Every Markdown file of the project that is written by hand or by tools/reference.py."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
    found += [*ROOT.glob("experiments/**/*.md")]
    return sorted(path for path in found if ".venv" not in path.parts)  # packages of an example's own


@pytest.mark.parametrize("name", reference.WRITERS)
def test_a_page_is_what_the_code_says(name: str) -> None:
    written = (reference.PAGES / name).read_text(encoding="utf-8")
    assert written == reference.WRITERS[name](), "run: make docs"


def test_no_page_is_left_over() -> None:
    assert {path.name for path in reference.PAGES.iterdir()} == set(reference.WRITERS)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.yaml")), ids=lambda path: path.stem)
def test_an_example_is_a_valid_run(path: Path) -> None:
    load_run(path)
    assert path.name in (ROOT / "examples" / "README.md").read_text(encoding="utf-8")


def test_the_site_has_every_page_and_no_other() -> None:
    listed = re.findall(r": (docs/\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    pages = [str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.*") if path.suffix in (".md", ".ipynb")]
    assert sorted(listed) == sorted(page.replace(".ipynb", ".md") for page in pages)


def headings(path: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    plain = (found.replace("`", "").replace("&lt;", "<").replace("\\*", "*") for found in HEADING.findall(text))
    return {reference.anchor(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip())) for heading in plain}


def broken(path: Path) -> Iterator[str]:
    """Relative links of a file that lead nowhere."""
    for target in LINK.findall(CODE.sub("", path.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, fragment = target.partition("#")
        other = (path.parent / name) if name else path
        if not other.exists() or (fragment and other.suffix == ".md" and fragment not in headings(other)):
            yield f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path}: {target}"


def test_every_link_leads_somewhere() -> None:
    assert [link for path in documents() for link in broken(path)] == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One `key`\n[a](page.md#one-key) [b](no.md) `[c](no.md)` [d](#two) [e](https://x.y/z)\n")
    assert list(broken(page)) == [f"{page}: no.md", f"{page}: #two"]


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_that_a_page_names_exists(path: Path) -> None:
    named = re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|c|yaml))`", path.read_text(encoding="utf-8"))
    roots = (ROOT, ROOT / "streamrl", ROOT / "streamrl" / "config", path.parent)
    assert [name for name in named if not any((root / name).exists() for root in roots)] == []


class Inner(BaseModel):
    """Something inside."""

    kind: Literal["inner"] = "inner"
    size: int | None = Field(None, ge=1, description="how | large")


class Outer(BaseModel):
    """A whole file."""

    inner: Inner = Field(default_factory=Inner)
    many: list[Inner] = Field(min_length=1)
    share: Annotated[float, Field(gt=0, le=1)] = 0.5
    names: dict[str, list[str]] = Field(default_factory=dict)


def test_a_configuration_page_has_types_bounds_defaults_and_sections() -> None:
    text = reference.page("T", "about", reference.ConfigPage(Outer).sections())
    assert "| `inner` | [inner](#inner) | `{kind: inner}` |  |" in text
    assert "| `many` | list of [inner](#inner), length >= 1 | required |  |" in text
    assert "| `share` | number > 0, &lt;= 1 | `0.5` |  |" in text
    assert "| `names` | map of text to list of text | `{}` |  |" in text
    assert "## inner\n\nSomething inside.\n" in text
    assert r"| `size` | integer >= 1 or null | `null` | how \| large |" in text


def test_message_types_are_listed_with_their_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("msgspec")
    path = tmp_path / "an_edge.py"
    path.write_text(
        '"""One edge."""\nimport msgspec\n\n\nclass Asked(msgspec.Struct, tag="asked"):\n    """A question."""\n\n'
        '    number: int\n    """Of the question."""\n    text: str | None = None\n\n\nclass _Hidden(msgspec.Struct):\n'
        "    x: int\n"
    )
    spec = importlib.util.spec_from_file_location("an_edge", path)
    assert spec is not None and spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "an_edge", module)
    spec.loader.exec_module(module)
    (asked,) = reference.structs_of(module)
    lines = "\n".join(reference.struct_lines(asked))
    assert "### Asked\n\nA question.\n" in lines and "`asked` on the wire." in lines
    assert "| `number` | integer | Of the question. |" in lines and "| `text` | text or null |  |" in lines
