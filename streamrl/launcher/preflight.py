"""Checks before anything starts; all problems are reported in one message."""

from __future__ import annotations

import importlib.util
import itertools
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from scheduler.schedule.schedules import KINDS
from streamrl.config.cluster import ClusterConfig
from streamrl.config.evaluation import plain_name
from streamrl.config.load import check_resolved
from streamrl.config.run import CRITIC_KEY, RunConfig
from streamrl.config.tasks import AgentTask, FileTask
from streamrl.errors import ErrorCode, UserError
from streamrl.launcher.capacity_check import (
    check_cores,
    check_open_files,
    memory_warnings,
    numa_nodes,
    numa_warnings,
    task_warnings,
    thread_warnings,
)
from streamrl.launcher.cluster_warnings import cluster_warnings, unused_here
from streamrl.launcher.folder_check import (
    check_database_paths,
    check_disk,
    check_folder,
    check_launcher,
    disk_warnings,
)
from streamrl.launcher.generation_check import (
    check_architecture,
    check_comparison,
    check_eight_bits,
    check_generation,
    check_head_size,
    check_kv_cache,
    comparison_warnings,
)
from streamrl.launcher.gpu_checks import check_this_machine, names_here, warnings_here
from streamrl.launcher.model_check import check_critic, check_heads, check_model, critic_warnings
from streamrl.launcher.new_run_check import check_new_run
from streamrl.launcher.program_check import check_scripts
from streamrl.launcher.prompt_check import check_prompts
from streamrl.launcher.resume_check import check_checkpoint, check_newest, checkpoint_warnings
from streamrl.launcher.router_check import check_router_replay
from streamrl.launcher.run_warnings import run_warnings
from streamrl.launcher.sequence_check import check_sequence_parallel
from streamrl.launcher.site_setup import check_sockets
from streamrl.launcher.speculation_check import check_speculation
from streamrl.launcher.untried_paths import untried_warning
from streamrl.launcher.version_folder import check_semaphores, shared_memory_warnings
from streamrl.machine.installed_packages import package_problems
from streamrl.machine.model_files import resolve_model
from streamrl.machine.open_files import most_open_files
from streamrl.machine.own_share import core_numbers, free_memory, free_tasks, usable_cores
from streamrl.runtime.process_plan import plan_processes
from streamrl.tasks.sandbox import isolation_of
from streamrl.tasks.source import PromptSource, TaskContent
from streamrl.trackers.backends.opener import missing_packages
from streamrl.training.packing_choice import decide_packing
from streamrl.transport.ip_addresses import family_of, host_port, resolve


def check(
    cluster: ClusterConfig,
    run: RunConfig,
    runs_root: Path,
    site: str | None = None,
    emulate: bool = False,
    resumed: Path | None = None,
    cluster_file: str = "F",
    before: ClusterConfig | None = None,
) -> list[str]:
    """Check files, machine and packages against the configuration; return warnings about what may be slow or fail.

    Args:
        runs_root: parent of the run folders, in which a new run makes its own.
        site: the only site started here; None: all.
        emulate: whether the sites are emulated.
        resumed: folder of the run that is continued; None: a new run.
        cluster_file: the cluster file that messages name.
        before: the cluster of the run that is continued, if it gets another one.

    Raises:
        UserError: one line per problem.
    """
    # alone and at once: others take minutes, and may need the temporary folder themselves, or ports of a run that lives
    refuse([check_launcher(resumed), check_sockets()])
    checks = [
        check_resolved(cluster, run),
        check_packages(cluster),
        check_model(run),
        check_heads(cluster, run),
        check_speculation(cluster, run),
        check_router_replay(cluster, run),
        check_generation(cluster, run, site),
        check_head_size(cluster, run),
        check_kv_cache(cluster, run, site, emulate),
        check_sites(cluster, run),
        check_weight_path(cluster, run),
        check_this_machine(cluster, run, site, resumed is not None),
        check_folder(runs_root, resumed),
        check_database_paths(run, runs_root, resumed, cluster.remote_sites if emulate else ()),
        check_semaphores(cluster, site),
        check_ray(cluster, run, site),
    ]
    trains = site in (None, cluster.trainer_site)
    contents: dict[str, TaskContent] = {}
    if trains:
        checks.append(check_tasks(run, resumed=resumed is not None, contents=contents))
        checks += [check_ranker(run), check_packing(run)]
        checks += [check_sequence_parallel(cluster, run), check_trackers(run), check_disk(run, runs_root, resumed)]
        checks += [check_newest(run, resumed), check_checkpoint(run, resumed)]
    if not emulate:
        checks.append(check_ports(cluster, site or cluster.trainer_site))
    checks.append(check_metrics(cluster, site or cluster.trainer_site))
    if cluster.remote_sites and site is not None:
        checks.append(check_keys(cluster, site, cluster_file))
    of_new = [*check_scripts(cluster, run, site), *(check_critic(cluster, run) if trains else [])]
    of_new += [*check_architecture(cluster, run), *check_comparison(cluster, run, site)]
    of_new += of_cluster(cluster, run, site)
    if cluster.hardware == "cpu":
        checks.append(check_cores(cluster, run, core_numbers(), site))
    if resumed is None:  # earlier versions began runs without these checks
        checks.append(of_new)
    elif before is not None:
        checks.append(new_problems(partial(of_cluster, run=run, site=site), cluster, before))
    refuse(checks)
    return [
        *untried_warning(cluster, run),
        *run_warnings(run),
        *(() if emulate else cluster_warnings(cluster)),
        *unused_here(cluster, run),
        *(critic_warnings(run) if trains else []),
        *sandbox_warnings(run),
        *ray_warnings(cluster, os.environ, site),
        *thread_warnings(cluster, run, usable_cores(), site),
        *memory_warnings(cluster, run, free_memory(), site),
        *task_warnings(cluster, run, free_tasks(), site),
        *numa_warnings(cluster, numa_nodes(), site),
        *shared_memory_warnings(cluster, run, names_here(cluster, site)),
        *(disk_warnings(run, runs_root, resumed) if trains else []),
        *(checkpoint_warnings(run, resumed, contents) if trains else []),
        *warnings_here(cluster, run, site),
        *comparison_warnings(cluster, run, site),
        *of_new,
    ]


def of_cluster(cluster: ClusterConfig, run: RunConfig, site: str | None) -> list[str]:
    """Check of a cluster what earlier versions have not checked."""
    found = [*check_new_run(cluster, run), *check_open_files(cluster, run, most_open_files(), site)]
    if cluster.hardware == "cuda" and (site is None or site in cluster.sites):
        found += check_cores(cluster, run, core_numbers(), site)
    return found


def new_problems(
    check: Callable[[ClusterConfig], Iterable[str]], cluster: ClusterConfig, before: ClusterConfig
) -> list[str]:
    """Return the problems of the cluster that a continued run gets, without those with which it has run before."""
    known = set(check(before))
    return [problem for problem in check(cluster) if problem not in known]


def refuse(checks: Iterable[Iterable[str]]) -> None:
    """Carry out checks, in order.

    Raises:
        UserError: one line per problem.
    """
    # several checks may meet the same problem, such as a missing model
    if problems := dict.fromkeys(itertools.chain.from_iterable(checks)):
        raise UserError("\n".join(problems))


def check_files(
    cluster: ClusterConfig, run: RunConfig, resumed: bool = False, before: ClusterConfig | None = None
) -> list[str]:
    """Check what does not depend on the machine, for the plan of several sites elsewhere.

    Args:
        resumed: whether a run is continued.
        before: the cluster of the run that is continued, if it gets another one.

    Returns:
        Warnings about what was not checked, and about what is missing here but may be present at the sites.

    Raises:
        UserError: one line per problem of the files themselves.
    """
    checks, missing = [check_resolved(cluster, run), check_sites(cluster, run)], []
    checks.append(check_tasks(run, rendered=False, resumed=resumed))
    checks.append(check_ranker(run))
    checks += [check_weight_path(cluster, run), check_speculation(cluster, run), check_eight_bits(cluster, run)]
    of_new = [*check_new_run(cluster, run), *check_critic(cluster, run)]
    if not resumed:  # earlier versions began runs without these checks
        checks.append(of_new)
    elif before is not None:
        checks.append(new_problems(partial(check_new_run, run=run), cluster, before))
    try:
        resolve_model(run.model.path)
        of_model = [check_model(run), check_heads(cluster, run), check_router_replay(cluster, run)]
        checks = [*of_model, check_sequence_parallel(cluster, run), *checks]
    except UserError as error:
        missing.append(f"on this machine: {error}")
    if run.critic_path is not None:
        try:
            resolve_model(run.critic_path, CRITIC_KEY)
        except UserError as error:
            missing.append(f"on this machine: {error}")
    refuse(checks)
    skipped = "packages, model, GPUs, ports, keys, Ray's nodes, disk and memory"
    note = f"not checked: {skipped} of the sites; each checks its own with --site NAME --dry-run"
    told = [*untried_warning(cluster, run), *run_warnings(run), *cluster_warnings(cluster), *unused_here(cluster, run)]
    return [note, *told, *missing, *of_new]


def check_sites(cluster: ClusterConfig, run: RunConfig) -> Iterable[str]:
    """Check for what a cluster of several sites cannot do."""
    if not cluster.remote_sites:
        return
    if run.schedule.exclusive or run.schedule.name == "auto":
        apart = ", ".join(name for name, kind in KINDS.items() if not kind.exclusive)
        yield (
            f"schedule: {run.schedule.name} gives the same devices to generation and training, and the cluster has "
            f"{len(cluster.sites)} sites; expected one of {apart}"
        )
    if not run.weights.path.fetched:
        yield f"weights.backend: {run.weights.backend} works inside one site; expected auto or stream"
    home = cluster.sites[cluster.trainer_site]
    if not home.port:
        yield f"sites.{cluster.trainer_site}.port: other sites need to know it; expected a port such as 5600"


def check_weight_path(cluster: ClusterConfig, run: RunConfig) -> Iterable[str]:
    """Check that the hardware is what the weight path sends from and to, and where it reaches."""
    backend = run.weights.backend
    if backend == "nccl" and cluster.hardware != "cuda":
        yield "weights.backend: nccl sends between GPUs, and hardware is cpu; expected auto, stream, gloo or ipc"
    for name, site in cluster.sites.items():
        if run.weights.path.one_machine and site.on_ray:
            yield (
                f"weights.backend: {backend} needs trainer and instances on one machine, and Ray places those of site "
                f"{name} on any of its nodes; expected auto, stream or gloo, or sites.{name}.launch.backend: local"
            )


def check_ray(cluster: ClusterConfig, run: RunConfig, site: str | None = None) -> Iterable[str]:
    """Check that Ray answers and has the requested nodes."""
    for name in [site] if site is not None else cluster.sites:
        if not cluster.sites[name].on_ray:
            continue
        if importlib.util.find_spec("ray") is None:
            yield f"sites.{name}.launch.backend: ray is not installed; install with: pip install 'streamrl[ray]'"
            continue
        from streamrl.launcher.ray_backend import problems

        yield from problems(cluster, name, plan_processes(cluster, run, Path(), [name]))


def check_keys(cluster: ClusterConfig, site: str, cluster_file: str = "F") -> Iterable[str]:
    """Check a site's own secret key, and the public keys of all that it connects to or admits; name all problems.

    Args:
        cluster: the resolved cluster file.
        site: the site.
        cluster_file: the cluster file that messages name.
    """
    from streamrl.transport.curve import ServerSecurity, load_own, load_public

    if cluster.security.encryption == "none":
        return
    folder = Path(cluster.security.keys)
    admits = site == cluster.trainer_site or bool(cluster.sites[site].port)  # a port: it passes weights on
    admitted = [other for other in cluster.remote_sites if other != site] if admits else []
    servers = [] if site == cluster.trainer_site else [cluster.trainer_site, *cluster.relays_for(site)]
    loads: list[Callable[[], object]] = [lambda: load_own(folder, site, cluster_file=cluster_file)]
    loads += [partial(load_public, folder, other, cluster_file) for other in dict.fromkeys([*servers, *admitted])]
    found = False
    for load in loads:
        try:
            load()
        except UserError as error:
            found = True
            yield str(error)
    if not found and admitted:
        try:
            ServerSecurity.load(folder, site, admitted)
        except UserError as error:  # two sites have the same key
            yield str(error)


def check_packages(cluster: ClusterConfig) -> Iterable[str]:
    """Check that torch and vLLM are installed (they are not in the base install), and fit each other."""
    extra = "gpu" if cluster.hardware == "cuda" else "cpu"
    yield from package_problems(("torch", "vllm", "transformers"), f"{extra},tasks")


def check_packing(run: RunConfig) -> Iterable[str]:
    """Check that `batch.packing` is proven right for the models that are trained; the proof is kept."""
    for key, path in run.trained_models.items():
        try:
            decide_packing(run, resolve_model(path, key), key)
        except UserError as error:
            yield str(error)


def check_tasks(
    run: RunConfig,
    rendered: bool = True,
    resumed: bool = False,
    contents: dict[str, TaskContent] | None = None,
) -> Iterable[str]:
    """Check task names, settings, files, reward functions and agents by building them as the run will.

    Args:
        run: the run.
        rendered: whether the first prompt of each is rendered in the model's chat template, if the model is here.
        resumed: whether a run is continued, which may have found prompts that fit after many that do not, and was begun
            without some checks.
        contents: gets what each task of a continued run holds, by the task's own key; None: nobody compares it.
    """
    from streamrl.agents.agent_function import check_items, load_agent
    from streamrl.tasks.rewards import Scorer

    held_out = run.evaluation.tasks if run.evaluation else []
    named = [(f"tasks.{index}", task) for index, task in enumerate(run.tasks)]
    named += [(f"evaluation.tasks.{index}", task) for index, task in enumerate(held_out)]
    sources = {}
    if not resumed:
        yield from _trained_under_other_names(run)
    for key, task in named:
        try:
            source = PromptSource([task], run.seed)
            source.prompt(0)
            sources[key] = source
            if contents is not None and resumed and key.startswith("tasks."):
                contents |= source.contents()
            if source.problem and not resumed:
                raise UserError(source.problem)
            Scorer([task], run.seed)
            if isinstance(task, AgentTask):
                load_agent(task)
                if not resumed:  # a function may take long for each of its items
                    check_items(task, _items(source, all_of_them=task.path is not None))
        except UserError as error:
            yield f"{key}: {error}"
    if rendered:
        fitting: list[str] = []
        evaluated = None
        if not resumed:
            fitting = [key for key, _ in named[: len(run.tasks)]]
            if run.evaluation and len(sources) == len(named):  # what could not be read has been told
                tasks = run.evaluation.held_out(run.tasks)
                try:
                    read = [sources[f"evaluation.tasks.{index}"] for index in range(len(held_out))]
                    evaluated = PromptSource(tasks, run.seed, read or None)
                except UserError as error:
                    text = str(error)
                    for task in tasks:
                        text = text.replace(repr(task.key), repr(plain_name(task.key)))
                    yield f"evaluation: {text}"
        yield from check_prompts(run, sources, fitting, evaluated)


def _items(source: PromptSource, all_of_them: bool) -> Iterable[tuple[str, dict[str, Any]]]:
    """Yield the items of a source with their prompts' ids, in the order of the first epoch; or the first one."""
    for number in itertools.count():
        prompt = source.prompt(number)
        if prompt.epoch > 0 or (number and not all_of_them):
            return
        yield prompt.prompt_id, prompt.reward_input


def _trained_under_other_names(run: RunConfig) -> Iterable[str]:
    """Name held-out data sets that are also trained on; where the names are equal, the run file is refused as it is."""
    trained = {task.data_set: task.key for task in run.tasks if isinstance(task, FileTask) and task.data_set}
    for index, task in enumerate(run.evaluation.tasks if run.evaluation else []):
        if isinstance(task, FileTask) and task.data_set in trained:
            twin = f"{task.path} is what task {trained[task.data_set]!r} is trained on"
            yield f"evaluation.tasks.{index}: {twin}: name another data set or split"


def check_ranker(run: RunConfig) -> Iterable[str]:
    """Check that the initial ranker can be read."""
    from streamrl.controller.length_predictor import load_ranker

    try:
        load_ranker(run)
    except UserError as error:
        yield str(error)


def check_trackers(run: RunConfig) -> Iterable[str]:
    """Check that the packages of the trackers are installed."""
    return (f"trackers: {problem}" for problem in missing_packages(run.trackers))


def ray_warnings(cluster: ClusterConfig, environment: Mapping[str, str], site: str | None) -> Iterable[str]:
    """Say that a Ray cluster without its token lets everyone in that reaches it."""
    names = [site] if site is not None else list(cluster.sites)
    on_ray = [name for name in names if cluster.sites[name].on_ray]
    if on_ray and environment.get("RAY_AUTH_MODE") != "token":
        yield (
            f"site {on_ray[0]}: whoever reaches its Ray can run commands there; start Ray and streamrl with "
            "RAY_AUTH_MODE=token and one RAY_AUTH_TOKEN_PATH on all nodes"
        )


def sandbox_warnings(run: RunConfig) -> Iterable[str]:
    """Say what programs that a model writes can do here in spite of their sandbox."""
    for task in [*run.tasks, *(run.evaluation.tasks if run.evaluation else [])]:
        if isinstance(task, FileTask) and task.sandbox and (weaker := isolation_of(task.sandbox).weaker):
            yield f"task {task.key!r}: {weaker}"


def check_ports(cluster: ClusterConfig, name: str) -> Iterable[str]:
    """Check that the ports on which a site listens are free."""
    site = cluster.sites[name]
    address = site.listen or site.address
    ports = [site.port] if site.port or site.trainer else []
    if site.trainer and cluster.remote_sites and site.port:
        ports.append(site.port + 1)
    for port in ports:
        try:
            found = resolve(address)
            with socket.socket(family_of(found)) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((found, port))
        except OSError as error:
            taken = f"sites.{name}: cannot listen on {host_port(address, port)}: {error.strerror or error}"
            yield ErrorCode.PORT.refer(taken)


def check_metrics(cluster: ClusterConfig, name: str) -> Iterable[str]:
    """Check that the launcher can serve a site's metrics."""
    if (endpoint := cluster.sites[name].metrics) is None:
        return
    if importlib.util.find_spec("prometheus_client") is None:
        yield f"sites.{name}.metrics: prometheus-client is not installed; install with: pip install prometheus-client"
        return
    from streamrl.exporter.metrics_server import endpoint_problems

    yield from endpoint_problems(endpoint, f"sites.{name}.metrics")
