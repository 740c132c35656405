"""Run a module of this package in a process of its own that has a time to end in; what it printed until then counts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping


def run_module(
    module: str, *arguments: str, limit_s: float, environment: Mapping[str, str], given: str | None = None
) -> tuple[str, subprocess.CompletedProcess[str] | None]:
    """Run a module and wait for its end.

    Args:
        module: its name.
        arguments: its arguments.
        limit_s: seconds after which it is killed.
        environment: environment variables besides this process's.
        given: its standard input; None: this process's.

    Returns:
        (What it printed, the ended process; None: it was killed).
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            input=given,
            env=os.environ | dict(environment),
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired as late:
        return late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or "", None
    return done.stdout, done
