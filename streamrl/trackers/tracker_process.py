"""The process that follows a run for one tracker: `python -m streamrl.trackers.tracker_process RUN_DIR NAME`.

It reads the run's files every `LOOK_S` seconds and sends what is new. A failed delivery is tried again, less and less
often; a call that does not return is noticed by a second thread. Neither is known to the run, which only writes its
files. Lines for the user go to standard output, where the launcher reads them; what the tracker's package prints goes
to standard error, which is its log.

When standard input ends, the launcher is done with the run (or has died): what is still open is sent, and after
`END_S` the process ends whatever the tracker does.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from pydantic import TypeAdapter

from streamrl.config.load import load_resolved
from streamrl.config.run import RunConfig
from streamrl.config.trackers import TrackerConfig
from streamrl.errors import UserError, as_typed
from streamrl.runtime.log_lines import log_to_stderr
from streamrl.trackers.backends.opener import open_tracker
from streamrl.trackers.follower import MOST_OPEN, Opener, RunFollower
from streamrl.trackers.sent_rows import RecordInUseError, SentRows
from streamrl.trackers.tracker import TrackedRun

log = logging.getLogger("streamrl.trackers.process")
log.addHandler(logging.NullHandler())  # tracebacks are for a process's log; `streamrl track` has none

LOOK_S = 2.0
"""Seconds between two looks at the run's files."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 120.0
"""Seconds until a failed delivery is tried again: at first, and at most."""
SLOW_S = 60.0
"""Seconds after which a call that has not returned is reported."""
END_S = 60.0
"""Seconds for what is still open when the run has ended."""
HANDOVER_S = END_S + 15.0
"""Seconds to wait for the process of an earlier launch, which sends its rest."""
NICENESS = 10
"""A run's processes come first."""


class PatientDelivery:
    """Deliveries of a follower one after the other: failures are tried again with longer pauses.

    A failure, or a call that does not return, is said once until a delivery succeeds, which is said as well.
    """

    def __init__(self, follower: RunFollower, say: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._follower, self._say, self._clock = follower, say, clock
        self._pause = 0.0
        self._next = 0.0
        self._lock = threading.Lock()
        """Held while one of the two threads uses what follows."""
        self._busy_since: float | None = None
        """Time at which the call in progress began; None: there is none."""
        self._said_slow = False
        """Whether it was said that a call does not return; a delivery that succeeds resets it."""

    def look(self, now_or_never: bool = False) -> bool:
        """Send what is new, and return whether everything is delivered.

        Args:
            now_or_never: this is the last try, which a recent failure does not put off.
        """
        if self._clock() < self._next and not now_or_never:
            return False
        with self._lock:
            self._busy_since = self._clock()
        try:
            self._follower.send()
        except Exception as error:
            log.warning("not delivered", exc_info=error)
            if not self._pause:
                later = "" if now_or_never else " and is sent as soon as it can be"
                self._say(f"takes nothing now ({_first_line(error)}); what it misses stays in the run's folder{later}")
            self._pause = min(LONGEST_PAUSE_S, 2 * self._pause or FIRST_PAUSE_S)
            self._next = self._clock() + self._pause
            return False
        finally:
            with self._lock:
                self._busy_since = None
        with self._lock:
            if self._pause or self._said_slow:
                self._say("is back: what it had missed is sent")
            self._said_slow = False
        self._pause = 0.0
        return True

    def notice_hang(self) -> None:
        """Say that the call in progress takes long, unless that was said; another thread than that of `look` asks."""
        with self._lock:
            since = self._busy_since
            if since is not None and not self._said_slow and self._clock() - since >= SLOW_S:
                self._said_slow = True
                missed = "what it misses stays in the run's folder"
                self._say(f"has not answered for {SLOW_S:.0f} s; the run goes on, and {missed}")


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


def follow(
    run_dir: Path, name: str, ended: threading.Event, say: Callable[[str], None], opener: Opener = open_tracker
) -> bool:
    """Follow a run for one of its trackers until `ended` is set; return whether everything was delivered.

    Args:
        run_dir: the run's folder.
        name: the tracker.
        ended: set when nothing new will come.
        say: shows a line to the user; it continues a sentence that begins with the tracker's name.
        opener: opens the tracker.

    Raises:
        UserError: another process sends to this tracker and does not end soon, or the folder is no run's.
    """
    _, config = load_resolved(run_dir)
    keys = tracker_keys(config, name)
    run = TrackedRun(run_dir, run_dir.resolve().name, config.model_dump(mode="json"))
    with _own_record(run_dir, name, ended, say) as sent:
        if sent.copied_from:
            say(f"begins a new run: this folder is a copy of {sent.copied_from}, whose run goes on under its own name")
        follower = RunFollower(run, keys, sent, opener, say)
        delivery = PatientDelivery(follower, say, time.monotonic)
        threading.Thread(target=_notice_hangs, args=(delivery,), daemon=True).start()
        while not ended.is_set():
            delivery.look()
            ended.wait(LOOK_S)
        delivered = delivery.look(now_or_never=True)
        try:
            follower.close()
        except Exception as error:
            log.warning("not closed", exc_info=error)
            say(f"did not close ({_first_line(error)})")
            return False
        if not delivered:
            count = follower.waiting
            rows = f"{count} or more rows" if count >= MOST_OPEN else f"{count} rows"
            say(f"has not taken {rows}; send them with: streamrl track {as_typed(run_dir, name)}")
        return delivered


def _own_record(run_dir: Path, name: str, ended: threading.Event, say: Callable[[str], None]) -> SentRows:
    """Open a tracker's record; while another process has it, wait, at most `HANDOVER_S` and until `ended` is set.

    Raises:
        UserError: the other process still has it, or it cannot be written.
    """
    until, said = time.monotonic() + HANDOVER_S, False
    while True:
        try:
            return SentRows(run_dir, name)
        except RecordInUseError:
            if ended.is_set() or time.monotonic() >= until:
                raise
        if not said:
            say("waits for the process of an earlier launch, which still sends its rest")
        said = True
        ended.wait(LOOK_S)


def tracker_keys(run: RunConfig, name: str) -> TrackerConfig:
    """Return the keys of a tracker in the run file, or its defaults if the run file does not have it."""
    adapter: TypeAdapter[TrackerConfig] = TypeAdapter(TrackerConfig)
    return next((one for one in run.trackers if one.name == name), None) or adapter.validate_python({"name": name})


def _notice_hangs(delivery: PatientDelivery) -> None:
    """Look for calls that do not return, for as long as the process lives."""
    while True:
        delivery.notice_hang()
        time.sleep(1.0)


def main() -> int:
    """Follow a run as its launcher asks; return the exit code."""
    run_dir, name = Path(sys.argv[1]), sys.argv[2]
    words: IO[str] = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # packages print as they like; it is all for the log
    os.nice(NICENESS)
    log_to_stderr()
    ended = threading.Event()

    def say(text: str) -> None:
        try:
            print(text, file=words, flush=True)
        except (OSError, ValueError):
            log.warning("%s", text)  # the launcher is gone

    def wait_for_the_end() -> None:
        sys.stdin.buffer.read()
        ended.set()
        time.sleep(END_S)
        say(f"did not take the rest within {END_S:.0f} s; send it with: streamrl track {as_typed(run_dir, name)}")
        os._exit(1)

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    try:
        return 0 if follow(run_dir, name, ended, say) else 1
    except UserError as error:
        say(f"is not sent anything: {error}")
        return 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of the tracker's package must not keep it alive
