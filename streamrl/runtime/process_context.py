"""The context that every process of a run starts from: run folder, resolved configuration and addresses."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from streamrl.atomic_files import replace_json
from streamrl.config.cluster import ClusterConfig, GenerationPool, SiteLink
from streamrl.config.load import load_resolved
from streamrl.config.run import RunConfig
from streamrl.errors import writing
from streamrl.machine.compute_type import ComputeType, TypeChoice, choose_in_process, wire_type, with_type
from streamrl.machine.engine_settings import settings_note
from streamrl.machine.model_files import resolve_model
from streamrl.run_dir import layout, start_stages
from streamrl.runtime.device_turns import others_start_s
from streamrl.runtime.handshake import agreement
from streamrl.runtime.inside_keys import load_inside_keys
from streamrl.transport.curve import ClientSecurity, KeyPair, ServerSecurity
from streamrl.transport.flow import Flow

log = logging.getLogger(__name__)

MANY = 100_000
"""Messages of a process with results that may be unacknowledged while its site's link is down."""


@dataclass(frozen=True)
class Addresses:
    """Where the processes of one site find each other: ZeroMQ addresses of a run's hubs, and their shared memory."""

    controller: str
    """Address at which this site's processes reach the controller."""
    publisher: str
    services: dict[str, str]
    """Address at which a site's instances reach its service, by site."""
    controller_outside: str = ""
    """Address on which the controller listens for other sites (trainer's site only); '': there are none."""
    publisher_outside: str = ""
    relay_outside: str = ""
    """Address on which this site's weight relay listens for other sites; '': it serves none."""
    relays: dict[str, str] = field(default_factory=dict)
    """Address at which this site reaches another site's relay, by site."""
    inside_keys: dict[str, str] = field(default_factory=dict)
    """Public key of each process of this site and launch, by its name."""
    shared_memory: str = ""
    """Folder in shared memory for weight versions; '': they are in the run folder."""

    def save(self, run_dir: Path) -> None:
        """Replace the addresses in the run folder, which processes may be reading.

        Raises:
            RunFailed: they cannot be written.
        """
        with writing(path := run_dir / layout.ADDRESSES):
            replace_json(path, asdict(self))

    def weights_folder(self, run_dir: Path) -> Path:
        """Return where all processes of this site find weight versions."""
        return Path(self.shared_memory or run_dir / layout.WEIGHTS)

    @staticmethod
    def load(run_dir: Path) -> Addresses:
        """Read the addresses from a run folder."""
        return Addresses(**json.loads((run_dir / layout.ADDRESSES).read_bytes()))


@dataclass(frozen=True)
class RoleContext:
    """Everything a role is given at its start."""

    name: str
    site: str
    run_dir: Path
    cluster: ClusterConfig
    run: RunConfig
    """The run file; in a process that computes, `model.dtype` is its compute type."""
    addresses: Addresses
    resume: bool
    as_written: RunConfig | None = None
    """The run file before `model.dtype: auto` was resolved, the same at all sites; None: nothing was resolved."""
    type_choice: TypeChoice | None = None
    """Compute type of this process and the reason for it; None: it does not compute."""

    @staticmethod
    def load(name: str, site: str, run_dir: Path, resume: bool) -> RoleContext:
        """Read the context from a run folder; `site` '' means the trainer's."""
        cluster, run = load_resolved(run_dir)
        addresses = Addresses.load(run_dir)
        return RoleContext(name, site or cluster.trainer_site, run_dir, cluster, run, addresses, resume)

    def computing(self, device: int = 0) -> RoleContext:
        """Resolve `model.dtype` for the device of this process; imports torch.

        Args:
            device: position of its GPU among those that it sees.
        """
        choice = choose_in_process(self.run.model, self.cluster.hardware == "cuda", device)
        log.info("computes in %s", choice)
        return self.computing_in(choice)

    def computing_in(self, choice: TypeChoice) -> RoleContext:
        """Return this context with a compute type that has been chosen already."""
        written = self.as_written or self.run
        return replace(self, run=with_type(written, choice), as_written=written, type_choice=choice)

    def say(self, stage: str) -> None:
        """Record what this process does while it starts (see `run_dir/start_stages.py`)."""
        start_stages.say(self.run_dir, self.name, stage)

    @cached_property
    def agreement(self) -> dict[str, Any]:
        """Configuration and tokenizer checksums that other sites compare with theirs; read once."""
        return agreement(self.cluster, self.as_written or self.run)

    def pool(self, name: str) -> GenerationPool:
        """Return a generation pool of this site by name."""
        return next(pool for pool in self.cluster.sites[self.site].generation if pool.name == name)

    @property
    def wire_type(self) -> ComputeType:
        """The type in which weight versions are published.

        Raises:
            ValueError: the type is not in the files, and this process does not compute.
        """
        asked = (self.as_written or self.run).model.dtype
        computed = self.type_choice.dtype if self.type_choice else None
        return wire_type(asked, computed, bool(self.cluster.remote_sites))

    @property
    def compute_type_status(self) -> dict[str, str]:
        """Compute type and reason, as this process's heartbeats report them."""
        return {"dtype": self.type_choice.dtype, "dtype_why": self.type_choice.why} if self.type_choice else {}

    def engine_note(self, pool: GenerationPool) -> str:
        """Return the vLLM settings of a pool's instances on this machine's CPU, and what was measured of others.

        Raises:
            UserError: the model is missing.
        """
        return settings_note(Path(resolve_model(self.run.model.path)), self.run.model.dtype, pool.threads)

    @property
    def one_machine(self) -> bool:
        """Whether all processes of this site are on this machine."""
        return not self.cluster.sites[self.site].on_ray

    @property
    def weights_folder(self) -> Path:
        """Folder in which all processes of this site find weight versions."""
        return self.addresses.weights_folder(self.run_dir)

    @property
    def remote(self) -> bool:
        """Whether this is not the trainer's site."""
        return self.site != self.cluster.trainer_site

    @property
    def link(self) -> SiteLink | None:
        """Link between this site and the trainer's; None at the trainer's site."""
        return self.cluster.link(self.site)

    @property
    def startup_s(self) -> float:
        """Seconds that others may take to start, if need be in turns; with several sites at least `absence_s`."""
        return others_start_s(self.cluster, self.run)

    @property
    def local_flow(self) -> Flow:
        """Flow settings inside the site: no limit of silence, as fleet and launcher watch its processes."""
        return Flow(lost_after_s=math.inf)

    @property
    def results_flow(self) -> Flow:
        """Flow to the site's service from processes that have results, which it acknowledges once they are committed.

        While a link is down, the service's own limit, which throttles dispatch, must be reached before this one.
        """
        return replace(self.local_flow, credits=MANY) if self.remote else self.local_flow

    def link_flow(self, link: SiteLink, message_bytes: int) -> Flow:
        """Return the flow settings to peers behind a link; `message_bytes`: size of a typical large message."""
        return Flow.over(link.bytes_per_s, link.rtt_s, self.cluster.absence_s, message_bytes)

    @cached_property
    def inside_keys(self) -> KeyPair:
        """Key pair of this process inside its site.

        Raises:
            UserError: it is missing, open to others, or of another process, site or launch.
        """
        return load_inside_keys(self.run_dir, self.site, self.name, self.addresses.inside_keys)

    def inside_server_security(self) -> ServerSecurity:
        """Return what a hub of this process needs to admit the site's own processes; raises like `inside_keys`."""
        return ServerSecurity(
            self.inside_keys, {key.encode(): name for name, key in self.addresses.inside_keys.items()}
        )

    def inside_client_security(self, server: str) -> ClientSecurity:
        """Return what this process needs to connect to a hub of the process `server`; raises like `inside_keys`."""
        return ClientSecurity(self.inside_keys, self.addresses.inside_keys[server].encode())

    def server_security(self) -> ServerSecurity | None:
        """Load the keys by which this site admits others; None with `encryption: none`.

        Raises:
            UserError: a key is missing, or other users can read the secret key.
        """
        security = self.cluster.security
        if security.encryption == "none":
            return None
        others = [site for site in self.cluster.remote_sites if site != self.site]
        return ServerSecurity.load(Path(security.keys), self.site, others)

    def client_security(self, server: str | None = None) -> ClientSecurity | None:
        """Load the keys with which this site connects to another; None if unencrypted or inside a site.

        Args:
            server: the other site; None: the trainer's.

        Raises:
            UserError: a key is missing, or other users can read the secret key.
        """
        security = self.cluster.security
        if not self.remote or security.encryption == "none":
            return None
        return ClientSecurity.load(Path(security.keys), self.site, server or self.cluster.trainer_site)
