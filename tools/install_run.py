"""Run pip and uv for `make install`: show their progress, and retry broken and slow downloads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import install_checks as checks

LOOK_S = 0.2
"""Seconds between two checks of a running installer."""

Stage = Callable[[Iterable[str]], tuple[str, bool]]


class InstallError(Exception):
    """Raised when the installation failed; the message says what the user can do."""


@dataclass(frozen=True)
class Patience:
    """Limits of waiting and retrying."""

    tries: int = 4
    pause_s: float = 3.0
    """Seconds before the second try; longer before each further one."""
    window_s: float = 60.0
    least_bytes: float = 1e6
    """Bytes in `window_s` seconds below which a download is slow."""
    every_s: float = 8.0
    """Seconds between two lines of progress without a terminal."""


class Running:
    """A running program, with its output in a file."""

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
        """Return the lines it has written so far."""
        return os.pread(self.log.fileno(), 1 << 26, 0).decode(errors="replace").splitlines()

    def written(self) -> float | None:
        """Return the bytes that it has written to files; None if the system does not report them."""
        try:
            counters = Path(f"/proc/{self.process.pid}/io").read_text()
        except OSError:
            return None
        return float(dict(line.split(": ") for line in counters.splitlines())["wchar"])

    def stop(self) -> None:
        """End the program, if it runs."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class Progress:
    """Progress as one rewritten line in a terminal, or a line every few seconds elsewhere."""

    def __init__(self, every_s: float) -> None:
        self.terminal = sys.stdout.isatty()
        self.every_s = every_s
        self.started = self.shown = time.monotonic()

    def show(self, stage: str, written: float | None) -> None:
        """Show the current stage."""
        now = time.monotonic()
        if not self.terminal and now - self.shown < self.every_s:
            return
        figures = f", {written / 1e9:.2f} GB unpacked" if written is not None and written > 5e7 else ""
        figures += f" ({now - self.started:.0f} s)"
        if self.terminal:  # a line that is wrapped would leave its first row behind
            room = max(0, shutil.get_terminal_size().columns - 3)
            line = stage[: max(0, room - len(figures))] + figures
            print(f"\r\033[K  {line[:room]}", end="", flush=True)
        else:
            say(f"  {stage}{figures}")
            self.shown = now

    def tell(self, text: str) -> None:
        """Print a line that stays."""
        self.clear()
        say(text)
        self.shown = time.monotonic()

    def clear(self) -> None:
        """Remove the rewritten line."""
        if self.terminal:
            print("\r\033[K", end="", flush=True)


def follow(running: Running, stage: Stage, progress: Progress, pace: checks.Pace | None) -> bool:
    """Show a program's progress until it ends; return False if it was ended because its download was too slow."""
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
    """Run an installer until it succeeds; retry after a failure of the network or a download that is too slow.

    Args:
        start: starts the installer, whose cache has what earlier tries fetched.
        stage: returns the current stage from the installer's log.
        patience: limits of waiting and retrying.

    Raises:
        Unreachable: the network failed every time.
        InstallError: a failure that a retry does not fix.
    """
    progress = Progress(patience.every_s)
    for attempt in range(1, patience.tries + 1):
        last = attempt == patience.tries
        # the last try has no limit, so that a permanently slow network can finish
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
    """Raised when the network failed at every try."""


def say(text: str) -> None:
    """Print one line of progress."""
    print(f"install: {text}", flush=True)
