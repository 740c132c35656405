"""Trials of vLLM's settings, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.config.cluster import GenerationPool
from streamrl.config.run import RunConfig
from streamrl.generation.instance import settings_trial
from streamrl.generation.instance.settings_trial import error_of
from streamrl.machine.engine_settings import CANDIDATES
from streamrl.runtime.processes import is_alive
from tests.waiting import wait_for

HANGS = """
import os, pathlib, signal

pathlib.Path("new").write_text(str(os.getpid()))
os.rename("new", "pid")
signal.pause()
"""
STARTS = """
from streamrl.config.cluster import GenerationPool
from streamrl.config.run import RunConfig
from streamrl.generation.instance import settings_trial

settings_trial.__name__ = "hangs"
settings_trial._try(settings_trial.CANDIDATES[0], GenerationPool(), RunConfig(), "here")
"""


def test_a_trial_ends_with_the_command_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    paths = [str(tmp_path), str(Path(settings_trial.__file__).parents[3])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = subprocess.Popen([sys.executable, "-c", STARTS], cwd=tmp_path, env=env)
    wait_for((tmp_path / "pid").exists, 60)
    command.kill()
    command.wait()
    wait_for(lambda: not is_alive(int((tmp_path / "pid").read_text())), 30)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("print('loading'); print('{\"start_s\": 2.0, \"step_s\": [[1, 0.5]]}')", ""),
        ("import sys; input(); sys.exit('ValueError: no')", "ValueError: no"),
        ("import signal; signal.pause()", "no answer within 0 s"),
    ],
)
def test_what_a_trial_says_is_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, error: str
) -> None:
    (tmp_path / "trial.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(settings_trial, "__name__", "trial")
    if error.startswith("no answer"):
        monkeypatch.setattr(settings_trial, "TRIAL_LIMIT_S", 0.01)
    found = settings_trial._try(CANDIDATES[0], GenerationPool(), RunConfig(), "here")
    assert found.error == error
    if not error:
        assert (found.start_s, found.step_s) == (2.0, ((1, 0.5),))


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("ValueError: too many values to unpack (expected 3)", "ValueError: too many values to unpack (expected 3)"),
        ("AssertionError", "AssertionError"),
        ("KeyError: 'layers[0] (linear)'", "KeyError: 'layers[0] (linear)'"),
    ],
)
def test_the_first_error_of_an_engine_is_taken_whole(line: str, found: str) -> None:
    logged = "(EngineCore pid=24909) ERROR 11-30 14:16:02 [core.py:1512] "
    after = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above)"
    assert error_of(f"{logged}Traceback (most recent call last):\n{logged}{line}\n{after}\n") == found
    assert error_of("one\nlast\n") == "last" and error_of("") == "it ended without any output"
