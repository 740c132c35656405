"""Scripts of a model in a sandbox: what they print comes back, and no more."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from streamrl.config.tasks import Sandbox
from streamrl.rollouts.void import VoidCause
from streamrl.tasks import sandbox_script
from streamrl.tasks.sandbox_script import MOST_OUTPUT, Language, run_script
from streamrl.tasks.void_reward import VoidReward
from tests.tasks.passing_time import passing_once
from tests.waiting import scaled

SANDBOX = Sandbox(seconds=scaled(10))


@pytest.mark.parametrize(
    ("language", "source", "text", "ended"),
    [
        ("python", "print(6 * 7)", "42\n", ""),
        ("bash", "x=4; echo $((x * 2)); cat", "8\n", ""),
        ("python", "pass", "", ""),
        ("bash", "echo oops >&2; exit 3", "oops\n", "exit code 3"),
        ("python", "print('[\"begun\", null]')", '["begun", null]\n', ""),
    ],
)
def test_a_script_returns_what_it_prints_and_how_it_ended(
    language: Language, source: str, text: str, ended: str
) -> None:
    output = run_script(source, language, SANDBOX)
    assert (output.text, output.ended) == (text, ended)


def test_an_exception_is_shown_to_its_author() -> None:
    output = run_script("print('so far')\n1 / 0", "python", SANDBOX)
    error = 'Traceback (most recent call last):\n  File "<string>", line 2, in <module>\n    1 / 0\n'
    assert output.text.startswith("so far\n" + error) and "ZeroDivisionError" in output.text
    assert output.ended == "exit code 1"


@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_a_script_may_start_processes_that_begin_afresh(start: str) -> None:
    source = f"""
import math, multiprocessing
if __name__ == "__main__":
    queue = multiprocessing.get_context("{start}").Queue()
    process = multiprocessing.get_context("{start}").Process(target=queue.put, args=(7,))
    process.start()
    print(queue.get())
    process.join()
    print(process.exitcode)
"""
    output = run_script(source, "python", Sandbox(seconds=scaled(30)))
    assert (output.text, output.ended) == ("7\n0\n", "")


def test_a_script_is_text_that_belongs_to_no_file() -> None:
    output = run_script(
        "# coding: latin-1\nimport sys\nprint('é', '__file__' in globals(), 'load' in globals(), sys.argv)",
        "python",
        SANDBOX,
    )
    assert (output.text, output.ended) == ("é False False ['-c']\n", "")


@pytest.mark.parametrize(("language", "last"), [("python", "print('done')"), ("bash", "echo done")])
def test_a_script_may_be_longer_than_an_argument_of_a_program(language: Language, last: str) -> None:
    output = run_script("# a comment\n" * 50_000 + last, language, SANDBOX)
    assert (output.text, output.ended) == ("done\n", "")


@pytest.mark.parametrize(("language", "source"), [("python", "print(1)\0"), ("bash", "echo 1\necho '\0'")])
def test_a_script_with_a_nul_character_is_told_so(language: Language, source: str) -> None:
    output = run_script(source, language, SANDBOX)
    assert "NUL character" in output.text and output.ended == "not run"


def test_a_script_with_half_a_character_is_answered_by_python() -> None:
    output = run_script("print('\ud83d')", "python", SANDBOX)
    assert "surrogates not allowed" in output.text and output.ended == "exit code 1"


def test_a_script_that_does_not_end_or_prints_without_end_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there"
    monkeypatch.setattr(sandbox_script, "time", passing_once(there, 3))  # over after one more look at the output
    script = f"print('begun', flush=True)\nopen({str(there)!r}, 'w').close()\nimport time; time.sleep(199)"
    hangs = run_script(script, "python", Sandbox(command=["env"], seconds=5))
    assert (hangs.text, hangs.ended) == ("begun\n", "timed out after 5 s") and there.exists()
    monkeypatch.undo()
    flood = run_script("while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; done", "bash", SANDBOX)
    assert len(flood.text) == MOST_OUTPUT and "printed more than" in flood.ended


def test_a_script_has_no_network_and_no_other_processes_and_little_memory() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = (
            f"import socket\ntry: socket.create_connection(('127.0.0.1', {port}), 1)\nexcept OSError: print('nobody')"
        )
        assert run_script(code, "python", SANDBOX).text == "nobody\n"
    assert run_script("import os\nprint(os.getppid())", "python", SANDBOX).text in ("0\n", "1\n")
    hungry = run_script("x = bytearray(2 << 30)", "python", SANDBOX)
    assert "MemoryError" in hungry.text and hungry.ended


def test_a_sandbox_that_does_not_start_is_void_and_no_answer_to_the_model() -> None:
    with pytest.raises(VoidReward, match="never started the python") as found:
        run_script("print(1)", "python", Sandbox(command=["false"]))
    assert found.value.cause == VoidCause.SANDBOX
