"""The end of a process is seen everywhere, also where the kernel refuses to report it (`pidfd_open`)."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from streamrl.launcher.trainer_ranks import run_ranks
from streamrl.runtime import processes, warden
from tests.signals import own_handlers
from tests.waiting import scaled

UNTIL_TOLD = "import sys; print('here', flush=True); sys.stdin.read()"


def refusing(number: int) -> object:
    def refuse(pid: int, flags: int = 0) -> int:
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.fixture(params=[None, errno.ENOSYS, errno.EPERM, errno.EMFILE], ids=["reported", "ENOSYS", "EPERM", "EMFILE"])
def _kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that reports ends, and some that refuse to."""
    monkeypatch.setattr(warden, "SELDOM_S", 0.01)
    if request.param is not None:
        monkeypatch.setattr(os, "pidfd_open", refusing(request.param))


@pytest.fixture
def _own_signals() -> Iterator[None]:
    """Keeps pytest's handlers of signals from what `run_ranks` sets."""
    with own_handlers(signal.SIGTERM, signal.SIGINT):
        yield


def child(code: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-S", "-c", code]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@pytest.mark.usefixtures("_kernel")
def test_a_child_that_has_ended_is_seen_and_left_to_its_parent() -> None:
    with child("raise SystemExit(7)") as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert warden.wait_for_an_end([os.getpid(), ended.pid]) == ended.pid
        assert ended.wait() == 7
    assert warden.wait_for_an_end([os.getpid(), ended.pid]) == ended.pid


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("name", ["python", "a) Z 1", "b) X"])
def test_a_living_process_is_waited_for_until_the_limit_whatever_its_name(name: str) -> None:
    with child(f"open('/proc/self/comm', 'w').write({name!r}); {UNTIL_TOLD}") as living:
        assert living.stdout is not None and living.stdout.readline() == b"here\n"
        assert warden.wait_for_an_end([living.pid], 0.0) is None
        living.kill()
        assert warden.wait_for_an_end([living.pid], scaled(20)) == living.pid


def test_a_process_of_another_user_is_alive_where_there_is_no_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "pidfd_open", refusing(errno.ENOSYS))
    monkeypatch.setattr(os, "kill", refuse)
    assert warden.wait_for_an_end([2**22 + 1], 0.0) is None  # no such process: nor has it a file


@pytest.mark.usefixtures("_kernel", "_own_signals")
@pytest.mark.parametrize("code", [0, 3])
def test_ranks_end_as_the_first_that_fails(code: int) -> None:
    fails_if_first = f"import os, sys; sys.exit({code} if os.environ['RANK'] == '0' else 0)"
    assert run_ranks([sys.executable, "-S", "-c", fails_if_first], [{"RANK": "0"}, {"RANK": "1"}]) == code


@pytest.mark.usefixtures("_kernel")
def test_a_warden_ends_the_watched_process_gently_once_a_starter_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    with child("pass") as starter:
        starter.communicate()
    sent: list[tuple[int, int]] = []
    kill = os.kill
    monkeypatch.setattr(os, "kill", lambda pid, number: (number and sent.append((pid, number)), kill(pid, number)))
    with child(UNTIL_TOLD) as watched:
        assert watched.stdout is not None and watched.stdout.readline() == b"here\n"
        warden.watch(watched.pid, [os.getpid(), starter.pid])
        assert watched.wait() == -signal.SIGTERM
    assert sent == [(watched.pid, signal.SIGTERM), (watched.pid, signal.SIGCONT)]


def test_a_warden_does_not_look_like_a_rank_of_the_job_that_a_launch_is_part_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks are found as children of the rank launcher that have a RANK, and its warden is another child."""
    given: list[dict[str, str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: given.append(options["env"]))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/of/python")
    processes.start_warden([os.getppid()])
    (environment,) = given
    assert "RANK" not in environment and environment["LD_LIBRARY_PATH"] == "/of/python"
