"""The compute type of a process: `model.dtype`, with `auto` resolved for the device at hand.

    CPU    bf16 if the CPU has instructions for it and the probe finds it no slower than fp32; else fp32
    CUDA   bf16 from compute capability 8.0 (Ampere) on; else fp32

Every computing process decides for its own device, so sites may differ, and so may trainer and instances. The type in
which weights are sent is `wire_type`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from streamrl.config.model_and_batch import ModelConfig
from streamrl.config.run import RunConfig
from streamrl.machine.cpu import Cpu, this_cpu
from streamrl.machine.gpus import oldest_compute_capability
from streamrl.machine.model_files import resolve_model
from streamrl.machine.probe import Probe, probe

ComputeType = Literal["bfloat16", "float32"]
AMPERE = (8, 0)
"""The first compute capability with bf16 tensor cores."""
NO_SLOWER = 1.1
"""Largest slowdown of bf16 against fp32 in the probe that still counts as equal (noise); bf16 halves the bytes read and
sent."""
WORTH_A_WARNING = 1.5


@dataclass(frozen=True)
class TypeChoice:
    """A compute type and the reason for it."""

    dtype: ComputeType
    why: str
    warning: str = ""
    """Warning about a type set by hand; '': none."""

    def __str__(self) -> str:
        return f"{self.dtype} ({self.why})"


def choose_for_cpu(asked: Literal["auto"] | ComputeType, cpu: Cpu, found: Probe | None) -> TypeChoice:
    """Choose the type for a CPU.

    Args:
        asked: `model.dtype`.
        cpu: the CPU.
        found: the probe of its matrix products; None: not measured, the instructions alone decide.
    """
    rates = (
        f"{cpu.instructions}; one thread multiplies at {found.bf16_gflops:.3g} GFLOP/s in bfloat16 and "
        f"{found.fp32_gflops:.3g} in float32"
        if found
        else f"{cpu.instructions}; not measured"
    )
    if asked == "auto":
        quick = cpu.has_bf16 and (found is None or found.bf16_slowdown <= NO_SLOWER)
        return TypeChoice("bfloat16" if quick else "float32", rates)
    warning = ""
    if asked == "bfloat16" and found is not None and found.bf16_slowdown > WORTH_A_WARNING:
        warning = (
            f"model.dtype: bfloat16: products take {found.bf16_slowdown:.0f} x as long as in float32 on this CPU "
            f"({cpu.instructions}; {found.bf16_gflops:.3g} against {found.fp32_gflops:.3g} GFLOP/s on one thread); "
            "set model.dtype: auto"
        )
    return TypeChoice(asked, f"model.dtype; {rates}", warning)


def choose_for_cuda(asked: Literal["auto"] | ComputeType, capability: tuple[int, int] | None) -> TypeChoice:
    """Choose the type for a GPU.

    Args:
        asked: `model.dtype`.
        capability: its compute capability; None: unknown, assumed to be recent.
    """
    known = "GPU of unknown compute capability" if capability is None else f"compute capability {dotted(capability)}"
    old = capability is not None and capability < AMPERE
    if asked == "auto":
        return TypeChoice("float32" if old else "bfloat16", known)
    warning = (
        f"model.dtype: bfloat16: {no_bf16(capability)}"
        if asked == "bfloat16" and old and capability is not None
        else ""
    )
    return TypeChoice(asked, f"model.dtype; {known}", warning)


def choose(model: ModelConfig, cuda: bool) -> TypeChoice:
    """Choose the type for this machine before anything starts: for its CPU, or the oldest GPU that this user may use.

    Raises:
        UserError: the model is missing.
    """
    if cuda:
        return choose_for_cuda(model.dtype, oldest_compute_capability())
    return choose_for_cpu(model.dtype, this_cpu(), probe(Path(resolve_model(model.path))))


def with_type(run: RunConfig, choice: TypeChoice) -> RunConfig:
    """Return the run file of a process that computes in this type."""
    return run.model_copy(update={"model": run.model.model_copy(update={"dtype": choice.dtype})})


def decided(run: RunConfig, cuda: bool) -> RunConfig:
    """Return the run file with `model.dtype` resolved for this process's device, to compute outside a run.

    Raises:
        UserError: the model is missing.
    """
    return with_type(run, choose_in_process(run.model, cuda))


def choose_in_process(model: ModelConfig, cuda: bool, device: int = 0) -> TypeChoice:
    """Choose the type for the device of this process.

    Args:
        model: keys of the model.
        cuda: whether GPUs compute.
        device: position of the GPU among those that this process sees.

    Raises:
        UserError: the model is missing.
    """
    if cuda:
        import torch

        return choose_for_cuda(model.dtype, torch.cuda.get_device_capability(device))
    if model.dtype != "auto":
        return TypeChoice(model.dtype, "model.dtype")
    return choose(model, cuda=False)


def wire_type(asked: Literal["auto"] | ComputeType, computed: ComputeType | None, several_sites: bool) -> ComputeType:
    """Return the type in which weight versions are published.

    Every site must know it before it reaches the trainer, so with several sites it follows from the run file alone:
    `auto` is bf16, whose sparse deltas make links bearable. Inside one site it is the trainer's type.

    Args:
        asked: `model.dtype`.
        computed: the trainer's compute type; None: not known to the caller.
        several_sites: whether weights cross links.

    Raises:
        ValueError: it is the trainer's type, which is not known.
    """
    if asked != "auto":
        return asked
    if several_sites:
        return "bfloat16"
    if computed is None:
        raise ValueError("inside a site the versions have the trainer's type, which only the trainer knows")
    return computed


def no_bf16(capability: tuple[int, int]) -> str:
    """Say that a GPU older than `AMPERE` cannot compute in bf16."""
    return (
        f"a GPU of compute capability {dotted(capability)} has no bf16 units (from 8.0 on), and vLLM refuses it; set "
        "model.dtype: auto"
    )


def dotted(capability: tuple[int, int]) -> str:
    """Return a compute capability as NVIDIA writes it, such as 8.0."""
    return ".".join(map(str, capability))
