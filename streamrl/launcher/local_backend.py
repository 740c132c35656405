"""The local backend: starts processes on this machine, each in a session of its own."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from streamrl.emulation.namespaces import enter
from streamrl.errors import RunFailed, UserError, with_limit
from streamrl.launcher.started_process import RunProcess
from streamrl.machine.gpus import BY_BUS, ORDER, VISIBLE, devices_of_user
from streamrl.run_dir.jsonl import append_whole
from streamrl.runtime.process_plan import PROCESS, STARTER, ProcessSpec
from streamrl.runtime.processes import end_with_parent, kill_group


def _in_child(namespace: str | None) -> None:
    """Prepare the child before exec: it is signalled when the launcher ends, and enters its network namespace."""
    end_with_parent()
    if namespace is not None:
        enter(namespace)


@dataclass(kw_only=True)
class LocalProcess(RunProcess):
    """A process on this machine."""

    process: subprocess.Popen[bytes]

    @property
    def exit_code(self) -> int | None:
        return self.process.poll()

    @property
    def pid(self) -> int:
        return self.process.pid

    def signal(self, number: int) -> None:
        if self.exit_code is None:
            self.process.send_signal(number)

    def request_kill(self) -> None:
        kill_group(self.process.pid)

    def finish_kill(self, limit_s: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that the kernel cannot end yet
            self.process.wait(timeout=limit_s)


def environment(spec: ProcessSpec, resume: bool, further: Mapping[str, str], number: int) -> dict[str, str]:
    """Return the environment variables of a process, on top of those it inherits.

    Libraries read files of their own in the encoding of the locale, as torch its templates, and need UTF-8.
    """
    own = {"STREAMRL_RESUME": "1" if resume else "0", PROCESS: str(number), "PYTHONUTF8": "1"}
    return spec.env | dict(further) | own


def begin_log(spec: ProcessSpec, log_dir: Path) -> tuple[Path, int]:
    """Mark the start of a process in its log; return the log, and the offset at which its output begins.

    Raises:
        RunFailed: the log cannot be opened.
    """
    log = log_dir / f"{spec.name}.log"
    try:
        with log.open("ab", buffering=0) as output:
            begin = output.tell()
            with contextlib.suppress(RunFailed):  # on a full disk; the process will know whether it can do without
                append_whole(output, f"--- started {time.strftime('%Y-%m-%d %H:%M:%S')} by {os.getpid()}\n".encode())
    except OSError as error:
        raise RunFailed(f"cannot start {spec.name}: {with_limit(error)}") from error
    return log, begin


def spawn(
    command: Sequence[str], log: Path, env: Mapping[str, str], namespace: str | None = None, cwd: str | None = None
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own that appends its output to a log and ends with this process.

    Raises:
        OSError: it cannot be started.
    """
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**env, STARTER: str(os.getpid())},
            start_new_session=True,
            preexec_fn=functools.partial(_in_child, namespace),
            cwd=cwd,
        )


def start(
    spec: ProcessSpec,
    log_dir: Path,
    resume: bool,
    further_env: Mapping[str, str] = MappingProxyType({}),
    namespace: str | None = None,
    number: int = 1,
) -> LocalProcess:
    """Start a process that appends its output to logs/<name>.log, in a network namespace if one is named.

    Its CUDA devices are taken from those that this user's CUDA_VISIBLE_DEVICES names, by position, and numbers are
    those of nvidia-smi unless the user's CUDA_DEVICE_ORDER says otherwise.

    Raises:
        RunFailed: it cannot be started.
    """
    log, begin = begin_log(spec, log_dir)
    try:
        env = os.environ | environment(spec, resume, further_env, number)
        if spec.gpu_ids:
            env[VISIBLE] = devices_of_user(spec.gpu_ids, os.environ.get(VISIBLE))
            env.setdefault(ORDER, BY_BUS)
        process = spawn(spec.command, log, env, namespace)
    except (OSError, UserError) as error:
        raise RunFailed(f"cannot start {spec.name}: {with_limit(error)}") from error
    return LocalProcess(spec, log, number, begin, process=process)
