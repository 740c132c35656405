"""The cluster file: which machines there are and what runs on them.

A cluster is a set of *sites* joined by *links*. A site may hold the trainer, generation pools, reward workers, or all
of them; exactly one site holds the trainer, and the controller runs beside it. All other sites connect to that one, so
it alone listens for outside connections.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

PoolName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,30}$")]
GPU_TYPE = r"^[A-Za-z0-9][A-Za-z0-9 ._:+-]{0,63}$"
GpuType = Annotated[str, Field(pattern=GPU_TYPE)]
"""A name that is written into job scripts, so that it must not be able to be anything else there."""


class StrictModel(BaseModel):
    """Base of configuration models: unknown keys are errors, numbers are finite, no booleans; values are read-only."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _no_booleans_for_numbers(cls, values: object) -> object:
        """Turn booleans into text where numbers are expected: they would be taken for 1 and 0."""
        if not isinstance(values, dict):
            return values
        fields = {name: cls.model_fields[name].annotation for name in values if name in cls.model_fields}
        numbers = {name for name, one in fields.items() if _takes(one, (int, float)) and not _takes(one, (bool, Any))}
        return {name: _as_text(value) if name in numbers else value for name, value in values.items()}


def _as_text(value: object) -> object:
    """Return a boolean, or those in a list, as text; anything else as it is."""
    if isinstance(value, list | tuple):
        return [_as_text(one) for one in value]
    return str(value).lower() if isinstance(value, bool) else value


def _takes(annotation: object, types: tuple[object, ...]) -> bool:
    """Return whether a field's annotation is one of these types, or has one among its parts (unions, lists)."""
    return annotation in types or any(_takes(part, types) for part in get_args(annotation))


Cores = Annotated[
    list[Annotated[int, Field(ge=0)]] | None,
    Field(
        min_length=1,
        description="CPU cores that the processes are pinned to, divided among replicas if there are enough: on CPUs "
        "for the threads of each, which it gets; with hardware: cuda for one per GPU and another one, and each replica "
        "gets an equal part; none: any",
    ),
]


class LaunchConfig(StrictModel):
    """The backend that starts a site's processes."""

    backend: Literal["local", "ray"] = Field(
        "local",
        description="local: `streamrl launch` starts them on its machine; ray: Ray places them on its cluster's nodes",
    )
    address: str = Field(
        "auto",
        min_length=1,
        description="address of the Ray cluster, host:port; auto: the cluster that the launcher's node belongs to",
    )


class TrainerPool(StrictModel):
    """The trainer's ranks: one process each, started node by node by `launcher/trainer_ranks.py`."""

    ranks: int = Field(1, ge=1, description="trainer processes, over which FSDP2 shards the model")
    nodes: int = Field(
        1, ge=1, description="machines over which the ranks are spread evenly (needs launch.backend: ray)"
    )
    sharding: Literal["full", "hybrid"] = Field(
        "full",
        description="full: shard over all ranks; hybrid (HSDP): shard inside each node, with a copy on every node",
    )
    tensor_parallel: int = Field(
        1, ge=1, description="ranks that split each layer, by the model's own plan; FSDP shards over the others"
    )
    sequence_parallel: int = Field(
        1,
        ge=1,
        description="ranks that share each row of tokens, for completions whose activations exceed one GPU: each has a "
        "part of the tokens, and in attention a part of the heads (DeepSpeed-Ulysses); FSDP shards over them as well",
    )
    reduce_gradients: Literal["auto", "step", "micro_batch"] = Field(
        "auto",
        description="step: gradients are summed over the ranks once per optimizer step, for which each rank keeps "
        "those of the whole model in fp32; micro_batch: after every micro-batch, so that each keeps its shard alone "
        "(copies of hybrid sharding still once per step); auto: step where the whole gradient takes at most an eighth "
        "of a rank's memory",
    )
    gpu: GpuType = Field("cpu", description="GPU type of every rank, or 'cpu'")
    threads: int = Field(2, ge=1, description="CPU threads per rank (torch intra-op)")
    cores: Cores = None
    price_per_hour: float = Field(0.0, ge=0.0, description="USD per rank and hour")

    @property
    def sharing(self) -> int:
        """Number of adjacent ranks that get the same micro-batches, as they share layers or rows."""
        return self.tensor_parallel * self.sequence_parallel


class GenerationPool(StrictModel):
    """A pool of vLLM instances of the same shape."""

    name: PoolName = Field("regular", description="pool name, shown in every rollout row")
    replicas: int = Field(1, ge=1, description="vLLM instances at the start of a run")
    min_replicas: int = Field(
        1, ge=1, description="fewest instances to which `streamrl scale` or elasticity may shrink the pool"
    )
    max_replicas: int | None = Field(
        None,
        ge=1,
        description="most instances to which they may grow the pool, for which the site has devices; none: `replicas`",
    )
    gpus_per_replica: int = Field(
        1, ge=1, description="tensor-parallel size: GPUs (on CPU: processes) over which an instance splits its model"
    )
    nodes: int = Field(
        1, ge=1, description="machines over which an instance's GPUs are spread evenly (needs launch.backend: ray)"
    )
    gpu: GpuType = Field("cpu", description="GPU type of every instance, or 'cpu'")
    threads: int = Field(1, ge=1, description="CPU threads of each process of an instance (gpu: cpu)")
    cores: Cores = None
    max_batch: int = Field(64, ge=1, description="most sequences that an instance decodes at once")
    kv_cache_gb: float = Field(0.5, gt=0, description="KV cache per instance in GiB (hardware: cpu)")
    gpu_memory_fraction: float = Field(
        0.85, gt=0, le=1, description="share of each GPU's memory that vLLM may use (hardware: cuda)"
    )
    price_per_hour: float = Field(0.0, ge=0.0, description="USD per instance and hour")

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
        """Most instances that the pool may have."""
        return self.replicas if self.max_replicas is None else self.max_replicas


class RewardPoolConfig(StrictModel):
    """Worker processes that score completions."""

    workers: int = Field(1, ge=1, description="reward worker processes")


class AgentPoolConfig(StrictModel):
    """Processes that lead the episodes of agents: one with their endpoint, its workers, and those of environments."""

    workers: int = Field(1, ge=1, description="agent worker processes; each leads many episodes at once")
    cores: Cores = Field(None, description="CPU cores that all of them, environments included, are pinned to")


class MetricsEndpoint(StrictModel):
    """The page of metrics that a site's launcher serves for Prometheus, at /metrics."""

    port: int = Field(9464, ge=0, le=65535, description="port to listen at; 0: any free one")
    listen: str = Field(
        "127.0.0.1",
        min_length=1,
        description="address to listen at; any other than this machine's loopback needs a token_file",
    )
    token_file: str | None = Field(
        None,
        min_length=1,
        description="file with the token that a scraper sends (Authorization: Bearer TOKEN), readable by its owner "
        "only; a relative path counts from the folder in which `streamrl launch` is called; none: no token",
    )


class Site(StrictModel):
    """One datacenter, or one machine."""

    address: str = Field(
        "127.0.0.1",
        min_length=1,
        description="host name or address (IPv4 or IPv6) at which other sites reach this site; a name that has both is "
        "reached by IPv4",
    )
    listen: str = Field(
        "",
        description="address on which to listen for other sites, e.g. 0.0.0.0, or '::' for IPv6 as well; empty: "
        "`address`",
    )
    port: int = Field(
        0,
        ge=0,
        le=65534,
        description="trainer's site: the port at which other sites reach the controller, or on Ray its nodes; weights "
        "use the next one (0: any free ports, one site only); other sites: the port from which further sites can fetch "
        "weights (0: they cannot)",
    )
    launch: LaunchConfig = Field(default_factory=LaunchConfig)
    trainer: TrainerPool | None = None
    generation: list[GenerationPool] = Field(default_factory=list)
    rewards: RewardPoolConfig | None = None
    agents: AgentPoolConfig = Field(
        default_factory=AgentPoolConfig, description="used in runs that have a task of kind `agent`"
    )

    metrics: MetricsEndpoint | None = Field(
        None, description="metrics for Prometheus, of all processes that the site's launcher starts; none: not served"
    )

    @property
    def on_ray(self) -> bool:
        """Whether Ray places the site's processes, instead of the launcher running them on its machine."""
        return self.launch.backend == "ray"

    @field_validator("address", "listen")
    @classmethod
    def _without_brackets(cls, host: str) -> str:
        """Return an IPv6 address as such: brackets only part it from a port."""
        return host[1:-1] if host.startswith("[") and host.endswith("]") else host

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
        if self.trainer is not None and self.trainer.ranks // self.trainer.nodes % self.trainer.sequence_parallel:
            raise ValueError(
                f"trainer: ranks of a node ({self.trainer.ranks // self.trainer.nodes}) must be a multiple of "
                f"sequence_parallel ({self.trainer.sequence_parallel})"
            )
        if self.trainer is not None and self.trainer.sequence_parallel > 1 and self.trainer.tensor_parallel > 1:
            raise ValueError(
                f"trainer: sequence_parallel is {self.trainer.sequence_parallel} and tensor_parallel "
                f"{self.trainer.tensor_parallel}: expected 1 for one of them; both together are not proven"
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
    """The network link between two sites, the same in both directions."""

    between: tuple[PoolName, PoolName] = Field(description="names of the two sites")
    bandwidth_gbit_s: float = Field(gt=0, le=1e9, description="bandwidth in each direction, 10^9 bits per second")
    rtt_ms: float = Field(ge=0, description="round-trip time in milliseconds")
    loss: float = Field(0.0, ge=0, lt=0.5, description="share of packets lost (used by --emulate only)")
    weight_share: float = Field(
        0.8, gt=0, le=1, description="share of the bandwidth that weights may use; the rest is kept for samples"
    )
    price_per_gb: float = Field(0.0, ge=0, description="USD per 10^9 bytes sent")

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth in each direction, bytes per second."""
        return self.bandwidth_gbit_s * 1e9 / 8

    @property
    def rtt_s(self) -> float:
        """Round-trip time in seconds."""
        return self.rtt_ms / 1e3


class Security(StrictModel):
    """Security of the connections between sites; those inside a site have keys of their run."""

    encryption: Literal["curve", "none"] = Field(
        "curve",
        description="curve: encrypt, and admit known sites only; none: for networks that already do both",
    )
    keys: str = Field("keys", description="folder with the sites' keys (`streamrl keys`), relative to this file")


class Emulation(StrictModel):
    """The CPU processes that `launch --emulate` starts on this machine in place of each pool."""

    replicas: int = Field(1, ge=1, description="most instances per generation pool")
    threads: int = Field(1, ge=1, description="CPU threads of each process of an instance")
    trainer_ranks: int = Field(1, ge=1, description="most trainer processes")
    trainer_threads: int = Field(2, ge=1, description="CPU threads per trainer process")
    max_batch: int = Field(32, ge=1, description="upper bound on a pool's max_batch")
    kv_cache_gb: float = Field(0.25, gt=0, description="upper bound on a pool's kv_cache_gb (GiB)")


class ClusterConfig(StrictModel):
    """The cluster file."""

    name: str = Field("cluster", pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,59}$")
    hardware: Literal["cpu", "cuda"] = Field(description="device type of the trainer and the instances")
    # the keys' pattern alone would leave a schema's checker free to accept other names
    sites: dict[PoolName, Site] = Field(min_length=1, json_schema_extra={"additionalProperties": False})
    links: list[SiteLink] = Field(
        default_factory=list,
        description="one link between the trainer's site and each other site; further ones where sites pass on weights",
    )
    absence_s: float = Field(
        600.0,
        gt=0,
        description="seconds for which a site may be unreachable before the run ends; at the start at least "
        "`deadlines.startup_s` of the run file",
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
    def _different_names(self) -> Self:
        pools: dict[str, str] = {}
        for site_name, site in self.sites.items():
            for pool in site.generation:
                name, here = f"{site_name}-{pool.name}", f"sites.{site_name}.generation ({pool.name})"
                if (other := pools.setdefault(name, here)) != here:
                    raise ValueError(
                        f"{other} and {here} would both have an instance {name}-0: expected different names; rename "
                        "one of these pools or sites"
                    )
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
        """Return the link between the trainer's site and another one; None for the trainer's site itself."""
        return self.link_between(site, self.trainer_site)

    def link_between(self, site: str, other: str) -> SiteLink | None:
        """Return the link between two sites; None: there is none."""
        return next((link for link in self.links if set(link.between) == {site, other}), None)

    def relays_for(self, site: str) -> list[str]:
        """List the sites that can pass weights on to a site; none can to the trainer's, where they are made."""
        others = [name for name in self.remote_sites if site not in (name, self.trainer_site) and self.sites[name].port]
        return [name for name in others if self.link_between(site, name) is not None]

    @property
    def remote_sites(self) -> list[str]:
        """Names of the sites that do not train."""
        return [name for name in self.sites if name != self.trainer_site]

    @property
    def trainer_site(self) -> str:
        """Name of the site that trains, which also has the controller and the ledger."""
        return next(name for name, site in self.sites.items() if site.trainer is not None)

    @property
    def trainer(self) -> TrainerPool:
        """The trainer, which `trainer_site` holds."""
        trainer = self.sites[self.trainer_site].trainer
        assert trainer is not None
        return trainer
