"""Runs pip and uv for `make install`: shows how far they are, and tries broken and slow downloads again."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import install_checks as checks

LOOK_S = 0.2
"""Seconds between two looks at a running installer."""

Stage = Callable[[Iterable[str]], tuple[str, bool]]


class InstallError(Exception):
    """Installation failed; the message says what the user can do."""


@dataclass(frozen=True)
class Patience:
    """How long is waited, and how often tried."""

    tries: int = 4
    pause_s: float = 3.0
    """Seconds before the second try; longer before each further one."""
    window_s: float = 60.0
    least_bytes: float = 1e6
    """A download is slow that brings fewer bytes in so many seconds."""
    every_s: float = 8.0
    """Seconds between two lines where there is no terminal."""


class Running:
    """A program at work, with its output in a file."""

    def __init__(self, command: list[str], environment: dict[str, str] | None = None, cwd: str | None = None) -> None:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as this object
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            cwd=cwd,
        )

    def lines(self) -> list[str]:
        """What it has written so far."""
        return os.pread(self.log.fileno(), 1 << 26, 0).decode(errors="replace").splitlines()

    def written(self) -> float | None:
        """Bytes that it has written to files; None where the system does not tell."""
        try:
            counters = Path(f"/proc/{self.process.pid}/io").read_text()
        except OSError:
            return None
        return float(dict(line.split(": ") for line in counters.splitlines())["wchar"])

    def stop(self) -> None:
        """Ends it, if it runs."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class Progress:
    """One line that is rewritten in a terminal; a line every few seconds elsewhere."""

    def __init__(self, every_s: float) -> None:
        self.terminal = sys.stdout.isatty()
        self.every_s = every_s
        self.started = self.told = time.monotonic()

    def show(self, stage: str, written: float | None) -> None:
        """What is going on now."""
        now = time.monotonic()
        if not self.terminal and now - self.told < self.every_s:
            return
        if written is not None and written > 5e7:
            stage += f", {written / 1e9:.2f} GB unpacked"
        stage += f" ({now - self.started:.0f} s)"
        if self.terminal:
            print(f"\r\033[K  {stage}", end="", flush=True)
        else:
            say(f"  {stage}")
            self.told = now

    def tell(self, text: str) -> None:
        """A line that stays."""
        self.clear()
        say(text)
        self.told = time.monotonic()

    def clear(self) -> None:
        """Takes the rewritten line away."""
        if self.terminal:
            print("\r\033[K", end="", flush=True)


def follow(running: Running, stage: Stage, progress: Progress, pace: checks.Pace | None) -> bool:
    """Shows a program's progress until it ends; False if it was ended because nothing came any more."""
    retries = 0
    try:
        while True:
            ended = running.process.poll() is not None
            lines = running.lines()
            for said in checks.own_retries(lines)[retries:]:
                progress.tell(f"  {said}")
                retries += 1
            if ended:
                return True
            now, fetching = stage(lines)
            written = running.written()
            if pace is not None and pace.slow(time.monotonic(), written, fetching):
                return False
            progress.show(now, written)
            time.sleep(LOOK_S)
    finally:
        running.stop()
        progress.clear()


def install(start: Callable[[], Running], stage: Stage, patience: Patience) -> None:
    """Runs an installer until it succeeds: again after a failure of the network, and when nothing comes any more.

    Args:
        start: starts it; what an earlier try fetched is in its cache.
        stage: what it does, of its log.
        patience: how long and how often.

    Raises:
        Unreachable: the network failed every time.
        InstallError: a failure that another try does not mend.
    """
    progress = Progress(patience.every_s)
    for attempt in range(1, patience.tries + 1):
        last = attempt == patience.tries
        # a network that is slow for good must not be cut off for ever
        pace = None if last else checks.Pace(patience.window_s, patience.least_bytes)
        running = start()
        if not follow(running, stage, progress, pace):
            what = f"under {patience.least_bytes / 1e6:g} MB came in {patience.window_s:.0f} s"
        elif running.process.returncode == 0:
            return
        else:
            lines = running.lines()
            error = checks.last_error(lines)
            what = checks.reason(error)
            if not checks.may_pass(lines):
                raise InstallError("\n".join(f"  {line}" for line in error))
            if last:
                raise Unreachable(f"the download broke {attempt} times: {what}")
        pause = patience.pause_s * attempt
        progress.tell(f"{what}; trying again in {pause:.0f} s (try {attempt + 1} of {patience.tries})")
        time.sleep(pause)


class Unreachable(InstallError):
    """The network failed every time that it was tried."""


def say(text: str) -> None:
    """One line of progress."""
    print(f"install: {text}", flush=True)
