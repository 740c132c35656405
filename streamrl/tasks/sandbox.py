"""Runs code that a model wrote, inside the sandbox that the run file configures, against tests.

What isolates is the sandbox's own program (bubblewrap, nsjail, a container); this module only starts it, gives it the
code, and ends it. Beside that: a limit of time, of memory and of file sizes, an empty environment, a folder of its own.
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
"""Bytes that are read of what the program prints."""
DRIVER = """
import json, sys
told = json.loads(sys.stdin.read())
space = {"__name__": "__main__"}
exec(compile(told["code"], "completion", "exec"), space)
exec(compile(told["tests"], "tests", "exec"), space)
print("\\n" + told["word"], flush=True)
"""
"""Who leaves early (sys.exit, os._exit) does not print the word, which the code does not know."""


def code_of(completion: str) -> str:
    """The program in a completion: its last fenced block, or all of it if there is none.

    >>> code_of("Use this:\\n```python\\nx = 1\\n```\\nDone.")
    'x = 1\\n'
    """
    blocks = BLOCK.findall(completion)
    return blocks[-1] if blocks else completion


def passes(completion: str, tests: str, sandbox: Sandbox) -> bool:
    """Whether the program of a completion gets through tests, within the limits.

    Args:
        completion: the model's text.
        tests: Python that raises if something is wrong (`assert add(1, 2) == 3`); it sees the program's names.
        sandbox: what it runs in.

    Raises:
        FileNotFoundError: the sandbox's own program is not there.
    """
    word = secrets.token_hex(16)
    told = json.dumps({"code": code_of(completion), "tests": tests, "word": word})
    command = [*sandbox.command, sys.executable, "-I", "-c", DRIVER]

    def limit() -> None:
        end_with_parent(signal.SIGKILL)  # a worker that is killed cannot end it
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
                process.communicate(told.encode(), timeout=sandbox.seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        size = printed.seek(0, os.SEEK_END)
        printed.seek(max(0, size - MOST_OUTPUT))
        lines = printed.read().splitlines()
    return process.returncode == 0 and bool(lines) and lines[-1] == word.encode()
