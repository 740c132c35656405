"""Files that commands are to write."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from streamrl.errors import UserError
from streamrl.output_files import check_output


def test_a_file_that_can_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text("mine")
    for path in (old, tmp_path / "new.json", Path(os.devnull)):
        check_output("--out", path)
    assert list(tmp_path.iterdir()) == [old] and old.read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "is a folder; expected a file's name"),
        ("no/new.json", "its folder does not exist"),
        ("old.json/new.json", "its folder does not exist"),
        ("dangling", "its folder does not exist"),
        ("itself", "cannot be written: "),
        ("/proc/new.json", "cannot be written: "),  # where root may write by its permissions
        ("x" * 300, "cannot be written: File name too long"),
        ("a\0b", "cannot be written: "),
    ],
)
def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "old.json").touch()
    (tmp_path / "dangling").symlink_to("no/new.json")
    (tmp_path / "itself").symlink_to("itself")
    with pytest.raises(UserError) as refused:
        check_output("--out", tmp_path / name)
    assert str(refused.value).startswith(f"--out {tmp_path / name}: {why}")


def test_a_file_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old.json").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UserError, match=r"old.json: this file is not writable$"):
        check_output("--out", tmp_path / "old.json")
