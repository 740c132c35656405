"""The part of a cluster file that a plan stands for, to be copied."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import yaml

from scheduler.capacity.placement_plan import PlacementPlan
from scheduler.capacity.problem import Offer
from scheduler.cost.generation_cost import GPU_MEMORY_FRACTION
from scheduler.cost.hardware import CPU

STATED = "the cluster file"
"""Source of a price that the cluster file has."""


def site_keys(plan: PlacementPlan, prices: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the keys of the cluster file's sites that give a plan, the trainer's site first.

    Args:
        plan: the plan.
        prices: source of each offer's price; those of the cluster file are repeated.
    """
    offers, time, home = plan.problem.offers, plan.split.time, plan.split.trainer
    used = Counter({home: time.gpus})
    for one in plan.split.generation:
        used[one.offer] += one.gpus
    sites: dict[str, dict[str, Any]] = {offers[number].site: {} for number in used}
    for site, keys in sites.items():
        machines = math.fsum(
            gpus / offers[number].device.per_machine for number, gpus in used.items() if offers[number].site == site
        )
        if machines > 1 + 1e-9 or (site == offers[home].site and time.nodes > 1):
            keys["launch"] = {"backend": "ray"}  # a launcher's own processes are on one machine
    sites[offers[home].site]["trainer"] = {"ranks": time.gpus, **time.keys, **_device_keys(plan, home, prices)}
    for one in plan.split.generation:
        offer, degree = offers[one.offer], one.kind.tensor_parallel
        pools = sites[offer.site].setdefault("generation", [])
        pool: dict[str, Any] = {"name": _free_name(offer, pools), "replicas": one.count, "gpus_per_replica": degree}
        pool["max_batch"] = one.kind.slots
        if offer.device.name != CPU:
            pool["gpu_memory_fraction"] = GPU_MEMORY_FRACTION
        pools.append(pool | _device_keys(plan, one.offer, prices, degree))
    return sites


def as_yaml(sites: dict[str, dict[str, Any]]) -> str:
    """Return sites as they are written in a cluster file, a line for the trainer and for each pool."""
    return yaml.safe_dump({"sites": sites}, default_flow_style=None, sort_keys=False, width=1000)


def _device_keys(plan: PlacementPlan, number: int, prices: Sequence[str], gpus: int = 1) -> dict[str, Any]:
    offer = plan.problem.offers[number]
    keys: dict[str, Any] = {"gpu": offer.device.name}
    if offer.device.name == CPU:
        keys["threads"] = 1  # a plan counts cores
    if prices[number] == STATED or offer.tiers:
        keys["price_per_hour"] = float(f"{gpus * plan.split.price(plan.problem.offers, number):.6g}")
    return keys


def _free_name(offer: Offer, pools: Sequence[dict[str, Any]]) -> str:
    """Return a name for a pool of these GPUs that none of its site has."""
    name = re.sub(r"[^a-z0-9_-]", "-", offer.device.name.lower())[:24]
    name = name if name[:1].isalpha() else f"gpu-{name}"
    same = sum(pool["gpu"] == offer.device.name for pool in pools)
    return f"{name}-{same + 1}" if same else name
