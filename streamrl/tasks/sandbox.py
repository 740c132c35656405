"""Tests of model-written code inside the sandbox that the run file configures.

The isolation is up to the sandbox program (bubblewrap, nsjail, a container); this module starts it, passes it the code,
and ends it. It also limits time, memory and file sizes, and provides an empty environment and a separate folder.
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

from streamrl.config.tasks import Sandbox
from streamrl.runtime.processes import end_with_parent

BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
MOST_FILE_BYTES = 16 * 2**20
MOST_OUTPUT = 64 * 1024
"""Most bytes of the program's output that are read."""
DRIVER = """
import json, sys
given = json.loads(sys.stdin.read())
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
        FileNotFoundError: the sandbox program does not exist.
    """
    word = secrets.token_hex(16)
    given = json.dumps({"code": code_of(completion), "tests": tests, "word": word})
    command = [*sandbox.command, sys.executable, "-I", "-c", DRIVER]

    def limit() -> None:
        end_with_parent(signal.SIGKILL)  # a killed worker cannot end it
        resource.setrlimit(resource.RLIMIT_AS, (sandbox.memory_mb << 20, sandbox.memory_mb << 20))
        resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_FILE_BYTES, MOST_FILE_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    with tempfile.TemporaryDirectory(prefix="streamrl-") as folder, tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.environ.get("PATH", os.defpath), "HOME": folder},
            start_new_session=True,
            preexec_fn=limit,
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(given.encode(), timeout=sandbox.seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        size = printed.seek(0, os.SEEK_END)
        printed.seek(max(0, size - MOST_OUTPUT))
        lines = printed.read().splitlines()
    return process.returncode == 0 and bool(lines) and lines[-1] == word.encode()
