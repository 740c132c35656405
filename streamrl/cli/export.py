"""`streamrl export`: writes a job file for Slurm or Kubernetes."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from streamrl.errors import UserError

if TYPE_CHECKING:
    from streamrl.config.cluster import ClusterConfig
    from streamrl.config.run import RunConfig
    from streamrl.launcher.job_nodes import Job, NodeGroup

OF_SLURM = ("partition", "account", "time", "setup", "gres", "shared_head")
OF_KUBERAY = ("image", "volume_claim", "node_selector", "keys", "resume")
SLURM_WORD = re.compile(r"[A-Za-z0-9_.,+@:-]+")
SLURM_TIME = re.compile(r"\d+:\d{1,2}:\d{1,2}|\d+-\d{1,2}(:\d{1,2}){0,2}")
SLURM_MINUTES = re.compile(r"(\d+)(?::(\d{1,2}))?")
"""What Slurm reads as minutes, or minutes and seconds, and one writes for hours."""
OF_SHELL = re.compile(r"[\s\"'`$\\&;|<>()*?!\[\]{}]")
"""Characters that a script's shell does not take as they are."""
KUBE_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
"""Names allowed for a RayJob; KubeRay adds suffixes and accepts at most 47 characters."""
KUBE_NODES = "--node-selector TYPE=LABEL=VALUE"


@click.command(name="export")
@click.option("--format", "kind", type=click.Choice(["slurm", "kuberay"]), required=True, help="format of the job file")
@click.option("--cluster", "cluster_file", type=click.Path(path_type=Path), required=True, help="cluster file (YAML)")
@click.option("--run", "run_file", type=click.Path(path_type=Path), help="run file (YAML; default: all defaults)")
@click.option("--site", metavar="NAME", help="site of the job, in a cluster of several sites")
@click.option("--name", help="name of the job  [default: the names of the run and the site]")
@click.option("--out", type=click.Path(path_type=Path), help="file to write  [default: standard output]")
@click.option("--runs-dir", help="folder of the runs, on a shared file system  [default: runs; kuberay: /runs]")
@click.option("--gpus-per-node", type=click.IntRange(1), default=8, show_default=True, help="GPUs per node")
@click.option(
    "--cpus-per-node", type=click.IntRange(1), help="CPU cores per node except the head  [default: as needed]"
)
@click.option("--memory", type=click.IntRange(1), metavar="GIB", help="memory per node except the head  [default: all]")
@click.option(
    "--head-memory",
    type=click.IntRange(1),
    metavar="GIB",
    default=32,
    show_default=True,
    help="memory of the head node",
)
@click.option(
    "--partition",
    multiple=True,
    metavar="[TYPE=]NAME",
    help="slurm: partition of all nodes, of a GPU type, or of the head",
)
@click.option("--gres", multiple=True, metavar="TYPE=NAME", help="slurm: Slurm's name of a GPU type")
@click.option("--account", help="slurm: account to charge")
@click.option(
    "--time",
    metavar="TIME",
    help="slurm: time limit of the job, hours:minutes:seconds or days-hours  [default: 24:00:00]",
)
@click.option(
    "--setup",
    multiple=True,
    metavar="LINE",
    help="slurm: shell line to run first, e.g. to activate a venv; may be repeated",
)
@click.option("--shared-head", is_flag=True, help="slurm: run Ray's head on the first GPU node instead of its own")
@click.option("--image", help="kuberay: container image with streamrl and Ray (required)")
@click.option("--volume-claim", metavar="NAME", help="kuberay: volume claim mounted at --runs-dir (required)")
@click.option(
    "--node-selector", multiple=True, metavar="TYPE=LABEL=VALUE", help="kuberay: label of the nodes with a GPU type"
)
@click.option("--keys", metavar="DIR", help="kuberay: folder of the sites' keys in the pods  [default: RUNS_DIR/keys]")
@click.option("--resume", metavar="DIR", help="kuberay: resume the run in this folder of the pods")
def command(
    kind: str,
    cluster_file: Path,
    run_file: Path | None,
    site: str | None,
    name: str | None,
    out: Path | None,
    runs_dir: str | None,
    gpus_per_node: int,
    cpus_per_node: int | None,
    memory: int | None,
    head_memory: int,
    **options: Any,
) -> None:
    """Write the job file of one site, an sbatch script or a RayJob for KubeRay; nothing is started.

    The job starts a Ray cluster on the nodes that the site needs, then `streamrl launch`. The site must have
    launch: {backend: ray, address: auto} in the cluster file. docs/how-to/cluster.md says what to check first.

    \b
    Examples:
      streamrl export --format slurm --cluster my.yaml --run run.yaml --partition gpu --out job.sh
      streamrl export --format kuberay --cluster my.yaml --site west --image IMAGE --volume-claim runs
    """
    from streamrl.config.load import load_cluster, load_run
    from streamrl.config.named_files import naming_files
    from streamrl.launcher.job_nodes import Job, node_groups
    from streamrl.launcher.new_run_check import check_new_run
    from streamrl.launcher.preflight import refuse

    cluster, run = load_cluster(cluster_file), load_run(run_file)
    with naming_files(cluster_file, run_file):
        refuse([check_new_run(cluster, run)])
    try:
        chosen = _site(cluster, site)
        for other in OF_KUBERAY if kind == "slurm" else OF_SLURM:
            if options[other]:
                raise UserError(f"--{other.replace('_', '-')} is not for --format {kind}")
        groups = node_groups(cluster, run, chosen, gpus_per_node, cpus_per_node or 0)
        job = Job(
            name=name or re.sub(r"[^a-z0-9]+", "-", f"{run.name}-{chosen}".lower()).strip("-")[:40].strip("-"),
            cluster_file=str(cluster_file.resolve()),
            run_file=None if run_file is None else str(run_file.resolve()),
            runs_dir=runs_dir or "runs",
            site=chosen if cluster.remote_sites else None,
            memory_gib=memory or 0,
            head_memory_gib=head_memory,
        )
        if kind == "slurm":
            text = _slurm(job, groups, options)
        else:
            text = _kuberay(job, groups, options, cluster, run, runs_dir or "/runs", chosen)
    except UserError as error:
        raise UserError(f"{cluster_file}: {error}") from error
    if out is None:
        click.echo(text, nl=False)
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror or error}") from error
    click.echo(f"{out}: {', '.join(f'{group.most} x {group.name}' for group in groups)}", err=True)


def _site(cluster: ClusterConfig, site: str | None) -> str:
    """Return the chosen site, or the only one.

    Raises:
        UserError: the site does not exist, or there are several to choose from.
    """
    names = ", ".join(cluster.sites)
    if site is None and cluster.remote_sites:
        raise UserError(f"the cluster has {len(cluster.sites)} sites, each needs a job file; --site one of: {names}")
    if site is not None and site not in cluster.sites:
        raise UserError(f"--site {site}: no such site; sites: {names}")
    return site or cluster.trainer_site


def _slurm(job: Job, groups: Sequence[NodeGroup], options: Mapping[str, Any]) -> str:
    from streamrl.launcher.job_nodes import HEAD
    from streamrl.launcher.slurm import STOP_S, SlurmOptions, slurm_script, slurm_seconds

    types = [group.gpu for group in groups if group.name != HEAD]
    partitions = _by_type("--partition", [t if "=" in t else f"={t}" for t in options["partition"]], [*types, HEAD, ""])
    gres = _by_type("--gres", options["gres"], types)
    with_gpus = [group.gpu for group in groups if group.gpus]
    for gpu in with_gpus if len(with_gpus) > 1 else ():
        if gpu not in gres and re.search("[ :]", gpu):
            raise UserError(
                f"GPU type {gpu!r}: Slurm takes no space or ':' in a type; give its name: --gres '{gpu}=NAME'"
            )
    time = options["time"] or "24:00:00"
    if not SLURM_TIME.fullmatch(time):
        read = ""
        if minutes := SLURM_MINUTES.fullmatch(time):
            seconds = f" and {minutes[2]} seconds" if minutes[2] else ""
            read = f"Slurm reads {minutes[1]} minutes{seconds}; "
        raise UserError(f"--time {time}: {read}expected hours:minutes:seconds or days-hours, such as 24:00:00 or 3-0")
    if (limit_s := slurm_seconds(time)) <= STOP_S:
        read = "Slurm sets no time limit then" if not limit_s else "the run is asked to end as it begins"
        raise UserError(f"--time {time}: {read}; expected more than {STOP_S} s, before whose end a run is asked to end")
    runs_dir = str(Path(job.runs_dir).resolve())
    if OF_SHELL.search(runs_dir):
        plain = "expected a path without spaces, quotes, $, backslashes and the like"
        raise UserError(f"--runs-dir {job.runs_dir!r}: {plain}, got {runs_dir!r}")
    words = {"--name": [job.name], "--partition": partitions.values(), "--gres": gres.values()}
    for option, values in (words | {"--account": [options["account"] or "-"]}).items():
        for value in values:
            if not SLURM_WORD.fullmatch(value):
                raise UserError(f"{option} {value!r}: expected letters, digits and any of _ . , + @ : -")
    return slurm_script(
        replace(job, runs_dir=runs_dir),
        groups,
        SlurmOptions(partitions, gres, options["account"] or "", time, options["setup"], options["shared_head"]),
    )


def _kuberay(
    job: Job,
    groups: Sequence[NodeGroup],
    options: Mapping[str, Any],
    cluster: ClusterConfig,
    run: RunConfig,
    runs_dir: str,
    site: str,
) -> str:
    import yaml

    from streamrl.launcher.kuberay import FILES, KubeOptions, kuberay_manifest

    for option in ("image", "volume_claim"):
        if not options[option]:
            raise UserError(f"--{option.replace('_', '-')} is needed for --format kuberay")
    if not runs_dir.startswith("/"):
        raise UserError(f"--runs-dir {runs_dir}: expected an absolute path, at which pods mount the volume")
    if not KUBE_NAME.fullmatch(job.name):
        raise UserError(f"--name {job.name}: expected at most 40 small letters, digits and '-', a letter first")
    types = [group.gpu for group in groups if group.gpus]
    labels = _by_type("--node-selector", options["node_selector"], types)
    selectors = {gpu: dict([label.split("=", 1)]) for gpu, label in labels.items() if "=" in label}
    if wrong := labels.keys() - selectors.keys():
        raise UserError(f"--node-selector {wrong.pop()}=...: expected {KUBE_NODES}")
    if len(types) > 1 and (missing := [gpu for gpu in types if gpu not in selectors]):
        raise UserError(
            f"the site has GPUs of types {', '.join(types)}: say which nodes have {missing[0]}: {KUBE_NODES}"
        )
    keys = options["keys"] or f"{runs_dir}/keys"
    security = cluster.security.model_copy(update={"keys": keys})
    models = {"cluster.yaml": cluster.model_copy(update={"security": security}), "run.yaml": run}
    files = {
        name: yaml.safe_dump(model.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
        for name, model in models.items()
    }
    kube = KubeOptions(
        *(options["image"], options["volume_claim"], files, options["resume"] or ""),
        *(selectors, _ports(cluster, site), _ray_version()),
    )
    job = replace(job, cluster_file=f"{FILES}/cluster.yaml", run_file=f"{FILES}/run.yaml", runs_dir=runs_dir)
    return yaml.safe_dump_all(kuberay_manifest(job, groups, kube), sort_keys=False, allow_unicode=True)


def _ray_version() -> str:
    """Return the version of Ray here, which the image should have too; KubeRay needs to know it."""
    from streamrl.launcher.kuberay import FIRST_WITH_TOKEN

    try:
        return importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        return FIRST_WITH_TOKEN


def _ports(cluster: ClusterConfig, name: str) -> dict[str, int]:
    """Return the ports that other sites connect to, by name.

    Raises:
        UserError: the site's `port` is missing, or it listens on an address that a pod does not have.
    """
    site = cluster.sites[name]
    if not cluster.remote_sites or (name != cluster.trainer_site and not site.port):
        return {}
    if not site.port:
        raise UserError(f"sites.{name}.port: other sites need to know it; expected a port such as 5600")
    if site.listen != "0.0.0.0":
        raise UserError(
            f"sites.{name}.listen is {site.listen!r}: a pod does not have the load balancer's address; write 0.0.0.0"
        )
    return {"controller": site.port, "weights": site.port + 1} if site.trainer else {"relay": site.port}


def _by_type(option: str, texts: Sequence[str], known: Collection[str]) -> dict[str, str]:
    """Parse TYPE=VALUE texts into a mapping.

    Raises:
        UserError: '=' or the value is missing, or the type is unknown.
    """
    found = {}
    for text in texts:
        gpu, _, value = text.partition("=")
        if gpu not in known or not value:
            raise UserError(f"{option} {text}: expected TYPE=VALUE, with a type of: {', '.join(filter(None, known))}")
        found[gpu] = value
    return found
