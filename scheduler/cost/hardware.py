"""Hardware catalogue: peak rates that vendors publish, each with the page where it was looked up.

Rates are dense (no sparsity) and per device. Prices are dated inputs, not facts: a cluster file or a user's hardware
file overrides them.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

TENSOR_PARALLEL = (1, 2, 4, 8)
"""Degrees of tensor parallelism to try: the divisors of a machine of 8."""


@dataclass(frozen=True)
class Price:
    """Default price of a device."""

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
    """Memory in 10^9 bytes: all that its driver tells of, which is what a launch compares with."""
    memory_bandwidth_gb_s: float
    """Memory bandwidth in 10^9 bytes per second."""
    link_gb_s: float
    """Rate between devices of one machine, both directions together, 10^9 bytes per second."""
    source: str
    network_gbit_s: float = 100.0
    """A device's share of its machine's network to other machines of the site, each way, 10^9 bits per second."""
    network_source: str = "assumption: 100 Gbit/s per device"
    per_machine: int = 8
    """Devices of one machine, which tensor parallelism and fast links reach. 8 in DGX and HGX machines and in AMD's
    MI300X platform; for cards on PCIe an assumption.
    """
    matmul_share: float = 0.80
    """Share of `bf16_tflops` that the best large product reaches."""
    attention_share: float = 0.35
    """Share of `bf16_tflops` that FlashAttention reaches over the forward and backward pass."""
    shares_source: str = "assumption: those of an H100"
    price: Price | None = None

    def __post_init__(self) -> None:
        for key in POSITIVE:
            value = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(f"device {self.name}: {key} must be a positive number, got {value!r}")
        if self.per_machine != int(self.per_machine):
            raise ValueError(f"device {self.name}: per_machine must be a whole number, got {self.per_machine!r}")
        if max(self.matmul_share, self.attention_share) > 1:
            raise ValueError(f"device {self.name}: matmul_share and attention_share are shares of the peak, at most 1")
        if self.price is not None and not 0 < self.price.usd_per_hour < math.inf:
            raise ValueError(f"device {self.name}: its price must be positive, got {self.price.usd_per_hour!r} USD/h")


POSITIVE = (
    *("bf16_tflops", "memory_gb", "memory_bandwidth_gb_s", "link_gb_s", "network_gbit_s", "per_machine"),
    *("matmul_share", "attention_share"),
)
NEEDED = ("bf16_tflops", "memory_gb", "memory_bandwidth_gb_s", "link_gb_s")
"""Figures that a device of a user's own must have."""

_PAPER = "StreamRL, arXiv 2504.15930, table 1"
_PAPER_PRICE = f"{_PAPER}: machine cost relative to an H20, not USD"
_CLOUDS = "assumption: order of magnitude of on-demand list prices of GPU clouds, rounded; put your own"


def _mib(count: int) -> float:
    """Return 10^9 bytes of `count` MiB.

    The catalogue has `memory.total` of nvidia-smi (rocm-smi for the MI300X), as public logs of such machines show it:
    what data sheets give in GB are GiB, of which drivers keep some.
    """
    return count * 2**20 / 1e9


def _cloud(usd_per_hour: float) -> Price:
    return Price(usd_per_hour, "2025-07", _CLOUDS)


# Where a vendor's own page was not available, the source is the page that repeats its table and that was compared.
_H100 = (
    "HPCTECH, NVIDIA H100 (its copy of NVIDIA's table: 1,979 TFLOPS with sparsity, half of it without), "
    "https://archive-lib.hpctech.co.jp/gpuproduct/nvidia-h100.html"
)
_H200 = (
    "S. Bekman, Machine Learning Engineering, accelerators (989 TFLOPS dense, as the H100; 4.8 TB/s), "
    "https://github.com/stas00/ml-engineering; NVLink: NVIDIA's system description in MLPerf Inference 4.1, "
    "https://github.com/mlcommons/inference_results_v4.1"
)
_A100 = (
    "G. Lockwood, A100 80G SXM4 (from NVIDIA's data sheet; the PCIe card has 1,935 GB/s), "
    "https://glennklockwood.com/garden/processors/A100"
)
_L40S = (
    "Mullet, NVIDIA L40S (copy of NVIDIA's table: 362.05 TFLOPS dense, 733 with sparsity; PCIe gen 4 x16, no NVLink), "
    "https://www.mullet.se/product.html?product_id=355414"
)
_RTX4090 = (
    "NVIDIA Ada GPU architecture 2.02, appendix A, as public repositories quote it (165.2 TFLOPS dense, fp32 "
    "accumulation; 330.3 is the rate with fp16 accumulation), "
    "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf; "
    "link: assumption, PCIe gen 4 x16 as the L40S"
)
_B200 = (
    "G. Lockwood, B200 (HGX at 1,000 W: 2,250 TFLOPS dense), https://glennklockwood.com/garden/processors/B200; "
    "8 TB/s, 1.8 TB/s: Vultr, HGX B200, https://docs.vultr.com/inference-cookbook/cuda/getting-started/hardware-overview"
)
_MI300X = (
    "304 compute units (AMD, https://rocm.docs.amd.com/en/docs-6.2.2/conceptual/gpu-arch/mi300.html) x 2,048 "
    "operations x 2.1 GHz (AMD's data sheet, not looked up); 5.3 TB/s, 896 GB/s (7 links of 128): Yobitel, "
    "https://www.yobitel.com/knowledge-base/amd-mi300x"
)

_DGX = (
    "NVIDIA, DGX BasePOD, core components: 8 single-port ConnectX-7 of up to 400 Gbit/s, https://docs.nvidia.com/"
    "dgx-basepod/reference-architecture-infrastructure-foundation-enterprise-ai/latest/core-components.html"
)
_DGX_A100 = "NVIDIA DGX A100 data sheet (not looked up): 8 single-port ConnectX-6 of 200 Gbit/s"
_ROCM = (
    "AMD, vLLM distributed inference with MoRI: 8 ConnectX-7 for 8 MI300X (up to 400 Gbit/s each), https://rocm.docs."
    "amd.com/en/latest/how-to/rocm-for-ai/inference/benchmark-docker/vllm-mori-distributed.html"
)
_PCIE = "assumption: one 100 Gbit/s adapter for the 8 devices of a machine"

_MAMF = (
    "products: S. Bekman, Machine Learning Engineering, maximum achievable matmul FLOPS in bf16 (A100 SXM 267.9 of "
    "312, H100 and H200 SXM 794.5 of 989, B200 1,745 of 2,250, MI300X 781.9 of 1,300), "
    "https://github.com/stas00/ml-engineering/tree/master/compute/accelerator; "
)
_FLASH_H100 = _MAMF + "attention: FlashAttention-2 on an H100, 35 % (FlashAttention-3, arXiv 2407.08608, abstract)"
_FLASH_A100 = _MAMF + "attention: FlashAttention-2 on an A100, 50 to 73 % (arXiv 2307.08691, abstract), the middle"
_OTHER_FLASH = _MAMF + "attention: assumption, that of an H100"
_AS_H100 = _FLASH_H100 + "; that this GPU reaches the same is an assumption"

CATALOGUE: dict[str, Device] = {
    device.name: device
    for device in (
        Device(
            *("H20", 148.0, _mib(97_871), 4000.0, 900.0, _PAPER),
            *(12.5, "StreamRL, arXiv 2504.15930: 100 Gbit/s, taken as one machine's"),
            matmul_share=0.803,
            attention_share=0.35,
            shares_source=_AS_H100,
            price=Price(1.0, "2025-04", _PAPER_PRICE),
        ),
        Device(
            *("H800", 989.5, _mib(81_559), 3350.0, 400.0, _PAPER),
            *(200.0, "StreamRL, arXiv 2504.15930: 8 x 200 Gbit/s per machine"),
            matmul_share=0.803,
            attention_share=0.35,
            shares_source=_AS_H100,
            price=Price(2.85, "2025-04", _PAPER_PRICE),
        ),
        Device(
            *("H100", 989.5, _mib(81_559), 3350.0, 900.0, _H100, 400.0, _DGX),
            *(8, 0.803, 0.35, _FLASH_H100),
            price=_cloud(3.0),
        ),
        Device(
            *("H200", 989.5, _mib(143_771), 4800.0, 900.0, _H200, 400.0, _DGX),
            *(8, 0.803, 0.35, _FLASH_H100),
            price=_cloud(3.8),
        ),
        Device(
            "A100-80",
            312.0,
            _mib(81_920),
            2039.0,
            600.0,
            _A100,
            200.0,
            _DGX_A100,
            8,
            0.859,
            0.6,
            _FLASH_A100,
            price=_cloud(1.8),
        ),
        Device("L40S", 362.05, _mib(46_068), 864.0, 64.0, _L40S, 12.5, _PCIE, price=_cloud(0.9)),
        Device("RTX4090", 165.2, _mib(24_564), 1008.0, 64.0, _RTX4090, 12.5, _PCIE, price=_cloud(0.5)),
        Device(
            *("B200", 2250.0, _mib(183_359), 8000.0, 1800.0, _B200, 400.0, _DGX),
            *(8, 0.776, 0.35, _OTHER_FLASH),
            price=_cloud(5.5),
        ),
        Device(
            "MI300X",
            1307.4,
            _mib(196_592),
            5300.0,
            896.0,
            _MI300X,
            400.0,
            _ROCM,
            8,
            0.601,
            0.35,
            _OTHER_FLASH,
            price=_cloud(2.5),
        ),
    )
}

CPU = "cpu"
"""Name of one core of the local machine."""
CORE_TFLOPS = 0.1
"""bf16 or fp32 rate of one x86 server core (assumption: 2 AVX2 units x 8 lanes x 2 operations x 3 GHz)."""
CORE_BANDWIDTH_GB_S = 10.0
"""A core's share of a server's memory channels (assumption: 8 x 25 GB/s for 20 cores)."""


def this_cpu() -> Device:
    """Return one core of this machine with its share of the memory; its rates are estimates."""
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
        f"estimate of one of this machine's {cores} cores (AVX2 at 3 GHz); its memory as the system reports it",
        10.0,
        "assumption: 10 Gbit/s",
        cores,
        price=Price(0.05, "2025-07", "assumption: order of magnitude of a cloud's virtual core"),
    )


def known_devices(overrides: Mapping[str, Device] | None = None) -> dict[str, Device]:
    """Return the catalogue and this machine's CPU, overridden by a user's own devices."""
    return {**CATALOGUE, CPU: this_cpu(), **(overrides or {})}


def device(name: str, devices: Mapping[str, Device] | None = None) -> Device:
    """Look up a device by its name; case, spaces, dashes and a leading "NVIDIA" do not matter.

    Args:
        name: such as "H100" or "RTX 4090".
        devices: devices to search; None: the catalogue and this machine's CPU.

    Raises:
        ValueError: the name is unknown; the message lists the known names and the nearest ones.
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


def tensor_parallel_degrees(device: Device, heads: int) -> list[int]:
    """Return the degrees of tensor parallelism that divide the heads and stay inside a machine.

    Args:
        device: the GPU.
        heads: heads that may not be split: those of attention for a generator, which may hold copies of KV heads;
            the KV heads for a trainer.
    """
    return [tp for tp in TENSOR_PARALLEL if tp <= device.per_machine and heads % tp == 0]


def machines_of(device: Device, gpus: int, together: int = 1) -> int | None:
    """Return over how many machines a trainer's GPUs are spread evenly, as few as hold them; None: not evenly.

    Args:
        device: the kind of GPU.
        gpus: of the trainer.
        together: GPUs that share layers or rows, which are on one machine.
    """
    machines = math.ceil(gpus / (device.per_machine // together * together))
    return None if gpus % (machines * together) else machines


def peak_tflops(name: str, count: int) -> float | None:
    """Return the dense bf16 peak of `count` devices together, 10^12 operations per second.

    None if the device is not in the catalogue, or is a CPU, whose rate is only an estimate.
    """
    try:
        found = device(name, CATALOGUE)
    except ValueError:
        return None
    return count * found.bf16_tflops


def _plain(name: str) -> str:
    kept = "".join(letter for letter in name.lower() if letter.isalnum())
    return kept.removeprefix("nvidia").removeprefix("amd").removeprefix("geforce")


def devices_from(values: Any) -> dict[str, Device]:
    """Read devices from a user's file: for a known name the given figures change, a new one needs all rates.

    Args:
        values: {name: {bf16_tflops, memory_gb, ..., usd_per_hour, source}}.

    Raises:
        ValueError: the value is not of this form, a device is there in two spellings, a key is unknown or missing, or
            a number is not positive.
    """
    if not isinstance(values, Mapping) or not values:
        raise ValueError("expected devices by name, like {H100: {usd_per_hour: 2.1}}")
    allowed = [entry.name for entry in fields(Device) if entry.name not in ("name", "price")]
    allowed += ["usd_per_hour", "price_date", "price_source"]
    found, made = known_devices(), {}
    spellings: dict[str, str] = {}
    for name, given in values.items():
        if not isinstance(name, str) or not isinstance(given, Mapping):
            raise ValueError(f"device {name!r}: expected figures by key, like {{usd_per_hour: 2.1}}, got {given!r}")
        if (other := spellings.setdefault(_plain(name), name)) != name:
            raise ValueError(f"device {name} is {other} in another spelling: write all its figures below {other}")
        for key in given:
            if key not in allowed:
                close = difflib.get_close_matches(str(key), allowed, n=1)
                near = f", did you mean {close[0]}?" if close else ""
                raise ValueError(f"device {name}: unknown key {key!r}{near}; allowed: {', '.join(allowed)}")
        try:
            old: Device | None = device(name, found)
        except ValueError:
            old = None
        if old is None and (missing := [key for key in NEEDED if key not in given]):
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
