"""`streamrl launch`: starts, supervises and shows a run."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from streamrl.errors import ErrorCode, UserError
from streamrl.launcher.shadowing_check import check_shadowing
from streamrl.launcher.unblocked_output import unblocked

if TYPE_CHECKING:
    from streamrl.config.cluster import ClusterConfig
    from streamrl.config.run import RunConfig
    from streamrl.machine.compute_type import TypeChoice
    from streamrl.runtime.process_plan import ProcessSpec


@click.command()
@click.option("--cluster", "cluster_file", type=click.Path(path_type=Path), help="cluster file (YAML)")
@click.option("--run", "run_file", type=click.Path(path_type=Path), help="run file (YAML; default: all defaults)")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="override a key of the run file")
@click.option("--steps", type=click.IntRange(1), help="total optimizer steps (same as --set steps=N)")
@click.option(
    "--dry-run",
    is_flag=True,
    help="print what would run where (without --site: at all sites) and start nothing; a model on the hub is fetched "
    "for the checks of what would start here, not for the plan of several sites",
)
@click.option("--resume", "resume_dir", type=click.Path(path_type=Path), help="continue the run in this folder")
@click.option("--site", metavar="NAME", help="start only this site's share of a cluster of several sites")
@click.option(
    "--emulate", is_flag=True, help="start all sites on this machine, on CPU, with links emulated as declared"
)
@click.option("--runs-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True)
@click.option("--folder", type=click.Path(path_type=Path), hidden=True)  # of `streamrl chaos`: made for this run, empty
@click.option("--plain", is_flag=True, help="print plain lines instead of the live view")
@click.option("--dashboard", is_flag=True, help="show the run in a browser, too, while it runs; prints the address")
@unblocked
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
    folder: Path | None,
    plain: bool,
    dashboard: bool,
) -> None:
    """Run a cluster: start, supervise and watch all processes of a run.

    \b
    Examples:
      streamrl launch --cluster cluster_configs/local.yaml --run examples/demo.yaml
      streamrl launch --cluster cluster_configs/local.yaml --run examples/demo.yaml --dashboard
      streamrl launch --cluster cluster_configs/local.yaml --set optimizer.lr=1e-5 --dry-run
      streamrl launch --resume runs/demo --steps 40
      streamrl launch --cluster cluster_configs/heterogeneous.yaml --dry-run
      streamrl launch --cluster cluster_configs/heterogeneous.yaml --site generate
      streamrl launch --cluster cluster_configs/heterogeneous.yaml --emulate
    """
    check_shadowing()
    say = partial(click.echo, err=dry_run)  # the output of a dry run is the plan alone
    say("reading the configuration and checking this machine")  # at once: the imports take seconds
    from streamrl.config.load import load_cluster, load_resolved, load_run
    from streamrl.config.named_files import naming_files
    from streamrl.dashboard.web_server import beside_run, check_installed
    from streamrl.launcher.emulated_cluster import emulated
    from streamrl.machine.first_time import announced
    from streamrl.machine.model_files import cached_models_only
    from streamrl.plain_files import check_plain
    from streamrl.run_dir.layout import FOREIGN, new_folder

    if dashboard:
        check_installed()
    if steps is not None:
        overrides = (*overrides, f"steps={steps}")
    if resume_dir is not None:
        if run_file is not None or any(not o.startswith("steps=") for o in overrides):
            kept = (
                "--resume continues a run as it was; only --cluster and --steps (or --set steps=N) may be given with it"
            )
            raise UserError(ErrorCode.RESUME.refer(kept))
        cluster, run = load_resolved(resume_dir, overrides)
        check_plain(resume_dir, apart=FOREIGN)
        _refuse_finished(resume_dir, run)
        run_dir = resume_dir
    else:
        if cluster_file is None:
            raise UserError("--cluster FILE is needed (or --resume DIR)")
        run = load_run(run_file, overrides)
        name = run.name if site is None else f"{run.name}-{site}"
        run_dir = folder or new_folder(runs_dir, name)
    before = None
    if cluster_file is not None:
        before = cluster if resume_dir is not None else None
        cluster = load_cluster(cluster_file)
    _check_share(cluster, site, emulate, dry_run)
    if resume_dir is not None:
        _refuse_generating(resume_dir, before or cluster, cluster.trainer_site, site)
    if emulate:
        cluster = emulated(cluster)
    elsewhere = bool(cluster.remote_sites) and site is None and not emulate
    with cached_models_only(elsewhere):  # nothing here would read its weights
        with naming_files(cluster_file, run_file, overrides, resume_dir), announced(say):
            types = _check(cluster, run, run_dir.parent, site, emulate, elsewhere, resume_dir, cluster_file, before)
        if dry_run:
            _print_plan(cluster, run, run_dir, site, emulate, types)
            return
    click.echo(f"computes in {types}")
    if not elsewhere and site in (None, cluster.trainer_site):
        click.echo(f"packs groups: {_packing(run)}")
    from streamrl.launcher import supervisor  # takes seconds, so before there is a folder

    if resume_dir is None:
        run_dir = _claimed(folder) if folder is not None else _made(run_dir, name)
    with _kept_unless_empty(run_dir), ExitStack() as beside:
        if dashboard:
            click.echo(f"dashboard at {beside.enter_context(beside_run(run_dir))} until the run ends")
        supervisor.run(cluster, run, run_dir, resume_dir is not None, plain, site, emulate)


def start(cluster: ClusterConfig, run: RunConfig, runs_dir: Path, plain: bool) -> None:
    """Check and run a cluster of one site in a new folder.

    Raises:
        UserError: a check failed; nothing was started.
        RunFailed: the run failed; the message ends with the cause.
    """
    from streamrl.launcher import supervisor
    from streamrl.machine.first_time import announced
    from streamrl.run_dir.layout import make_folder

    check_shadowing()
    with announced(click.echo):
        _check(cluster, run, runs_dir)
    supervisor.run(cluster, run, make_folder(runs_dir, run.name), False, plain)


def _made(planned: Path, name: str) -> Path:
    """Make the folder of a new run, which another launch may have made since it was planned: checks take minutes."""
    from streamrl.run_dir.layout import make_folder

    made = make_folder(planned.parent, name)
    if made != planned:
        click.echo(f"{planned} is another run's by now: this one is in {made}")
    return made


@contextmanager
def _kept_unless_empty(run_dir: Path) -> Iterator[None]:
    """Delete a folder with at most a lock in it when the launch fails or is stopped: it would take the run's name."""
    from streamrl.run_dir.layout import LOCK

    try:
        yield
    except BaseException:
        with suppress(OSError):  # it holds something, or is gone
            if [path.name for path in run_dir.iterdir()] == [LOCK]:
                (run_dir / LOCK).unlink()
            run_dir.rmdir()
        raise


def _claimed(folder: Path) -> Path:
    """Return a folder that was made for this run.

    Raises:
        UserError: it is none, or not empty.
    """
    if not folder.is_dir() or any(folder.iterdir()):
        raise UserError(f"--folder {folder}: expected an empty folder; without the option a new one is made")
    return folder


def _check(
    cluster: ClusterConfig,
    run: RunConfig,
    runs_dir: Path,
    site: str | None = None,
    emulate: bool = False,
    elsewhere: bool = False,
    resumed: Path | None = None,
    cluster_file: Path | None = None,
    before: ClusterConfig | None = None,
) -> TypeChoice | None:
    """Check files and machine, print the warnings, and choose the type that this machine computes in.

    Args:
        cluster: the resolved cluster file.
        run: the resolved run file.
        runs_dir: parent of the run's folder.
        site: the only site started here; None: all.
        emulate: whether all sites are emulated on this machine.
        elsewhere: whether nothing is started here; then only files are checked, and None is returned.
        resumed: folder of the run that is continued; None: a new run.
        cluster_file: the cluster file; None: not known.
        before: the cluster of the run that is continued, if it gets another one.

    Raises:
        UserError: a check failed.
    """
    from streamrl.launcher.preflight import check, check_files
    from streamrl.launcher.resume_check import type_warnings
    from streamrl.machine.compute_type import choose

    if elsewhere:
        warnings = check_files(cluster, run, resumed is not None, before)
    else:
        warnings = check(cluster, run, runs_dir, site, emulate, resumed, str(cluster_file or "F"), before)
    types = None if elsewhere else choose(run.model, cluster.hardware == "cuda")
    if types is not None:
        warnings += [types.warning] if types.warning else []
        warnings += type_warnings(cluster, run, resumed, site, types)
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)
    return types


def _check_share(cluster: ClusterConfig, site: str | None, emulate: bool, dry_run: bool) -> None:
    """Check that --site and --emulate fit the cluster: several sites need one of them, unless nothing is started.

    Raises:
        UserError: neither, both, or no such site.
    """
    names = ", ".join(cluster.sites)
    if site is not None and emulate:
        raise UserError("--site starts one site, --emulate all of them: give one of both")
    if site is not None and site not in cluster.sites:
        near = difflib.get_close_matches(site, cluster.sites, n=1)
        raise UserError(f"--site {site}: no such site{f', did you mean {near[0]}?' if near else ''}; sites: {names}")
    if cluster.remote_sites and site is None and not emulate and not dry_run:
        raise UserError(
            f"the cluster has {len(cluster.sites)} sites ({names}): start each where it is with --site NAME, "
            "or try all of them on this machine with --emulate; --dry-run prints the plan of all"
        )


def _refuse_finished(run_dir: Path, run: RunConfig) -> None:
    """Check that a run has steps to do, or an evaluation of its last step.

    Raises:
        UserError: it has done everything.
    """
    from streamrl.run_dir.finished import nothing_left

    if (done := nothing_left(run_dir, run)) is not None:
        finished = f"{run_dir} has done {done} of {run.steps} steps; --steps {done + run.steps} trains it further"
        raise UserError(ErrorCode.RESUME.refer(finished))


def _refuse_generating(run_dir: Path, began: ClusterConfig, trainer_site: str, site: str | None) -> None:
    """Check that a run is continued at the site that trains, in that site's folder.

    Args:
        run_dir: the folder of the run that is continued.
        began: the cluster that it has been started with.
        trainer_site: the site that trains from now on.
        site: the only site started here; None: all.

    Raises:
        UserError: the site, or that of the folder, only generates.
    """
    from streamrl.run_dir.layout import LEDGER
    from streamrl.runtime.process_context import Addresses

    if site not in (None, trainer_site):
        new = f"start it as before, without --resume; the run itself is continued with --site {trainer_site}"
        raise UserError(
            ErrorCode.RESUME.refer(f"--site {site} only generates: it begins from nothing, in a new folder: {new}")
        )
    with suppress(OSError, ValueError, TypeError):  # killed before it was written, or damaged: it is written anew
        own = [name for name in Addresses.load(run_dir).services if name != began.trainer_site]
        if own and not (run_dir / LEDGER).exists():  # earlier versions have started such sites in a trainer's folder
            wrong = f"{run_dir} is the folder of site {own[0]}, which only generates: it holds nothing to continue"
            raise UserError(ErrorCode.RESUME.refer(f"{wrong}; expected the folder of site {began.trainer_site}"))


def _model_folder(run: RunConfig) -> str:
    """Return the model's folder on this machine; it may exist at the sites only."""
    from streamrl.machine.model_files import resolve_model

    try:
        return str(resolve_model(run.model.path))
    except UserError:
        return "not on this machine"


def _types(cluster: ClusterConfig, run: RunConfig, site: str | None, emulate: bool, here: TypeChoice | None) -> str:
    """Describe the compute types of trainer and instances, and the type in which weights are sent.

    Args:
        cluster: the resolved cluster file.
        run: the resolved run file.
        site: the only site started here; None: all.
        emulate: whether all sites are emulated on this machine.
        here: the type chosen on this machine; None: nothing is started on it.
    """
    from streamrl.machine.compute_type import wire_type

    parts = [str(here)] if here else []
    if run.model.dtype == "auto":
        others = [] if emulate else [name for name in cluster.sites if name != site or here is None]
        if cluster.remote_sites and others:
            parts.append(f"{', '.join(others)}: decided there")
        if any(one.on_ray for one in cluster.sites.values()):
            parts.append("on Ray each node decides for itself")
    elif here is None:
        parts.append(run.model.dtype)
    if here is not None or cluster.remote_sites or run.model.dtype != "auto":
        sent = wire_type(run.model.dtype, here.dtype if here else None, bool(cluster.remote_sites))
        if here is None or sent != here.dtype:
            parts.append(f"weights are sent in {sent}")
    return "; ".join(parts)


def _packing(run: RunConfig) -> str:
    """Describe how the trainer packs groups, as preflight has found."""
    from streamrl.machine.model_files import resolve_model
    from streamrl.training.packing_choice import decide_packing

    return str(decide_packing(run, resolve_model(run.model.path)) or "decided by the trainer")


def _engines(cluster: ClusterConfig, run: RunConfig, site: str | None, types: TypeChoice | None) -> dict[str, str]:
    """Describe how instances compute on this machine; empty if none is started here."""
    from streamrl.generation.instance.eight_bits import choose_here
    from streamrl.machine.compute_type import with_type
    from streamrl.machine.engine_settings import settings_note
    from streamrl.machine.model_files import resolve_model

    if types is None:
        return {}
    cuda = cluster.hardware == "cuda"
    sites = [cluster.sites[site]] if site is not None else list(cluster.sites.values())
    pools = [pool for one in sites for pool in one.generation]
    folder = Path(resolve_model(run.model.path))
    notes = set() if cuda else {settings_note(folder, types.dtype, pool.threads) for pool in pools}
    computed = {choose_here(with_type(run, types), cuda, pool.gpus_per_replica) for pool in pools}
    said = [*sorted(notes), *sorted(str(one) for one in computed if one.why)]
    return {"instances": "; ".join(said)} if said else {}


def _ranks(cluster: ClusterConfig, site: str | None) -> dict[str, str]:
    """Return how the trainer's ranks divide the work, if there are several and the site has them."""
    trainer = cluster.trainer
    if site not in (None, cluster.trainer_site) or trainer.ranks == 1:
        return {}
    if trainer.sharing == 1:
        return {"ranks": f"{trainer.ranks}, each with micro-batches of its own"}
    what = "share each row of tokens" if trainer.sequence_parallel > 1 else "split each layer"
    groups = trainer.ranks // trainer.sharing
    return {"ranks": f"{trainer.ranks} in {groups} group(s) of {trainer.sharing} that {what}"}


def _alike(specs: Sequence[ProcessSpec]) -> list[list[ProcessSpec]]:
    """Group the processes into rows of the plan: instances of a pool share one, as their GPUs follow each other."""
    rows: list[list[ProcessSpec]] = []
    for spec in specs:
        before = rows[-1][-1] if rows else spec
        same = spec.role == "instance" and (spec.site, spec.pool) == (before.site, before.pool)
        if same and spec is not before and spec.gpu_ids[:1] == tuple(number + 1 for number in before.gpu_ids[-1:]):
            rows[-1].append(spec)
        else:
            rows.append([spec])
    return rows


def _row(alike: Sequence[ProcessSpec]) -> tuple[str, ...]:
    """Return the row of one process, or of instances of a pool."""
    first, last, count = alike[0], alike[-1], len(alike)
    name = first.name if count == 1 else f"{first.name} to {last.index}"
    gpus = [number for spec in alike for number in spec.gpu_ids]
    kind = "" if first.gpu == "cpu" else f" ({first.gpu})"  # the cluster file need not name it
    if not gpus:
        on = f"{first.ranks} x " * (first.ranks > 1) + f"{first.threads} CPU thread(s)"
    elif len(gpus) == 1:
        on = f"GPU {gpus[0]}{kind}"
    else:
        on = f"GPU {gpus[0]} to {gpus[-1]}{kind}"
    if count > 1 and len(first.gpu_ids) != 1:
        on += f", {len(first.gpu_ids)} each" if gpus else " each"
    price = f"{first.price_per_hour:.2f}"
    return name, first.role, first.site, first.pool or "", on, f"{count} x {price}" if count > 1 else price


def _print_plan(
    cluster: ClusterConfig, run: RunConfig, run_dir: Path, site: str | None, emulate: bool, types: TypeChoice | None
) -> None:
    from streamrl.report.terminal import ruled_table, terminal
    from streamrl.runtime.process_plan import plan_processes, usd_per_hour

    console = terminal()
    specs = plan_processes(cluster, run, run_dir, None if site is None else [site])
    titles = ("process", "role", "site", "pool", "runs on", "USD/h")
    rows = [_row(alike) for alike in _alike(specs)]
    console.print(ruled_table(f"plan of {run_dir} (nothing started)", titles, titles[:-1], rows))
    batch, sampling = run.batch, run.sampling
    tasks = ", ".join(f"{task.key} ({task.kind}, weight {task.weight:g})" for task in run.tasks)
    lines = {
        "model": f"{run.model.path} -> {_model_folder(run)}",
        "computes in": _types(cluster, run, site, emulate, types),
        **_engines(cluster, run, site, types),
        **_ranks(cluster, site),
        **({"packing": _packing(run)} if types is not None and site in (None, cluster.trainer_site) else {}),
        "tasks": tasks,
        "steps": f"{run.steps} of {batch.prompts_per_step} prompts x {batch.samples_per_prompt} samples, "
        f"at most {sampling.max_tokens} tokens each, temperature {sampling.temperature:g}",
        "algorithm": f"{run.algorithm.name}, lr {run.optimizer.lr:g}",
        "schedule": run.schedule.name,
        "weights": run.weights.backend,
        "checkpoints": f"every {run.checkpoint.every} steps, {run.checkpoint.keep} kept",
        "price": f"{usd_per_hour(specs):.2f} USD/h",
    }
    if cluster.hardware == "cuda" and types is not None:
        from streamrl.launcher.gpu_checks import memory_plan

        plan = memory_plan(cluster, run, site)
        lines |= {f"{title}, {phase.name}": phase.words for title, phase in plan}
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
