"""`streamrl calibrate`: measures the step times of a real instance on this machine."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from streamrl.errors import UserError
from streamrl.finite_float import FiniteFloat
from streamrl.given_options import given_options
from streamrl.output_files import check_output, write_output

if TYPE_CHECKING:
    from streamrl.config.cluster import ClusterConfig, GenerationPool
    from streamrl.config.run import RunConfig


@click.command(name="calibrate")
@click.option("--cluster", "cluster_file", required=True, type=click.Path(path_type=Path), help="Cluster file.")
@click.option(
    "--run", "run_file", type=click.Path(path_type=Path), help="Run file, which names the model and its context."
)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the run file.")
@click.option("--pool", help="Generation pool whose instance is measured (default: the first in the file).")
@click.option("--site", help="Site of the pool, if several sites have one of that name.")
@click.option(
    "--seconds",
    default=180.0,
    show_default=True,
    type=FiniteFloat(1),
    help="Most seconds of measuring; fewer if repeats agree earlier.",
)
@click.option("--engine", is_flag=True, help="Compare vLLM's settings on this CPU instead.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("calibration.json"), show_default=True)
def command(
    cluster_file: Path,
    run_file: Path | None,
    overrides: tuple[str, ...],
    pool: str | None,
    site: str | None,
    seconds: float,
    engine: bool,
    out: Path,
) -> None:
    """Measure how long a decode step takes at each batch size and context, with vLLM, on this machine.

    Starts a single instance as the cluster file describes it; takes a minute or two. Each step time is measured again
    until its repeats agree, and what else the machine does meanwhile is noted. Step times that fall with the batch are
    nonsense, so no file is written. With --engine, starts it once with each of vLLM's compile modes, thread bindings
    and KV-cache types, then prints and stores a table of their speeds. Runs keep vLLM's default settings;
    docs/how-to/machines.md says why.

    \b
    Example:
      streamrl calibrate --cluster cluster_configs/local.yaml --run examples/demo.yaml --out local.json
      streamrl calibrate --cluster cluster_configs/local.yaml --run examples/demo.yaml --engine
      streamrl simulate --trace runs/demo --curve local.json --instances 2 --slots 32
    """
    if engine and (given := given_options("seconds", "out")):
        raise UserError(f"{given[0]} does not go with --engine, which measures and stores in its own way")
    from streamrl.config.load import load_cluster, load_run
    from streamrl.config.named_files import naming_files
    from streamrl.launcher.generation_check import check_generation, check_head_size, check_kv_cache
    from streamrl.launcher.model_check import check_heads, check_model
    from streamrl.launcher.preflight import check_packages, refuse
    from streamrl.launcher.speculation_check import check_speculation
    from streamrl.machine.gpus import BY_BUS, ORDER
    from streamrl.runtime.process_plan import KEPT_HEAP, PASSIVE_WAITING

    cluster, run = load_cluster(cluster_file), load_run(run_file, overrides)
    its_site, chosen = _chosen(cluster, cluster_file, pool, site)
    if not engine:
        check_output("--out", out)
    cluster = with_one_pool(cluster, its_site, chosen)
    checks = [check_heads(cluster, run), check_speculation(cluster, run), check_generation(cluster, run, its_site)]
    with naming_files(cluster_file, run_file, overrides):
        refuse([check_packages(cluster)])
        refuse([check_model(run), *checks, check_head_size(cluster, run), check_kv_cache(cluster, run, its_site)])
    # those of an instance: torch reads its number of threads when it is imported, glibc how it keeps memory when vLLM's
    # process starts
    heap = {} if cluster.hardware == "cuda" else KEPT_HEAP
    os.environ.update(PASSIVE_WAITING | heap | {"OMP_NUM_THREADS": str(chosen.threads)})
    os.environ.setdefault(ORDER, BY_BUS)
    from streamrl.machine.compute_type import choose, with_type

    types = choose(run.model, cluster.hardware == "cuda")
    click.echo(f"computes in {types}")
    from streamrl.generation.instance.eight_bits import choose_here, with_computation

    run = with_type(run, types)
    computation = choose_here(run, cluster.hardware == "cuda", chosen.gpus_per_replica)
    if computation.why:
        click.echo(str(computation))
    run = with_computation(run, computation)
    if engine:
        if cluster.hardware == "cuda":
            raise UserError("--engine: these are vLLM's settings on CPUs; this cluster has hardware: cuda")
        from streamrl.generation.instance.settings_trial import try_settings

        return try_settings(chosen, run, its_site, click.echo)
    curve, lines = asyncio.run(_measured(cluster, chosen, run, its_site, seconds))
    computed = {
        "dtype": types.dtype if computation.kind == "same" else computation.kind,
        "dtype_why": f"{types.why}; {computation}" if computation.why else types.why,
    }
    _keep(out, curve | computed, lines)


async def _measured(
    cluster: ClusterConfig, pool: GenerationPool, run: RunConfig, site: str, seconds: float
) -> tuple[dict[str, object], list[str]]:
    """Start an instance and time its steps; return what is stored of them, and what is printed.

    Raises:
        UserError: vLLM does not start, or the step times are not usable.
    """
    from streamrl.generation.instance.calibration import measure
    from streamrl.generation.instance.engine import Engine

    try:
        engine = Engine(pool, run, cluster.hardware == "cuda", "calibrate", site)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"vLLM does not start an instance of pool {pool.name!r}: {error}") from error
    try:
        await engine.warm_up()
        trials, load = await measure(engine, pool.max_batch, run.model.max_context, seconds, click.echo)
    finally:
        engine.close()
    curve = trials.curve
    lines = [
        f"batch {batch}: {1e3 * step:.1f} ms a step" for batch, step in zip(curve.batches, curve.seconds, strict=True)
    ]
    rates = 1e6 * curve.per_context_token, 1e6 * curve.per_prefill_token
    lines.append(f"context {rates[0]:.3f} us a token and step, prefill {rates[1]:.0f} us a token; {load}")
    if trials.fall:
        click.echo("\n".join(lines))
        raise UserError(
            f"these step times are not usable: {trials.fall}; {load}. Nothing was written: measure again while the "
            "machine does nothing else"
        )
    if trials.doubts:
        lines.append(f"doubtful: {trials.doubts}; measure again while the machine does nothing else, or longer")
    stored = curve.to_json() | {
        "repeats": [
            {"batch": batch, "prompt_tokens": prompt, "step_seconds": times}
            for (batch, prompt), times in trials.times.items()
        ],
        "doubts": trials.doubts,
        "load": str(load),
        "model": run.model.path,
        "gpu": pool.gpu,
        "gpus_per_replica": pool.gpus_per_replica,
        "threads": pool.threads,
        "measured": time.strftime("%Y-%m-%d"),
    }
    return stored, lines


def _keep(out: Path, values: dict[str, object], lines: list[str]) -> None:
    """Write what was measured, then print it: a reader that ends early (`| head`) ends the command.

    Raises:
        UserError: it cannot be written; it is printed all the same.
    """
    problem = None
    try:
        write_output(out, json.dumps(values, indent=1) + "\n")
    except OSError as error:
        problem = UserError(f"--out {out}: nothing was kept of this: {error.strerror or error}")
    click.echo("\n".join(lines))
    if problem is not None:
        raise problem
    click.echo(f"calibration written to {out}")


def _chosen(
    cluster: ClusterConfig, cluster_file: Path, pool: str | None, site: str | None
) -> tuple[str, GenerationPool]:
    """Return the pool to measure, with its site: the first one unless it is named.

    Raises:
        UserError: there is no such pool, or several sites have it.
    """
    pools = [(name, one) for name, values in cluster.sites.items() for one in values.generation]
    found = [(name, one) for name, one in pools if site in (None, name) and pool in (None, one.name)]
    if not found:
        asked = [f"--{option} {value}" for option, value in (("pool", pool), ("site", site)) if value is not None]
        there = ", ".join(f"{name}/{one.name}" for name, one in pools)
        raise UserError(f"{' '.join(asked)}: {cluster_file} has no such generation pool; expected one of {there}")
    if pool is not None and len(found) > 1:
        could = " or ".join(f"{name}/{one.name}" for name, one in found)
        raise UserError(f"--pool {pool} could be {could}: name its --site")
    return found[0]


def with_one_pool(cluster: ClusterConfig, site: str, pool: GenerationPool) -> ClusterConfig:
    """Return the cluster without the pools that are not measured, whose mistakes do not matter."""
    sites = {
        name: one.model_copy(update={"generation": [pool] if name == site else []})
        for name, one in cluster.sites.items()
    }
    return cluster.model_copy(update={"sites": sites})
