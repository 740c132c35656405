"""The cluster file: which machines there are and what runs on them.

A cluster is a set of *sites*. A site may hold the trainer pool, generation pools, reward workers, or all of
them; exactly one site holds the trainer, and the controller runs beside it.
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


class TrainerPool(StrictModel):
    """The ranks that train: one process each, started by torch's elastic launcher."""

    ranks: int = Field(1, ge=1, description="trainer processes (FSDP2 shards over them)")
    gpu: str = Field("cpu", description="GPU type of every rank, or 'cpu'")
    threads: int = Field(2, ge=1, description="CPU threads per rank (torch intra-op)")
    cores: Cores = None
    price_per_hour: float = Field(0.0, ge=0.0, description="USD per hour and rank")


class GenerationPool(StrictModel):
    """Replicas of a vLLM engine with the same shape."""

    name: PoolName = Field("regular", description="pool name, shown in every rollout row")
    replicas: int = Field(1, ge=1, description="vLLM instances (one process each)")
    gpus_per_replica: int = Field(1, ge=1, description="GPUs (tensor parallel) per instance; CPU: leave at 1")
    gpu: str = Field("cpu", description="GPU type, or 'cpu'")
    threads: int = Field(1, ge=1, description="CPU threads per instance (hardware: cpu)")
    cores: Cores = None
    max_batch: int = Field(64, ge=1, description="most sequences decoded together by one instance")
    kv_cache_gb: float = Field(0.5, gt=0, description="KV cache per instance in GiB (hardware: cpu)")
    gpu_memory_fraction: float = Field(
        0.85, gt=0, le=1, description="share of a GPU's memory for vLLM (hardware: cuda)"
    )
    price_per_hour: float = Field(0.0, ge=0.0, description="USD per hour and replica")


class RewardPool(StrictModel):
    """Worker processes that score completions."""

    workers: int = Field(1, ge=1, description="reward worker processes")


class Site(StrictModel):
    """One datacenter, or one machine."""

    address: str = Field("127.0.0.1", description="address on which this site's services listen")
    port: int = Field(0, ge=0, le=65535, description="controller's port (0: a free one)")
    trainer: TrainerPool | None = None
    generation: list[GenerationPool] = Field(default_factory=list)
    rewards: RewardPool | None = None

    @model_validator(mode="after")
    def _has_a_role(self) -> Self:
        if self.trainer is None and not self.generation:
            raise ValueError("a site needs a 'trainer', a 'generation' pool, or both")
        names = [pool.name for pool in self.generation]
        if len(names) != len(set(names)):
            raise ValueError(f"generation pools of one site need different names, got {names}")
        return self


class ClusterConfig(StrictModel):
    """A whole cluster file."""

    name: str = Field("cluster", pattern=r"^[A-Za-z0-9_.-]{1,60}$")
    hardware: Literal["cpu", "cuda"] = Field(description="what the trainer and the instances run on")
    sites: dict[PoolName, Site] = Field(min_length=1)

    @model_validator(mode="after")
    def _one_trainer(self) -> Self:
        trainers = [name for name, site in self.sites.items() if site.trainer is not None]
        if len(trainers) != 1:
            raise ValueError(f"exactly one site must hold the 'trainer', found {trainers or 'none'}")
        if not any(site.generation for site in self.sites.values()):
            raise ValueError("no site has a 'generation' pool: nothing would generate")
        if len(self.sites) > 1:
            raise ValueError(f"this version runs one site, the file has {len(self.sites)}: {sorted(self.sites)}")
        return self

    @property
    def trainer_site(self) -> str:
        """Name of the site that trains (the controller and the ledger are there too)."""
        return next(name for name, site in self.sites.items() if site.trainer is not None)
