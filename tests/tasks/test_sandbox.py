"""Code that a model wrote: off without a sandbox, limited, and not paid for leaving early."""

from __future__ import annotations

import itertools
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from streamrl.config.run import RunConfig
from streamrl.config.tasks import FileTask, Sandbox
from streamrl.errors import UserError
from streamrl.rollouts.void import VoidCause
from streamrl.tasks import sandbox
from streamrl.tasks.rewards import Scorer
from streamrl.tasks.sandbox import _bubblewrap_options, passes
from streamrl.tasks.void_reward import VoidReward
from tests.tasks.bare_sandbox import BARE, NOTHING
from tests.tasks.passing_time import passing_once
from tests.tasks.same_process import OnThread
from tests.waiting import scaled, wait_for

TESTS = "assert add(1, 2) == 3"
RIGHT = "Like this:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."


IMPORTED = {*("builtins", "contextlib", "ctypes", "json", "operator", "os", "resource", "signal", "sys", "types")}
"""Modules that a sandbox imports as it starts; `typing` alone would take as long as all of them."""


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file whose coming lets a sandbox's time pass, fast."""
    path = tmp_path / "there"
    monkeypatch.setattr(sandbox, "time", passing_once(path, 0.2))
    return path


def test_two_processes_for_each_reward_import_little() -> None:
    found = re.findall(r"^(?:from|import) (?!__future__)(\w+)", sandbox.DRIVER, re.MULTILINE)
    assert set(found) == IMPORTED


def task(**changes: object) -> FileTask:
    return FileTask.model_validate({"kind": "file", "name": "programs", "path": "x.jsonl", **changes})


def test_the_program_reward_is_off_without_a_sandbox() -> None:
    with pytest.raises(ValidationError, match=r"code that a model wrote: it is off until the task has a `sandbox`"):
        task(reward="python_tests")
    with pytest.raises(ValidationError, match="exact_match does not use a sandbox"):
        task(reward="exact_match", sandbox={"command": ["env"]})


def test_a_sandbox_that_is_not_there_is_told_before_anything_is_scored() -> None:
    with pytest.raises(UserError, match="there is no program 'no-such-sandbox'"):
        Scorer([task(reward="python_tests", sandbox={"command": ["no-such-sandbox"]})], 0)


def test_programs_are_scored_by_their_tests() -> None:
    scorer = Scorer([task(reward="python_tests", sandbox={"command": BARE, "seconds": 20})], 0)
    given = {"prompt": "Write add.", "answer": TESTS}
    assert scorer.score("programs", RIGHT, given) == 1.0
    assert scorer.score("programs", RIGHT.replace("+", "-"), given) == 0.0
    assert scorer.score("programs", "I do not know.", given) == 0.0


@pytest.mark.parametrize(
    "program",
    [
        "raise SystemExit",
        "def add(a, b): return a + b\nraise SystemExit(1)",
        "def add(a, b): return a + b\nimport os; os._exit(0)",
        "print('0' * 32)\nimport os; os._exit(0)",
    ],
)
def test_leaving_before_the_tests_is_not_passing_them(program: str) -> None:
    assert not passes(program, TESTS, NOTHING)


OWN_TESTS = """
import sys, unittest
def add(a, b): return a + b
class TestAdd(unittest.TestCase):
    def test_add(self): self.assertEqual(add(1, 2), 3)
def main(): return 0
if __name__ == "__main__":
"""


@pytest.mark.usefixtures("same_process")
@pytest.mark.parametrize("end", ["sys.exit()", "sys.exit(main())", "sys.exit(False)"])
def test_a_program_may_end_as_a_script_that_succeeds_does(end: str) -> None:
    assert passes(OWN_TESTS + f"    {end}", TESTS, NOTHING)
    assert not passes(OWN_TESTS + f"    {end}", "assert add(1, 2) == 4", NOTHING)


def test_a_program_may_end_with_its_own_tests_which_must_pass_too() -> None:
    program = OWN_TESTS + "    unittest.main()"
    assert passes(program, TESTS, NOTHING)
    assert not passes(program, "assert add(1, 2) == 4", NOTHING)
    assert not passes(program.replace("3)", "4)"), TESTS, NOTHING)


def test_a_program_that_does_not_end_is_ended_with_what_it_has_started(there: Path) -> None:
    began = time.monotonic()
    started = f"open({str(there)!r}, 'w').close(); import time; time.sleep(199)"
    assert not passes(
        f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {started!r}])",
        "",
        Sandbox(command=BARE, seconds=1),
    )
    assert there.exists() and time.monotonic() - began < scaled(60)


def test_a_program_has_none_of_this_process_variables_and_an_empty_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert passes("import os", "assert 'HF_TOKEN' not in os.environ\nassert os.listdir() == []", NOTHING)


def test_numpy_starts_one_thread_however_many_cores_there_are() -> None:
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    tests = "\n".join(f"assert variable({name!r}) == '1'" for name in names)
    assert passes("import os\ndef variable(name): return os.environ.get(name)", tests, NOTHING)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["env", "--chdir=/nowhere"], "env ended with 125 and never started the (program|tests): env: cannot change"),
        (["sh", "-c", "kill -9 $$"], "sh ended with -9 and never started the (program|tests): it said nothing"),
        (["sleep", "60"], "sleep ended with 1 and never started"),
        (["sh", "-c", "sleep 60"], "sh did not end within 0.3 s and never started"),
        (["no-such-sandbox"], "no-such-sandbox did not start: "),
    ],
)
def test_a_sandbox_that_never_starts_the_program_makes_the_reward_void(
    command: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "START_S", 0.3 if "0.3" in says else scaled(20))
    with pytest.raises(VoidReward, match=says) as raised:
        passes(RIGHT, TESTS, Sandbox(command=command, seconds=20))
    assert raised.value.cause is VoidCause.SANDBOX


def test_the_time_of_a_program_begins_when_both_processes_have_started(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("START_S", "MOST_LOOK_S"):
        monkeypatch.setattr(sandbox, limit, 1e9)
    looks = itertools.count()
    monkeypatch.setattr(sandbox, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 1e6 * (next(looks) > 0)))
    assert passes(RIGHT, TESTS, Sandbox(command=BARE, seconds=scaled(20)))


def test_time_in_which_the_worker_stands_still_is_not_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    stood_still_s, readable = 0.0, sandbox._readable
    monkeypatch.setattr(sandbox, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + stood_still_s))

    def stand_still(ready: Any, both: Any, seconds: float) -> list[sandbox.Boxed]:
        nonlocal stood_still_s
        found = readable(ready, both, seconds)
        if all(one.begun for one in both):
            stood_still_s = 1e6
        return found

    monkeypatch.setattr(sandbox, "_readable", stand_still)
    assert passes(RIGHT, TESTS, Sandbox(command=BARE, seconds=scaled(20)))


def test_a_verdict_that_has_come_counts_although_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now, (reading, writing) = 0.0, os.pipe()

    def answer() -> None:
        nonlocal now
        if not now:
            os.write(writing, sandbox.PASSED)
            now = 0.4

    def side(output: int, flush: Callable[[], None]) -> Any:
        limits = Sandbox(command=["env"], seconds=0.3)
        pending = bytearray()
        shared = {"begun": True, "closed": False, "has_too_many": lambda: False, "read": lambda: [os.read(output, 99)]}

        def flushed() -> None:
            pending.clear()
            flush()

        return SimpleNamespace(**shared, sandbox=limits, output=output, pending=pending, flush=flushed)

    monkeypatch.setattr(sandbox, "time", SimpleNamespace(monotonic=lambda: now))
    silent, _ = quiet = os.pipe()
    assert sandbox._verdict(side(silent, lambda: None), side(reading, answer))
    for file in (reading, writing, *quiet):
        os.close(file)


def test_a_program_waits_until_its_tests_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could delay the start of its judge, and so make the reward void."""
    monkeypatch.setattr(sandbox, "START_S", scaled(0.3))
    only_first = f'mkdir {tmp_path}/first 2>/dev/null || exec sleep 600; exec "$@"'
    started: list[sandbox.Boxed] = []
    begun: list[float] = []

    def monotonic() -> float:
        """Time begins when the program's process has, which would run it at once."""
        if not begun and any(one.begun for one in started):
            begun.append(time.monotonic())
        return time.monotonic() - begun[0] if begun else 0.0

    monkeypatch.setattr(sandbox, "time", SimpleNamespace(monotonic=monotonic))
    enter = sandbox.Boxed.__enter__

    def entered(self: sandbox.Boxed) -> sandbox.Boxed:
        wait_for(lambda: not started or (tmp_path / "first").exists(), 20)
        started.append(self)
        return enter(self)

    monkeypatch.setattr(sandbox.Boxed, "__enter__", entered)
    with pytest.raises(VoidReward, match="never started the tests"):
        passes(
            f"open({str(tmp_path / 'ran')!r}, 'w')", TESTS, Sandbox(command=["sh", "-c", only_first, "sh"], seconds=20)
        )
    assert [one.side for one in started] == ["program", "tests"] and not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "program",
    [
        "open({there!r}, 'w')\nwhile True: pass",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import os; os.ftruncate(1, 0); os._exit(0)",  # what was printed cannot be taken back
        "print('x' * (1 << 20)); raise SystemExit(1)",
        "this is no Python",
    ],
)
def test_failures_of_the_program_itself_are_not_void(program: str, there: Path) -> None:
    assert not passes(program.format(there=str(there)), TESTS, Sandbox(command=BARE, seconds=1))


@pytest.mark.usefixtures("same_process")
def test_processes_are_counted_once_the_program_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before that they are those of the sandbox's command: what it needs to start is not the program's doing."""
    monkeypatch.setattr(sandbox, "LOOK_S", 0.0)
    monkeypatch.setattr(OnThread, "has_too_many", lambda self: not self.begun)
    assert passes(RIGHT, TESTS, NOTHING)
    monkeypatch.setattr(OnThread, "has_too_many", lambda self: self.side == "program")
    assert not passes(RIGHT, TESTS, NOTHING)


def test_a_program_may_print_much_before_it_passes() -> None:
    assert passes("def add(a, b): return a + b\nprint('x\\n' * (1 << 20))", TESTS, NOTHING)


def test_tests_that_are_no_python_are_an_error_and_no_failure_of_the_program() -> None:
    with pytest.raises(SyntaxError):
        passes(RIGHT, "assert add(1, 2 ==", NOTHING)


@pytest.mark.usefixtures("same_process")
@pytest.mark.parametrize(
    ("tests", "ended"),
    [
        ("", "ended without an error"),
        ("['assert add(1, 2) == 4']", "ended without an error"),
        ('{"inputs": ["1 2"], "outputs": ["4"]}', "ended without an error"),
        ("def check(candidate):\n    assert candidate(1, 2) == 4", "ended without an error"),
        ("assert sum([1, 2]) == 3", "ended without an error"),  # Python's, not the program's
        ("assert 1 + 2 == 4", "AssertionError"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise SystemExit", "SystemExit"),
        ("__file__", "NameError"),  # no name that a program gives
    ],
)
def test_tests_that_never_use_the_program_judge_none(tests: str, ended: str) -> None:
    program = "def add(a, b): return a + b\ndef sum(values): return 3"
    with pytest.raises(VoidReward, match=f"the tests never used the program, .*{ended}") as raised:
        passes(program, tests, NOTHING)
    assert raised.value.cause is VoidCause.VERIFIER and not raised.value.retry


@pytest.mark.usefixtures("same_process")
@pytest.mark.parametrize(
    ("tests", "passed"),
    [
        ("add(1, 2)", True),
        ("def check(candidate):\n    assert candidate(1, 2) == 3\ncheck(add)", True),
        ("import sys\nsys.exit(add(1, 2) - 3)", True),
        ("import sys\nsys.exit(add(1, 2))", False),
        ("try:\n    subtract(1, 2)\nexcept NameError:\n    pass", True),
        ("assert subtract(1, 2) == -1", False),  # a program that has not what is asked for is wrong
    ],
)
def test_looking_for_one_name_is_using_the_program(tests: str, passed: bool) -> None:
    assert passes("def add(a, b): return a + b", tests, NOTHING) is passed


USES = """
import contextlib, decimal, sys
class Mine: pass
def add(a, b): return a + b
"""


@pytest.mark.usefixtures("same_process")
@pytest.mark.parametrize(
    ("tests", "kind"),
    [
        ("assert total(range(3)) == 3", "range"),
        ("assert total(xs=(x for x in [1, 2])) == 3", "generator"),
        ("assert total([decimal.Decimal(3)]) == 3", "Decimal"),
        ("total(Mine())", "Mine"),
        ("assert each(range, [1, 2]) == [[0], [0, 1]]", "range"),
        ("try:\n    total(Mine())\nexcept Exception as error:\n    raise AssertionError('failed') from error", "Mine"),
        ("try:\n    total(Mine())\nexcept Exception:\n    sys.exit(1)", "Mine"),
    ],
)
def test_tests_that_pass_what_no_program_can_be_given_judge_none(tests: str, kind: str) -> None:
    program = "def total(xs): return sum(xs)\ndef each(f, xs): return [list(f(x)) for x in xs]"
    with pytest.raises(VoidReward, match=f"the tests pass an object of the type {kind} to the program") as raised:
        passes(program, USES + tests, NOTHING)
    assert raised.value.cause is VoidCause.VERIFIER and not raised.value.retry


@pytest.mark.usefixtures("same_process")
def test_tests_that_expect_an_argument_to_be_refused_judge_the_rest() -> None:
    expects = USES + "with contextlib.suppress(TypeError): total(Mine())\nassert total([1, 2]) == 3"
    assert passes("def total(xs): return sum(xs)", expects, NOTHING)
    assert not passes("def total(xs): return 0", expects, NOTHING)


def test_a_sandbox_may_not_take_as_long_as_a_reward() -> None:
    programs = task(reward="python_tests", sandbox={"command": ["env"], "seconds": 20}).model_dump()
    with pytest.raises(ValidationError, match=r"sandbox.seconds \(20\) must be less than deadlines.reward_s \(20\)"):
        RunConfig.model_validate({"tasks": [programs]})
    RunConfig.model_validate({"tasks": [programs], "deadlines": {"reward_s": 21}})


def test_bubblewrap_shows_this_python_even_where_it_is_below_tmp() -> None:
    options = _bubblewrap_options()  # carried out in their order
    assert options.index("--tmpfs") < min(options.index(sys.prefix), options.index(sys.base_prefix))


LONG = Sandbox(command=BARE, seconds=scaled(60), memory_mb=4096)


@pytest.mark.usefixtures("same_process")
@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("def f(numbers):\n    return sum(numbers)", "assert f(list(range(50_000))) == 1249975000"),
        ("def f(n):\n    return list(range(n))", "assert len(f(50_000)) == 50_000"),
        ("def f(text):\n    return text[::-1]", "assert f('ab' * 1_500_000).startswith('ba')"),
    ],
)
def test_a_program_may_be_given_much_and_give_much_back(program: str, tests: str) -> None:
    assert passes(program, tests, LONG)
    assert not passes(program, tests.replace("==", "!=").replace("'ba'", "'ab'"), LONG)


def test_a_program_may_be_as_long_as_an_answer_can_be() -> None:
    program = "def add(a, b):\n    return a + b\n" + "# and on\n" * 200_000
    assert passes(program, "assert add(1, 2) == 3", LONG)


@pytest.mark.usefixtures("same_process")
def test_tests_that_pass_too_much_void_the_reward_whatever_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sandbox.MOST_BYTES, "tests", 2**20)
    with pytest.raises(VoidReward, match="the tests pass more than 1 MiB to the program at once") as found:
        passes("def f(text):\n    return 1", "assert f('a' * 2_000_000) == 1", LONG)
    assert found.value.cause == VoidCause.VERIFIER
    monkeypatch.setitem(sandbox.MOST_BYTES, "program", 2**20)
    assert not passes("def f():\n    return 'a' * 2_000_000", "assert len(f()) == 2_000_000", LONG)


@pytest.mark.usefixtures("same_process")
def test_a_program_is_compiled_as_a_file_of_its_own_would_be() -> None:
    missing = "def f(a: List[int]) -> int:\n    return sum(a)"
    assert not passes(missing, "assert f([1, 2]) == 3", NOTHING)
    assert passes(f"from typing import List\n{missing}", "assert f([1, 2]) == 3", NOTHING)
    assert passes(f"from __future__ import annotations\n{missing}", "assert f([1, 2]) == 3", NOTHING)
    shared = "seen: ClassVar[list] = []\n    x: int = 0"
    point = f"from dataclasses import dataclass\nfrom typing import ClassVar\n@dataclass\nclass P:\n    {shared}"
    assert passes(point, "assert P(3).x == 3", NOTHING)
