"""The YAML of docs/how-to says which file it is of, and is taken as that file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from streamrl.config.load import load_cluster, load_run

PAGES = Path(__file__).parents[1] / "docs" / "how-to"
SNIPPETS = [
    (f"{page.name}-{number}", text)
    for page in sorted(PAGES.glob("*.md"))
    for number, text in enumerate(re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))
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


def test_every_kind_of_snippet_is_looked_at() -> None:
    firsts = [text.splitlines()[0] for _, text in SNIPPETS]
    assert sum(first.startswith("# run file") for first in firsts) > 5
    assert sum(first.startswith("# cluster file") for first in firsts) > 4
