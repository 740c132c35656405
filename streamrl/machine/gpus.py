"""The NVIDIA GPUs of this machine, as nvidia-smi lists them, and those of them that this user may use."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence

from streamrl.errors import UserError

ANSWER_S = 30
"""Seconds within which nvidia-smi must answer; with eight idle GPUs it takes several."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Environment variable with the devices that a process may use, in its own order."""
NAME = re.compile(r"UUID: ((?:GPU|MIG)-[^)\s]+)")


def gpu_names() -> list[str]:
    """List the names (UUIDs) of the GPUs in the order of their numbers, then those of their MIG parts.

    Raises:
        UserError: nvidia-smi does not answer.
    """
    found = [name for line in _nvidia_smi("--list-gpus") for name in NAME.findall(line)]
    return sorted(found, key=lambda name: name.startswith("MIG-"))


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
        if device.isdecimal():
            found = gpus[int(device) : int(device) + 1]
        else:  # CUDA takes the beginning of a name
            found = [name for name in names if device and name.startswith(device)]
        if len(found) != 1:
            has = f"GPUs 0 to {len(gpus) - 1} ({', '.join(names)})" if gpus else "no GPU"
            raise UserError(f"{VISIBLE}={setting}: expected numbers or names of devices, got {device!r}; it has {has}")
        if other := known.get(found[0]):
            raise UserError(f"{VISIBLE}={setting}: {other} and {device} are one device")
        known[found[0]] = device
    return devices


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


def _entries(setting: str) -> list[str]:
    return [entry.strip() for entry in setting.split(",")] if setting.strip() else []


def oldest_compute_capability() -> tuple[int, int] | None:
    """Return the lowest compute capability of the GPUs; None: unknown.

    Raises:
        UserError: nvidia-smi does not answer.
    """
    found = []
    for line in _nvidia_smi("--query-gpu=compute_cap", "--format=csv,noheader"):
        major, _, minor = line.strip().partition(".")
        if major.isdigit() and minor.isdigit():
            found.append((int(major), int(minor)))
    return min(found, default=None)


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
