"""The two sides of a sandbox on threads of this process: for tests of what crosses between them, and of the verdict.

The sides, the lines between them and what judges them are those of a run; only nothing is isolated or limited, and no
interpreter is started, which is all the time that such a test would take.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from streamrl.tasks import sandbox
from streamrl.tasks.sandbox_driver import Channel, Program, Tests


class OnThread(sandbox.Boxed):
    """One side on a thread, with pipes in the place of its input and output."""

    def __enter__(self) -> OnThread:
        (read, given), (told, write) = os.pipe(), os.pipe()
        for pipe in (given, told):
            os.set_blocking(pipe, False)
        self.process: Any = SimpleNamespace(stdin=open(given, "wb", 0), stdout=open(told, "rb", 0))
        self._thread = threading.Thread(target=self._work, args=(read, write), daemon=True)
        self.flush()
        self._thread.start()
        return self

    def _work(self, read: int, write: int) -> None:
        """Do as `sandbox_driver.main` does."""
        channel = Channel.__new__(Channel)
        with (
            contextlib.suppress(EOFError, BrokenPipeError),  # it is ended
            open(read, "rb") as channel._read,
            open(write, "wb") as channel._write,
        ):
            source = json.loads(channel._read.readline())["source"]
            channel.send("begun")
            (Program(channel) if self.side == "program" else Tests(channel)).run(source)

    def has_too_many(self) -> bool:
        """Nothing counts the processes of this one."""
        return False

    def __exit__(self, *_: Any) -> None:
        self.input.close()
        self.output.close()
        self._thread.join()
        self._close()


@pytest.fixture
def same_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let `passes` run both sides in this process."""
    main = sys.modules["__main__"]
    monkeypatch.setattr(sandbox, "Boxed", OnThread)
    yield
    sys.modules["__main__"] = main  # a program's side puts its own there
