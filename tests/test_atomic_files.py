"""A file is replaced whole or not at all, and nothing is left beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.atomic_files import remove_left, replace_json, replacing
from tests.run_dir.conftest import Disk
from tests.run_dir.conftest import disk as disk


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


def test_what_killed_processes_have_left_is_deleted_and_nothing_else(tmp_path: Path) -> None:
    remove_left(tmp_path / "missing", lambda name: True)
    left = [f".file.{digit * 16}" for digit in "0f"]
    others = ["file", ".file", ".other." + "0" * 16, ".file." + "0" * 15, ".file." + "g" * 16, "file." + "0" * 16]
    for name in left + others:
        (tmp_path / name).touch()
    remove_left(tmp_path, "file".__eq__)
    assert {path.name for path in tmp_path.iterdir()} == set(others)


@pytest.mark.parametrize("lasting", [False, True])
def test_a_lasting_file_is_on_disk_before_it_has_its_name_and_its_name_afterwards(
    tmp_path: Path, disk: Disk, lasting: bool
) -> None:
    replace_json(tmp_path / "file", {}, lasting=lasting)
    kinds = [(what, name.rpartition(".")[0] or name) for what, name in disk.events]
    on_disk = [("on disk", ".file"), ("renamed", ".file"), ("on disk", tmp_path.name)]
    assert kinds == (on_disk if lasting else [("renamed", ".file")])
