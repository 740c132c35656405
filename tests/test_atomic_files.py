"""A file is replaced whole or not at all, and nothing is left beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.atomic_files import replacing


def test_a_block_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "file"
    with replacing(target) as new:
        new.write_text("first")
        assert not target.exists()
    with pytest.raises(OSError, match="no space"), replacing(target) as new:
        new.write_text("half")
        raise OSError("no space")
    assert target.read_text() == "first"
    assert list(tmp_path.iterdir()) == [target]
