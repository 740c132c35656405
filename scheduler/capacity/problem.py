"""What a plan is made for: GPUs that are offered, links between their sites, and the batch and model of a step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from scheduler.cost.generation_cost import Batch
from scheduler.cost.hardware import Device
from scheduler.cost.model_shapes import Transformer
from scheduler.cost.trainer_work import TrainingWork

DELTA_RATIO = 70.0
"""Ratio of the bytes of full bf16 weights to those of their lossless difference to the previous version: measured at a
learning rate of 5e-6 with settled masters (experiments/results/delta_codec.md).
"""
SAMPLE_BYTES_PER_TOKEN = 12.0
"""Bytes of token, log-probability and version of each token, as they cross a link (`controller/site_services.py`)."""


@dataclass(frozen=True)
class Offer:
    """GPUs of one type in one site."""

    site: str
    device: Device
    count: int
    usd_per_hour: float
    """Price of one GPU; where some cost more than others, their mean."""
    max_batch: int | None = None
    """Largest number of sequences that a replica may decode together; None: as many as its memory holds."""
    trains: bool = True
    """Whether the trainer may run here."""
    generates: bool = True
    tiers: tuple[tuple[int, float], ...] = ()
    """(GPUs, price of each) where some cost more than others, the cheapest first; (): all cost the same."""

    @classmethod
    def at_prices(cls, site: str, device: Device, tiers: Iterable[tuple[int, float]], max_batch: int | None) -> Offer:
        """Return GPUs of which so many have each price."""
        ascending = tuple(sorted(tiers, key=lambda one: one[1]))
        if len(ascending) == 1:
            return cls(site, device, *ascending[0], max_batch)
        count = sum(gpus for gpus, _ in ascending)
        mean = math.fsum(gpus * usd for gpus, usd in ascending) / count
        return cls(site, device, count, mean, max_batch, tiers=ascending)

    def rent(self, gpus: int) -> float:
        """Return the USD per hour of so many of the GPUs, of which the cheapest are taken."""
        if not self.tiers:
            return gpus * self.usd_per_hour
        usd, left = 0.0, gpus
        for count, price in self.tiers:
            usd += min(count, left) * price
            left -= min(count, left)
        return usd

    def __post_init__(self) -> None:
        if self.count < 1 or (self.max_batch is not None and self.max_batch < 1):
            raise ValueError(f"{self.site}: {self.device.name}: counts must be 1 or more, got {self.count}")
        if not 0 < self.usd_per_hour < math.inf:
            raise ValueError(
                f"{self.site}: {self.device.name}: the price must be positive, got {self.usd_per_hour:g} USD/h"
            )

    @property
    def name(self) -> str:
        """Count, type and site, for messages."""
        return f"{self.count} {self.device.name} in {self.site}"


@dataclass(frozen=True)
class Route:
    """A link between two sites."""

    bytes_per_s: float
    """Bandwidth in each direction."""
    rtt_s: float = 0.0
    usd_per_gb: float = 0.0
    """USD per 10^9 bytes."""
    weight_share: float = 0.8
    """Share of the bandwidth away from the trainer that weights may use."""

    def __post_init__(self) -> None:
        if not 0 < self.bytes_per_s < math.inf:
            raise ValueError(f"a link's bandwidth must be positive, got {self.bytes_per_s:g} bytes/s")
        if self.rtt_s < 0 or self.usd_per_gb < 0 or not 0 < self.weight_share <= 1:
            raise ValueError(
                "a link's round trip and price must not be negative, and its weight_share must be above 0 and at most 1"
            )

    def weight_seconds(self, sent_bytes: float) -> float:
        """Return the seconds in which new weights get over the link."""
        return self.rtt_s + sent_bytes / (self.bytes_per_s * self.weight_share)


@dataclass(frozen=True)
class Problem:
    """Inputs of a plan."""

    model: Transformer
    batch: Batch
    work: TrainingWork
    offers: tuple[Offer, ...]
    routes: tuple[tuple[frozenset[str], Route], ...] = ()
    budget: float = math.inf
    """USD per hour, traffic included."""
    delta_ratio: float = DELTA_RATIO
    """Ratio of the full weights to the bytes that cross a link; 1: full weights are sent."""
    home: str = ""
    """Site that trains now; of plans that are alike, one that trains there is chosen. '': none."""
    sync_every: int = 1
    """Steps between versions of the weights."""
    site_processes: int | None = None
    """Processes of environments at each site that generates; None: the batch's, wherever it is generated."""
    shares_rows: bool = False
    """Whether a trainer's GPUs may share rows of tokens although some offer holds it otherwise (`trainers_of`)."""

    def __post_init__(self) -> None:
        if not self.offers:
            raise ValueError("a plan needs at least one offer of GPUs")
        if not self.budget > 0:
            raise ValueError(f"the budget must be positive, got {self.budget:g} USD/h")
        if not self.delta_ratio >= 1:
            raise ValueError(
                f"delta_ratio must be 1 or more (deltas are not larger than weights), got {self.delta_ratio}"
            )
        if self.site_processes is not None and self.site_processes < 1:
            raise ValueError(f"a site needs one process of environments or more, got {self.site_processes}")

    def batch_at(self, sites: int) -> Batch:
        """Return the batch with the processes of environments that it has where so many sites generate."""
        if self.site_processes is None:
            return self.batch
        return replace(self.batch, environment_processes=self.site_processes * sites)

    def route(self, one: str, other: str) -> Route | None:
        """Return the route between two sites; None: there is none."""
        return next((route for ends, route in self.routes if ends == {one, other}), None)

    @property
    def sent_bytes(self) -> float:
        """Bytes of a version that are sent to one remote site."""
        return self.model.weight_bytes / self.delta_ratio

    def transfer_s(self, offer: int, home: str) -> float:
        """Return the seconds of a version from the site that trains to all GPUs of an offer; infinite: no link.

        One copy goes over the link. From one machine of a site to the others, and there to every GPU, broadcasts are
        pipelined, over each machine's whole network and its fast links.
        """
        site, device = self.offers[offer].site, self.offers[offer].device
        route = None if site == home else self.route(home, site)
        if site != home and route is None:
            return math.inf
        over = 0.0 if route is None else route.weight_seconds(self.sent_bytes)
        network = device.per_machine * device.network_gbit_s * 1e9 / 8
        return over + self.model.weight_bytes * (1 / network + 2 / (device.link_gb_s * 1e9))

    @property
    def sample_bytes(self) -> float:
        """Bytes of a whole batch that comes back from remote sites."""
        tokens = self.batch.samples * (self.batch.mean_length + self.batch.prompt_tokens)
        return tokens * SAMPLE_BYTES_PER_TOKEN
