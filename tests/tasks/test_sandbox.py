"""Code that a model wrote: off without a sandbox, limited, and not paid for leaving early."""

from __future__ import annotations

import time

import pytest
from pydantic import ValidationError

from streamrl.config.tasks import FileTask, Sandbox
from streamrl.errors import UserError
from streamrl.tasks.rewards import Scorer
from streamrl.tasks.sandbox import code_of, passes
from tests.waiting import scaled

NOTHING = Sandbox(command=["env"], seconds=20)
"""Isolates nothing: these programs are the tests' own."""
TESTS = "assert add(1, 2) == 3"
RIGHT = "Like this:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."


def task(**changes: object) -> FileTask:
    return FileTask.model_validate({"kind": "file", "name": "programs", "path": "x.jsonl", **changes})


def test_without_a_sandbox_it_is_off() -> None:
    with pytest.raises(ValidationError, match=r"code that a model wrote: it is off until `sandbox.command`"):
        task(reward="python_tests")
    with pytest.raises(ValidationError, match="exact_match does not use a sandbox"):
        task(reward="exact_match", sandbox={"command": ["env"]})


def test_a_sandbox_that_is_not_there_is_told_before_anything_is_scored() -> None:
    with pytest.raises(UserError, match="there is no program 'no-such-sandbox'"):
        Scorer([task(reward="python_tests", sandbox={"command": ["no-such-sandbox"]})], 0)


def test_programs_are_scored_by_their_tests() -> None:
    scorer = Scorer([task(reward="python_tests", sandbox={"command": ["env"], "seconds": 20})], 0)
    given = {"prompt": "Write add.", "answer": TESTS}
    assert scorer.score("programs", RIGHT, given) == 1.0
    assert scorer.score("programs", RIGHT.replace("+", "-"), given) == 0.0
    assert scorer.score("programs", "I do not know.", given) == 0.0


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "print('0' * 32)\nimport os; os._exit(0)",
    ],
)
def test_leaving_before_the_tests_is_not_passing_them(program: str) -> None:
    assert not passes(program, TESTS, NOTHING)


def test_a_program_that_does_not_end_is_ended_with_what_it_has_started() -> None:
    began = time.monotonic()
    assert not passes(
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(99)'])",
        "",
        Sandbox(command=["env"], seconds=1),
    )
    assert time.monotonic() - began < scaled(10)


def test_memory_files_and_environment_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert not passes("x = bytearray(1 << 30)", "", Sandbox(command=["env"], seconds=20, memory_mb=512))
    assert not passes("open('large', 'wb').write(bytes(1 << 26))", "", NOTHING)
    assert passes("import os", "assert 'HF_TOKEN' not in os.environ\nassert os.listdir() == []", NOTHING)


def test_the_last_block_is_the_program() -> None:
    assert code_of("```\nx = 1\n```\nbetter:\n```py\nx = 2\n```") == "x = 2\n"
    assert code_of("x = 3") == "x = 3"
