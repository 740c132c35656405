"""Run a module of this package in a process of its own that has a time to end in; what it printed until then counts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping

from streamrl.runtime.processes import end_with_parent


def run_module(
    module: str, *arguments: str, limit_s: float, environment: Mapping[str, str], given: str | None = None
) -> tuple[str, subprocess.CompletedProcess[str] | None]:
    """Run a module and wait for its end.

    Args:
        module: its name.
        arguments: its arguments.
        limit_s: seconds after which it is killed, with its children; so it is when this process is interrupted.
        environment: environment variables besides this process's.
        given: its standard input; None: this process's.

    Returns:
        (What it printed, the ended process; None: it was killed).
    """
    with subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=None if given is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | dict(environment),
        text=True,
        start_new_session=True,  # so that what it has started can be ended with it
        preexec_fn=end_with_parent,  # as neither Ctrl-C nor a hangup of the terminal reaches it
    ) as child:
        try:
            said, errors = child.communicate(given, timeout=limit_s)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):  # all of them have ended meanwhile
                os.killpg(child.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or "", None
    return said, subprocess.CompletedProcess(child.args, child.returncode, said, errors)
