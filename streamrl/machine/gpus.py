"""The NVIDIA GPUs of this machine, as nvidia-smi lists them."""

from __future__ import annotations

import shutil
import subprocess

from streamrl.errors import UserError

ANSWER_S = 30
"""Seconds within which nvidia-smi must answer; with eight idle GPUs it takes several."""


def count_gpus() -> int:
    """Count the GPUs.

    Raises:
        UserError: nvidia-smi does not answer.
    """
    return sum(line.startswith("GPU ") for line in _nvidia_smi("--list-gpus"))


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
