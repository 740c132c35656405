"""Tests of model-written code inside the sandbox that the run file configures.

The isolation is up to the sandbox program (bubblewrap, nsjail, a container); this module starts it, passes it the code,
and ends it. It also limits time, memory and file sizes, and provides an empty environment and a separate folder.

    the sandbox never starts the driver        -> the reward is void: nothing was learned about the code
    the driver has begun, and the code fails,
    loops, exits or uses too much memory       -> it does not pass: that is the policy's doing

The driver proves by a secret word that it has begun. Its output goes through a pipe, so that the code, which runs
later, cannot take that word back.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from typing import IO

from streamrl.config.tasks import Sandbox
from streamrl.rollouts.void import VoidCause
from streamrl.runtime.processes import end_with_parent
from streamrl.tasks.void_reward import VoidReward

BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
MOST_FILE_BYTES = 16 * 2**20
MOST_OUTPUT = 64 * 1024
"""Most bytes of the program's output that are read."""
LONGEST_READ_S = 2.0
"""Seconds for which the rest of the output is read after the program's end."""
MOST_STDERR = 300
"""Most characters of a sandbox's last words."""
DRIVER = """
import json, sys
given = json.loads(sys.stdin.read())
print(given["begun"], flush=True)
space = {"__name__": "__main__"}
exec(compile(given["code"], "completion", "exec"), space)
exec(compile(given["tests"], "tests", "exec"), space)
print("\\n" + given["word"], flush=True)
"""
"""Python program that runs the code and its tests. A program that exits early (sys.exit, os._exit) does not print the
secret word, which it does not know."""


def code_of(completion: str) -> str:
    """Return the program in a completion: its last fenced block, or all of it if there is none.

    >>> code_of("Use this:\\n```python\\nx = 1\\n```\\nDone.")
    'x = 1\\n'
    """
    blocks = BLOCK.findall(completion)
    return blocks[-1] if blocks else completion


def passes(completion: str, tests: str, sandbox: Sandbox) -> bool:
    """Whether the program of a completion passes its tests within the limits.

    Args:
        completion: the model's text.
        tests: Python that raises on failure (`assert add(1, 2) == 3`); it sees the program's names.
        sandbox: the sandbox to run in.

    Raises:
        VoidReward: the sandbox did not start the driver.
        SyntaxError: the tests are not Python.
    """
    compile(tests, "tests", "exec", dont_inherit=True)  # otherwise every program would fail them
    begun, word = secrets.token_hex(16), secrets.token_hex(16)
    given = json.dumps({"code": code_of(completion), "tests": tests, "begun": begun, "word": word})
    command = [*sandbox.command, sys.executable, "-I", "-c", DRIVER]

    def limit() -> None:
        end_with_parent(signal.SIGKILL)  # a killed worker cannot end it
        resource.setrlimit(resource.RLIMIT_AS, (sandbox.memory_mb << 20, sandbox.memory_mb << 20))
        resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_FILE_BYTES, MOST_FILE_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    with tempfile.TemporaryDirectory(prefix="streamrl-") as folder, tempfile.TemporaryFile() as complaints:
        printed = _Printed()
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=printed.writing,
                stderr=complaints,
                cwd=folder,
                env={"PATH": os.environ.get("PATH", os.defpath), "HOME": folder},
                start_new_session=True,
                preexec_fn=limit,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise VoidReward(VoidCause.SANDBOX, f"the sandbox {command[0]} did not start: {error}") from error
        finally:
            printed.read()
        ended = f"did not end within {sandbox.seconds:g} s"
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(given.encode(), timeout=sandbox.seconds)
                ended = f"ended with {process.returncode}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        printed.end()
        if begun.encode() not in printed.head.splitlines():
            text = f"the sandbox {command[0]} {ended} and never started the program: {_last_words(complaints)}"
            raise VoidReward(VoidCause.SANDBOX, text)
        lines = printed.tail.splitlines()
    return process.returncode == 0 and bool(lines) and lines[-1] == word.encode()


def _last_words(complaints: IO[bytes]) -> str:
    """Return the end of what a sandbox has written to its standard error, in one line."""
    complaints.seek(max(0, complaints.seek(0, os.SEEK_END) - MOST_STDERR))
    return " ".join(complaints.read().decode(errors="replace").split()) or "it said nothing"


class _Printed:
    """A program's output: its first and its last bytes, read by a thread as they come."""

    def __init__(self) -> None:
        self._reading, self.writing = os.pipe()
        """`writing` is the end for the program; `read` closes it here."""
        self.head = self.tail = b""
        self._thread = threading.Thread(target=self._keep, name="read-sandbox", daemon=True)

    def read(self) -> None:
        """Begin to read, now that the program has its end of the pipe."""
        os.close(self.writing)
        self._thread.start()

    def end(self) -> None:
        """Wait until all is read; a process that has left its group, and still writes, is not waited for."""
        self._thread.join(LONGEST_READ_S)

    def _keep(self) -> None:
        with open(self._reading, "rb", buffering=0) as pipe:
            while part := pipe.read(MOST_OUTPUT):
                if len(self.head) < MOST_OUTPUT:
                    self.head += part
                self.tail = (self.tail + part)[-MOST_OUTPUT:]
