"""Compare decoding with what this CPU can do: the part of `cpu_speed.py` that runs vLLM.

    .venv/bin/python experiments/cpu_speed_decode.py      # a minute, on a machine that does nothing else

One engine as `streamrl launch` sets it up, with one thread, in this process; a step of all its requests is timed, and a
few more run under torch's profiler. At batch 1 a step cannot be shorter than the weights take to be read, at batch 64
than the products take at the GEMM peak.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from streamrl.config.cluster import GenerationPool
from streamrl.config.run import RunConfig
from streamrl.runtime.process_plan import ONE_BLAS_THREAD, PASSIVE_WAITING

PROMPT = 32
STEPS, PROFILED = 16, 4
KINDS = {
    "products": ("_C::onednn_mm", "aten::addmm", "aten::mm", "few_rows"),
    "attention": ("_C::cpu_attention_with_kv_cache", "_C::cpu_attn_reshape_and_cache"),
    "sampling": ("_C::fused_gumbel_argmax", "_C::greedy_argmax", "aten::_log_softmax", "aten::ge"),
}


@dataclass(frozen=True)
class Decoding:
    """Steps of one batch size."""

    batch: int
    step_ms: float
    bound_ms: float
    """The longer one of the weights' reading and the products at the GEMM peak."""
    times_reading: float
    """The step in times of weight bytes / measured bandwidth."""
    share_of_peak: float
    """Share of the GEMM peak of one thread that the step's products come to."""
    kinds_ms: dict[str, float]
    """Of a step, by the profile; 'other' is the rest: torch's small operations, vLLM's Python, the profiler."""


def measure_decoding(
    run: RunConfig, gemm_gflops: float, read_gb_s: float, batches: tuple[int, ...] = (1, 64)
) -> list[Decoding]:
    """Times decoding with one thread; the environment must be `as_an_instance()` before torch is loaded.

    Args:
        run: with its type decided.
        gemm_gflops: measured peak of one thread in the run's type.
        read_gb_s: measured bandwidth of one thread.
        batches: requests at a time.

    Returns:
        A `Decoding` for each batch size.
    """
    import torch
    from bounds import shape_of
    from torch.profiler import ProfilerActivity, profile
    from vllm import SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    from streamrl.generation.instance import few_rows_vllm
    from streamrl.generation.instance.engine_config import engine_config
    from streamrl.machine.model_files import resolve_model

    pool = GenerationPool(name="speed", max_batch=max(batches), kv_cache_gb=0.25)
    shape = shape_of(Path(resolve_model(run.model.path)))
    engine = LLMEngine.from_vllm_config(engine_config(pool, run, cuda=False))
    rng, count = np.random.default_rng(0), 0
    plain = few_rows_vllm.multiply

    def named(*arguments: Any) -> Any:
        with torch.profiler.record_function("few_rows"):
            return plain(*arguments)

    def steps(batch: int, number: int, watch: Any = None) -> list[float]:
        """Seconds of each step that only decodes; the profiler `watch` sees no others."""
        nonlocal count
        for seed in range(batch):
            count += 1
            params = SamplingParams(
                temperature=1.0, seed=seed, max_tokens=number + 2, ignore_eos=True, logprobs=0, detokenize=False
            )
            prompt = {"prompt_token_ids": rng.integers(0, shape.vocabulary, PROMPT).tolist()}
            engine.add_request(f"request-{count}", prompt, params)
        engine.step()  # reads the prompts
        times = []
        with watch or contextlib.nullcontext():
            while engine.has_unfinished_requests():
                began = time.perf_counter()
                engine.step()
                times.append(time.perf_counter() - began)
        return times

    found = []
    width = 4 if run.model.dtype == "float32" else 2
    for batch in batches:
        steps(batch, 2)
        step_s = float(np.median(steps(batch, STEPS)))
        few_rows_vllm.multiply = named
        profiled = profile(activities=[ProfilerActivity.CPU])
        told = steps(batch, PROFILED, profiled)
        few_rows_vllm.multiply = plain
        flops = shape.forward_flops(batch, 0, batch)
        reading_s = shape.forward_flops(1, 0, 1) / 2 * width / (read_gb_s * 1e9)
        kinds: dict[str, float] = defaultdict(float)
        for event in profiled.key_averages():
            kind = next((kind for kind, names in KINDS.items() if event.key in names), None)
            if kind is not None:
                own = event.cpu_time_total if event.key == "few_rows" else event.self_cpu_time_total
                kinds[kind] += own / 1e3 / len(told)
        kinds["other"] = max(0.0, step_s * 1e3 - sum(kinds.values()))
        found.append(
            Decoding(
                batch=batch,
                step_ms=step_s * 1e3,
                bound_ms=max(reading_s, flops / (gemm_gflops * 1e9)) * 1e3,
                times_reading=step_s / reading_s,
                share_of_peak=flops / step_s / (gemm_gflops * 1e9),
                kinds_ms=dict(kinds),
            )
        )
    return found


def as_an_instance() -> None:
    """The environment of an instance's process."""
    os.environ.update(PASSIVE_WAITING | ONE_BLAS_THREAD | {"OMP_NUM_THREADS": "1"})


def lines(found: list[Decoding]) -> list[str]:
    """What was measured, for people."""
    told = []
    for one in found:
        kinds = ", ".join(f"{kind} {ms:.1f}" for kind, ms in one.kinds_ms.items())
        told.append(
            f"batch {one.batch}: {one.step_ms:.1f} ms a step (bound {one.bound_ms:.1f}), {one.times_reading:.2f} x the "
            f"reading of the weights, {one.share_of_peak:.0%} of the GEMM peak; ms by profile: {kinds}"
        )
    return told


@click.command()
@click.option("--run", "run_file", type=click.Path(path_type=Path), default=Path("examples/demo.yaml"))
def main(run_file: Path) -> None:
    """Measures the machine's peaks on one thread, then decoding."""
    as_an_instance()
    from bounds import gemm_peak, read_bandwidth

    from streamrl.config.load import load_run
    from streamrl.machine.compute_type import decided

    run = decided(load_run(run_file, ()), cuda=False)
    gemm, read = gemm_peak(run.model.dtype, 1), read_bandwidth(1)
    click.echo(f"one thread: {gemm:.1f} GFLOP/s in {run.model.dtype}, reads {read:.1f} GB/s")
    found = measure_decoding(run, gemm, read)
    click.echo("\n".join(lines(found)))
    click.echo([asdict(one) for one in found])


if __name__ == "__main__":
    main()
