"""Each new run gets a folder that no other run has."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from streamrl.errors import UserError
from streamrl.run_dir.layout import make_folder, new_folder


def test_folders_are_numbered_from_the_second_on(tmp_path: Path) -> None:
    runs = tmp_path / "a" / "runs"
    for name in ("demo", "demo-2", "demo-3"):
        assert new_folder(runs, "demo") == runs / name
        assert make_folder(runs, "demo") == runs / name and (runs / name).is_dir()
    (runs / "demo-2").rmdir()
    assert make_folder(runs, "demo") == runs / "demo-2"


def test_a_name_that_is_no_folders_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "demo").write_text("mine")
    (tmp_path / "demo-2").symlink_to("nowhere")
    assert make_folder(tmp_path, "demo") == tmp_path / "demo-3"
    assert (tmp_path / "demo").read_text() == "mine" and (tmp_path / "demo-2").is_symlink()


def test_launches_at_once_get_folders_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: make_folder(tmp_path / "runs", "demo"), range(32)))
    assert len(set(made)) == 32 and set(made) == set((tmp_path / "runs").iterdir())


def test_a_place_without_room_for_runs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--runs-dir .*file: expected a folder for runs, this is none"):
        make_folder(tmp_path / "file", "demo")
    with pytest.raises(
        UserError, match=r"cannot make the run folder .*/file/runs/demo: Not a directory; choose another"
    ):
        make_folder(tmp_path / "file" / "runs", "demo")
