"""What devices can do: peak rates from vendors' data sheets, each with its source.

Rates are dense (no sparsity) and per device. Prices are inputs with a date, never facts: a cluster file or a user's
hardware file overrides them.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True)
class Price:
    """What a device is assumed to cost where nobody says otherwise."""

    usd_per_hour: float
    date: str
    source: str


@dataclass(frozen=True)
class Device:
    """One GPU type (or this machine's CPU)."""

    name: str
    bf16_tflops: float
    """Dense bf16 matrix rate, 10^12 operations per second."""
    memory_gb: float
    """10^9 bytes."""
    memory_bandwidth_gb_s: float
    """10^9 bytes per second."""
    link_gb_s: float
    """Between devices of one machine, both directions together, 10^9 bytes per second."""
    source: str
    network_gbit_s: float = 100.0
    """A device's share of its machine's network to others of the site, each way, 10^9 bits per second."""
    network_source: str = "assumption: 100 Gbit/s per device"
    per_machine: int = 8
    """Devices of one machine: what tensor parallelism and fast links reach."""
    price: Price | None = None

    def __post_init__(self) -> None:
        for key in POSITIVE:
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"device {self.name}: {key} must be a positive number, got {value!r}")
        if self.per_machine != int(self.per_machine):
            raise ValueError(f"device {self.name}: per_machine must be a whole number, got {self.per_machine!r}")
        if self.price is not None and not 0 < self.price.usd_per_hour < math.inf:
            raise ValueError(f"device {self.name}: its price must be positive, got {self.price.usd_per_hour!r} USD/h")


POSITIVE = ("bf16_tflops", "memory_gb", "memory_bandwidth_gb_s", "link_gb_s", "network_gbit_s", "per_machine")

_PAPER_PRICE = "StreamRL, arXiv 2504.15930, table 1: machine cost relative to an H20, not USD"
_CLOUDS = "assumption: order of magnitude of on-demand list prices of GPU clouds, rounded; put your own"


def _cloud(usd_per_hour: float) -> Price:
    return Price(usd_per_hour, "2025-07", _CLOUDS)


_PCIE = "assumption: one 100 Gbit/s adapter for the 8 devices of a machine"

CATALOGUE: dict[str, Device] = {
    device.name: device
    for device in (
        Device(
            *("H20", 148.0, 96.0, 4000.0, 900.0, "StreamRL, arXiv 2504.15930, table 1"),
            *(12.5, "StreamRL, arXiv 2504.15930: 100 Gbit/s, taken as one machine's"),
            price=Price(1.0, "2025-04", _PAPER_PRICE),
        ),
        Device(
            *("H800", 989.5, 80.0, 3350.0, 400.0, "StreamRL, arXiv 2504.15930, table 1"),
            *(200.0, "StreamRL, arXiv 2504.15930: 8 x 200 Gbit/s per machine"),
            price=Price(2.85, "2025-04", _PAPER_PRICE),
        ),
        Device(
            *("H100", 989.5, 80.0, 3350.0, 900.0, "NVIDIA H100 SXM data sheet (dense = half of the sparse figure)"),
            *(400.0, "NVIDIA DGX H100 data sheet: 8 x 400 Gbit/s ConnectX-7"),
            price=_cloud(3.0),
        ),
        Device(
            *("H200", 989.5, 141.0, 4800.0, 900.0, "NVIDIA H200 SXM data sheet (dense = half of the sparse figure)"),
            *(400.0, "NVIDIA DGX H200 data sheet: 8 x 400 Gbit/s ConnectX-7"),
            price=_cloud(3.8),
        ),
        Device(
            *("A100-80", 312.0, 80.0, 2039.0, 600.0, "NVIDIA A100 80GB SXM data sheet"),
            *(200.0, "NVIDIA DGX A100 data sheet: 8 x 200 Gbit/s"),
            price=_cloud(1.8),
        ),
        Device(
            *("L40S", 362.05, 48.0, 864.0, 64.0, "NVIDIA L40S data sheet (dense; PCIe gen 4 x16)"),
            *(12.5, _PCIE),
            price=_cloud(0.9),
        ),
        Device(
            *("RTX4090", 165.2, 24.0, 1008.0, 64.0),
            "NVIDIA Ada whitepaper (dense, fp32 accumulation; PCIe gen 4 x16)",
            *(12.5, _PCIE),
            price=_cloud(0.5),
        ),
        Device(
            *("B200", 2250.0, 180.0, 8000.0, 1800.0, "NVIDIA DGX B200 data sheet, per GPU (dense)"),
            *(400.0, "NVIDIA DGX B200 data sheet: 8 x 400 Gbit/s ConnectX-7"),
            price=_cloud(5.5),
        ),
        Device(
            *("MI300X", 1307.4, 192.0, 5300.0, 896.0, "AMD Instinct MI300X data sheet"),
            *(400.0, "assumption: one 400 Gbit/s adapter per device, as in AMD's reference designs"),
            price=_cloud(2.5),
        ),
    )
}

CPU = "cpu"
"""Name of one core of the machine that asks."""
CORE_TFLOPS = 0.1
"""bf16 or fp32 products of one x86 server core: 2 AVX2 units x 8 lanes x 2 operations x 3 GHz."""
CORE_BANDWIDTH_GB_S = 10.0
"""Assumption: a core's share of a server's memory channels (8 x 25 GB/s for 20 cores)."""


def this_cpu() -> Device:
    """One core of this machine, with its share of the memory; rates are estimates (`streamrl calibrate` measures)."""
    cores = os.cpu_count() or 1
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    except (AttributeError, OSError, ValueError):  # not a POSIX system
        memory = 4.0 * cores
    return Device(
        CPU,
        CORE_TFLOPS,
        memory / cores,
        CORE_BANDWIDTH_GB_S,
        2 * CORE_BANDWIDTH_GB_S,
        f"estimate of one of this machine's {cores} cores (AVX2 at 3 GHz); its memory as the system tells it",
        10.0,
        "assumption: 10 Gbit/s",
        cores,
        Price(0.05, "2025-07", "assumption: order of magnitude of a cloud's virtual core"),
    )


def known_devices(overrides: Mapping[str, Device] | None = None) -> dict[str, Device]:
    """The catalogue with this machine's CPU, and on top of them a user's own."""
    return {**CATALOGUE, CPU: this_cpu(), **(overrides or {})}


def device(name: str, devices: Mapping[str, Device] | None = None) -> Device:
    """A device by its name; case, spaces, dashes and an "NVIDIA" in front do not matter.

    Args:
        name: such as "H100" or "RTX 4090".
        devices: to look in; None: the catalogue and this machine's CPU.

    Raises:
        ValueError: it is not in there; the message lists the nearest names and what is.
    """
    among = known_devices() if devices is None else devices
    if name in among:
        return among[name]
    plain = {_plain(known): known for known in among}
    if _plain(name) in plain:
        return among[plain[_plain(name)]]
    close = difflib.get_close_matches(_plain(name), plain, n=3, cutoff=0.5)
    near = f"; did you mean {' or '.join(plain[one] for one in close)}?" if close else ""
    raise ValueError(f"unknown device {name!r}; known: {', '.join(among)}{near}")


def _plain(name: str) -> str:
    kept = "".join(letter for letter in name.lower() if letter.isalnum())
    return kept.removeprefix("nvidia").removeprefix("amd").removeprefix("geforce")


def devices_from(values: Any) -> dict[str, Device]:
    """Devices that a user's file describes: a known name changes the figures that are given, a new one needs all rates.

    Args:
        values: {name: {bf16_tflops, memory_gb, ..., usd_per_hour, source}}.

    Raises:
        ValueError: something else is there, a key is unknown or missing, or a number is not positive.
    """
    if not isinstance(values, Mapping) or not values:
        raise ValueError("expected devices by name, like {H100: {usd_per_hour: 2.1}}")
    allowed = [entry.name for entry in fields(Device) if entry.name not in ("name", "price")]
    allowed += ["usd_per_hour", "price_date", "price_source"]
    needed = [key for key in POSITIVE if key not in ("network_gbit_s", "per_machine")]
    found, made = known_devices(), {}
    for name, given in values.items():
        if not isinstance(name, str) or not isinstance(given, Mapping):
            raise ValueError(f"device {name!r}: expected figures by key, like {{usd_per_hour: 2.1}}, got {given!r}")
        for key in given:
            if key not in allowed:
                close = difflib.get_close_matches(str(key), allowed, n=1)
                near = f", did you mean {close[0]}?" if close else ""
                raise ValueError(f"device {name}: unknown key {key!r}{near}; allowed: {', '.join(allowed)}")
        try:
            old: Device | None = device(name, found)
        except ValueError:
            old = None
        if old is None and (missing := [key for key in needed if key not in given]):
            raise ValueError(f"device {name} is not in the catalogue, so it also needs {', '.join(missing)}")
        price = None if old is None else old.price
        if "usd_per_hour" in given:
            usd = given["usd_per_hour"]
            if isinstance(usd, bool) or not isinstance(usd, int | float):
                raise ValueError(f"device {name}: usd_per_hour must be a positive number, got {usd!r}")
            price = Price(usd, str(given.get("price_date", "undated")), str(given.get("price_source", "user's file")))
        figures: dict[str, Any] = {key: value for key, value in given.items() if key in allowed[: -len(_PRICE_KEYS)]}
        if "source" not in figures:
            changed = ", ".join(key for key in figures if key in POSITIVE)
            kept = f"; the rest: {old.source}" if old else ""
            figures["source"] = f"user's file ({changed}){kept}" if changed or old is None else old.source
        if old is not None:
            made[old.name] = replace(old, price=price, **figures)
        else:
            made[name] = Device(name, price=price, **figures)
    return made


_PRICE_KEYS = ("usd_per_hour", "price_date", "price_source")
