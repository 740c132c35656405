"""The Ray backend: places a site's processes on the nodes of a Ray cluster.

Ray finds a node for each process, reports when a node is lost, and, with an autoscaler, gets more nodes for waiting
processes. On the node an actor starts the process as the local backend would (`launcher/local_backend.py`), so a role
does not know which backend started it. Controller and service stay beside the launcher: all others connect to them.

    trainer     one placement group, PACK: a bundle for each node that it spans (`trainer.nodes`)
    instances   SPREAD, each with its GPUs, or as many of the resource that is named like its GPU type; one that spans
                nodes has a placement group, STRICT_SPREAD: a bundle and a process for each node, one life for all
    rewards     on a node without GPUs, if one has room; so is the agents process with the processes of its
                environments, which asks for a core for each of them and for the memory that they may use

The run's folder must be on a file system that all nodes mount at the same path: it holds the logs, the checkpoints and
the weights that instances load. Nodes that do not see it, or have other versions of streamrl, vLLM or torch, are
refused.
"""

from __future__ import annotations

import secrets
import signal
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import In, NodeLabelSchedulingStrategy, PlacementGroupSchedulingStrategy

from streamrl.config.cluster import ClusterConfig
from streamrl.environments.installed import FOLDER, environments_folder
from streamrl.errors import RunFailed, UserError
from streamrl.launcher.local_backend import begin_log, environment
from streamrl.launcher.ray_node import TOKEN, NodeProcess, versions
from streamrl.launcher.started_process import RunProcess
from streamrl.runtime.process_plan import ON_RAY, ProcessSpec

CONNECT_S = 5.0
"""Seconds within which Ray's address must accept a connection."""
LOOK_S = 1
"""Whole seconds of one wait for Ray, after which a request to stop is seen."""
OF_TYPE = "accelerator_type:"
NODE_ID = "ray.io/node-id"
"""Label that Ray gives each node."""
MEMORY = "memory"
"""Ray's resource, in bytes; what asks for none of it is not counted."""


def demand(spec: ProcessSpec, known: Mapping[str, float]) -> dict[str, float]:
    """Return the resources that a process requests from Ray.

    These are CPU threads, and GPUs of the type that Ray has detected, or of a resource named like the type if one is
    `known` to Ray (amounts do not matter).
    """
    count = float(max(spec.ranks, len(spec.gpu_ids)))
    wanted = {"CPU": float(spec.threads * spec.ranks)}
    if spec.memory_gb:
        wanted[MEMORY] = float(round(spec.memory_gb * 2**30))
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
    """List the resources of which Ray has fewer than all processes together request; empty: it has enough."""
    there: defaultdict[str, float] = defaultdict(float)
    for node in nodes:
        for name, amount in node.items():
            # Ray only marks that a node has a GPU type; count that node's GPUs
            there[name] += node.get("GPU", 0) if name.startswith(OF_TYPE) else amount
    total: defaultdict[str, float] = defaultdict(float)
    for spec in specs:
        for name, amount in demand(spec, there).items():
            total[name] += len(spec.gpu_ids) if name.startswith(OF_TYPE) else amount
    kinds = ", ".join(sorted(name.removeprefix(OF_TYPE) for name in there if name.startswith(OF_TYPE)))
    lines = []
    for name, amount in sorted(total.items()):
        if amount > there[name]:
            if name == MEMORY:
                lines.append(f"{amount / 2**30:.1f} GiB of memory asked for, {there[name] / 2**30:.1f} in Ray")
                continue
            has = f"; its GPUs: {kinds}" if name.startswith(OF_TYPE) and kinds else ""
            lines.append(f"{amount:g} {name.removeprefix(OF_TYPE)} asked for, {there[name]:g} in Ray{has}")
    return lines


@dataclass(kw_only=True)
class RayProcess(RunProcess):
    """A process on a node of the Ray cluster."""

    actors: list[Any]
    """One actor per node that the process spans; the first one's process stands for all."""
    begun: Any
    """Ray reference that resolves to its PID and node."""
    ended: list[Any]
    """Ray references that resolve to (exit code, why it was not started), and fail if their node is lost."""
    wants: str
    """Requested resources, in words."""
    group: Any = None
    """Placement group of a process that spans nodes."""
    _place: tuple[int, str] | None = None
    _end: tuple[int, str] | None = None
    _kills: list[Any] = field(default_factory=list)
    """Ray references of its kill, one per node."""

    @property
    def exit_code(self) -> int | None:
        """Exit code; None while it lives; a process lost with its node counts as killed."""
        if self._end is None and (over := ray.wait(self.ended, timeout=0)[0]):
            try:
                self._end = ray.get(over[0])
            except ray.exceptions.RayError as error:
                self._end = -signal.SIGKILL, f"is gone with its node ({_short(error)})"
        return self._end[0] if self._end is not None else None

    @property
    def pid(self) -> int:
        return self._where()[0]

    @property
    def node(self) -> str:
        """Address of its node, or what it waits for."""
        return self._where()[1]

    def _where(self) -> tuple[int, str]:
        if self._place is None and ray.wait([self.begun], timeout=0)[0]:
            try:
                self._place = ray.get(self.begun)
            except ray.exceptions.RayError:
                self._place = 0, "a lost node"
        return self._place or (0, f"waits for a node with {self.wants}")

    def how_it_ended(self) -> str:
        """Return in a few words how it ended, or why it was not started."""
        reason = self._end[1] if self.exit_code is not None and self._end is not None else ""
        return reason or super().how_it_ended()

    @property
    def is_final(self) -> bool:
        """Whether a restarted process would end for the same cause; an unusable node counts."""
        return super().is_final or (self.exit_code == 1 and bool(self._end and self._end[1]))

    def signal(self, number: int) -> None:
        """Signal the process on each of its nodes."""
        if self.exit_code is None:
            for actor in self.actors:
                actor.signal.remote(number)

    def request_kill(self) -> None:
        if not self._kills:
            self._kills = [actor.kill.remote() for actor in self.actors]

    def finish_kill(self, limit_s: float) -> None:
        awaited = [*self._kills, *self.ended]
        ray.wait(awaited, num_returns=len(awaited), timeout=limit_s)
        self.exit_code  # noqa: B018  (it may have ended by itself before)
        for actor in self.actors:
            ray.kill(actor)
        if self.group is not None:
            remove_placement_group(self.group)
        self._end = self._end or (-signal.SIGKILL, "")


class RaySite:
    """A site whose trainer, instances, agents and reward workers Ray places."""

    def __init__(self, cluster: ClusterConfig, site: str, run_dir: Path) -> None:
        """Connect to Ray.

        Raises:
            UserError: Ray does not answer at the site's address.
        """
        self.run_dir = run_dir.resolve()
        connect(cluster, site)
        self.host = str(ray.util.get_node_ip_address())
        """Address at which other nodes reach this machine."""
        self.token = secrets.token_hex(8)
        (self.run_dir / TOKEN).write_text(self.token, encoding="utf-8")
        self._group: Any = None
        self.meeting = ""
        """Rendezvous of the trainer's nodes, host:port."""

    def place_trainer(
        self, specs: Sequence[ProcessSpec], limit_s: float, check_stop: Callable[[], None]
    ) -> tuple[str, int, int]:
        """Find nodes for the trainer's processes (one per node), replacing those they had.

        Args:
            specs: the processes.
            limit_s: seconds within which Ray must have room, and the nodes must answer.
            check_stop: called every second, it raises to end the wait.

        Returns:
            Address of rank 0's node, and two free ports on it.

        Raises:
            RunFailed: no room within `limit_s`, or a node cannot be used.
        """
        if self._group is not None:
            remove_placement_group(self._group)
        known = ray.cluster_resources()
        wanted = [demand(spec, known) for spec in specs]
        self._group = placement_group(wanted, strategy="PACK")
        if not _waited(self._group.wait, limit_s, check_stop):
            asked = ", ".join(_words(one) for one in wanted)
            free = _words(ray.available_resources())
            raise RunFailed(f"Ray has no room for the trainer: it needs {asked} within {limit_s:.0f} s; free: {free}")
        probes = [_actor({}, _in_group(self._group, number)) for number in range(len(specs))]
        try:
            looks = [probe.look.remote(str(self.run_dir), self.token, versions()) for probe in probes]
            found = _answers(looks, limit_s, check_stop)
            if problem := next((why for _, why in found if why), ""):
                raise RunFailed(problem)
            node = found[0][0]
            ((first, second, third),) = _answers([probes[0].free_ports.remote(node, 3)], limit_s, check_stop)
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
        """Let Ray place and start a process; return at once.

        Raises:
            RunFailed: its log cannot be written.
        """
        log, begin = begin_log(spec, log_dir)
        wanted = demand(spec, ray.cluster_resources())
        group = None
        if spec.role == "trainer":
            actors = [_actor(wanted, _in_group(self._group, spec.index))]
        elif spec.nodes > 1:
            wanted = {name: amount / spec.nodes for name, amount in wanted.items()}
            group = placement_group([wanted] * spec.nodes, strategy="STRICT_SPREAD")
            actors = [_actor(wanted, _in_group(group, node)) for node in range(spec.nodes)]
        else:
            actors = [_actor(wanted, _without_gpus() if spec.role in ("rewards", "agents") else "SPREAD")]
        meeting = actors[0].meeting.remote() if spec.nodes > 1 else ""  # resolves once the first actor has its node
        env = environment(spec, resume, further_env, number)
        if spec.role == "agents":
            env[FOLDER] = str(environments_folder().absolute())
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
        """Release the run's resources of the cluster."""
        if self._group is not None:
            remove_placement_group(self._group)
        ray.shutdown()


def _actor(wanted: Mapping[str, float], where: Any) -> Any:
    made = ray.remote(NodeProcess).options(
        num_cpus=wanted.get("CPU", 0),
        num_gpus=wanted.get("GPU", 0),
        memory=wanted.get(MEMORY),
        resources={name: n for name, n in wanted.items() if name not in ("CPU", "GPU", MEMORY)},
        scheduling_strategy=where,
        max_concurrency=8,
    )
    return made.remote()


def _waited(ready: Callable[[int], bool], limit_s: float, check_stop: Callable[[], None]) -> bool:
    """Wait until something is ready, and return whether it was within `limit_s`; `check_stop` may raise meanwhile."""
    end = time.monotonic() + limit_s
    while not ready(LOOK_S):
        check_stop()
        if time.monotonic() > end:
            return False
    return True


def _answers(asked: list[Any], limit_s: float, check_stop: Callable[[], None]) -> list[Any]:
    """Return what Ray references resolve to; `check_stop` may raise meanwhile.

    Raises:
        ray.exceptions.RayError: no answer within `limit_s`, or an actor failed.
    """
    if not _waited(lambda s: not ray.wait(asked, num_returns=len(asked), timeout=s)[1], limit_s, check_stop):
        raise ray.exceptions.GetTimeoutError(f"no answer within {limit_s:.0f} s")
    return list(ray.get(asked))


def _without_gpus() -> Any:
    """Return a scheduling strategy that prefers nodes without GPUs, if one of them has room."""
    plain = {"CPU", "memory", "object_store_memory"}
    found = []
    for node in ray.nodes():
        kinds = {name for name in node["Resources"] if not name.startswith("node:")}
        if node["Alive"] and "CPU" in kinds and kinds <= plain:
            found.append(node["NodeID"])
    return NodeLabelSchedulingStrategy({}, soft={NODE_ID: In(*found)}) if found else "DEFAULT"


def connect(cluster: ClusterConfig, site: str) -> None:
    """Connect this process to a site's Ray.

    Raises:
        UserError: Ray does not answer at the site's address, or not without its token.
    """
    address = cluster.sites[site].launch.address
    try:
        host, colon, port = address.rpartition(":")
        if colon and port.isdigit():  # Ray itself would try for a minute
            socket.create_connection((host, int(port)), CONNECT_S).close()
        ray.init(address=address, log_to_driver=False, configure_logging=False, namespace="streamrl")
    except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise UserError(f"sites.{site}.launch.address: no Ray cluster at {address!r}: {_short(error)}") from error


def problems(cluster: ClusterConfig, site: str, specs: Iterable[ProcessSpec]) -> list[str]:
    """List why a site's processes cannot run on its Ray: it does not answer, or has too few resources."""
    try:
        connect(cluster, site)
    except UserError as error:
        return [str(error)]
    try:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        lines = missing([spec for spec in specs if spec.role in ON_RAY], nodes)
        return [f"sites.{site}: {line}" for line in lines]
    finally:
        ray.shutdown()


def _in_group(group: Any, bundle: int) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)


def _words(resources: Mapping[str, float]) -> str:
    shown = {name: n for name, n in resources.items() if "memory" not in name and not name.startswith("node:")}
    words = [f"{n:g} {name}" for name, n in sorted(shown.items())]
    if asked := resources.get(MEMORY):
        words.append(f"{asked / 2**30:.1f} GiB of memory")
    return " + ".join(words) or "nothing"


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
