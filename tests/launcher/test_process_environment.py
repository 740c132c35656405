"""What surrounds the processes of a run, whatever the shell is like that it is launched from."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from streamrl.launcher import entry_point
from streamrl.run_dir.start_stages import read_stages
from tests.troubled_place import Place


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Place:
    return Place(tmp_path, monkeypatch, capfd)


def test_a_locale_without_utf8_does_not_keep_libraries_from_reading_their_files(place: Place) -> None:
    for name, value in {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}.items():
        place.monkeypatch.setenv(name, value)
    (place.folder / "template").write_bytes("\u2026".encode())
    ended = place.process("here-one-0", "import sys; sys.exit(open('template').read() != '\\u2026')")
    assert ended.exit_code == 0, ended.last_words()


@pytest.mark.parametrize(
    ("role", "rank", "said"),
    [
        ("controller", "3", {"controller"}),
        ("service", "3", {"service-here"}),
        ("instance", "3", {"here-one-0"}),
        ("trainer", "3", set()),
        ("trainer", "0", {"trainer"}),
    ],
)
def test_a_rank_left_by_another_job_hides_no_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, rank: str, said: set[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    name = "here-one-0" if role == "instance" else ""
    entry_point._say(Namespace(role=role, run_dir=tmp_path, site="here", name=name, node=0), "importing libraries")
    assert read_stages(tmp_path).keys() == said
