"""Tests of model-written code in a sandbox.

The program runs in one process and its tests in another (`sandbox_driver.py`). This module starts both, passes on what
they ask and answer, and takes the verdict from the tests alone: nothing that the program says, prints or changes in
its own process counts as success, and no process with its code ever holds an expected answer.

    a sandbox never starts its driver          -> the reward is void: nothing was learned about the code
    the driver has begun, and the code fails,
    loops, exits or uses too much memory       -> it does not pass: that is the policy's doing
    the tests end, and have never used a name
    of the program, or fail because of what
    they pass to it                            -> the reward is void: they would say the same of every program

Isolation, the first that is there (`isolation_of`):

    sandbox.command        what the run file names (bubblewrap, nsjail, a container): it isolates
    bubblewrap             no network, no other processes, no files but /usr, Python's own and an empty folder
    namespaces             no network and no other processes; files that the program's user can read stay readable, but
                           for the run's keys and sockets (`HIDDEN`)

Limits for each process: memory, processes, open files, file size, CPU time. The kernel does not limit root's processes:
where root runs this, each sandbox is a user of its own (`may_change_user`). Everything ends with the reward's worker,
also when that is killed: the kernel kills the first process of each sandbox, and with it its namespace.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import resource
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from streamrl.config.tasks import Sandbox
from streamrl.rollouts.void import VoidCause
from streamrl.runtime.process_plan import HIDDEN
from streamrl.runtime.processes import end_with_parent
from streamrl.scratch_folders import ScratchFolder
from streamrl.tasks import sandbox_driver, sandbox_values
from streamrl.tasks.fenced_code import code_of
from streamrl.tasks.void_reward import VoidReward


def _driver() -> str:
    """Return the driver's program with what it imports from this package, which cannot be seen in a sandbox."""
    values = Path(sandbox_values.__file__).read_text(encoding="utf-8")
    driver = Path(sandbox_driver.__file__).read_text(encoding="utf-8")
    left_out = ("from __future__ ", f"from {sandbox_values.__name__} ")
    return values + "".join(line for line in driver.splitlines(keepends=True) if not line.startswith(left_out))


DRIVER = _driver()
MOST_FILE_BYTES = 16 * 2**20
MOST_BYTES = {"tests": 2**24, "program": 2**26}
"""Most bytes of one question, and of one answer, which repeats the arguments; an integer has about 20."""
MOST_STDERR = 300
"""Most characters of a sandbox's last words."""
MOST_PROCESSES = 32
"""Processes and threads that one program may have."""
FIRST_USER, USERS_OF_WORKER = 0x7000_0000, 64
"""Numbers of users that root gives to sandboxes, which systemd, containers and directories leave free; a worker takes
so many in turn."""
PROBE_S = 10.0
"""Seconds in which a sandbox of another user must have begun to be used."""
START_S = 10.0
"""Seconds in which both sides must have begun; the program's own time starts then."""
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Variables of libraries that start a thread for each core as they are imported: the stacks of 32 exceed the limits."""
LOOK_S = 0.1
"""Seconds between two counts of a program's processes."""
MOST_LOOK_S = 0.5
"""Most seconds of one look at both sides that count; a longer one is a standstill of this worker or of the machine."""


@dataclass(frozen=True)
class Isolation:
    """How the processes of one sandbox are isolated."""

    command: tuple[str, ...]
    """Command to which the driver's is appended; (): the driver isolates itself in namespaces."""
    weaker: str = ""
    """What it does not isolate, and the remedy; '': streamrl knows of nothing."""


def isolation_of(sandbox: Sandbox) -> Isolation:
    """Choose how programs are isolated here."""
    if sandbox.command:
        return Isolation(tuple(sandbox.command))
    if (bubblewrap := shutil.which("bwrap")) is not None:
        return Isolation((bubblewrap, *_bubblewrap_options()))
    readers = "everybody" if may_change_user(()) else "this user"
    return Isolation(
        (),
        "there is no bubblewrap (bwrap) here: programs have no network and see no other process, but they can read "
        f"every file that {readers} can; install bubblewrap, or name another sandbox in `sandbox.command`",
    )


_numbers = itertools.count()
"""Numbers of this worker's sandboxes."""


@functools.cache
def may_change_user(command: tuple[str, ...]) -> bool:
    """Whether this process is root, and a user without any rights can run this Python in such a sandbox.

    Args:
        command: the isolation's.
    """
    if os.geteuid():
        return False
    given = _first_words("python", "import sys; print(sys.base_prefix)", command)
    with ScratchFolder() as folder:
        try:
            os.chown(folder, FIRST_USER, FIRST_USER)
            tried = subprocess.run(
                [*command, sys.executable, "-I", "-c", DRIVER],
                input=given,
                cwd=folder,
                user=FIRST_USER,
                group=FIRST_USER,
                extra_groups=(),
                capture_output=True,
                check=False,
                timeout=PROBE_S,
            )
        except (OSError, subprocess.SubprocessError):  # root without the right to be others, among other things
            return False
    # Python that cannot reach its own library takes another one's, if it finds any
    return tried.returncode == 0 and tried.stdout == BEGUN + f"{sys.base_prefix}\n".encode()


def _first_words(side: str, source: str, command: tuple[str, ...]) -> bytes:
    """Return the line that a driver reads first."""
    parent = None if command else os.getpid()
    hidden = json.loads(os.environ.get(HIDDEN, "[]"))
    first = {"side": side, "source": source, "processes": MOST_PROCESSES, "parent": parent, "hidden": hidden}
    return json.dumps(first).encode() + b"\n"


def _bubblewrap_options() -> list[str]:
    """Return options that show the system's programs and this Python, read-only, and nothing else."""
    shown = ["/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", sys.base_prefix, sys.prefix]
    folders = [word for path in dict.fromkeys(shown) for word in ("--ro-bind-try", path, path)]
    return [
        *("--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
        *("--tmpfs", "/tmp"),  # first, as this Python may be below it
        *folders,
        *("--proc", "/proc", "--dev", "/dev", "--chdir", "/tmp"),
    ]


def passes(completion: str, tests: str, sandbox: Sandbox) -> bool:
    """Whether the program of a completion passes its tests within the limits.

    Args:
        completion: the model's text.
        tests: Python that raises on failure (`assert add(1, 2) == 3`); it can use the program's names.
        sandbox: the sandbox to run in.

    Raises:
        VoidReward: a sandbox did not start its driver, or the tests judge no program.
        SyntaxError: the tests are not Python.
    """
    compile(tests, "tests", "exec", dont_inherit=True)  # otherwise every program would fail them
    isolation = isolation_of(sandbox)
    with (
        Boxed("program", code_of(completion), isolation, sandbox) as program,
        Boxed("tests", tests, isolation, sandbox) as judge,
    ):
        return _verdict(program, judge)


def _verdict(program: Boxed, judge: Boxed) -> bool:
    """Pass on questions and answers until the tests have decided, one side has ended, or the time is over.

    The program waits until both have begun, and its time starts then. What has come is read before the time is looked
    at, and a standstill (`MOST_LOOK_S`), in which nobody answers the program, does not count.

    Raises:
        VoidReward: one of them never began, or the tests judge no program.
    """
    both, looked, runs = (program, judge), time.monotonic(), False
    look, end = looked + LOOK_S, looked + START_S
    with selectors.DefaultSelector() as ready:
        for one in both:
            ready.register(one.output, selectors.EVENT_READ, one)
        while True:
            now = time.monotonic()
            end += max(0.0, now - looked - MOST_LOOK_S)
            looked = now
            for one in _readable(ready, both, max(0.0, min(end - now, LOOK_S))):
                for line in one.read():
                    if (verdict := _pass_on(one, line, program, judge)) is not None:
                        return verdict
            if not runs and all(one.begun for one in both):
                runs, end = True, time.monotonic() + program.sandbox.seconds
                program.pending += GO
            for one in both:
                if one.closed:
                    if one is judge and one.sends_too_much:
                        text = f"the tests pass more than {MOST_BYTES['tests'] >> 20} MiB to the program at once"
                        raise VoidReward(VoidCause.VERIFIER, text, retry=False)
                    if one.begun:
                        return False
                    raise one.never_began(f"ended with {one.wait()}")
                one.flush()
            if runs and time.monotonic() > look:  # no code of either side has run before
                if any(one.has_too_many() for one in both):
                    return False
                look = time.monotonic() + LOOK_S
            if now >= end:
                break
    for one in both:
        if not one.begun:
            one.kill()
            raise one.never_began(f"did not end within {START_S:g} s")
    return False


def _readable(ready: selectors.BaseSelector, both: Iterable[Boxed], seconds: float) -> list[Boxed]:
    """Wait until something can be read, or what is pending written; return those that can be read."""
    waiting = [one.input for one in both if one.pending]
    for pipe in waiting:
        ready.register(pipe, selectors.EVENT_WRITE)
    found = [key.data for key, _ in ready.select(seconds) if key.data is not None]
    for pipe in waiting:
        ready.unregister(pipe)
    return found


def _pass_on(one: Boxed, line: bytes, program: Boxed, judge: Boxed) -> bool | None:
    """Take one line of one side; return the verdict, or None: there is none yet.

    Raises:
        VoidReward: the tests judge no program.
    """
    if not one.begun:
        one.begun = line == BEGUN
        return None
    if one is program:
        if line.startswith(FAILED):
            return False
        judge.pending += line
        return None
    if line.startswith(VERDICT):
        return line == PASSED
    if line.startswith(VOID):
        raise VoidReward(VoidCause.VERIFIER, json.loads(line)[1], retry=False)
    program.pending += line
    return None


GO = b'["go", null]\n'
"""Line for which the program's driver waits."""
BEGUN, FAILED, VERDICT, PASSED = b'["begun", null]\n', b'["failed", ', b'["verdict", ', b'["verdict", true]\n'
VOID = b'["void", '
"""Lines of a driver that are meant for this module; those of the program's process never mean success."""


class Boxed:
    """One process in its sandbox, with a folder of its own."""

    def __init__(self, side: str, source: str, isolation: Isolation, sandbox: Sandbox) -> None:
        self.side, self.sandbox = side, sandbox
        self.begun = self.closed = self.sends_too_much = False
        driver = [sys.executable, "-I", "-c", DRIVER]
        self.command = [*isolation.command, *driver]
        self.user: int | None = None
        """Number of the user that it runs as; None: this process's."""
        if not sandbox.command and may_change_user(isolation.command):  # a command of the run file may need to be root
            self.user = FIRST_USER + USERS_OF_WORKER * os.getpid() + next(_numbers) % USERS_OF_WORKER
        self.pending = bytearray(_first_words(side, source, isolation.command))
        """Bytes that it has not taken yet."""
        self._read = bytearray()
        self._folder = ScratchFolder()
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `_close`)

    def __enter__(self) -> Boxed:
        seconds, memory = int(self.sandbox.seconds) + 2, self.sandbox.memory_mb << 20

        def limit() -> None:
            end_with_parent(signal.SIGKILL)  # a killed worker cannot end it
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
            resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_FILE_BYTES, MOST_FILE_BYTES))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))

        folder = self._folder.path
        try:
            if self.user is not None:
                os.chown(folder, self.user, self.user)
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._complaints,
                bufsize=0,
                cwd=folder,
                env={"PATH": os.environ.get("PATH", os.defpath), "HOME": str(folder), **ONE_THREAD},
                start_new_session=True,
                user=self.user,
                group=self.user,
                extra_groups=None if self.user is None else (),
                preexec_fn=limit,
            )
        except (OSError, subprocess.SubprocessError) as error:
            self._close()
            raise VoidReward(VoidCause.SANDBOX, f"the sandbox {self.command[0]} did not start: {error}") from error
        for pipe in (self.input, self.output):
            os.set_blocking(pipe.fileno(), False)
        if self.user is not None:  # else it could not open /dev/stdout
            for file in (self.input, self.output, self._complaints):
                os.fchown(file.fileno(), self.user, self.user)
        self.flush()
        return self

    @property
    def input(self) -> IO[bytes]:
        """The pipe to it."""
        assert self.process.stdin is not None
        return self.process.stdin

    @property
    def output(self) -> IO[bytes]:
        """The pipe from it."""
        assert self.process.stdout is not None
        return self.process.stdout

    def read(self) -> list[bytes]:
        """Return the lines that are there now; whoever sends too long a line has ended."""
        try:
            part = os.read(self.output.fileno(), 2**20)
        except BlockingIOError:
            return []
        self._read += part
        lines: list[bytes] = []
        if b"\n" in part:
            *lines, rest = bytes(self._read).split(b"\n")
            self._read = bytearray(rest)
        self.sends_too_much = len(self._read) > MOST_BYTES[self.side]
        self.closed = not part or self.sends_too_much
        return [line + b"\n" for line in lines]

    def flush(self) -> None:
        """Write as much of what is pending as it takes now."""
        try:
            while self.pending and (count := os.write(self.input.fileno(), self.pending)):
                del self.pending[:count]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.pending.clear()

    def has_too_many(self) -> bool:
        """Whether it has started too many processes; for root, whom the kernel does not limit."""
        if os.geteuid() or self.user is not None:
            return False
        try:
            return len(psutil.Process(self.process.pid).children(recursive=True)) > MOST_PROCESSES
        except psutil.Error:
            return False

    def last_words(self) -> str:
        """Return the end of what the sandbox has written to its standard error, in one line."""
        self._complaints.seek(max(0, self._complaints.seek(0, os.SEEK_END) - MOST_STDERR))
        return " ".join(self._complaints.read().decode(errors="replace").split()) or "it said nothing"

    def never_began(self, ended: str) -> VoidReward:
        """Return the error of a sandbox that has not started its driver."""
        text = f"the sandbox {self.command[0]} {ended} and never started the {self.side}: {self.last_words()}"
        return VoidReward(VoidCause.SANDBOX, text)

    def wait(self) -> int:
        """Return the exit code of a process that has closed its output."""
        try:
            return self.process.wait(LOOK_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return self.process.wait()

    def kill(self) -> None:
        """Kill the process, its group, and all that it has started elsewhere."""
        started: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            started = psutil.Process(self.process.pid).children(recursive=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for one in started:  # those that have left the group
            with contextlib.suppress(psutil.Error):
                one.kill()

    def _close(self) -> None:
        self._complaints.close()
        self._folder.close()

    def __exit__(self, *_: Any) -> None:
        self.kill()
        self.process.wait()
        self.input.close()
        self.output.close()
        self._close()
