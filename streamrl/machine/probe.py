"""A probe of how fast this CPU multiplies matrices of a model's shapes in bf16 and fp32; takes less than a second.

`probe` reads the cached result if this CPU was probed before with these shapes and this torch. Otherwise it measures,
in a separate process (`python -m streamrl.machine.probe FOLDER`) unless the caller has imported torch.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from scheduler.cost.model_shapes import text_part
from streamrl.imports import importing
from streamrl.machine.cpu import this_cpu
from streamrl.machine.first_time import announce
from streamrl.machine.kept_results import keep_result, result_file
from streamrl.machine.model_files import read_config

ROWS = 128
"""Tokens in a product: enough for the full speed of a GEMM, few enough for a slow type."""
LARGEST = 2048
"""Largest side of a probed matrix: beyond it the rate no longer changes, and slow types stay quick to probe."""
FEWEST = 5
"""Runs of a product at least: the first ones load kernels and fetch memory."""
SECONDS_PER_PRODUCT = 0.02
"""CPU seconds of a product's runs at least, unless a slow type needs more for its `FEWEST`."""
SECONDS_PER_TYPE = 0.3
"""CPU seconds for the `FEWEST` runs of all products of a type. Where they would take longer, smaller matrices are
multiplied."""
SIDES = (LARGEST, 1536, 1024, 768, 512, 384, 256)
"""Largest sides to choose from; the last one is multiplied to predict what the others take."""
METHOD = "thread time"
"""How rates are measured, as a part of the name that they are kept by: those measured in another way are not read."""
LIMIT_S = 120.0
"""Seconds that the measuring process may take; importing torch takes nearly all of them."""

Shape = tuple[int, int]
"""(Inputs, outputs) of a linear layer."""


class ProbeFailed(Exception):
    """Raised when the rates cannot be measured; the message has the last words of the process that tried."""


@dataclass(frozen=True)
class Probe:
    """GEMM rates of one thread, in 10^9 operations per second (a multiply-add counts as two)."""

    bf16_gflops: float
    fp32_gflops: float

    @property
    def bf16_slowdown(self) -> float:
        """Time of a product in bf16 relative to fp32."""
        return self.fp32_gflops / self.bf16_gflops


def product_shapes(config: Mapping[str, Any]) -> list[Shape]:
    """Return the shapes of a decoder layer's linear layers, without duplicates.

    Args:
        config: a model's `config.json`; shapes whose keys are missing are left out.
    """
    values = text_part(config)
    hidden, inner = values.get("hidden_size"), values.get("intermediate_size")
    heads, size = values.get("num_attention_heads"), values.get("head_dim")
    shapes: list[Shape] = []
    if isinstance(hidden, int) and isinstance(inner, int):
        shapes += [(hidden, inner), (inner, hidden)]
    if isinstance(hidden, int):
        width = heads * size if isinstance(heads, int) and isinstance(size, int) else hidden
        shapes.append((hidden, width))
    return cut(shapes or [(1024, 1024)], LARGEST)


def cut(shapes: Sequence[Shape], side: int) -> list[Shape]:
    """Return the shapes with no side above this one, without duplicates."""
    return list(dict.fromkeys((min(a, side), min(b, side)) for a, b in shapes))


def affordable(shapes: Sequence[Shape], gflops: float) -> list[Shape]:
    """Cut the shapes as little as their products' `FEWEST` runs within `SECONDS_PER_TYPE` need.

    Args:
        shapes: (inputs, outputs) of the linear layers.
        gflops: the rate by which the time is predicted, 10^9 operations per second.
    """
    found = (cut(shapes, side) for side in SIDES)
    most = SECONDS_PER_TYPE * gflops * 1e9 / FEWEST
    return next((some for some in found if sum(map(_operations, some)) <= most), cut(shapes, SIDES[-1]))


def _operations(shape: Shape) -> float:
    """Return the operations of a layer's three products; a multiply-add counts as two."""
    return 3 * 2.0 * ROWS * shape[0] * shape[1]


def cpu_seconds(product: Callable[[], object]) -> float:
    """Return the CPU seconds of the fastest of at least `FEWEST` runs of a product that this thread computes alone.

    Seconds of a clock on the wall would contain those in which a busy machine lets others compute.
    """
    taken: list[float] = []
    spent = 0.0
    while len(taken) < FEWEST or spent < SECONDS_PER_PRODUCT:
        began = time.thread_time()
        product()
        taken.append(time.thread_time() - began)
        spent += taken[-1]
    # the clock of some systems goes on in steps of 10 ms: then only the sum says something
    return min(taken) or spent / len(taken)


def measure(shapes: Sequence[Shape]) -> Probe:
    """Time the matrix products of a linear layer with torch: forward, and for the gradients of its input and weight.

    The three have different memory layouts; in bf16 without kernels the slowest takes seven times as long as the
    fastest. Torch's thread count is the caller's to set to one: a product is timed by the CPU time of this thread.
    """
    import torch

    def rate(dtype: torch.dtype, shapes: Sequence[Shape]) -> float:
        """Return the 10^9 operations per second over all shapes."""
        spent = 0.0
        for inputs, outputs in shapes:
            x, weight, gradient = (
                torch.randn(shape).to(dtype) for shape in ((ROWS, inputs), (outputs, inputs), (ROWS, outputs))
            )
            for product in (
                partial(torch.nn.functional.linear, x, weight),
                partial(torch.mm, gradient, weight),
                partial(torch.mm, gradient.t(), x),
            ):
                spent += cpu_seconds(product)
        return sum(map(_operations, shapes)) / spent / 1e9

    with torch.no_grad():
        first = {dtype: rate(dtype, cut(shapes, SIDES[-1])) for dtype in (torch.float32, torch.bfloat16)}
        bf16, fp32 = (rate(one, affordable(shapes, first[one])) for one in (torch.bfloat16, torch.float32))
        return Probe(bf16, fp32)


def probe(model_folder: Path) -> Probe | None:
    """Return this CPU's rates for a model's shapes, measured now or cached; None: they cannot be measured.

    Args:
        model_folder: the model in HF format.
    """
    try:
        return rates(model_folder)
    except ProbeFailed:
        return None


def rates(model_folder: Path) -> Probe:
    """Return what `probe` does, and say why if there is nothing to return.

    Args:
        model_folder: the model in HF format.

    Raises:
        ProbeFailed: torch is not installed, or the measuring process failed.
    """
    if importlib.util.find_spec("torch") is None:
        raise ProbeFailed("torch is not installed")
    shapes = product_shapes(read_config(model_folder))
    key = this_cpu().fingerprint(importlib.metadata.version("torch"), shapes, ROWS, METHOD)
    path = result_file("products", key)
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        values = json.loads(path.read_bytes())
        return Probe(float(values["bf16_gflops"]), float(values["fp32_gflops"]))
    announce("measuring how fast this CPU multiplies in bfloat16 and in float32")
    found = _measured_here(shapes) if "torch" in sys.modules else _measured_apart(model_folder)
    keep_result(path, asdict(found) | {"cpu": str(this_cpu()), "shapes": shapes, "rows": ROWS})
    return found


def _measured_here(shapes: Sequence[Shape]) -> Probe:
    """Measure on one thread in this process, which has imported torch."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return measure(shapes)
    finally:
        torch.set_num_threads(threads)


def _measured_apart(model_folder: Path) -> Probe:
    """Measure in a process of its own.

    Raises:
        ProbeFailed: it failed or took too long.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", "streamrl.machine.probe", str(model_folder)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=True,
        )
        return Probe(**json.loads(done.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired as error:
        raise ProbeFailed(f"importing torch and multiplying took more than {LIMIT_S:g} s") from error
    except subprocess.CalledProcessError as error:
        raise ProbeFailed(_last_words(error)) from error
    except OSError as error:
        raise ProbeFailed(f"{sys.executable} could not be started: {error.strerror or error}") from error
    except (ValueError, TypeError, IndexError) as error:
        raise ProbeFailed(f"the measuring process printed no rates, but {done.stdout[-200:]!r}") from error


def _last_words(failure: subprocess.CalledProcessError) -> str:
    """Return the last line that a failed process wrote, or else how it ended: 'it was ended by SIGILL'."""
    said = failure.stderr.strip().splitlines()
    if failure.returncode < 0:
        end = f"it was ended by {signal.Signals(-failure.returncode).name}"
        return f"{end}, after: {said[-1]}" if said else end
    return str(said[-1]) if said else f"it ended with exit code {failure.returncode}, without a word"


def main() -> None:
    """Measure and print the rates as JSON."""
    shapes = product_shapes(read_config(Path(sys.argv[1])))
    with importing():
        import torch

    torch.set_num_threads(1)
    print(json.dumps(asdict(measure(shapes))), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # taking down torch takes a second
