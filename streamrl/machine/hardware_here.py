"""Hardware of this machine in words, by which speeds that were measured elsewhere are recognised."""

from __future__ import annotations

from streamrl.errors import UserError
from streamrl.machine.cpu import this_cpu
from streamrl.machine.gpus import gpu_models
from streamrl.machine.own_share import usable_cores


def hardware_here(cuda: bool) -> str:
    """Return the CPU's model, the number of cores that this process may use, and, with `cuda`, the models of the GPUs.

    GPUs are left out where nvidia-smi does not answer, as at a node of Ray that has none.
    """
    gpus: list[str] = []
    if cuda:
        try:
            gpus = gpu_models()
        except UserError:
            gpus = []
    return ", ".join([f"{usable_cores()} cores of {this_cpu().name}", *gpus])
