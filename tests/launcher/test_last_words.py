"""Last words of several lines, such as the traceback of a user's reward, from a process's log to the terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config.run import RunConfig
from streamrl.controller.void_watch import FEWEST, VoidWatch
from streamrl.launcher import entry_point
from streamrl.report.panels import header
from streamrl.rollouts.void import Void, VoidCause
from streamrl.run_dir.status import read_status
from tests.troubled_place import Place

TRACE = (
    'Traceback (most recent call last):\n  File "mine.py", line 3, in score\n    return 1 / 0\nZeroDivisionError: zero'
)
RAISES = """
import sys
from streamrl.errors import RunFailed
from streamrl.launcher import entry_point

async def fail():
    raise RunFailed({words!r})

entry_point._role = lambda args: fail()
sys.argv[1:] = ["controller", "--run-dir", "runs/tiny"]
sys.exit(entry_point.main())
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Place:
    return Place(tmp_path, monkeypatch, capfd)


def words(cause: VoidCause) -> str:
    watch, void = VoidWatch(RunConfig()), Void(cause, "ZeroDivisionError: zero")
    return [watch.record("mine", str(number), void, TRACE) for number in range(FEWEST)][-1] or ""


def test_the_traceback_of_a_reward_keeps_its_lines_and_what_to_mend_comes_first(place: Place) -> None:
    said = words(VoidCause.VERIFIER)
    assert said.endswith(f"The last one: ZeroDivisionError: zero\n{TRACE}")
    printed = place.supervise({"controller": RAISES.format(words=said)})
    resume = "mend the reward, then continue with: streamrl launch --resume runs/tiny"
    lines = f"error: controller ended with exit code 1: {said}\n{resume}".splitlines()
    assert "\n".join([lines[0], *("       " + line for line in lines[1:])]) + "\n" in printed
    assert printed.count("Traceback") == 1, "once, at the end"
    status = read_status(place.folder / "runs" / "tiny")
    assert status.error == "\n".join(lines).removeprefix("error: ")
    assert status.short_error.splitlines() == [lines[0].removeprefix("error: "), resume]
    shown = str(header(status, [], status.updated_at))
    assert "ZeroDivisionError: zero\nmend the reward" in shown and "Traceback" not in shown


def test_a_run_that_ends_for_another_cause_is_continued_as_it_is(place: Place) -> None:
    printed = place.supervise({"controller": RAISES.format(words=words(VoidCause.GENERATION))})
    assert "\n       continue with: streamrl launch --resume runs/tiny\n" in printed


def test_a_terminal_obeys_no_last_words_and_no_line_of_them_is_one_of_the_log() -> None:
    said = entry_point._last_words("first\x1b[2J\nLAST WORDS: \x85second\r\n\n    third")
    assert said == "LAST WORDS: first?[2J\n    | LAST WORDS: ?second?\n    |     third"
