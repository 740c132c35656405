"""What every process of a run starts from: its run folder, the resolved configuration and the addresses."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from streamrl.config.cluster import ClusterConfig, GenerationPool, SiteLink
from streamrl.config.load import load_resolved
from streamrl.config.run import RunConfig
from streamrl.machine.compute_type import ComputeType, TypeChoice, choose_in_process, wire_type, with_type
from streamrl.machine.engine_settings import EngineChoice, chosen_settings
from streamrl.machine.model_files import resolve_model
from streamrl.run_dir import layout, start_stages
from streamrl.runtime.handshake import agreement
from streamrl.transport.curve import ClientSecurity, ServerSecurity
from streamrl.transport.flow import Flow

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Addresses:
    """ZeroMQ addresses of a run's hubs, as the processes of one site use them."""

    controller: str
    """At the trainer's site, where its own processes reach it; elsewhere, where that site does."""
    publisher: str
    services: dict[str, str]
    """Where its own instances reach it, by site."""
    nccl_port: int = 0
    """Rendezvous port of the NCCL weight path."""
    controller_outside: str = ""
    """At the trainer's site: what the controller listens on for other sites; '': there are none."""
    publisher_outside: str = ""
    relay_outside: str = ""
    """At another site: what its relay listens on for sites that get weights from it; '': it serves none."""
    relays: dict[str, str] = field(default_factory=dict)
    """Where this site reaches the relays of others, by site."""

    def save(self, run_dir: Path) -> None:
        """Writes them where the run's processes look."""
        (run_dir / layout.ADDRESSES).write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(run_dir: Path) -> Addresses:
        """Reads them."""
        return Addresses(**json.loads((run_dir / layout.ADDRESSES).read_text()))


@dataclass(frozen=True)
class RoleContext:
    """Everything that a role is given."""

    name: str
    site: str
    run_dir: Path
    cluster: ClusterConfig
    run: RunConfig
    """In a process that computes, `model.dtype` is the type that it computes in."""
    addresses: Addresses
    resume: bool
    as_written: RunConfig | None = None
    """The run file before `model.dtype: auto` was decided, which all sites have alike; None: nothing was decided."""
    type_choice: TypeChoice | None = None
    """Of a process that computes."""

    @staticmethod
    def load(name: str, site: str, run_dir: Path, resume: bool) -> RoleContext:
        """Reads a run folder. `site` '': the trainer's."""
        cluster, run = load_resolved(run_dir)
        addresses = Addresses.load(run_dir)
        return RoleContext(name, site or cluster.trainer_site, run_dir, cluster, run, addresses, resume)

    def computing(self) -> RoleContext:
        """Decide `model.dtype` for the device of this process; loads torch."""
        choice = choose_in_process(self.run.model, self.cluster.hardware == "cuda")
        log.info("computes in %s", choice)
        return self.computing_in(choice)

    def computing_in(self, choice: TypeChoice) -> RoleContext:
        """The same, with a type that was decided for it."""
        written = self.as_written or self.run
        return replace(self, run=with_type(written, choice), as_written=written, type_choice=choice)

    def say(self, stage: str) -> None:
        """Say what this process does while it starts (see `run_dir/start_stages.py`)."""
        start_stages.say(self.run_dir, self.name, stage)

    @cached_property
    def agreement(self) -> dict[str, Any]:
        """What this process was started with, for other sites to compare; reads the tokenizer's files, once."""
        return agreement(self.cluster, self.as_written or self.run)

    def pool(self, name: str) -> GenerationPool:
        """Of this site."""
        return next(pool for pool in self.cluster.sites[self.site].generation if pool.name == name)

    @property
    def wire_type(self) -> ComputeType:
        """The type that versions of the weights are published in.

        Raises:
            ValueError: this process neither computes nor knows it from the files.
        """
        asked = (self.as_written or self.run).model.dtype
        computed = self.type_choice.dtype if self.type_choice else None
        return wire_type(asked, computed, bool(self.cluster.remote_sites))

    @property
    def type_told(self) -> dict[str, str]:
        """What this process's heartbeats say of the type that it computes in."""
        return {"dtype": self.type_choice.dtype, "dtype_why": self.type_choice.why} if self.type_choice else {}

    def engine_choice(self, pool: GenerationPool) -> EngineChoice:
        """vLLM's settings of a pool's instances on this machine's CPU.

        Raises:
            UserError: the model is not there.
        """
        return chosen_settings(Path(resolve_model(self.run.model.path)), self.run.model.dtype, pool.threads)

    @property
    def one_machine(self) -> bool:
        """Whether all processes of this site are on this machine."""
        return not self.cluster.sites[self.site].on_ray

    @property
    def weights_folder(self) -> Path:
        """Where all processes of this site find versions of the weights."""
        return layout.weights_folder(self.run_dir, self.one_machine)

    @property
    def remote(self) -> bool:
        """Whether this site is another than the trainer's."""
        return self.site != self.cluster.trainer_site

    @property
    def link(self) -> SiteLink | None:
        """Between this site and the trainer's; None: it is the same."""
        return self.cluster.link(self.site)

    @property
    def startup_s(self) -> float:
        """How long others may take to start: other sites as long as they may be away."""
        limit_s = self.run.deadlines.startup_s
        return max(limit_s, self.cluster.absence_s) if self.cluster.remote_sites else limit_s

    @property
    def near(self) -> Flow:
        """To peers of the same site: who is silent there is judged by the fleet (instances) or by the launcher."""
        return Flow(lost_after_s=math.inf)

    def far(self, link: SiteLink, message_bytes: int) -> Flow:
        """To peers behind a link.

        Args:
            link: which.
            message_bytes: of the usual large message.
        """
        return Flow.over(link.bytes_per_s, link.rtt_s, self.cluster.absence_s, message_bytes)

    def server_security(self) -> ServerSecurity | None:
        """What this site lets other sites in by; None: the cluster file has encryption: none.

        Raises:
            UserError: a key is missing, or others can read the secret one.
        """
        security = self.cluster.security
        if security.encryption == "none":
            return None
        others = [site for site in self.cluster.remote_sites if site != self.site]
        return ServerSecurity.load(Path(security.keys), self.site, others)

    def client_security(self, server: str | None = None) -> ClientSecurity | None:
        """What this site connects to another one with; None: unencrypted, or inside a site.

        Args:
            server: the other site; None: the trainer's.

        Raises:
            UserError: a key is missing, or others can read the secret one.
        """
        security = self.cluster.security
        if not self.remote or security.encryption == "none":
            return None
        return ClientSecurity.load(Path(security.keys), self.site, server or self.cluster.trainer_site)
