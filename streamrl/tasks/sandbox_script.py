"""A script that a model wrote, run in a sandbox for what it prints; `sandbox.py` says what the sandbox keeps away."""

from __future__ import annotations

import os
import select
import time
from dataclasses import dataclass
from typing import Literal

from streamrl.config.tasks import Sandbox
from streamrl.tasks.sandbox import BEGUN, LOOK_S, Boxed, isolation_of

MOST_OUTPUT = 2**16
"""Bytes of output after which a script is ended."""

Language = Literal["python", "bash"]


@dataclass(frozen=True)
class ScriptOutput:
    """What became of a script."""

    text: str
    """What it has printed, standard error included."""
    ended: str
    """'' if it succeeded; else how it ended: 'exit code 1', 'timed out after 5 s', 'not run', ..."""


def run_script(source: str, language: Language, sandbox: Sandbox) -> ScriptOutput:
    """Run a script to its end, or to a limit of the sandbox.

    Raises:
        VoidReward: the sandbox did not start it.
    """
    if "\0" in source:  # bash would leave it out, or take the script for a binary file
        return ScriptOutput("the code has a NUL character, which no script may have", "not run")
    with Boxed(language, source, isolation_of(sandbox), sandbox) as box:
        printed, ended = b"", ""
        end = time.monotonic() + sandbox.seconds
        while not ended:
            box.flush()
            ready, _, _ = select.select([box.output], [box.input] if box.pending else [], [], LOOK_S)
            if ready and not (part := os.read(box.output.fileno(), MOST_OUTPUT)):
                break
            printed += part if ready else b""
            if len(printed) > MOST_OUTPUT + len(BEGUN):
                ended = f"ended: it printed more than {MOST_OUTPUT:,} bytes"
            elif time.monotonic() > end:
                ended = f"timed out after {sandbox.seconds:g} s"
            elif box.has_too_many():
                ended = "ended: it started too many processes"
        if not printed.startswith(BEGUN):
            box.kill()
            raise box.never_began(ended or f"ended with {box.wait()}")
        if not ended and (code := box.wait()):
            ended = f"exit code {code}"
    text = printed.removeprefix(BEGUN)[:MOST_OUTPUT].decode(errors="replace")
    return ScriptOutput(text, ended)
