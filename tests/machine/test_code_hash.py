"""The hash of a package's sources."""

from __future__ import annotations

from pathlib import Path

from streamrl.machine import code_hash


def test_the_hash_of_code_is_that_of_its_sources(tmp_path: Path) -> None:
    def of(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        code_hash.code_hash.cache_clear()
        return code_hash.code_hash(tmp_path)

    first = of("a.py", "1")
    assert of("notes.md", "1") == first
    assert of("a.py", "2") != first and of("a.py", "1") == first
    assert of("kernel.c", "1") != first
