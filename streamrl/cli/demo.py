"""`streamrl demo`: trains a real model, with a job as large as this machine manages in a few minutes."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import click

from streamrl.errors import ErrorCode, UserError
from streamrl.finite_float import FiniteFloat
from streamrl.launcher.unblocked_output import unblocked

MODEL = "smollm2-135m"
PACKAGES = ("torch", "vllm", "transformers", "gguf", "reasoning_gym")
"""What the demo needs besides the base install, by the names of their imports."""
GB = 1e9


@click.command()
@click.option(
    "--cluster", "cluster_file", type=click.Path(path_type=Path), help="another cluster file than the demo's own"
)
@click.option("--run", "run_file", type=click.Path(path_type=Path), help="another run file than the demo's own")
@click.option("--minutes", default=6.0, show_default=True, type=FiniteFloat(min=1), help="time limit for everything")
@click.option(
    "--memory", default=12.0, show_default=True, type=FiniteFloat(min=1), help="memory limit of all processes, GB"
)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="override a key of the run file")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
@click.option("--plain", is_flag=True, help="print plain lines instead of the live view")
@click.option("--dry-run", is_flag=True, help="print the chosen size and why, and start nothing")
@unblocked
def command(
    cluster_file: Path | None,
    run_file: Path | None,
    minutes: float,
    memory: float,
    overrides: tuple[str, ...],
    runs_dir: Path,
    plain: bool,
    dry_run: bool,
) -> None:
    """Train a real model on this machine: two vLLM instances and a trainer, in a few minutes.

    Fetches SmolLM2-135M, measures how fast this CPU multiplies matrices, and chooses the number and length of the
    answers so that everything should take at most --minutes; never fewer than 5 optimizer steps, even if that takes
    longer.

    \b
    Examples:
      streamrl demo
      streamrl demo --minutes 15 --memory 8
      streamrl demo --set 'algorithm={name: gspo}'
    """
    from scheduler.cost.model_shapes import Transformer
    from streamrl.cli.fetch_model import fetch_with_progress
    from streamrl.cli.launch import start
    from streamrl.config.load import load_cluster, load_run
    from streamrl.machine.compute_type import choose
    from streamrl.machine.cpu import this_cpu
    from streamrl.machine.demo_size import MICRO_BATCHES, choose_micro_batch, choose_size, peak_bytes
    from streamrl.machine.first_time import announced
    from streamrl.machine.installed_packages import package_problems
    from streamrl.machine.own_share import free_memory, usable_cores
    from streamrl.machine.probe import ProbeFailed, rates
    from streamrl.scaffold.project_files import shipped

    began = time.monotonic()
    if problems := list(package_problems(PACKAGES, "cpu,tasks")):
        raise UserError("\n".join(problems))
    run_file = run_file or shipped("demo.yaml")
    cluster, run = load_cluster(cluster_file or shipped("local.yaml")), load_run(run_file, overrides)
    cores = usable_cores()
    click.echo(f"demo: this machine has {this_cpu()}, {cores} cores, {free_memory() / GB:.0f} GB of memory free")
    folder = fetch_with_progress(MODEL, None)
    try:
        with announced(click.echo):
            found = rates(folder)
    except ProbeFailed as error:
        raise UserError(
            ErrorCode.INSTALLATION.refer(
                f"the demo could not measure this CPU with torch: {error}\n"
                f"{sys.executable} -c 'import torch' shows the whole error; start the demo again once that has none"
            )
        ) from error
    types = choose(run.model, cuda=False)
    model = Transformer.from_config(MODEL, json.loads((folder / "config.json").read_bytes()))
    rate = found.bf16_gflops if types.dtype == "bfloat16" else found.fp32_gflops
    gflops = rate * min(2, cores)  # the cluster file gives trainer and instances this many threads
    left = 60.0 * minutes - (time.monotonic() - began)
    size = choose_size(model, gflops, left)
    limit = min(memory * GB, free_memory())
    micro_batch = choose_micro_batch(model, types.dtype, limit)
    if micro_batch is None:
        needed = peak_bytes(model, types.dtype, MICRO_BATCHES[-1])
        raise UserError(
            f"the demo needs {needed / GB:.1f} GB of memory, {limit / GB:.1f} GB are there: "
            f"{(needed - limit) / GB:.1f} GB are missing"
        )
    click.echo(f"demo: computes in {types}")
    click.echo(
        f"demo: {size}: about {size.seconds(model, gflops) / 60:.1f} of the {minutes:g} minutes, as {gflops:.0f} "
        f"GFLOP/s on {min(2, cores)} threads do {60 / size.step_seconds(model, gflops):.1f} such steps a minute"
    )
    expected = peak_bytes(model, types.dtype, micro_batch)
    click.echo(
        f"demo: micro-batches of {micro_batch} tokens: about {expected / GB:.1f} GB of memory, of {limit / GB:.1f}"
    )
    chosen = [*size.overrides, f"batch.micro_batch_tokens={micro_batch}"]
    run = load_run(run_file, (*chosen, *overrides))
    if not dry_run:
        start(cluster, run, runs_dir, plain)
