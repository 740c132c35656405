"""Start the package's processes with everything already imported, by forking them from a template process.

Most of the computing of a tiny run before its first sample is imports: vLLM in each instance, torch and transformers in
each rank, 30 s of a core for every run. Here a template imports all that once and then waits, with a single thread:

    pytest
    ├── template              `python -m tests.warm`: imports, then forks processes on request
    ├── streamrl launch       forked by the template, and handed to pytest as its own child
    │   ├── its template      a copy of the launcher from before it ran anything
    │   └── controller, ...   forked by that copy, and handed to the launcher
    └── vLLM's engine         one that multiprocessing would spawn (`multiprocessing_warm`), with a copy of its own

The workers of pytest-xdist are forked in the same way (`forked_workers`): those of the slow tests with a copy of such a
template each, those of the quick tests by one without vLLM, which changes how torch compiles.

Such a process has the arguments, environment, folder, files and parent that it would have had otherwise, and a session
of its own if it should. Settings that C libraries and the interpreter read when they are loaded are the template's
(`SETTINGS`). Linux only: elsewhere, and where those settings would matter, processes are started in the ordinary way.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import logging
import multiprocessing.util
import os
import pickle
import pkgutil
import runpy
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrl.imports import importing
from streamrl.runtime.process_plan import ONE_BLAS_THREAD, PASSIVE_WAITING, SAME_HASHES
from streamrl.runtime.processes import end_with_parent
from tests.marks import MARK, WARM

MODULES = ("streamrl",)
"""Prefixes of the modules that the template can run in place of `python -m`."""
STARTERS = ("streamrl.cli.main", "streamrl.launcher.trainer_ranks")
"""Modules that start further processes, each in a session of its own."""
SPAWNED, FORK_SERVER = "from multiprocessing.spawn import ", "from multiprocessing.forkserver import "
"""Beginnings of the programs by which multiprocessing starts a process, and a server that forks others."""
WORKER = "import sys;exec(eval(sys.stdin.readline()))"
"""Program by which execnet starts a worker of pytest-xdist."""
SETTINGS = {"OMP_NUM_THREADS": "1"} | SAME_HASHES
"""Settings that libraries and the interpreter read once; a process that needs others is not forked."""
NO_THREADS = ONE_BLAS_THREAD | {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
"""Settings with which libraries start no threads when they are loaded."""
ROOM = 8192
"""Characters of a forked process's visible command line, and of its environment beyond the template's."""
PR_SET_CHILD_SUBREAPER = 36
HEADER = struct.Struct("=I")
MOST_FILES = 64
HIGH = 256
"""Number of open files above which those of a new process are kept until each has its own number."""
PID = struct.Struct("=i")

OF_VLLM = (
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "vllm.plugins.lora_resolvers.filesystem_resolver",
    "vllm.plugins.lora_resolvers.hf_hub_resolver",
    "vllm.renderers.hf",
    "vllm.utils.cpu_triton_utils",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.v1.pool.flash_maxsim",
)
LIBRARIES = (
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.tokenization_auto",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "reasoning_gym",
    "matplotlib.pyplot",
    "lightgbm",
)
"""Modules that the package, or most files of tests, import only as they run."""
OF_QUICK_TESTS = (
    *("streamrl.training.trainer", "streamrl.controller.controller"),
    *("anthropic", "datasets", "gguf", "openai", "ray", "torch._dynamo.backends.debugging", "trl"),
)
"""Modules that take long, which each worker of the quick tests would import itself as it collects their files."""


@dataclass(frozen=True)
class Request:
    """A process that should be started."""

    command: list[str]
    """Command as for the system: interpreter, its options, `-m` and a module or `-c` and a program, arguments."""
    environment: dict[str, str]
    folder: str
    new_session: bool = False
    before: Any = None
    """Function called in the process before its module runs, or None."""
    files: tuple[int, ...] = ()
    """Numbers of the files that are open in it beyond its input, output and errors."""

    @property
    def program(self) -> tuple[str, str, list[str]]:
        """`-m` or `-c`, the module or program, and the arguments."""
        place = next(n for n, word in enumerate(self.command) if word in ("-m", "-c"))
        return self.command[place], self.command[place + 1], self.command[place + 2 :]

    @property
    def own_template(self) -> bool:
        """Whether the process gets a template of its own, as it will start others that import much."""
        _, program, arguments = self.program
        return program.startswith(SPAWNED) or program in STARTERS or arguments[:1] == ["rewards"]

    @property
    def is_test_worker(self) -> bool:
        """Whether the process is one of pytest-xdist."""
        return self.program[1] == WORKER


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Make this process adopt descendants whose parent ends meanwhile."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0)


class Template:
    """A template process, as seen by the process that makes requests."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection, self._pid, self._lock = connection, pid, threading.Lock()

    def fork(self, request: Request, files: Sequence[int]) -> int:
        """Start a process with these open files: its input, output and errors, then those that the request names.

        Returns:
            Its pid; it is a child of this process.

        Raises:
            OSError: the template has ended.
        """
        data = pickle.dumps(request)
        with self._lock, adopting():
            socket.send_fds(self._connection, [HEADER.pack(len(data))], files)
            self._connection.sendall(data)
            return int(PID.unpack(_exactly(self._connection, PID.size))[0])

    def close(self) -> None:
        """End the template, and wait for its end."""
        self._connection.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (more := connection.recv(count - len(data))):
            raise OSError("the template has ended")
        data += more
    return data


def _receive(connection: socket.socket) -> tuple[Request, list[int]]:
    header, files, _, _ = socket.recv_fds(connection, HEADER.size, MOST_FILES)
    if not header:
        os._exit(0)  # no more requests will come
    header += _exactly(connection, HEADER.size - len(header))
    return pickle.loads(_exactly(connection, HEADER.unpack(header)[0])), files


def serve(connection: socket.socket, parent: int, path: list[str], variables: dict[str, str]) -> None:
    """Fork the requested processes until the requesting process ends; this never returns.

    Args:
        connection: connection to the requesting process.
        parent: pid of the requesting process.
        path: folders to search for modules, after a process's own.
        variables: environment variables that imported modules have set.
    """
    while True:
        request, files = _receive(connection)
        (told, tell), (wait, go) = os.pipe(), os.pipe()
        if (between := os.fork()) == 0:
            if (child := os.fork()) != 0:
                os.write(tell, PID.pack(child))
                os._exit(0)
            os.close(go)
            os.read(wait, 1)  # wait until the template closes its end; the requesting process is the parent by then
            for fd in (connection.detach(), told, wait):
                os.close(fd)
            if os.getppid() != parent:
                os._exit(1)  # the requesting process has died
            _begin(request, files, tell, path, variables)
        for fd in (*files, tell, wait):
            os.close(fd)
        child = PID.unpack(os.read(told, PID.size))[0]
        os.waitpid(between, 0)
        os.close(go)
        os.read(told, 1)  # wait until the process is set up, or has ended
        os.close(told)
        connection.sendall(PID.pack(child))


def _begin(request: Request, files: list[int], begun: int, path: list[str], variables: dict[str, str]) -> None:
    """Run a module as `python -m` does, in a process that was just forked; this does not return.

    Args:
        request: the process to run.
        files: its input, output and errors, and those that the request names.
        begun: file that is closed once the process is set up.
        path: see `serve`.
        variables: see `serve`.
    """
    *files, begun = [_moved(fd) for fd in (*files, begun)]
    for number, fd in zip((0, 1, 2, *request.files), files, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    _open_streams()
    if request.new_session:
        os.setsid()
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(variables | request.environment)
    of_environment = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    sys.path[:] = [os.getcwd(), *of_environment, *path]
    importlib.invalidate_caches()
    if request.is_test_worker and OF_VLLM[0] in sys.modules:
        _own.append(_copy(path, variables, new_session=True))  # it still shows the template's command line
    _show(request)
    if request.before is not None:
        request.before()
    os.close(begun)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # type: ignore[attr-defined]
    copy = _copy(path, variables, request.program[1] in STARTERS) if request.own_template else None
    if copy is not None:
        _start_through(copy)
    code = _run(request)
    if copy is not None:
        copy.close()
    os._exit(code)


def _moved(fd: int) -> int:
    """Give an open file a number above those that a process asks for."""
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH)
    finally:
        os.close(fd)


def _open_streams() -> None:
    """Open `sys.stdin`, `sys.stdout` and `sys.stderr` anew, as an interpreter does that starts with these files.

    Those of the template know whether its own files can seek and are terminals, which need not hold for these.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        stream = os.fdopen(number, "w" if number else "r", encoding=old.encoding, errors=old.errors, closefd=False)
        if name == "stderr":
            stream.reconfigure(line_buffering=True)
        setattr(sys, name, stream)


def _run(request: Request) -> int:
    kind, program, arguments = request.program
    sys.argv = [kind, *arguments]
    code: object = 0
    try:
        if kind == "-m":
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*found in sys.modules.*", category=RuntimeWarning)
                runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.modules["__main__"] = main_module = types.ModuleType("__main__")
            exec(program, main_module.__dict__)
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return int(code or 0)  # type: ignore[call-overload]


def _show(request: Request) -> None:
    """Show this command line and environment to other processes, in place of the template's.

    The template has reserved room for them. Nothing in this process refers to that memory: Python has copied both.
    """
    numbers = [int(one) for one in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:49]]
    marked = sorted(request.environment.items(), key=lambda one: one[0] != MARK)  # first what must not be cut off
    for begin, end, words in (
        (*numbers[:2], request.command),
        (*numbers[2:], [f"{name}={value}" for name, value in marked]),
    ):
        text = b"\0".join(map(os.fsencode, words))[: end - begin - 1]
        ctypes.memset(begin, 0, end - begin)
        ctypes.memmove(begin, text, len(text))


def _copy(path: list[str], variables: dict[str, str], new_session: bool) -> Template:
    """Return a template that is a copy of this process as it is now, and ends with it."""
    here, there = socket.socketpair()
    parent = os.getpid()
    if (pid := os.fork()) == 0:
        _close_all_but(there)
        _become_template(parent, new_session)
        serve(there, parent, path, variables)
    there.close()
    return Template(here, pid)


def _close_all_but(connection: socket.socket) -> None:
    """Close all files of this process but its input, output and errors, and one connection."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd != connection.fileno():
            with contextlib.suppress(OSError):  # the file of the listing itself is already closed
                os.close(fd)


def _become_template(parent: int, new_session: bool) -> None:
    """Make this process a template: it ends with its parent and keeps none of that one's input and outputs.

    Args:
        parent: pid of its parent.
        new_session: whether it leaves its parent's session, so that signals of a terminal do not reach it; what it
            starts then is not of that session either.
    """
    end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    if new_session:
        os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    os.close(null)
    os.chdir("/")
    gc.freeze()


def _start_through(template: Template) -> None:
    """Make `subprocess` and `multiprocessing` start processes through a template from now on, if it can."""
    subprocess.Popen._execute_child = functools.partialmethod(_execute_child, template)  # type: ignore[attr-defined]
    multiprocessing.util.spawnv_passfds = functools.partial(_spawn, lambda: template)  # type: ignore[attr-defined]


_exec = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_PARAMETERS = _exec.__code__.co_varnames[1 : _exec.__code__.co_argcount]


def _execute_child(self: subprocess.Popen[Any], template: Template, *given: Any) -> None:
    """Do the work of `Popen._execute_child` through a template."""
    values = dict(zip(_PARAMETERS, given, strict=True))
    request = _request(values)
    if request is None:
        return _exec(self, *given)
    files = [values["p2cread"], values["c2pwrite"], values["errwrite"]]
    files = [number if fd == -1 else fd for number, fd in enumerate(files)]
    self.pid = template.fork(request, (files[0], files[1], files[2]))
    self._child_created = True  # type: ignore[attr-defined]
    ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    self._close_pipe_fds(*(values[end] for end in ends))  # type: ignore[attr-defined]
    return None


_spawnv = multiprocessing.util.spawnv_passfds  # type: ignore[attr-defined]


def _spawn(
    template: Callable[[], Template | None], path: str | bytes, command: Sequence[str | bytes], files: Sequence[int]
) -> int:
    """Do the work of `multiprocessing.util.spawnv_passfds` through a template; return the process's pid."""
    words = list(map(os.fsdecode, command))
    program = words[words.index("-c") + 1] if "-c" in words else ""
    found = template() if program.startswith((SPAWNED, FORK_SERVER)) and _has_settings(os.environ) else None
    if found is None:
        return int(_spawnv(path, command, files))
    numbers = tuple(sorted(set(map(int, files))))
    return found.fork(Request(words, dict(os.environ), os.getcwd(), files=numbers), (0, 1, 2, *numbers))


@contextlib.contextmanager
def multiprocessing_warm() -> Iterator[None]:
    """Let `multiprocessing` spawn processes, and start fork servers, through the session's template meanwhile."""
    multiprocessing.util.spawnv_passfds = functools.partial(_spawn, template)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        multiprocessing.util.spawnv_passfds = _spawnv  # type: ignore[attr-defined]


@contextlib.contextmanager
def subprocess_warm() -> Iterator[None]:
    """Let `subprocess` start the package's processes through this process's own template meanwhile, if it has one.

    Without one they are started in the ordinary way: a template takes longer than the processes of a few files.
    """
    if not _own:
        yield
        return
    subprocess.Popen._execute_child = functools.partialmethod(_execute_child, _own[0])  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess.Popen._execute_child = _exec  # type: ignore[attr-defined]


def _has_settings(environment: Mapping[str, str]) -> bool:
    """Whether a process of this environment may have the template's settings."""
    return all(environment.get(name, value) == value for name, value in SETTINGS.items())


def _request(values: dict[str, Any]) -> Request | None:
    """Return the request for a process; None: a template cannot start it."""
    command = values["args"]
    if not isinstance(command, list | tuple) or values["shell"] or values["pass_fds"] or values["executable"]:
        return None
    words = [os.fspath(word) for word in command]
    environment = dict(os.environ if values["env"] is None else values["env"])
    if len(words) < 3 or words[0] != sys.executable or not _has_settings(environment):
        return None
    if words[-2:] != ["-c", WORKER] and not (words[1] == "-m" and words[2].startswith(MODULES)):
        return None
    folder = os.getcwd() if values["cwd"] is None else os.fspath(values["cwd"])
    return Request(words, environment, folder, bool(values["start_new_session"]), values["preexec_fn"])


@contextlib.contextmanager
def forked_workers(vllm: bool) -> Iterator[None]:
    """Let execnet start the workers of pytest-xdist through a template meanwhile: each would import everything itself.

    Args:
        vllm: whether they have vLLM, too; then each has a template of its own.
    """
    if sys.platform != "linux":
        yield
        return
    found = _start_template(vllm)
    subprocess.Popen._execute_child = functools.partialmethod(_execute_child, found)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        subprocess.Popen._execute_child = _exec  # type: ignore[attr-defined]
        found.close()


_own: list[Template] = []
"""Template with vLLM that this process was given when it was forked, if any."""


@functools.cache
def template() -> Template | None:
    """Return the template of this pytest session, which ends with it; None: this system does not support it."""
    if sys.platform != "linux":
        return None
    found = _own[0] if _own else _start_template(vllm=True)
    atexit.register(found.close)
    return found


def _start_template(vllm: bool) -> Template:
    here, there = socket.socketpair()
    environment = os.environ | SETTINGS | PASSIVE_WAITING | NO_THREADS
    environment |= {"ROOM": "." * ROOM}
    environment.pop(MARK, None)  # it is started in one test, but serves all
    command = [sys.executable, "-m", WARM, str(there.fileno()), str(os.getpid()), str(int(vllm)), "." * ROOM]
    root = str(Path(__file__).parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    there.set_inheritable(True)
    found = Template(here, os.posix_spawn(sys.executable, command, environment))
    there.close()
    return found


class Popen(subprocess.Popen[str]):
    """A `subprocess.Popen` that starts the process through the session's template if possible."""

    def _execute_child(self, *given: Any) -> None:
        """Start the process, as `subprocess.Popen` does."""
        if (found := template()) is None:
            return _exec(self, *given)
        return _execute_child(self, found, *given)


def run(command: list[str], timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run such a process to its end, and return its output; kill it if it takes longer than `timeout` seconds.

    Raises:
        subprocess.TimeoutExpired: it was killed.
    """
    with Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def import_all(vllm: bool) -> None:
    """Import everything that any process of a run imports; without `vllm`, what the quick tests import.

    Raises:
        RuntimeError: an import has started a thread, which a fork would lose.
    """
    for name in ("streamrl", "scheduler", "ranker") if vllm else ():
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            importlib.import_module(module.name)
    for name in (*LIBRARIES, *(OF_VLLM if vllm else OF_QUICK_TESTS)):
        importlib.import_module(name)
    if vllm:  # it imports all types of weights to find one
        sys.modules["vllm.model_executor.layers.quantization"].get_quantization_config("fp8")
    tempfile.tempdir = None  # an import may have asked: a process that begins here has a TMPDIR of its own
    if (threads := len(os.listdir("/proc/self/task"))) != 1:
        raise RuntimeError(f"an import has started {threads - 1} threads")


def main() -> None:
    """Become a template for the process that has started this one."""
    connection, parent, vllm = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), sys.argv[3] == "1"
    _close_all_but(connection)
    before = dict(os.environ)
    outside = set(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    path = [one for one in sys.path if one not in outside and one not in ("", os.getcwd())]
    logging.disable(logging.WARNING)  # of what this machine has not, which the tests' output need not say
    with importing():
        import_all(vllm)
    logging.disable(logging.NOTSET)
    variables = {name: value for name, value in os.environ.items() if before.get(name) != value}
    _become_template(parent, new_session=True)
    serve(connection, parent, path, variables)


if __name__ == "__main__":
    # run under the module's own name, so that pickled classes are found in it
    importlib.import_module(WARM).main()
