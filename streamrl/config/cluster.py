"""The cluster file: which machines there are and what runs on them.

A cluster is a set of *sites*, joined by *links*. A site may hold the trainer pool, generation pools, reward workers, or
all of them; exactly one site holds the trainer, and the controller runs beside it. All others connect to that one, so
it alone listens to the outside.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

PoolName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,30}$")]


class StrictModel(BaseModel):
    """Unknown keys are errors, values cannot be changed after the file was read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Cores = Annotated[
    list[Annotated[int, Field(ge=0)]] | None,
    Field(
        min_length=1,
        description="CPU cores that its processes are pinned to (hardware: cpu), shared out among replicas if there "
        "are enough for the threads of each; none: any",
    ),
]


class LaunchConfig(StrictModel):
    """Who starts a site's processes."""

    backend: Literal["local", "ray"] = Field(
        "local", description="local: `streamrl launch` itself, on its machine; ray: Ray, over the nodes of its cluster"
    )
    address: str = Field("auto", min_length=1, description="of the Ray cluster, host:port; auto: the one of this node")


class TrainerPool(StrictModel):
    """The ranks that train: one process each, started by torch's elastic launcher."""

    ranks: int = Field(1, ge=1, description="trainer processes (FSDP2 shards over them)")
    nodes: int = Field(1, ge=1, description="machines that the ranks are spread over evenly (launch.backend: ray)")
    sharding: Literal["full", "hybrid"] = Field(
        "full", description="full: over all ranks; hybrid (HSDP): inside each node, with a copy on every node"
    )
    tensor_parallel: int = Field(
        1, ge=1, description="ranks that share each layer, by the model's own plan; FSDP shards over the others"
    )
    gpu: str = Field("cpu", description="GPU type of every rank, or 'cpu'")
    threads: int = Field(2, ge=1, description="CPU threads per rank (torch intra-op)")
    cores: Cores = None
    price_per_hour: float = Field(0.0, ge=0.0, description="USD per hour and rank")


class GenerationPool(StrictModel):
    """Replicas of a vLLM engine with the same shape."""

    name: PoolName = Field("regular", description="pool name, shown in every rollout row")
    replicas: int = Field(1, ge=1, description="vLLM instances (one process each) that a run begins with")
    min_replicas: int = Field(1, ge=1, description="fewest that `streamrl scale` and the run's own elasticity leave")
    max_replicas: int | None = Field(
        None, ge=1, description="most that they may make of it: what the site has devices for; none: `replicas`"
    )
    gpus_per_replica: int = Field(
        1, ge=1, description="tensor parallel: GPUs that share an instance's model (CPU: processes that do)"
    )
    nodes: int = Field(
        1, ge=1, description="machines that the GPUs of one instance are spread over evenly (launch.backend: ray)"
    )
    gpu: str = Field("cpu", description="GPU type, or 'cpu'")
    threads: int = Field(1, ge=1, description="CPU threads per instance (hardware: cpu)")
    cores: Cores = None
    max_batch: int = Field(64, ge=1, description="most sequences decoded together by one instance")
    kv_cache_gb: float = Field(0.5, gt=0, description="KV cache per instance in GiB (hardware: cpu)")
    gpu_memory_fraction: float = Field(
        0.85, gt=0, le=1, description="share of a GPU's memory for vLLM (hardware: cuda)"
    )
    price_per_hour: float = Field(0.0, ge=0.0, description="USD per hour and replica")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if not self.min_replicas <= self.replicas <= self.most_replicas:
            raise ValueError(
                f"expected min_replicas <= replicas <= max_replicas, got {self.min_replicas}, {self.replicas}, "
                f"{self.most_replicas}"
            )
        if self.gpus_per_replica % self.nodes:
            raise ValueError(f"gpus_per_replica ({self.gpus_per_replica}) must be a multiple of nodes ({self.nodes})")
        return self

    @property
    def most_replicas(self) -> int:
        """Instances that the site has room for."""
        return self.replicas if self.max_replicas is None else self.max_replicas


class RewardPoolConfig(StrictModel):
    """Worker processes that score completions."""

    workers: int = Field(1, ge=1, description="reward worker processes")


class Site(StrictModel):
    """One datacenter, or one machine."""

    address: str = Field(
        "127.0.0.1", min_length=1, description="host name or address at which other sites reach this one"
    )
    listen: str = Field("", description="address to listen on for other sites, e.g. 0.0.0.0; none: `address`")
    port: int = Field(
        0,
        ge=0,
        le=65534,
        description="at the trainer's site the controller's port, and the one after it for weights (0: free ones, if "
        "there is one site); elsewhere the port at which other sites can get weights from this one (0: they cannot)",
    )
    launch: LaunchConfig = Field(default_factory=LaunchConfig)
    trainer: TrainerPool | None = None
    generation: list[GenerationPool] = Field(default_factory=list)
    rewards: RewardPoolConfig | None = None

    @property
    def on_ray(self) -> bool:
        """Whether its processes are on the nodes of a Ray cluster, not all on the launcher's machine."""
        return self.launch.backend == "ray"

    @model_validator(mode="after")
    def _has_a_role(self) -> Self:
        if self.trainer is None and not self.generation:
            raise ValueError("a site needs a 'trainer', a 'generation' pool, or both")
        if self.trainer is not None and self.trainer.ranks % self.trainer.nodes:
            raise ValueError(f"trainer.ranks ({self.trainer.ranks}) must be a multiple of nodes ({self.trainer.nodes})")
        if self.trainer is not None and self.trainer.ranks // self.trainer.nodes % self.trainer.tensor_parallel:
            raise ValueError(
                f"trainer: ranks of a node ({self.trainer.ranks // self.trainer.nodes}) must be a multiple of "
                f"tensor_parallel ({self.trainer.tensor_parallel})"
            )
        if self.trainer is not None and self.trainer.nodes > 1 and not self.on_ray:
            raise ValueError(f"trainer.nodes is {self.trainer.nodes}: more than one needs launch: {{backend: ray}}")
        for pool in self.generation:
            if pool.nodes > 1 and not self.on_ray:
                raise ValueError(
                    f"generation pool {pool.name}: nodes is {pool.nodes}: more than one needs launch: {{backend: ray}}"
                )
        names = [pool.name for pool in self.generation]
        if len(names) != len(set(names)):
            raise ValueError(f"generation pools of one site need different names, got {names}")
        return self


class SiteLink(StrictModel):
    """What two sites are connected by: the same in both directions."""

    between: tuple[PoolName, PoolName] = Field(description="names of two sites")
    bandwidth_gbit_s: float = Field(gt=0, description="10^9 bits per second in each direction")
    rtt_ms: float = Field(ge=0, description="there and back, milliseconds")
    loss: float = Field(0.0, ge=0, lt=0.5, description="share of packets that are lost (only --emulate uses it)")
    weight_share: float = Field(
        0.8, gt=0, le=1, description="share of the bandwidth that weights may use; the rest stays free for samples"
    )
    price_per_gb: float = Field(0.0, ge=0, description="USD per 10^9 bytes")

    @property
    def bytes_per_s(self) -> float:
        """In each direction."""
        return self.bandwidth_gbit_s * 1e9 / 8

    @property
    def rtt_s(self) -> float:
        """Seconds there and back."""
        return self.rtt_ms / 1e3


class Security(StrictModel):
    """Of the connections between sites; those inside a site stay on its own network."""

    encryption: Literal["curve", "none"] = Field(
        "curve", description="curve: encrypted, and only known sites are let in; none: for networks that do it already"
    )
    keys: str = Field("keys", description="folder with the sites' keys (`streamrl keys`), relative to this file")


class Emulation(StrictModel):
    """What `launch --emulate` puts on this machine in place of each pool: CPU processes."""

    replicas: int = Field(1, ge=1, description="instances per generation pool at most")
    threads: int = Field(1, ge=1, description="CPU threads of each instance")
    trainer_ranks: int = Field(1, ge=1, description="trainer processes at most")
    trainer_threads: int = Field(2, ge=1, description="CPU threads of each")
    max_batch: int = Field(32, ge=1, description="most sequences decoded together by one instance, at most")
    kv_cache_gb: float = Field(0.25, gt=0, description="KV cache of each instance in GiB, at most")


class ClusterConfig(StrictModel):
    """A whole cluster file."""

    name: str = Field("cluster", pattern=r"^[A-Za-z0-9_.-]{1,60}$")
    hardware: Literal["cpu", "cuda"] = Field(description="what the trainer and the instances run on")
    sites: dict[PoolName, Site] = Field(min_length=1)
    links: list[SiteLink] = Field(
        default_factory=list,
        description="one between the trainer's site and every other one; more where sites can pass weights on",
    )
    absence_s: float = Field(
        600.0, gt=0, description="seconds that a site may be away, at the start or later, before the run ends"
    )
    security: Security = Field(default_factory=Security)
    emulation: Emulation = Field(default_factory=Emulation)

    @model_validator(mode="after")
    def _one_trainer(self) -> Self:
        trainers = [name for name, site in self.sites.items() if site.trainer is not None]
        if len(trainers) != 1:
            raise ValueError(f"exactly one site must hold the 'trainer', found {trainers or 'none'}")
        if not any(site.generation for site in self.sites.values()):
            raise ValueError("no site has a 'generation' pool: nothing would generate")
        return self

    @model_validator(mode="after")
    def _linked(self) -> Self:
        seen: set[frozenset[str]] = set()
        for link in self.links:
            if unknown := [name for name in link.between if name not in self.sites]:
                raise ValueError(f"link {list(link.between)}: no site {unknown[0]!r}; sites: {sorted(self.sites)}")
            ends = frozenset(link.between)
            if len(ends) < 2:
                raise ValueError(f"link {list(link.between)} must join two different sites")
            if ends in seen:
                raise ValueError(f"link {list(link.between)} comes twice; one holds for both directions")
            seen.add(ends)
        if missing := [name for name in self.remote_sites if self.link(name) is None]:
            raise ValueError(
                f"no link between {self.trainer_site!r} (it trains) and {missing[0]!r}: expected "
                f"links: [{{between: [{self.trainer_site}, {missing[0]}], bandwidth_gbit_s: ..., rtt_ms: ...}}]"
            )
        return self

    def link(self, site: str) -> SiteLink | None:
        """Between the trainer's site and another one; None: the same site, or there is none."""
        return self.link_between(site, self.trainer_site)

    def link_between(self, site: str, other: str) -> SiteLink | None:
        """Between two sites; None: there is none."""
        return next((link for link in self.links if set(link.between) == {site, other}), None)

    def relays_for(self, site: str) -> list[str]:
        """Sites, other than the trainer's, that a site can get weights from."""
        others = [name for name in self.remote_sites if name != site and self.sites[name].port]
        return [name for name in others if self.link_between(site, name) is not None]

    @property
    def remote_sites(self) -> list[str]:
        """Names of the sites that do not train."""
        return [name for name in self.sites if name != self.trainer_site]

    @property
    def trainer_site(self) -> str:
        """Name of the site that trains (the controller and the ledger are there too)."""
        return next(name for name, site in self.sites.items() if site.trainer is not None)
