"""The YAML of docs/how-to says which file it is of, and is taken as that file; docs/explanation has run files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from streamrl.config.load import load_cluster, load_run

PAGES = Path(__file__).parents[1] / "docs"


def blocks(folder: str) -> list[tuple[str, str]]:
    """Each block of YAML of a folder's pages, with a name for it."""
    return [
        (f"{page.name}-{number}", text)
        for page in sorted((PAGES / folder).glob("*.md"))
        for number, text in enumerate(re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))
    ]


def alternatives(text: str) -> list[str]:
    """Cut a block into the files that it shows: a key that it has already, or a comment after a key, begins one."""
    files: list[list[str]] = [[]]
    for line in text.splitlines():
        key = re.match(r"\w+:", line)
        earlier = [before for before in files[-1] if re.match(r"\w+:", before)]
        if earlier and (line.startswith("#") or (key and any(before.startswith(key[0]) for before in earlier))):
            files.append([])
        files[-1].append(line)
    return ["\n".join(lines) for lines in files]


SNIPPETS = blocks("how-to")
EXAMPLES = [
    (f"{name}-{number}", one)
    for name, text in blocks("explanation")
    if not text.startswith("# hardware file")
    for number, one in enumerate(alternatives(text))
]
REST: dict[str, Any] = {"hardware": "cuda", "sites": {"here": {"trainer": {}, "generation": [{}]}}}
"""A cluster file without what the snippets that are parts of one add to it."""


@pytest.mark.parametrize("text", [text for _, text in SNIPPETS], ids=[name for name, _ in SNIPPETS])
def test_a_snippet_names_its_file_and_can_be_pasted_into_it(text: str, tmp_path: Path) -> None:
    path, first = tmp_path / "file.yaml", text.splitlines()[0]
    path.write_text(text)
    if first.startswith("# run file"):
        load_run(path)
        return
    assert first.startswith("# cluster file"), "expected '# run file' or '# cluster file' as its first line"
    if "a part" in first:
        added = yaml.safe_load(text)["sites"]["here"]
        path.write_text(yaml.safe_dump(REST | {"sites": {"here": {**REST["sites"]["here"], **added}}}))
    load_cluster(path)


@pytest.mark.parametrize("text", [text for _, text in EXAMPLES], ids=[name for name, _ in EXAMPLES])
def test_an_example_of_an_explanation_is_taken_as_a_run_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    load_run(tmp_path / "run.yaml")


def test_every_kind_of_snippet_is_looked_at() -> None:
    firsts = [text.splitlines()[0] for _, text in SNIPPETS]
    assert sum(first.startswith("# run file") for first in firsts) > 5
    assert sum(first.startswith("# cluster file") for first in firsts) > 4
    assert sum("algorithms.md" in name for name, _ in EXAMPLES) > 8
    assert sum("schedules.md" in name for name, _ in EXAMPLES) > 3
