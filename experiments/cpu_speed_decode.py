"""Compare decoding with what this CPU can do: the part of `cpu_speed.py` that runs vLLM.

    .venv/bin/python experiments/cpu_speed_decode.py      # a minute, on a machine that does nothing else
    .venv/bin/python experiments/cpu_speed_decode.py --dtype float32

One engine as `streamrl launch` sets it up, with one thread, in this process; a step of all its requests is timed, and a
few more run under torch's profiler. At batch 1 a step cannot be shorter than the weights take to be read, at batch 64
than the products take at the GEMM peak. Writes experiments/results/cpu_speed_decode.json and .md, or
cpu_speed_decode_bfloat16 where the engine computes in that type, with AMX cpu_speed_decode_amx.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from bounds import gemm_peak, like_an_instance, read_bandwidth, result_name, shape_of
from running import ROOT, Sheet, machine, results_folder, terminal, write_results

from streamrl.cli.main import error_lines
from streamrl.config.cluster import GenerationPool
from streamrl.config.load import load_run
from streamrl.config.run import RunConfig
from streamrl.machine.compute_type import decided
from streamrl.machine.cpu import this_cpu

PROMPT = 32
STEPS, PROFILED = 16, 4
KINDS = {
    "layers": ("_C::onednn_mm", "_C::weight_packed_linear", "aten::addmm", "aten::mm", "few_rows", "in_c"),
    "attention": ("_C::cpu_attention_with_kv_cache", "_C::cpu_attn_reshape_and_cache"),
    "sampling": ("sampling",),
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
    """A step's time by the profile: layers: products, and norms and gates where they run in C; other: torch's small
    operations, vLLM's Python, the profiler."""


def measure_decoding(
    run: RunConfig, gemm_gflops: float, read_gb_s: float, batches: tuple[int, ...] = (1, 64)
) -> list[Decoding]:
    """Time decoding with one thread, in an environment that is `like_an_instance`.

    Args:
        run: with its type decided.
        gemm_gflops: measured peak of one thread in the run's type.
        read_gb_s: measured bandwidth of one thread.
        batches: requests at a time.

    Returns:
        A `Decoding` for each batch size.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.v1.engine.llm_engine import LLMEngine

    from streamrl.generation.instance import few_rows, native_calls, sampling_vllm
    from streamrl.generation.instance.engine_config import engine_config
    from streamrl.machine.model_files import resolve_model

    pool = GenerationPool(name="speed", max_batch=max(batches), kv_cache_gb=0.25)
    shape = shape_of(Path(resolve_model(run.model.path)))
    engine = LLMEngine.from_vllm_config(engine_config(pool, run, cuda=False))
    rng, count = np.random.default_rng(0), 0

    def named(called: Any, kind: str) -> Any:
        def work(*arguments: Any) -> Any:
            with torch.profiler.record_function(kind):
                return called(*arguments)

        return work

    def named_products(dtype: torch.dtype) -> few_rows.Products | None:
        found = products(dtype)
        return found and replace(found, function=named(found.function, "few_rows"))

    products = few_rows.products
    run_in_c = native_calls.NativeCalls.__call__
    plain = {
        (few_rows, "products"): products,
        (native_calls.NativeCalls, "__call__"): run_in_c,
        (sampling_vllm, "draw_"): sampling_vllm.draw_,
    }
    watched = {
        (few_rows, "products"): named_products,
        (native_calls.NativeCalls, "__call__"): named(run_in_c, "in_c"),
        (sampling_vllm, "draw_"): named(sampling_vllm.draw_, "sampling"),
    }

    def put(functions: dict[Any, Any]) -> None:
        for (module, name), function in functions.items():
            setattr(module, name, function)

    def steps(batch: int, number: int, watch: Any = None) -> list[float]:
        """Seconds of each step that only decodes; the profiler `watch` sees no others."""
        nonlocal count
        for seed in range(batch):
            count += 1
            params = SamplingParams(
                temperature=1.0, seed=seed, max_tokens=number + 2, ignore_eos=True, logprobs=0, detokenize=False
            )
            prompt = TokensPrompt(prompt_token_ids=rng.integers(0, shape.vocabulary, PROMPT).tolist())
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
        put(watched)
        profiled = profile(activities=[ProfilerActivity.CPU])
        told = steps(batch, PROFILED, profiled)
        put(plain)
        flops = shape.forward_flops(batch, 0, batch)
        reading_s = shape.forward_flops(1, 0, 1) / 2 * width / (read_gb_s * 1e9)
        kinds: dict[str, float] = defaultdict(float)
        for event in profiled.key_averages():
            kind = next((kind for kind, names in KINDS.items() if event.key in names), None)
            if kind is not None:
                whole = event.key in ("few_rows", "in_c", "sampling")
                own = event.cpu_time_total if whole else event.self_cpu_time_total
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


def sheets(found: list[Decoding], peaks: dict[str, float], dtype: str) -> list[Sheet]:
    """What was measured as tables."""
    rows = [
        [
            str(one.batch),
            f"{one.step_ms:.1f}",
            f"{one.bound_ms:.1f}",
            f"{one.times_reading:.2f}",
            f"{one.share_of_peak:.0%}",
            *[f"{one.kinds_ms[kind]:.1f}" for kind in (*KINDS, "other")],
        ]
        for one in found
    ]
    columns = ("requests", "step ms", "bound ms", "x reading", "of peak", *[f"{kind} ms" for kind in (*KINDS, "other")])
    notes = [
        f"one thread, {dtype}: products {peaks['gemm_gflops']:.0f} GFLOP/s, memory reads {peaks['read_gb_s']:.1f} GB/s",
        "bound: the longer one of reading the weights and the products at their peak; x reading: times the former",
        "by kind as profiled; layers: products, and norms and gates that run in C; "
        "other: small operations, vLLM's Python, the profiler",
    ]
    return [Sheet("A step that decodes", columns, rows, notes)]


@click.command(help=__doc__)
@click.option("--dtype", default="auto", show_default=True, type=click.Choice(["auto", "float32", "bfloat16"]))
@click.option("--model", default="smollm2-135m", show_default=True)
def main(dtype: str, model: str) -> None:
    out = results_folder(None, "model")
    like_an_instance()
    run = decided(
        load_run(ROOT / "examples" / "demo.yaml", [f"model.dtype={dtype}", f"model.path={model}"]), cuda=False
    )
    peaks = {"gemm_gflops": gemm_peak(run.model.dtype, 1), "read_gb_s": read_bandwidth(1)}
    found = measure_decoding(run, peaks["gemm_gflops"], peaks["read_gb_s"])
    record = {"machine": machine(), "cpu": str(this_cpu()), "peaks": peaks, "decoding": [asdict(one) for one in found]}
    tables = sheets(found, peaks, run.model.dtype)
    tables[0].show(terminal())
    target = out / f"{result_name('cpu_speed_decode', run.model.dtype)}.json"
    write_results(target, record, "Decoding on this CPU", tables)


if __name__ == "__main__":
    with error_lines():
        main()
