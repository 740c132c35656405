"""Last words of several lines, such as the traceback of a user's reward, from a process's log to the terminal."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import NoReturn

import pytest

from streamrl.config.run import RunConfig
from streamrl.controller.void_watch import FEWEST, VoidWatch
from streamrl.errors import ErrorCode
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
SAYS = """
import sys
print({said!r}, file=sys.stderr)
sys.exit(1)
"""
"""What `RAISES` says, without what it imports."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Place:
    return Place(tmp_path, monkeypatch, capfd)


def words(cause: VoidCause) -> str:
    watch, void = VoidWatch(RunConfig()), Void(cause, "ZeroDivisionError: zero")
    return [watch.record("mine", str(number), void, TRACE) for number in range(FEWEST)][-1] or ""


def test_last_words_of_an_unforeseen_error_are_cut() -> None:
    said = entry_point._unexpected(ValueError("not supported for now. Supported: " + "FooForCausalLM " * 700))
    assert said.startswith("LAST WORDS, unexpected: ValueError: not supported for now.") and said.endswith(" ...")
    assert len(said) < 900
    assert entry_point._unexpected(ValueError("short\n one")) == "LAST WORDS, unexpected: ValueError: short one"


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
    shown = str(header(status, status.updated_at))
    assert "ZeroDivisionError: zero\nmend the reward" in shown and "Traceback" not in shown


def test_a_run_that_ends_for_another_cause_is_continued_as_it_is(place: Place) -> None:
    printed = place.supervise({"controller": SAYS.format(said=entry_point._last_words(words(VoidCause.GENERATION)))})
    assert "\n       continue with: streamrl launch --resume runs/tiny\n" in printed


@pytest.mark.parametrize("code", [ErrorCode.RESUME, ErrorCode.CONFIGURATION, ErrorCode.CONTEXT])
def test_a_run_that_no_resume_continues_as_it_is_says_so(place: Place, code: ErrorCode) -> None:
    said = entry_point._last_words(code.refer("step_2 is missing"))
    printed = place.supervise({"controller": SAYS.format(said=said)})
    assert "\n       mend that, then continue with: streamrl launch --resume runs/tiny\n" in printed


def test_a_terminal_obeys_no_last_words_and_no_line_of_them_is_one_of_the_log() -> None:
    said = entry_point._last_words("first\x1b[2J\nLAST WORDS: \x85second\r\n\n    third")
    assert said == "LAST WORDS: first?[2J\n    | LAST WORDS: ?second?\n    |     third"


ENGINE_FAILS = """
import sys

print('''{log}''', file=sys.stderr)
print("LAST WORDS, unexpected: {words}", file=sys.stderr)
sys.exit(1)
"""
DEAD = "EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause."
CAUSE = "RuntimeError: Unsupported CPU attention configuration: head_dim=16"


@pytest.mark.parametrize("words", [DEAD, "RuntimeError: Engine core initialization failed. See root cause above."])
@pytest.mark.parametrize("before", ["", "(EngineCore pid=7) ERROR 11-28 07:02:06 [core.py:1512] "])
def test_an_instance_whose_engine_failed_says_why_and_where_its_log_is(place: Place, before: str, words: str) -> None:
    lines = ["ValueError: an earlier one", before + CAUSE, "(MainProcess pid=5) vllm.v1.engine.exceptions." + DEAD]
    ended = place.process("here-one-0", ENGINE_FAILS.format(log="\n".join(lines), words=words))
    expected = f"here-one-0 ended with exit code 1: {CAUSE}; see {ended.log}"
    assert ended.last_words() == ended.last_words(in_lines=True) == ended.short_words() == expected


def test_an_engine_that_said_nothing_leaves_the_words_of_its_instance(place: Place) -> None:
    ended = place.process("here-one-0", ENGINE_FAILS.format(log="", words=DEAD))
    assert ended.last_words() == f"here-one-0 ended with exit code 1: {DEAD}; see {ended.log}"


FULL_DISK = """
import os, sys, threading
from streamrl.errors import RestartNeeded, RunFailed
from streamrl.launcher import entry_point

os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
threading.Thread(target=threading.Event().wait).start()  # as one that computes

async def fail():
    raise {error}("cannot write the ledger: database or disk is full (see docs: E1007)")

entry_point._role = lambda args: fail()
sys.argv[1:] = ["controller", "--run-dir", "runs/tiny"]
entry_point.end(entry_point.main())
"""


@pytest.mark.parametrize(
    ("error", "code", "is_final"),
    [("RunFailed", 74, True), ("UserWarning", 1, False), ("RestartNeeded", 75, False)],
)
def test_what_ends_a_process_ends_the_run_also_if_its_log_does_not_take_it(
    place: Place, error: str, code: int, is_final: bool
) -> None:
    ended = place.process("controller", FULL_DISK.format(error=error))
    assert (ended.exit_code, ended.is_final) == (code, is_final)
    if is_final:
        assert f"ended with exit code 74, and {ended.log} does not take why (see docs: E1007)" in ended.short_words()


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (errno.ENOSPC, ": No space left on device (see docs: E1007)"),
        (errno.EROFS, ": Read-only file system"),
        (errno.EACCES, ": Permission denied"),
    ],
)
def test_a_file_system_that_takes_no_log_is_called_full_only_if_it_is(place: Place, number: int, told: str) -> None:
    ended = place.process("controller", "raise SystemExit(74)")

    def refused(**options: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    place.monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    expected = f"controller ended with exit code 74, and {ended.log} does not take why{told}"
    assert ended.short_words() == expected


def test_a_process_starts_although_its_log_takes_no_line(place: Place) -> None:
    (place.folder / "here-one-0.log").symlink_to("/dev/full")
    assert place.process("here-one-0", "").exit_code == 0
