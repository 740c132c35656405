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
from streamrl.atomic_files import replace_json
from streamrl.imports import importing
from streamrl.machine.cpu import this_cpu
from streamrl.machine.model_files import cache_directory, read_config

ROWS = 128
"""Tokens in a product: enough for the full speed of a GEMM, few enough for a slow type."""
LARGEST = 2048
"""Largest side of a probed matrix: beyond it the rate no longer changes, and slow types stay quick to probe."""
SECONDS_PER_PRODUCT = 0.02
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
    cut = [(min(a, LARGEST), min(b, LARGEST)) for a, b in shapes or [(1024, 1024)]]
    return list(dict.fromkeys(cut))


def measure(shapes: Sequence[Shape]) -> Probe:
    """Time the matrix products of a linear layer with torch: forward, and for the gradients of its input and weight.

    The three have different memory layouts; in bf16 without kernels the slowest takes seven times as long as the
    fastest. Torch's thread count is the caller's to set.
    """
    import torch

    def seconds(product: Callable[[], torch.Tensor]) -> float:
        """Return the fastest of a few runs."""
        best, spent = float("inf"), 0.0
        while spent < SECONDS_PER_PRODUCT:
            began = time.perf_counter()
            product()
            took = time.perf_counter() - began
            best, spent = min(best, took), spent + took
        return best

    def rate(dtype: torch.dtype) -> float:
        """Return the operations per nanosecond over all shapes."""
        operations = spent = 0.0
        for inputs, outputs in shapes:
            x, weight, gradient = (
                torch.randn(shape).to(dtype) for shape in ((ROWS, inputs), (outputs, inputs), (ROWS, outputs))
            )
            spent += seconds(partial(torch.nn.functional.linear, x, weight))
            spent += seconds(partial(torch.mm, gradient, weight))
            spent += seconds(partial(torch.mm, gradient.t(), x))
            operations += 3 * 2.0 * ROWS * inputs * outputs
        return operations / spent / 1e9

    with torch.no_grad():
        rate(torch.float32)  # warm-up: loads kernels, raises clocks
        return Probe(rate(torch.bfloat16), rate(torch.float32))


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
    key = this_cpu().fingerprint(importlib.metadata.version("torch"), shapes, ROWS)
    path = cache_directory() / "machine" / f"products-{key}.json"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        values = json.loads(path.read_bytes())
        return Probe(float(values["bf16_gflops"]), float(values["fp32_gflops"]))
    found = _measured_here(shapes) if "torch" in sys.modules else _measured_apart(model_folder)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_json(path, asdict(found) | {"cpu": str(this_cpu()), "shapes": shapes, "rows": ROWS})
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
