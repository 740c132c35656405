"""A run whose launcher is a child of this process: started, ended, and resumed from its newest checkpoint."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from streamrl.chaos.observation import processes_of
from streamrl.errors import RunFailed
from streamrl.launcher.local_backend import spawn
from streamrl.run_dir import layout

STOP_S = 30.0
"""Seconds from SIGINT until all processes of the run have ended; they take less than 10 s, under load more."""
REPORT_S = 300.0
"""Seconds that a launcher may then take to write the report: a few, on a loaded machine a minute."""
KILL_S = 30.0
"""Seconds for a killed launcher to be gone."""
ENDS_S = 60.0
"""Seconds for all processes of a killed launcher to end; their wardens stop them at once."""
FOLDER_S = 60.0
"""Least seconds for a launcher to begin the run in its folder; it first checks the files, the model and the machine."""
POLL_S = 0.1
LAST_LINES = 6
"""Lines of output quoted when there is no error line."""


class Launcher:
    """A `streamrl launch` process, with its output in the run's logs."""

    def __init__(self, run_dir: Path, arguments: Sequence[str], emulate: bool, startup_s: float) -> None:
        """Prepare the command; `start` runs it.

        Args:
            run_dir: the run's folder, made for it and empty; the launcher will fill it.
            arguments: arguments of `streamrl launch`, without --emulate.
            emulate: whether it emulates the sites.
            startup_s: seconds that it may take to begin the run, if they are more than `FOLDER_S`.
        """
        self.run_dir, self._arguments = run_dir, list(arguments)
        self._begin_s = max(FOLDER_S, startup_s)
        self._emulate = ["--emulate"] if emulate else []
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the run, or resume it if it was started before.

        Raises:
            RunFailed: the launcher ended at once, or began no run in the folder.
        """
        resumes = self._process is not None
        arguments = ["--resume", str(self.run_dir)] if resumes else self._arguments
        early = self.run_dir.with_name(f".{self.run_dir.name}.{layout.LAUNCHER_LOG}")
        final = self.run_dir / layout.LOGS / layout.LAUNCHER_LOG
        self._output = final if resumes else early
        self._output.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "streamrl.cli.main", "launch", "--plain", *arguments, *self._emulate]
        self._process = spawn(command, self._output, os.environ)  # Ctrl-C reaches only the process that injects faults
        end = time.monotonic() + self._begin_s
        while not (self.run_dir / layout.LOGS).is_dir():
            if not self.runs or time.monotonic() > end:
                words = self.last_words()
                self.end()
                self._output.unlink(missing_ok=True)
                raise RunFailed(words or f"the launcher has begun no run in {self.run_dir}")
            time.sleep(POLL_S)
        if not resumes:
            self._output = early.rename(final)

    @property
    def runs(self) -> bool:
        """Whether the launcher is running."""
        return self._process is not None and self._process.poll() is None

    def last_words(self) -> str:
        """Return the last error in the launcher's output, else its last lines."""
        lines = self._output.read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        return "\n".join(errors[-1:] or lines[-LAST_LINES:]).removeprefix("error: ")

    def kill(self) -> None:
        """Kill the launcher alone; its processes must end by themselves."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(KILL_S)

    def wait_for_end(self) -> list[str]:
        """Wait until no process of the run is left; kill those that take too long, and return their names."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(ENDS_S)
        end = time.monotonic() + ENDS_S
        while (left := _living(self.run_dir)) and time.monotonic() < end:
            time.sleep(POLL_S)
        for process in left.values():
            with contextlib.suppress(psutil.Error):
                process.kill()
        return sorted(left)

    def end(self) -> bool:
        """Send SIGINT, and SIGKILL if it does not help in time; return whether SIGINT sufficed.

        A folder that is still empty is removed.
        """
        ended_well = self._process is None or self._interrupt(self._process)
        with contextlib.suppress(OSError):
            self.run_dir.rmdir()
        return ended_well

    def _interrupt(self, process: subprocess.Popen[bytes]) -> bool:
        process.send_signal(signal.SIGINT)  # a no-op if it has ended
        end = time.monotonic() + STOP_S
        while process.poll() is None and _living(self.run_dir) and time.monotonic() < end:
            time.sleep(POLL_S)
        try:
            process.wait(0 if _living(self.run_dir) else REPORT_S)
        except subprocess.TimeoutExpired:
            self.kill()
            self.wait_for_end()
            return False
        return True


def _living(run_dir: Path) -> dict[str, psutil.Process]:
    """Return the processes of a run that have not ended, by name."""
    found = {}
    for name, one in processes_of(run_dir).items():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(one.pid)
            if process.status() != psutil.STATUS_ZOMBIE and str(run_dir) in " ".join(process.cmdline()):
                found[name] = process
    return found
