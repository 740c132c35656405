"""How many files a process may have open, each connection being one."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.machine.open_files import MOST_OPEN_FILES, most_open_files, raise_open_files
from tests.waiting import scaled

HAS = """
import asyncio, resource
from streamrl.launcher import entry_point

async def tell():
    print(resource.getrlimit(resource.RLIMIT_NOFILE), flush=True)

entry_point._role = lambda args: tell()
entry_point.main()
"""


@pytest.mark.parametrize(
    ("soft", "hard", "most"),
    [
        (1024, 524_288, MOST_OPEN_FILES),
        (1024, 4096, 4096),
        (1024, 1024, 1024),
        (100_000, 524_288, 100_000),
        (1024, resource.RLIM_INFINITY, MOST_OPEN_FILES),
    ],
)
def test_a_process_asks_for_as_many_files_as_it_may_have_but_not_for_millions(
    soft: int, hard: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: asked.append(limits))
    assert most_open_files() == most
    raise_open_files()
    assert asked == ([(most, hard)] if most > soft else [])


def test_each_process_of_a_run_asks_for_them_whatever_its_shell_gives(tmp_path: Path) -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 512))

    command = [sys.executable, "-c", HAS, "service", "--run-dir", str(tmp_path), "--site", "here"]
    done = subprocess.run(command, preexec_fn=few, capture_output=True, text=True, timeout=scaled(60), check=False)
    assert done.stdout == "(512, 512)\n", done.stderr
