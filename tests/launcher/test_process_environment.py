"""What surrounds the processes of a run, whatever the shell is like that it is launched from."""

from __future__ import annotations

from pathlib import Path

import pytest

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
