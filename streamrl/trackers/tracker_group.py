"""The tracker processes of a launcher: started with the run, asked to finish when it ends, never waited for in it."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from streamrl.config.trackers import TrackerConfig
from streamrl.errors import as_typed
from streamrl.run_dir import layout

RESTARTS = 3
"""Restarts of one tracker process that dies during the run."""
QUICK_S = 3.0
"""Seconds for the rest if the run was interrupted or has failed."""
PATIENCE_S = 65.0
"""Seconds for the rest if the run is done: the process itself gives up after `tracker_process.END_S`."""


class TrackerGroup:
    """One process for each tracker of a run."""

    def __init__(self, run_dir: Path, trackers: Sequence[TrackerConfig]) -> None:
        """Start them; the run's folder has its configuration."""
        self._run_dir = run_dir
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._restarts: dict[str, int] = {}
        self._readers: list[threading.Thread] = []
        self._processes = {tracker.name: self._try(tracker.name) for tracker in trackers}
        """Process of each tracker; None: it could not be started at the last try."""

    def _try(self, name: str) -> subprocess.Popen[str] | None:
        try:
            return self._start(name)
        except (OSError, RuntimeError) as error:  # no process, thread or descriptor is left
            rest = f"what it misses is sent by: streamrl track {as_typed(self._run_dir, name)}"
            self._lines.put(f"tracker {name} cannot be started now ({error}); {rest}")
            return None

    def _start(self, name: str) -> subprocess.Popen[str]:
        logs = self._run_dir / layout.LOGS
        logs.mkdir(exist_ok=True)
        with (logs / f"tracker-{name}.log").open("ab") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "streamrl.trackers.tracker_process", str(self._run_dir), name],
                stdin=subprocess.PIPE,  # its end asks the child to finish, however this process dies
                stdout=subprocess.PIPE,
                stderr=log,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C is for the run
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        reader = threading.Thread(target=self._read, args=(name, child), daemon=True)
        reader.start()
        self._readers.append(reader)
        return child

    def _read(self, name: str, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            self._lines.put(f"tracker {name} {line.rstrip()}")

    def look(self) -> list[str]:
        """Restart what has died, and return new lines for the user."""
        for name, child in self._processes.items():
            if (child is not None and child.poll() is None) or self._restarts.get(name, 0) > RESTARTS:
                continue
            self._restarts[name] = tries = self._restarts.get(name, 0) + 1
            log = self._run_dir / layout.LOGS / f"tracker-{name}.log"
            if tries > RESTARTS:
                rest = f"the rest is sent by: streamrl track {as_typed(self._run_dir, name)}"
                why = "could not be started" if child is None else f"has ended again (see {log})"
                self._lines.put(f"tracker {name} {why} and is not started again; {rest}")
                continue
            if child is not None:
                self._lines.put(f"tracker {name} has ended (exit code {child.returncode}, see {log}); it is restarted")
            self._processes[name] = self._try(name)
        return self._new_lines()

    def _new_lines(self) -> list[str]:
        lines = []
        while not self._lines.empty():
            lines.append(self._lines.get())
        return lines

    def finish(self, patience_s: float, stop: Sequence[int] = ()) -> list[str]:
        """Ask all to send the rest and end, kill those that take longer, and return the last lines for the user.

        Args:
            patience_s: seconds that they have.
            stop: requests to stop so far, which grow; one more ends the waiting.
        """
        children = {name: child for name, child in self._processes.items() if child is not None}
        for child in children.values():
            assert child.stdin is not None
            child.stdin.close()
        deadline, before = time.monotonic() + patience_s, len(stop)
        while any(child.poll() is None for child in children.values()):
            if time.monotonic() > deadline or len(stop) > before:
                break
            time.sleep(0.05)
        for name, child in children.items():
            if child.poll() is None:
                child.kill()
                child.wait()
                rest = f"send the rest with: streamrl track {as_typed(self._run_dir, name)}"
                self._lines.put(f"tracker {name} was ended before it had taken everything; {rest}")
        for reader in self._readers:
            reader.join(1.0)
        self._processes = {}
        return self._new_lines()
