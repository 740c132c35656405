"""The NVIDIA GPUs of this machine, as nvidia-smi lists them, and those of them that this user may use."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from scheduler.cost.hardware import CATALOGUE
from scheduler.cost.hardware import device as known_device
from streamrl.config.cluster import GPU_TYPE
from streamrl.errors import UserError

ANSWER_S = 30
"""Seconds within which nvidia-smi must answer; with eight idle GPUs it takes several."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Environment variable with the devices that a process may use, in its own order."""
ORDER = "CUDA_DEVICE_ORDER"
"""Environment variable with the order in which CUDA numbers devices; its default is the fastest first."""
BY_BUS = "PCI_BUS_ID"
"""The order of nvidia-smi, by which preflight reads what a device is."""
CSV = "--format=csv,noheader,nounits"
DRIVER_CUDA = """
import ctypes
cuda, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
if cuda.cuInit(0) == 0 and cuda.cuDriverGetVersion(ctypes.byref(version)) == 0:
    print(version.value)
"""
"""Program that prints the newest CUDA of the driver's library; nothing where that does not work with the GPUs."""
TYPES = {"NVIDIA H100 80GB HBM3": "H100", "NVIDIA A100-SXM4-80GB": "A100-80"}
"""Types of the cost model's catalogue whose names nvidia-smi words otherwise."""
NAME = re.compile(r"UUID: ((?:GPU|MIG)-[^)\s]+)")


@dataclass(frozen=True)
class Gpu:
    """One GPU, as nvidia-smi describes it."""

    number: int
    uuid: str
    name: str
    total_bytes: float
    used_bytes: float
    """Memory in use now, by anyone."""
    driver: str
    """Version of the driver, such as 570.124.06."""
    users: tuple[str, ...] = ()
    """Processes that compute on it, with their memory."""
    capability: tuple[int, int] | None = None
    """Compute capability, such as (9, 0); None: unknown."""


def gpus_here() -> list[Gpu]:
    """List the GPUs by their numbers.

    Raises:
        UserError: nvidia-smi does not answer.
    """
    found = parse_gpus(
        _nvidia_smi("--query-gpu=uuid,name,memory.total,memory.used,driver_version", CSV),
        _nvidia_smi("--query-compute-apps=gpu_uuid,pid,process_name,used_memory", CSV),
    )
    capabilities = _capabilities()
    return [replace(gpu, capability=capabilities.get(gpu.uuid)) for gpu in found]


def parse_gpus(lines: Iterable[str], processes: Iterable[str]) -> list[Gpu]:
    """Read nvidia-smi's answers to the queries of `gpus_here`; lines that are no answers are passed over.

    >>> parse_gpus(["GPU-a, NVIDIA H200, 143771, 4, 570.124.06"], ["GPU-a, 71, python, 4"])[0].users
    ('python (71) 4 MiB',)
    """
    users: dict[str, list[str]] = {}
    for line in processes:
        parts = [part.strip() for part in line.split(",")]
        if len(parts) >= 4 and parts[1].isdigit():
            memory = f"{parts[-1]} MiB" if parts[-1].isdigit() else "of unknown size"  # containers hide it
            users.setdefault(parts[0], []).append(f"{','.join(parts[2:-1])} ({parts[1]}) {memory}")
    found: list[Gpu] = []
    for line in lines:
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 5 and parts[2].isdigit():
            total, used_bytes = (float(part) * 2**20 if part.isdigit() else 0.0 for part in parts[2:4])
            own = tuple(users.get(parts[0], ()))
            found.append(Gpu(len(found), parts[0], parts[1], total, used_bytes, parts[4], own))
    return found


def gpu_type(gpus: Iterable[Gpu]) -> str | None:
    """Return the type of GPUs, as a cluster file names it (`gpu`); None: there are none, or of several kinds.

    Of a kind that the cost model does not know, it is the name that nvidia-smi gives.

    >>> gpu_type(parse_gpus(["GPU-a, NVIDIA H100 80GB HBM3, 81559, 4, 570.124.06"], []))
    'H100'
    """
    kinds = {gpu.name for gpu in gpus}
    if len(kinds) != 1:
        return None
    (name,) = kinds
    try:
        return known_device(TYPES.get(name, name), CATALOGUE).name
    except ValueError:
        return name.removeprefix("NVIDIA ") if re.fullmatch(GPU_TYPE, name) else None


def pairs_without_peer_access() -> set[tuple[int, int]]:
    """Return the pairs of GPU numbers, the smaller first, that cannot read each other's memory.

    Raises:
        UserError: nvidia-smi does not answer.
    """
    return parse_peers(_nvidia_smi("topo", "-p2p", "r"))


def parse_peers(lines: Iterable[str]) -> set[tuple[int, int]]:
    """Read the matrix of `nvidia-smi topo -p2p r`: rows and columns GPU0, GPU1, ...; OK where a read is possible.

    >>> parse_peers([" 	GPU0	GPU1", " GPU0	X	CNS", " GPU1	CNS	X"])
    {(0, 1)}
    """
    missing = set()
    for line in lines:
        name, *states = re.sub(r"\x1b\[[0-9;]*m", "", line).split() or [""]  # it underlines the header
        row = re.fullmatch(r"GPU(\d+)", name)
        if row is None or (states and states[0].startswith("GPU")):
            continue
        for column, state in enumerate(states):
            if state not in ("X", "OK"):
                missing.add((min(int(row[1]), column), max(int(row[1]), column)))
    return missing


def gpu_names() -> list[str]:
    """List the names (UUIDs) of the GPUs in the order of their numbers, then those of their MIG parts.

    Raises:
        UserError: nvidia-smi does not answer.
    """
    return sorted(_gpus_by_name(), key=lambda name: name.startswith("MIG-"))


def _gpus_by_name() -> dict[str, str]:
    """Return the GPU of each name that nvidia-smi lists: a GPU's own, or that of a MIG part, which follows its GPU."""
    found: dict[str, str] = {}
    gpu = ""
    for name in (name for line in _nvidia_smi("--list-gpus") for name in NAME.findall(line)):
        gpu = gpu if name.startswith("MIG-") else name
        found[name] = gpu
    return found


def gpu_models() -> list[str]:
    """List the models of the GPUs, such as NVIDIA H200, each once and in alphabetical order.

    Raises:
        UserError: nvidia-smi does not answer.
    """
    return sorted({line.strip() for line in _nvidia_smi("--query-gpu=name", "--format=csv,noheader")} - {""})


def usable_devices(setting: str | None, names: Sequence[str]) -> list[str]:
    """List the devices that this user may use, each by its number or name.

    >>> usable_devices("3,1", ["GPU-a", "GPU-b", "GPU-c", "GPU-d"])
    ['3', '1']

    Args:
        setting: value of CUDA_VISIBLE_DEVICES; None: not set, all GPUs.
        names: as `gpu_names`.

    Raises:
        UserError: an entry is no device of this machine, or there twice.
    """
    gpus = [name for name in names if not name.startswith("MIG-")]
    if setting is None:
        return [str(number) for number in range(len(gpus))]
    devices = _entries(setting)
    if devices in (["-1"], ["NoDevFiles"]):  # both mean none
        return []
    known: dict[str, str] = {}
    for device in devices:
        found = _named(device, names)
        if len(found) != 1:
            has = f"GPUs 0 to {len(gpus) - 1} ({', '.join(names)})" if gpus else "no GPU"
            raise UserError(f"{VISIBLE}={setting}: expected numbers or names of devices, got {device!r}; it has {has}")
        if other := known.get(found[0]):
            raise UserError(f"{VISIBLE}={setting}: {other} and {device} are one device")
        known[found[0]] = device
    return devices


def _named(device: str, names: Sequence[str]) -> list[str]:
    """Return the names (as `gpu_names`) that an entry of CUDA_VISIBLE_DEVICES may mean; one, if it is right."""
    if device.isdecimal():
        return [name for name in names if not name.startswith("MIG-")][int(device) : int(device) + 1]
    return [name for name in names if device and name.startswith(device)]  # CUDA takes the beginning of a name


def devices_of_user(positions: Iterable[int], setting: str | None) -> str:
    """Return the CUDA_VISIBLE_DEVICES of a process, given positions in the list of those that this user may use.

    >>> devices_of_user((0, 2), "GPU-7f,5,6")
    'GPU-7f,6'

    Args:
        positions: from 0.
        setting: this user's CUDA_VISIBLE_DEVICES; None: not set, a position is a device's number.

    Raises:
        UserError: the list is too short.
    """
    wanted = list(positions)
    if setting is None:
        return ",".join(map(str, wanted))
    own = _entries(setting)
    if beyond := [position for position in wanted if position >= len(own)]:
        raise UserError(
            f"{VISIBLE}={setting} has {len(own)} devices, and this process needs its number {beyond[0] + 1}"
        )
    return ",".join(own[position] for position in wanted)


def visible_devices() -> list[str]:
    """List the devices of this process, as CUDA_VISIBLE_DEVICES names them; none if it is not set."""
    return _entries(os.environ.get(VISIBLE, ""))


def _entries(setting: str) -> list[str]:
    return [entry.strip() for entry in setting.split(",")] if setting.strip() else []


def oldest_compute_capability() -> tuple[int, int] | None:
    """Return the lowest compute capability of the GPUs that this process may use; None: unknown.

    Raises:
        UserError: nvidia-smi does not answer.
    """
    capabilities, setting = _capabilities(), os.environ.get(VISIBLE)
    if setting is not None:
        gpus = _gpus_by_name()
        names = sorted(gpus, key=lambda name: name.startswith("MIG-"))
        own = {gpus[name] for device in _entries(setting) for name in _named(device, names)}
        capabilities = {gpu: capability for gpu, capability in capabilities.items() if gpu in own}
    return min(capabilities.values(), default=None)


def _capabilities() -> dict[str, tuple[int, int]]:
    """Return the compute capability of each GPU by its name (UUID); {}: the driver is too old to tell."""
    found = {}
    for line in _nvidia_smi("--query-gpu=compute_cap,uuid", CSV):
        capability, _, gpu = (part.strip() for part in line.partition(","))
        major, _, minor = capability.partition(".")
        if major.isdigit() and minor.isdigit():
            found[gpu] = (int(major), int(minor))
    return found


def cuda_of_driver() -> int | None:
    """Return the newest CUDA that the driver's library runs here, 1000 x major + 10 x minor; None: unknown.

    The library may be newer than the driver that nvidia-smi names (CUDA's forward compatibility, as in containers). It
    is loaded in a process of its own: this one keeps no device.
    """
    try:
        done = subprocess.run([sys.executable, "-c", DRIVER_CUDA], capture_output=True, text=True, timeout=ANSWER_S)
    except subprocess.TimeoutExpired:
        return None
    return int(done.stdout) if done.stdout.strip().isdigit() else None


def _nvidia_smi(*options: str) -> list[str]:
    """Return the lines that nvidia-smi prints; none if it is not installed."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{' '.join(command)} did not answer within {ANSWER_S} s") from error
    return done.stdout.splitlines()
