"""The part of a run that one launcher starts: all of a one-site cluster, one site of several, or all of them emulated.

Every site has a folder with the resolved configuration and the addresses that its own processes use. Only the trainer's
site listens for others; their processes connect to its address or, when emulated, to one of the emulated network.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from streamrl.atomic_files import remove_left
from streamrl.config.cluster import ClusterConfig
from streamrl.config.load import RESOLVED_NAME, save_resolved
from streamrl.config.run import RunConfig
from streamrl.emulation.network import EmulatedNetwork
from streamrl.emulation.shaping import LinkShape
from streamrl.errors import RunFailed
from streamrl.launcher.port_forward import Forwarder
from streamrl.launcher.version_folder import fits_into_shared_memory
from streamrl.machine.loopback import is_loopback
from streamrl.run_dir import layout, start_stages
from streamrl.run_dir.checkpoints import BEST_FILE
from streamrl.run_dir.instance_files import forget
from streamrl.runtime.inside_keys import inside_roles, make_inside_keys, remove_inside_keys
from streamrl.runtime.interfaces import free_ports
from streamrl.runtime.process_context import Addresses
from streamrl.runtime.process_plan import (
    HIDDEN,
    MEETING,
    SOCKETS_OF_VLLM,
    ProcessSpec,
    plan_processes,
    possible_instances,
)
from streamrl.scratch_folders import ScratchFolder
from streamrl.transport.curve import NEW_KEYS, make_keys, public_file, secret_file
from streamrl.transport.ip_addresses import host_port, resolve
from streamrl.weights.version_store import WeightStore

if TYPE_CHECKING:
    from streamrl.launcher.ray_backend import RaySite

LOOPBACK = "127.0.0.1"
LONGEST_SOCKET_PATH = 107
"""Most bytes of a Unix socket's path on Linux."""
SOCKET_OF_VLLM = "x" * 36
"""A name as long as those of vLLM's sockets (UUIDs), the longest in the launcher's folder for sockets."""
EMULATED_ENV = {"VLLM_HOST_IP": LOOPBACK, "GLOO_SOCKET_IFNAME": "lo"}
"""Environment inside an emulated site, where a process cannot find its own address by an outside route."""

REPLACED = frozenset(
    {
        RESOLVED_NAME,
        layout.STATUS,
        layout.METRICS,
        layout.EVALUATIONS,
        layout.REPLICAS,
        layout.SITE_STATUS,
        layout.WANTED_INSTANCES,
        layout.PROCESSES,
    }
)
"""Files of a site's folder that only its launcher and its processes replace; others write reports, too."""


@dataclass(frozen=True)
class Share:
    """The sites that one launcher starts, with their folders, emulated network and Ray backends."""

    cluster: ClusterConfig
    run: RunConfig
    folders: dict[str, Path]
    """Folder of each site started here; the first is the launcher's own run folder."""
    network: EmulatedNetwork | None = None
    """Network between emulated sites; None: real ones."""
    hosts: dict[str, RaySite] = field(default_factory=dict)
    """Ray backends, by site, of the sites whose processes Ray places."""
    forwarder: Forwarder | None = None
    """Forwarder of weights to other sites, if the trainer is on a node that they cannot reach."""
    scratch: Path | None = None
    """Folder with a short path for files that live as long as the launcher; None: the system's temporary folder."""

    @property
    def run_dir(self) -> Path:
        """The launcher's own run folder, which holds the logs of all processes, but not of other sites' workers."""
        return next(iter(self.folders.values()))

    @property
    def trains(self) -> bool:
        """Whether controller and trainer are started here."""
        return self.cluster.trainer_site in self.folders

    def processes(self) -> list[ProcessSpec]:
        """List the processes to start at once, the controller (else the service) first."""
        specs = plan_processes(self.cluster, self.run, self.run_dir, self.folders, self.folders)
        host = self.hosts.get(self.cluster.trainer_site)
        for number, spec in enumerate(specs):
            if host is not None and spec.role == "trainer":
                command = [word.replace(MEETING, host.meeting) for word in spec.command]
                specs[number] = replace(spec, command=command)
        return specs

    def place(self, check_stop: Callable[[], None]) -> None:
        """Let Ray place the trainer, if it does so here, and publish its address to processes started from now on.

        Args:
            check_stop: called while Ray looks for nodes, it raises to end the wait.

        Raises:
            RunFailed: Ray has no room, or a node cannot be used.
        """
        home = self.cluster.trainer_site
        if home in self.folders and home in self.hosts:
            specs = [spec for spec in self.processes() if spec.role == "trainer"]
            node, inside, outside = self.hosts[home].place_trainer(specs, self.run.deadlines.startup_s, check_stop)
            addresses = replace(Addresses.load(self.run_dir), publisher=f"tcp://{host_port(node, inside)}")
            if self.forwarder is not None:
                self.forwarder.target = node, outside
                addresses = replace(addresses, publisher_outside=f"tcp://{host_port(node, outside)}")
            addresses.save(self.run_dir)

    def possible_instances(self, site: str) -> dict[str, ProcessSpec]:
        """Return the instances that a site's service may request, by name."""
        return {spec.name: spec for spec in possible_instances(self.cluster, self.run, site, self.folders[site])}

    def namespace(self, site: str) -> str | None:
        """Return the network namespace of a site's processes; None: the machine's own."""
        return self.network.namespace(site) if self.network else None

    @property
    def env(self) -> dict[str, str]:
        """Additional environment variables of all processes."""
        # vLLM leaves a socket there for each killed engine, and a socket's path must be short
        sockets = {SOCKETS_OF_VLLM: str(self.scratch)} if self.scratch else {}
        private = [*([self.scratch] if self.scratch else []), *(one / layout.KEYS for one in self.folders.values())]
        private += [secret_file(Path(self.cluster.security.keys), site) for site in self.folders]
        hidden = {HIDDEN: json.dumps([str(one.resolve()) for one in private])}
        return sockets | hidden | (EMULATED_ENV if self.network else {})


@contextlib.contextmanager
def prepare(
    cluster: ClusterConfig, run: RunConfig, run_dir: Path, site: str | None = None, emulate: bool = False
) -> Iterator[Share]:
    """Create folders, addresses and, if emulated, the network; clean up at the end.

    Args:
        run_dir: the launcher's run folder, which exists.
        site: the only site to start; None: the only one there is, or all.
        emulate: whether to start all sites, with an emulated network between them.
    """
    home = cluster.trainer_site
    names = [site or home, *(cluster.remote_sites if emulate else [])]
    folders = {name: run_dir if not index else run_dir / layout.SITES / name for index, name in enumerate(names)}
    local = [name for name in folders if not cluster.sites[name].on_ray]
    in_memory = local if fits_into_shared_memory(cluster, run, local) else []
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(ScratchFolder())
        _unix_socket(scratch / SOCKET_OF_VLLM)
        network = None
        if emulate:
            cluster = _with_keys(cluster, run_dir / layout.KEYS)
            near = [(name, cluster.link(name)) for name in cluster.remote_sites]
            links = {name: LinkShape(link.bytes_per_s, link.rtt_s / 2, link.loss) for name, link in near if link}
            first, second = free_ports(2, LOOPBACK)  # free on this machine too, in case there are no namespaces
            network = stack.enter_context(EmulatedNetwork(run_dir / layout.NETWORK, home, links, (first, second)))
        hosts: dict[str, RaySite] = {}
        for name, folder in folders.items():
            save_resolved(folder, cluster, run)
            remove_left(folder, REPLACED.__contains__)
            remove_left(folder / layout.CHECKPOINTS, BEST_FILE.__eq__)
            if cluster.sites[name].on_ray:
                from streamrl.launcher.ray_backend import RaySite

                hosts[name] = RaySite(cluster, name, folder)
                stack.callback(hosts[name].close)
            forget(folder)
            start_stages.forget(folder)
            for journal in (layout.TOKEN_JOURNAL, layout.TURN_JOURNAL):  # this launch may resume from any step
                for left in folder.glob(f"{journal}*"):
                    left.unlink()
            node = hosts[name].host if name in hosts else ""
            addresses = choose_addresses(cluster, name, scratch, network, node)
            stack.callback(remove_inside_keys, folder, name)
            made = make_inside_keys(folder, name, inside_roles(cluster, run, name))
            memory = str(stack.enter_context(ScratchFolder(layout.SHARED_MEMORY))) if name in in_memory else ""
            replace(addresses, inside_keys=made, shared_memory=memory).save(folder)
            store = WeightStore(folder / layout.WEIGHTS)
            store.clear()
            stack.callback(store.clear)
        for folder in layout.site_folders(run_dir).values():
            if folder not in folders.values():  # of a site that an earlier launch has emulated
                forget(folder)
                start_stages.forget(folder)
                (folder / layout.SITE_STATUS).unlink(missing_ok=True)
        for folder in folders.values():  # workers of rewards and agents log in the folder of their site
            (folder / layout.LOGS).mkdir(exist_ok=True)
        forwarder = None
        if home in hosts and cluster.remote_sites:
            here = cluster.sites[home]
            forwarder = stack.enter_context(Forwarder(_resolve(here.listen or here.address), here.port + 1))
        yield Share(cluster, run, folders, network, hosts, forwarder, scratch)


def _with_keys(cluster: ClusterConfig, folder: Path) -> ClusterConfig:
    """Return the cluster with keys of its own for an emulated run, generated once."""
    if cluster.security.encryption == "none":
        return cluster
    for left in folder.glob(f"{NEW_KEYS}*"):  # of a launch that was killed
        shutil.rmtree(left, ignore_errors=True)
    for name in cluster.sites:
        if not (public_file(folder, name).exists() and secret_file(folder, name).exists()):
            make_keys(folder, name, replace=True)  # such a launch may have left one of the two
    return cluster.model_copy(update={"security": cluster.security.model_copy(update={"keys": str(folder.resolve())})})


def choose_addresses(
    cluster: ClusterConfig, site: str, sockets: Path, network: EmulatedNetwork | None = None, node: str = ""
) -> Addresses:
    """Choose the addresses on which a site's processes listen and to which they connect.

    Processes on one machine use Unix sockets in a folder that only their user can enter.

    Args:
        sockets: that folder.
        network: network between emulated sites; None: real ones.
        node: address at which the other nodes of the site reach this machine; '': there are none.

    Raises:
        RunFailed: the trainer's site has a host name that cannot be resolved, or `sockets` is too long a path.
    """
    home = cluster.sites[cluster.trainer_site]
    several = bool(cluster.remote_sites)
    controller, publisher, service = free_ports(3, node or LOOPBACK)

    def inside(name: str, port: int) -> str:
        return f"tcp://{host_port(node, port)}" if node else _unix_socket(sockets / name)

    services = {site: inside(f"service-{site}", service)}
    if site != cluster.trainer_site:
        ports = network.ports if network else (home.port, home.port + 1)
        first, second = (network.address_of_home(site, p) if network else (home.address, p) for p in ports)
        addresses = Addresses(f"tcp://{host_port(*first)}", f"tcp://{host_port(*second)}", services)
        return addresses if network else _with_relays(addresses, cluster, site)
    addresses = Addresses(
        controller=inside("controller", controller if several else home.port or controller),
        publisher=inside("publisher", publisher),
        services=services,
    )
    if not several:
        return addresses
    listen = network.listen_address() if network else _resolve(home.listen or home.address)
    for_samples, for_weights = network.ports if network else (home.port, home.port + 1)
    return replace(
        addresses,
        controller_outside=f"tcp://{host_port(listen, for_samples)}",
        publisher_outside=f"tcp://{host_port(listen, for_weights)}",
    )


def _unix_socket(path: Path) -> str:
    """Return the ZeroMQ address of a Unix socket.

    Raises:
        RunFailed: the system takes no path of that length.
    """
    if len(str(path).encode()) > LONGEST_SOCKET_PATH:
        raise RunFailed(f"{path} is too long for a socket ({LONGEST_SOCKET_PATH} bytes): set TMPDIR to a shorter path")
    return f"ipc://{path}"


def check_sockets() -> Iterable[str]:
    """Check that the launcher's folder for sockets can be made, and that its path is short enough."""
    try:
        with ScratchFolder() as folder:
            _unix_socket(folder / SOCKET_OF_VLLM)
    except RunFailed as error:
        yield str(error)
    except OSError as error:
        yield f"cannot make a temporary folder in {tempfile.gettempdir()}: {error.strerror}; set TMPDIR to another one"


def _with_relays(addresses: Addresses, cluster: ClusterConfig, site: str) -> Addresses:
    """Add the relays through which generating sites pass on weights (an emulated network has no links for them)."""
    own = cluster.sites[site]
    outside = f"tcp://{host_port(_resolve(own.listen or own.address), own.port)}" if own.port else ""
    relays = {
        name: f"tcp://{host_port(cluster.sites[name].address, cluster.sites[name].port)}"
        for name in cluster.relays_for(site)
    }
    return replace(addresses, relay_outside=outside, relays=relays)


def _resolve(name: str) -> str:
    """Resolve a host name, because ZeroMQ listens on addresses only.

    Raises:
        RunFailed: it cannot be resolved, or is this machine's own name in a file that gives it a loopback address, as
            many systems do: no other machine could connect.
    """
    try:
        found = resolve(name)
    except OSError as error:
        raise RunFailed(f"cannot resolve {name!r}, the address of this site: {error}") from error
    if is_loopback(found) and not is_loopback(name):
        raise RunFailed(
            f"{name!r}, the address of this site, is {found} here (/etc/hosts), where no other machine can connect: "
            "write `listen: 0.0.0.0`, or the address by which others reach this machine"
        )
    return found
