"""The tool that changes the code and runs its tests tells mutants that were noticed from those that were not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.loaded_tool import loaded_tool
from tests.waiting import scaled

ROOT = Path(__file__).parents[1]
mutants = loaded_tool("mutants")
mutant_run, mutant_summary = sys.modules["mutant_run"], sys.modules["mutant_summary"]

SOURCE = """
import functools

STEP = 1

class Counter:
    def __init__(self, start=0):
        self.at = start

    @functools.wraps(len)
    def up(self):
        while self.at < 0:
            self.at += 5
        self.at += STEP
        return self.at
"""
USER = "from counted.counter import STEP, Counter\n"
TEST = """
from counted.user import STEP, Counter

def test_up():
    assert Counter().up() == 1 and Counter(-3).up() == 3

def test_step():
    assert STEP < 3
"""
CHANGES = (
    ("self.at += STEP", "self.at -= STEP", "killed"),
    ("return self.at", "return  self.at", "survived"),
    ("self.at < 0", "self.at <= 0", "killed"),
    ("self.at += 5", "pass", "time"),
    ("start=0", "start=1", "killed"),
    ("STEP = 1", "STEP = 3", "killed"),
    ("STEP = 1", "STEP = 1 + 0", "survived"),
    ("import functools", "import functools, no_such_module", "broken"),
)
DRIVER = """
import json, sys
from pathlib import Path
import mutant_run
mutant_run.CPU_LEAST_S = 1
changed = json.loads(sys.argv[2])
job = mutant_run.Job(Path("counted/counter.py"), ["test_counter.py"], changed, Path(sys.argv[1]))
print(json.dumps([outcome.verdict for outcome in mutant_run.run_sources(job)]))
"""


def run(folder: Path, sources: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs the sources in a process of its own, as the tool forks."""
    command = [sys.executable, "-c", DRIVER, str(folder), json.dumps(sources)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tools")}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=scaled(120), check=False)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "counted").mkdir()
    for name, text in (("counted/counter.py", SOURCE), ("counted/user.py", USER), ("test_counter.py", TEST)):
        (tmp_path / name).write_text(text)
    return tmp_path


def test_each_change_is_judged_by_the_tests_also_constants_that_were_copied_and_loops_without_an_end(
    project: Path,
) -> None:
    for was, _, _ in CHANGES:
        assert SOURCE.count(was) == 1 or was == "return self.at"
    done = run(project, [SOURCE.replace(was, becomes) for was, becomes, _ in CHANGES])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [verdict for _, _, verdict in CHANGES]


def test_nothing_is_judged_by_tests_that_fail_anyway(project: Path) -> None:
    (project / "test_counter.py").write_text(TEST.replace("== 3", "== 4"))
    done = run(project, [SOURCE])
    assert done.returncode == 1 and "counter.py: its tests do not pass without any change" in done.stderr


def test_only_a_process_that_uses_no_cpu_is_given_up() -> None:
    patience = mutant_run.Patience(10.0)
    assert not patience.is_over(0, 100.0) and not patience.is_over(0, 110.0)
    assert not patience.is_over(1, 111.0)  # a busy machine let it work once
    assert not patience.is_over(1, 121.0) and patience.is_over(1, 121.1)


def test_a_process_that_waits_for_ever_is_ended() -> None:
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        signal.pause()
    assert os.WTERMSIG(mutant_run._wait(pid, 0.1)) == signal.SIGKILL


def test_annotations_docstrings_and_frozen_have_no_meaning_and_defaults_have() -> None:
    source = (
        "@dataclass(frozen=True)\nclass A:\n    a: int = 3\n\n"
        'def f(a: int | None = 1) -> int:\n    """One."""\n    b: int = 2\n    return a + b  # sum\n'
    )
    for was, becomes in (
        ("int | None", "int & None"),
        ("One", "Two"),
        ("b: int", "b: str"),
        ("# sum", ""),
        ("->", "->"),
    ):
        assert mutants.meaning(source.replace(was, becomes)) == mutants.meaning(source)
    for was, becomes in (("= 1", "= 2"), ("a + b", "a - b"), ("= 2", "= 3"), ("= 3", "= 4")):
        assert mutants.meaning(source.replace(was, becomes)) != mutants.meaning(source)
    assert mutants.meaning("def f(:\n") is None


def test_a_change_is_shown_by_its_line_before_and_after() -> None:
    before = "first_name = 1\nb = (\n    2\n    + 3\n)\nc = 4\n"
    assert mutants.difference(before, before.replace("+ 3", "- 3")) == (4, "2 + 3", "2 - 3")
    assert mutants.difference(before, before.replace("= 1", "= 2")) == (1, "first_name = 1", "first_name = 2")
    assert mutants.difference(before, before.replace("\n    + 3", " - 3")) == (3, "b = ( 2 + 3", "b = ( 2 - 3")


def test_only_statements_that_change_something_are_left_out() -> None:
    for statement in ("self.a = 1", "a[0] = 1", "a += 1", "f(a)", "self.a: int = 1", "a, self.b = 1, 2"):
        assert mutants._has_effect(statement)
    for statement in ("a = 1", "return f(a)", "'text'", "a: int", "import a", "x if"):
        assert not mutants._has_effect(statement)


def score(killed: int, *survivors: tuple[str, str, str], possible: int = 10) -> object:
    found = [{"line": 1, "operator": "O", "was": was, "becomes": new, "why": why} for was, new, why in survivors]
    return mutant_summary.Score(possible, 10, killed, {"killed": killed}, 1.0, found)


def test_low_scores_unexplained_survivors_and_explanations_without_one_are_problems() -> None:
    kept = {"m": {("a", "b"): "equal"}}
    assert mutant_summary.problems({"m": score(9, ("a", "b", "equal"))}, kept) == []
    assert mutant_summary.problems({"m": score(8, ("a", "b", "x"))}, kept) == [
        "m: 80.0% of the mutants are killed, expected 90%"
    ]
    same = ("a", "b", "Equivalent: it is.")
    assert mutant_summary.problems({"m": score(8, same, same)}, kept) == []  # 8 of 8
    assert mutant_summary.problems({"m": score(9, ("a", "c", ""))}, kept) == [
        "m: 1 survivors without an explanation",
        "m: no survivor becomes 'b'",
    ]
    assert mutant_summary.problems({"m": score(10, possible=11)}, kept) == []  # a sample may leave it out


def test_the_summary_lists_scores_and_survivors() -> None:
    text = mutant_summary.table(
        {"m": score(9, ("a < b", "a <= b", "Equivalent: as b is.")), "n": score(9, ("c", "d", ""))}, "Sampled."
    )
    assert "18 of 20 mutants killed (90.0%); 94.7% of those that are not" in text and "Sampled." in text
    assert "| `m` | 10 | 10 | 9 | 90.0% | 1 | 100.0% | 1 of 1 |" in text
    assert "| `n` | 10 | 10 | 9 | 90.0% | 0 | 90.0% | 0 of 1 |" in text
    assert "- `m`:1 (O): `a < b` -> `a <= b`. Equivalent: as b is.\n- `n`:1 (O): `c` -> `d`. Open." in text


def test_every_module_and_test_exists_and_explanations_are_of_lines_that_are_there() -> None:
    for path, tests in mutants.TESTS.items():
        assert (ROOT / path).is_file()
        for test in tests:
            file, _, name = test.removeprefix("--deselect=").partition("::")
            assert f"def {name.partition('[')[0]}" in (ROOT / file).read_text(encoding="utf-8"), test
    for path, changes in mutant_summary.explanations().items():
        text = " ".join((ROOT / path).read_text(encoding="utf-8").split())
        assert path in mutants.TESTS
        assert [was for was, _ in changes if was not in text] == [] and all(changes.values())
