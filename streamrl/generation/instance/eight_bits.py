"""Whether an instance multiplies in 8 bits: `generation.compute`, with `auto` resolved for the device at hand.

    int8   CPUs with AVX-512 VNNI; with AMX, vLLM's kernels take bf16 activations only
    fp8    GPUs from compute capability 8.9 (Ada) on; it has never been run
    auto   int8 where it can be had and a probe finds it faster by `WORTH`, else as without 8 bits

Weights of linear layers are int8 or fp8 codes with a scale per output row, activations are quantized by token as they
come (compressed-tensors calls this W8A8, dynamic). Output head, embeddings and norms stay in `model.dtype`. Every
instance decides for its own device, as with `model.dtype`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from streamrl.config.generation import EightBits
from streamrl.config.run import RunConfig
from streamrl.errors import UserError
from streamrl.generation.instance.eight_bit_probe import StepProducts, probe_products
from streamrl.machine.cpu import Cpu, this_cpu
from streamrl.machine.gpus import oldest_compute_capability
from streamrl.machine.model_files import read_config, resolve_model

WORTH = 1.25
"""Smallest speedup of the matrix products of a whole decode step for which `auto` takes 8 bits. What else a step does
stays as it was, and 8 bits make samples off-policy, so a little is not worth it."""
ADA = (8, 9)
"""The first compute capability with fp8 units."""
TRIED = frozenset(
    {
        "ApertusForCausalLM",
        "Cohere2ForCausalLM",
        "Cohere2MoeForCausalLM",
        "Gemma2ForCausalLM",
        "Glm4ForCausalLM",
        "GraniteForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
    }
)
"""Architectures whose versions load into vLLM's 8-bit layers as into a fresh engine (docs/results.md; `streamrl verify`
shows it for a model)."""
NEVER_RUN = "fp8 has never been run on a GPU: its configuration and codes are tested on CPUs only"


@dataclass(frozen=True)
class Computation:
    """What an instance computes linear layers in, and the reason."""

    kind: Literal["same"] | EightBits
    why: str
    """'': nobody asked for 8 bits."""

    def __str__(self) -> str:
        return f"linear layers in {'model.dtype' if self.kind == 'same' else self.kind} ({self.why})"


SAME = Computation("same", "")


def device_lacks(kind: EightBits, dtype: str, cpu: Cpu | None, capability: tuple[int, int] | None = None) -> str:
    """Return what a device lacks for a computation; '': nothing.

    Args:
        kind: the computation.
        dtype: `model.dtype`, resolved.
        cpu: the CPU; None: a GPU computes.
        capability: the GPU's compute capability; None: unknown, assumed to be recent.
    """
    if cpu is None:
        if kind == "int8":
            return "int8 is for CPUs; fp8 is what GPUs may try"
        if capability is not None and capability < ADA:
            return f"fp8 needs compute capability 8.9, and a GPU here has {capability[0]}.{capability[1]}"
        return ""
    if kind == "fp8":
        return "vLLM's CPU back end does not multiply in fp8; int8 is what it has"
    if not cpu.has_int8:
        return f"vLLM's int8 products need AVX-512 VNNI, and this CPU has {cpu.instructions}"
    if dtype == "float32" and "amx_tile" in cpu.flags:
        return "vLLM's int8 products on AMX take bfloat16 activations, and model.dtype is float32"
    return ""


def model_lacks(config: Mapping[str, Any]) -> str:
    """Return why a model is not computed in 8 bits; '': it can be.

    Args:
        config: the model's `config.json`.
    """
    if "quantization_config" in config:
        return "the model's own weights are quantized already"
    architectures = config.get("architectures") or ["an unnamed architecture"]
    if not TRIED.issuperset(architectures):
        return f"8-bit layers were tried with {', '.join(sorted(TRIED))}, and this model is {architectures[0]}"
    return ""


def choose(
    asked: Literal["same", "auto"] | EightBits, lacks: str, found: StepProducts | None, on_gpu: bool
) -> Computation:
    """Choose the computation of an instance.

    Args:
        asked: `generation.compute`.
        lacks: what is missing for the kind asked for (int8 with `auto`).
        found: the probe of the model's products; needed for `auto` on a CPU that lacks nothing; None: it failed.
        on_gpu: whether a GPU computes.

    Raises:
        UserError: a kind was asked for by name, and something is missing.
    """
    if asked == "same":
        return SAME
    if asked == "auto":
        if on_gpu:
            return Computation("same", f"generation.compute: auto; {NEVER_RUN}")
        if lacks:
            return Computation("same", f"generation.compute: auto; {lacks}")
        if found is None:
            return Computation("same", "generation.compute: auto; the probe of int8 products failed")
        quick = found.speedup >= WORTH
        return Computation(
            "int8" if quick else "same",
            f"generation.compute: auto; products of a decode step {found.words}, {WORTH:g} are asked for",
        )
    if lacks:
        raise UserError(f"generation.compute: {asked}: {lacks}; expected same or auto here")
    return Computation(asked, "generation.compute" + (f"; {NEVER_RUN}" if on_gpu else ""))


def choose_here(run: RunConfig, cuda: bool, workers: int) -> Computation:
    """Choose the computation of instances on this machine.

    Args:
        run: the run file, `model.dtype` resolved.
        cuda: whether GPUs compute.
        workers: `gpus_per_replica` of their pool.

    Raises:
        UserError: the model is missing, or 8 bits were asked for by name and cannot be had.
    """
    asked = run.generation.compute
    if asked == "same":
        return SAME
    folder = Path(resolve_model(run.model.path))
    kind: EightBits = "int8" if asked == "auto" else asked
    cpu, capability = (None, oldest_compute_capability()) if cuda else (this_cpu(), None)
    lacks = device_lacks(kind, run.model.dtype, cpu, capability) or model_lacks(read_config(folder))
    if workers > 1:  # each would have to know, and to check, its part of the codes
        lacks = f"8 bits need instances of one worker, and a pool has gpus_per_replica: {workers}"
    measures = asked == "auto" and not cuda and not lacks
    return choose(asked, lacks, probe_products(folder, run.model.dtype) if measures else None, cuda)


def with_computation(run: RunConfig, choice: Computation) -> RunConfig:
    """Return the run file of an instance that computes so."""
    return run.model_copy(update={"generation": run.generation.model_copy(update={"compute": choice.kind})})


def quantization_config(kind: EightBits) -> dict[str, Any]:
    """Return compressed-tensors' description of layers that multiply in 8 bits, as vLLM reads it from a model."""
    codes = {"num_bits": 8, "type": "int" if kind == "int8" else "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": codes | {"strategy": "channel", "dynamic": False},
        "input_activations": codes | {"strategy": "token", "dynamic": True},
    }
    form = "int-quantized" if kind == "int8" else "float-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head"],
        "config_groups": {"linear": group},
    }
