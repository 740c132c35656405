"""A command whose output cannot be written ends with one line instead of a traceback."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.waiting import scaled

RUN = "examples/small_reasoner.yaml"
COMMANDS = (
    *(("--help",), ("schema", "cluster"), ("explain",), ("explain", "E1004"), ("why-stuck", "--help")),
    ("launch", "--cluster", "cluster_configs/local.yaml", "--run", "examples/demo.yaml", "--help"),
)


def told(output: int, *arguments: str, unbuffered: str = "") -> tuple[int, str]:
    """Return the exit code of a command with some output, and what it has written to standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "streamrl.cli.main", *arguments],
        stdout=output,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        text=True,
        timeout=scaled(60),
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_behind_the_output_is_told(arguments: tuple[str, ...], unbuffered: str) -> None:
    with open("/dev/full", "wb") as full:
        code, error = told(full.fileno(), *arguments, unbuffered=unbuffered)
    assert (code, error) == (1, "error: cannot write the output: No space left on device\n")


def test_a_table_on_a_full_disk_is_told() -> None:
    with open("/dev/full", "wb") as full:
        code, error = told(full.fileno(), "plan", "--cluster", "cluster_configs/local.yaml", "--run", RUN)
    assert (code, error) == (1, "error: cannot write the output: No space left on device\n")


def test_an_output_that_nobody_reads_stays_quiet() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with open(writes, "wb") as pipe:
        assert told(pipe.fileno(), "schema", "cluster") == (1, "")
