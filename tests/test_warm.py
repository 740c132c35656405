"""A process that a template begins is one that the caller has started: its child, with its own everything."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import execnet
import psutil
import pytest

from tests import warm
from tests.marks import MARK
from tests.waiting import scaled

LOOK = """
import json, os, sys, tempfile
import numpy
if __name__ == "__main__":
    print(json.dumps({"argv": sys.argv[1:], "cwd": os.getcwd(), "parent": os.getppid(), "session": os.getsid(0),
        "pid": os.getpid(), "variable": os.environ.get("ONLY_HERE"), "inherited": "PATH" in os.environ,
        "path": sys.path[:2], "threads": len(os.listdir("/proc/self/task")), "vllm": "vllm" in sys.modules,
        "files": len(os.listdir("/proc/self/fd")), "random": numpy.random.random(),
        "temporary": tempfile.gettempdir()}))
    print("to errors", file=sys.stderr)
    sys.exit(int(sys.argv[1]))
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are handed over with a Linux call")


@pytest.fixture
def look(tmp_path: Path) -> list[str]:
    """A command that tells of its own process, with two arguments."""
    package = tmp_path / "streamrl_look"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "tell.py").write_text(LOOK)
    return [sys.executable, "-m", "streamrl_look.tell", "7", "a b"]


def told(command: list[str], folder: Path, **options: object) -> dict[str, object]:
    environment = os.environ | {"ONLY_HERE": "yes", "PYTHONPATH": str(folder), "TMPDIR": str(folder)}
    pipe = subprocess.PIPE
    process = warm.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=pipe,
        stderr=pipe,
        text=True,
        **options,  # type: ignore[call-overload]
    )
    output, errors = process.communicate(timeout=scaled(120))
    assert process.returncode == 7 and errors == "to errors\n", errors
    return dict(json.loads(output)) | {"id": process.pid}


def test_a_warm_process_has_the_arguments_folder_variables_and_parent_it_was_given(
    look: list[str], tmp_path: Path
) -> None:
    first, second = told(look, tmp_path), told(look, tmp_path, start_new_session=True)
    for one in (first, second):
        assert one["argv"] == ["7", "a b"] and one["cwd"] == str(tmp_path) and one["path"] == [str(tmp_path)] * 2
        assert one["parent"] == os.getpid() and one["pid"] == one["id"]
        assert one["variable"] == "yes" and one["inherited"] and one["temporary"] == str(tmp_path)
        assert one["vllm"] and one["threads"] == 1  # it begins with everything imported, and may fork
        assert one["files"] == 4  # three, and the folder that is listed
    assert second["session"] == second["pid"] != first["pid"]
    assert first["random"] != second["random"]


def test_a_warm_process_shows_its_command_line_and_gets_its_signals(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "streamrl.launcher.entry_point",
        "service",
        "--run-dir",
        str(tmp_path),
        "--site",
        "here",
    ]
    process = warm.Popen(command, stderr=subprocess.PIPE, text=True)
    _, errors = process.communicate(timeout=scaled(60))
    assert process.returncode == 1 and "LAST WORDS" in errors  # there is no run in that folder
    waits = warm.Popen([sys.executable, "-m", "streamrl.cli.main", "--help"], stdout=subprocess.PIPE, text=True)
    words = psutil.Process(waits.pid).cmdline()
    assert [word for word in words if word] == [sys.executable, "-m", "streamrl.cli.main", "--help"]
    assert psutil.Process(waits.pid).environ()[MARK] == os.environ[MARK]  # by which it is known whose it is
    assert "Usage" in waits.communicate(timeout=scaled(60))[0] and waits.returncode == 0
    stopped = warm.Popen(["sleep", "60"])  # no template can begin that
    stopped.send_signal(signal.SIGKILL)
    assert stopped.wait(60) == -signal.SIGKILL


def test_streams_of_a_warm_process_seek_as_its_own_files_do_whatever_the_templates_were(tmp_path: Path) -> None:
    program = """
import os, sys
from tests import warm
os.dup2({}, 1)
warm._open_streams()
sys.stdout.reconfigure(errors="replace")
print("seeks" if sys.stdout.seekable() else "does not seek", sys.stderr.line_buffering)
"""
    for number, seekable in ((2, False), (1, True)):
        with (tmp_path / str(number)).open("w+") as file:
            ended = subprocess.run(
                [sys.executable, "-c", program.format(number)], stdout=file, stderr=subprocess.PIPE, text=True
            )
            file.seek(0)
            assert ended.returncode == 0, ended.stderr
            want = "seeks True" if seekable else "does not seek True"
            assert (file.read() if seekable else ended.stderr).strip() == want


def test_who_starts_others_does_so_through_a_template_of_its_own_that_ends_with_it(
    look: list[str], tmp_path: Path
) -> None:
    warm.template()
    before = set(psutil.Process().children(recursive=True))
    command = [sys.executable, "-m", "streamrl.launcher.trainer_ranks", "--ranks=1", "--", *look[:3], "0", "rank"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    pipe = subprocess.PIPE
    process = warm.Popen(command, cwd=tmp_path, env=environment, stdout=pipe, stderr=pipe, text=True)
    output, errors = process.communicate(timeout=scaled(120))
    assert process.returncode == 0, errors
    rank = json.loads(output)
    assert rank["argv"] == ["0", "rank"] and rank["parent"] == process.pid
    assert rank["vllm"] and rank["threads"] == 1
    assert set(psutil.Process().children(recursive=True)) <= before


def test_subprocess_starts_the_packages_processes_warm_while_that_is_on_and_there_is_a_template(
    look: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_warm() -> bool:
        environment = os.environ | {"PYTHONPATH": str(tmp_path)}
        done = subprocess.run(look, env=environment, capture_output=True, text=True, timeout=scaled(120))
        return bool(json.loads(done.stdout)["vllm"])

    monkeypatch.setattr(warm, "_own", [warm.template()])
    with warm.subprocess_warm():
        assert is_warm()
    assert not is_warm()
    monkeypatch.setattr(warm, "_own", [])
    with warm.subprocess_warm():
        assert not is_warm()


TELLS = """
import os, sys
from tests import warm
help = warm.run([sys.executable, "-m", "streamrl.cli.main", "--help"], 100)
has = "torch" in sys.modules, "vllm" in sys.modules
channel.send((os.getppid(), *has, help.stdout, bool(warm._own)))
"""


@pytest.mark.parametrize("vllm", [False, True])
def test_a_worker_of_xdist_begins_with_the_large_libraries_and_is_a_child(
    vllm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert execnet.gateway_io.popen_bootstrapline == warm.WORKER
    if vllm:  # whose template takes long to start
        found = warm.template()
        monkeypatch.setattr(warm, "_start_template", lambda vllm: found)
        monkeypatch.setattr(warm.Template, "close", lambda self: None)
    with warm.forked_workers(vllm):
        gateway = execnet.makegateway("popen")
    try:  # it goes on without what it was forked from
        parent, has_torch, has_vllm, output, has_own = gateway.remote_exec(TELLS).receive(scaled(120))
    finally:
        gateway.exit()
        execnet.default_group.terminate(scaled(10))
    assert parent == os.getpid() and has_torch and has_vllm == has_own == vllm and "Usage" in output


@pytest.mark.parametrize(
    ("change", "can"),
    [
        ({}, True),
        ({"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}, True),
        ({"OMP_NUM_THREADS": "2"}, False),
        ({"PYTHONHASHSEED": "1"}, False),
    ],
)
def test_settings_read_once_must_equal_the_templates(change: dict[str, str], can: bool) -> None:
    values = {
        "args": [sys.executable, "-m", "streamrl.launcher.entry_point"],
        "shell": False,
        "pass_fds": (),
        "executable": None,
        "env": change,
        "cwd": None,
        "start_new_session": True,
        "preexec_fn": None,
    }
    assert (warm._request(values) is not None) == can
    assert warm._request(values | {"pass_fds": (5,)}) is None
    assert warm._request(values | {"args": ["ls", "-m", "streamrl.launcher.entry_point"]}) is None
    assert (warm._request(values | {"args": [sys.executable, "-u", "-c", warm.WORKER]}) is not None) == can
    assert warm._request(values | {"args": [sys.executable, "-u", "-c", "import sys"]}) is None
