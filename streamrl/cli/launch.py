"""`streamrl launch`: the main command."""

from __future__ import annotations

import difflib
import itertools
from pathlib import Path
from typing import TYPE_CHECKING

import click

from streamrl.errors import UserError

if TYPE_CHECKING:
    from streamrl.config.cluster import ClusterConfig
    from streamrl.config.run import RunConfig
    from streamrl.machine.compute_type import TypeChoice


@click.command()
@click.option("--cluster", "cluster_file", type=click.Path(path_type=Path), help="cluster file (YAML)")
@click.option("--run", "run_file", type=click.Path(path_type=Path), help="run file (YAML; default: all defaults)")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="change a key of the run file")
@click.option("--steps", type=click.IntRange(1), help="optimizer steps in total (same as --set steps=N)")
@click.option("--dry-run", is_flag=True, help="print what would run where, start nothing")
@click.option("--resume", "resume_dir", type=click.Path(path_type=Path), help="continue the run in this folder")
@click.option("--site", metavar="NAME", help="start only this site's share of a cluster of several sites")
@click.option("--emulate", is_flag=True, help="start all sites here, on CPU, with links shaped as declared")
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
@click.option("--plain", is_flag=True, help="plain lines instead of the live view")
def command(
    cluster_file: Path | None,
    run_file: Path | None,
    overrides: tuple[str, ...],
    steps: int | None,
    dry_run: bool,
    resume_dir: Path | None,
    site: str | None,
    emulate: bool,
    runs_dir: Path,
    plain: bool,
) -> None:
    """Run a cluster: start, supervise and watch all processes of a run.

    \b
    Examples:
      streamrl launch --cluster cluster_configs/local.yaml --run experiments/runs/demo.yaml
      streamrl launch --cluster cluster_configs/local.yaml --set optimizer.lr=1e-5 --dry-run
      streamrl launch --resume runs/demo --steps 40
      streamrl launch --cluster cluster_configs/heterogeneous.yaml --site generate
      streamrl launch --cluster cluster_configs/heterogeneous.yaml --emulate
    """
    if not dry_run:
        click.echo("reading the configuration and checking this machine")  # at once: the imports take seconds
    from streamrl.config.load import load_cluster, load_resolved, load_run
    from streamrl.launch.emulated import emulated
    from streamrl.launch.preflight import check
    from streamrl.machine.compute_type import choose

    if steps is not None:
        overrides = (*overrides, f"steps={steps}")
    if resume_dir is not None:
        cluster, run = load_resolved(resume_dir)
        if run_file is not None or any(not o.startswith("steps=") for o in overrides):
            raise UserError("--resume continues a run as it was; only --cluster and --steps may be given with it")
        if steps is not None:
            run = run.model_copy(update={"steps": steps})
        _refuse_finished(resume_dir, run.steps)
        run_dir = resume_dir
    else:
        if cluster_file is None:
            raise UserError("--cluster FILE is needed (or --resume DIR)")
        run = load_run(run_file, overrides)
        run_dir = _new_folder(runs_dir, run.name if site is None else f"{run.name}-{site}")
    if cluster_file is not None:
        cluster = load_cluster(cluster_file)
    _check_share(cluster, site, emulate)
    if emulate:
        cluster = emulated(cluster)
    for warning in check(cluster, run, run_dir.parent, site, emulate):
        click.echo(f"warning: {warning}", err=True)
    types = choose(run.model, cluster.hardware == "cuda")
    if types.warning:
        click.echo(f"warning: {types.warning}", err=True)
    if dry_run:
        _print_plan(cluster, run, run_dir, site, emulate, types)
        return
    click.echo(f"computes in {types}")
    from streamrl.launch import supervisor

    supervisor.run(cluster, run, run_dir, resume_dir is not None, plain, site, emulate)


def _check_share(cluster: ClusterConfig, site: str | None, emulate: bool) -> None:
    """One site of several, or all of them emulated.

    Raises:
        UserError: neither, both, or no such site.
    """
    names = ", ".join(cluster.sites)
    if site is not None and emulate:
        raise UserError("--site starts one site, --emulate all of them: give one of both")
    if site is not None and site not in cluster.sites:
        near = difflib.get_close_matches(site, cluster.sites, n=1)
        raise UserError(f"--site {site}: no such site{f', did you mean {near[0]}?' if near else ''}; sites: {names}")
    if cluster.remote_sites and site is None and not emulate:
        raise UserError(
            f"the cluster has {len(cluster.sites)} sites ({names}): start each where it is with --site NAME, "
            "or try all of them on this machine with --emulate"
        )


def _refuse_finished(run_dir: Path, steps: int) -> None:
    from streamrl.training.checkpoints import CheckpointFolder

    done = CheckpointFolder(run_dir / "checkpoints").latest()
    if done is not None and done >= steps:
        raise UserError(f"{run_dir} has done {done} of {steps} steps; --steps {done + steps} trains it further")


def _new_folder(runs_dir: Path, name: str) -> Path:
    """`<runs>/<name>`, or `<name>-2`, `-3` ... if that was used before: no run is overwritten."""
    names = itertools.chain([name], (f"{name}-{n}" for n in itertools.count(2)))
    return next(runs_dir / candidate for candidate in names if not (runs_dir / candidate).exists())


def _types(cluster: ClusterConfig, run: RunConfig, site: str | None, emulate: bool, here: TypeChoice) -> str:
    """What trainer and instances will compute in, and what weights are sent in."""
    from streamrl.machine.compute_type import wire_type

    text = f"{here}"
    others = [name for name in cluster.remote_sites if name != site] if not emulate else []
    if others and run.model.dtype == "auto":
        text += f"; {', '.join(others)}: decided there"
    if any(one.on_ray for one in cluster.sites.values()) and run.model.dtype == "auto":
        text += "; on Ray each node decides for itself"
    sent = wire_type(run.model.dtype, here.dtype, bool(cluster.remote_sites))
    return text if sent == here.dtype else f"{text}; weights are sent in {sent}"


def _print_plan(
    cluster: ClusterConfig, run: RunConfig, run_dir: Path, site: str | None, emulate: bool, types: TypeChoice
) -> None:
    from rich.console import Console
    from rich.table import Table

    from streamrl.launch.models import resolve_model
    from streamrl.launch.plan import plan_processes, usd_per_hour

    console = Console()
    table = Table("process", "role", "site", "pool", "runs on", "USD/h", title=f"plan of {run_dir} (nothing started)")
    specs = plan_processes(cluster, run, run_dir, None if site is None else [site])
    for spec in specs:
        on = f"GPU {','.join(map(str, spec.gpu_ids))} ({spec.gpu})" if spec.gpu_ids else f"{spec.threads} CPU thread(s)"
        table.add_row(spec.name, spec.role, spec.site, spec.pool or "", on, f"{spec.price_per_hour:.2f}")
    console.print(table)
    batch, sampling = run.batch, run.sampling
    tasks = ", ".join(f"{task.key} ({task.kind}, weight {task.weight:g})" for task in run.tasks)
    lines = {
        "model": f"{run.model.path} -> {resolve_model(run.model.path)}",
        "computes in": _types(cluster, run, site, emulate, types),
        "tasks": tasks,
        "steps": f"{run.steps} of {batch.prompts_per_step} prompts x {batch.samples_per_prompt} samples, "
        f"at most {sampling.max_tokens} tokens each, temperature {sampling.temperature:g}",
        "algorithm": f"{run.algorithm.name}, lr {run.optimizer.lr:g}",
        "schedule": run.schedule.name,
        "weights": run.weights.backend,
        "checkpoints": f"every {run.checkpoint.every} steps, {run.checkpoint.keep} kept",
        "price": f"{usd_per_hour(specs):.2f} USD/h",
    }
    for link in cluster.links:
        how: str = cluster.security.encryption
        if emulate:
            how = "emulated" if cluster.trainer_site in link.between else "not emulated: an emulated network is a star"
        loss = f", {link.loss:.2%} lost" if link.loss else ""
        lines[f"link {' - '.join(link.between)}"] = (
            f"{link.bandwidth_gbit_s:g} Gbit/s, {link.rtt_ms:g} ms there and back{loss}, "
            f"{link.price_per_gb:g} USD/GB, {how}"
        )
    for key, value in lines.items():
        console.print(f"{key:12} {value}", soft_wrap=True, highlight=False)
