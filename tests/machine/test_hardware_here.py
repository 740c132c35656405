"""The hardware of a machine is told by its CPU, its cores, and its GPUs if they are used."""

from __future__ import annotations

import pytest

from streamrl.errors import UserError
from streamrl.machine import gpus, hardware_here
from streamrl.machine.cpu import Cpu


def test_hardware_has_its_cpu_its_cores_and_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware_here, "this_cpu", lambda: Cpu("EPYC", frozenset(), ()))
    monkeypatch.setattr(hardware_here, "usable_cores", lambda: 4)
    monkeypatch.setattr(gpus, "_nvidia_smi", lambda *_: ["NVIDIA H200", "NVIDIA H200", "NVIDIA A40", ""])
    assert hardware_here.hardware_here(cuda=False) == "4 cores of EPYC"
    assert hardware_here.hardware_here(cuda=True) == "4 cores of EPYC, NVIDIA A40, NVIDIA H200"


def test_hardware_without_an_answer_of_nvidia_smi_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: str) -> list[str]:
        raise UserError("nvidia-smi does not answer")

    monkeypatch.setattr(gpus, "_nvidia_smi", silent)
    assert "NVIDIA" not in hardware_here.hardware_here(cuda=True)
