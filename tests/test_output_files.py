"""Files that commands are to write."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from streamrl.cli import calibrate
from streamrl.errors import UserError
from streamrl.output_files import check_output, write_output
from streamrl.verify import hardware_checks


def test_a_file_that_can_be_written_is_left_as_it_is(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text("mine")
    for path in (old, tmp_path / "new.json", Path(os.devnull)):
        check_output("--out", path)
    assert list(tmp_path.iterdir()) == [old] and old.read_text() == "mine"


@pytest.mark.parametrize("name", ["old.json", "link.json"])
def test_a_file_stays_as_it_is_where_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "old.json").write_text("mine")
    (tmp_path / "link.json").symlink_to("old.json")
    own = Path.write_text

    def full(path: Path, text: str, **how: Any) -> None:
        own(path, text[:1], **how)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        for write in (
            lambda path: calibrate._keep(path, {"load": "none"}, []),
            lambda path: hardware_checks.write_json(path, []),
        ):
            with pytest.raises((UserError, OSError), match="No space left on device"):
                write(tmp_path / name)
    assert (tmp_path / "old.json").read_text() == "mine" and len(list(tmp_path.iterdir())) == 2
    write_output(tmp_path / name, "new")
    assert (tmp_path / "old.json").read_text() == "new" and (tmp_path / "link.json").is_symlink()


def test_what_is_no_ordinary_file_is_written_to_and_stays(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_output(tmp_path / "pipe", "new")
    assert os.read(reader, 10) == b"new" and (tmp_path / "pipe").is_fifo()
    os.close(reader)


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
