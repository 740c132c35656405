"""Time matrix products of vLLM's CPU back end in 8 bits beside bf16 and fp32, one thread, in turns.

    .venv/bin/python experiments/int8_products.py     # half a minute; needs AVX-512 with VNNI

Writes experiments/results/int8_products.{json,md}. What a linear layer of a W8A8 model computes: activations in bf16
are quantised per token (symmetric, dynamic), weights are int8 with a scale per output. Shapes are those of SmolLM2-135M
and of a model with 1.5 B parameters; rows are the sequences of a decode step. Times are medians. The error is that of
the result against fp32, as a share of its norm, for normal activations and weights.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import click
import torch
import vllm._C  # noqa: F401  registers the kernels
from running import RESULTS, Sheet, machine, terminal, write_results
from vllm import _custom_ops as kernels

OUT = RESULTS / "int8_products.json"
SHAPES = ((576, 1536), (1536, 576), (1536, 8960), (8960, 1536))
ROWS = (1, 4, 16, 64, 256)
REPEATS = 30
CACHE = 32


def times_of(products: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median seconds of each product; they take turns."""
    taken: dict[str, list[float]] = {name: [] for name in products}
    for turn in range(REPEATS + 2):  # the first two prepare memory and kernels
        for name, product in products.items():
            began = time.perf_counter()
            product()
            if turn > 1:
                taken[name].append(time.perf_counter() - began)
    return {name: statistics.median(each) for name, each in taken.items()}


def measure(inputs: int, outputs: int) -> list[dict[str, float]]:
    """Return the figures of one layer for each number of rows."""
    weight = torch.randn(inputs, outputs)
    half = weight.to(torch.bfloat16)
    scale = weight.abs().amax(0) / 127
    codes = (weight / scale).round().to(torch.int8)
    plain = {
        name: kernels.create_onednn_mm(one.t().contiguous().t(), CACHE) for name, one in (("f", weight), ("b", half))
    }
    eight = kernels.create_onednn_scaled_mm(codes.t().contiguous().t(), scale, torch.bfloat16, True, False, CACHE)
    found = []
    for rows in ROWS:
        given = torch.randn(rows, inputs)
        given_half, result = given.to(torch.bfloat16), torch.empty(rows, outputs, dtype=torch.bfloat16)

        def in_8_bits(given: torch.Tensor = given_half, result: torch.Tensor = result) -> torch.Tensor:
            quantised, scales, _ = kernels.onednn_scaled_int8_quant(given)
            return kernels.onednn_scaled_mm(eight, quantised, result, scales, None, None, None)

        seconds = times_of(
            {
                "float32": partial(kernels.onednn_mm, plain["f"], given, None),
                "bfloat16": partial(kernels.onednn_mm, plain["b"], given_half, None),
                "int8": in_8_bits,
            }
        )
        exact = given @ weight
        error = float((in_8_bits().float() - exact).norm() / exact.norm())
        found.append({"inputs": inputs, "outputs": outputs, "rows": rows, "error": error} | seconds)
    return found


@click.command(help=__doc__)
def main() -> None:
    if not (torch.backends.cpu.get_cpu_capability().startswith("AVX512") and torch.cpu._is_vnni_supported()):
        raise SystemExit("int8_products.py: this CPU has no AVX-512 with VNNI, which 8-bit products need")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = [row for shape in SHAPES for row in measure(*shape)]
    rows = [
        (
            f"{one['inputs']:.0f} x {one['outputs']:.0f}, {one['rows']:.0f} rows",
            *(f"{1e6 * one[kind]:.0f}" for kind in ("float32", "bfloat16", "int8")),
            f"{one['int8'] / one['bfloat16']:.2f}",
            f"{one['error']:.3f}",
        )
        for one in found
    ]
    columns = ("layer", "fp32 us", "bf16 us", "int8 us", "int8 / bf16", "error of int8")
    sheet = Sheet("Products of a decode step", columns, rows, ["int8: quantisation of the activations included"])
    sheet.show(terminal())
    flags = torch.backends.cpu.get_cpu_capability() + (", AMX" if torch.cpu._is_amx_tile_supported() else "")
    record = {"machine": f"{machine()}, {flags}", "products": found}
    write_results(OUT, record, "Matrix products in 8 bits on a CPU", [sheet])


if __name__ == "__main__":
    main()
