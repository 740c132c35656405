"""What devices can do: peak rates from vendors' data sheets, each with its source.

Rates are dense (no sparsity) and per device. Prices are inputs with a date, never facts: a cluster file overrides them.
"""

from __future__ import annotations

from dataclasses import dataclass


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


CATALOGUE: dict[str, Device] = {
    device.name: device
    for device in (
        Device("H20", 148.0, 96.0, 4000.0, 900.0, "StreamRL, arXiv 2504.15930, table 1"),
        Device("H800", 989.5, 80.0, 3350.0, 400.0, "StreamRL, arXiv 2504.15930, table 1"),
        Device("H100", 989.5, 80.0, 3350.0, 900.0, "NVIDIA H100 SXM data sheet (dense = half of the sparse figure)"),
        Device("H200", 989.5, 141.0, 4800.0, 900.0, "NVIDIA H200 SXM data sheet (dense = half of the sparse figure)"),
        Device("A100-80", 312.0, 80.0, 2039.0, 600.0, "NVIDIA A100 80GB SXM data sheet"),
        Device("L40S", 362.05, 48.0, 864.0, 64.0, "NVIDIA L40S data sheet (dense; PCIe gen 4 x16)"),
        Device(
            "RTX4090", 165.2, 24.0, 1008.0, 64.0, "NVIDIA Ada whitepaper (dense, fp32 accumulation; PCIe gen 4 x16)"
        ),
        Device("B200", 2250.0, 180.0, 8000.0, 1800.0, "NVIDIA DGX B200 data sheet, per GPU (dense)"),
        Device("MI300X", 1307.4, 192.0, 5300.0, 896.0, "AMD Instinct MI300X data sheet"),
    )
}


def device(name: str) -> Device:
    """A device of the catalogue.

    Raises:
        ValueError: it is not in there; the message lists what is.
    """
    if name not in CATALOGUE:
        raise ValueError(f"unknown device {name!r}; known: {', '.join(CATALOGUE)}")
    return CATALOGUE[name]
