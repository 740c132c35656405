"""The log of what users' processes print."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.runtime import output_pipe
from streamrl.runtime.output_pipe import OutputLog


def test_a_full_log_loses_its_older_half_in_whole_lines_and_never_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output_pipe, "MOST_LOGGED", 1000)
    log, path = OutputLog(tmp_path / "agents.log"), tmp_path / "agents.log"
    with path.open("ab", buffering=0) as another:  # a worker that has it open
        for number in range(300):
            (log if number % 2 else another).write(b"line %3d\n" % number)
            note, *lines = path.read_text().splitlines() if number > 120 else ("[older output is removed]",)
            assert note == "[older output is removed]" and len(lines) < 120
            assert lines == [f"line {n:3d}" for n in range(number + 1 - len(lines), number + 1)]
    log.write(b"x" * 5000)
    assert path.read_bytes() == b"[older output is removed]\n" + b"x" * 500
    log.close()
