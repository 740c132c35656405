"""What can be known to be wrong before anything starts; all problems in one message."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.errors import UserError
from streamrl.launch.models import resolve_model

CHECKPOINT_BYTES_PER_WEIGHT_BYTE = 7
"""A checkpoint holds bf16 weights (2 bytes a parameter) and fp32 weights with two AdamW moments (12 more)."""


def check(cluster: ClusterConfig, run: RunConfig, runs_root: Path) -> None:
    """Checks files, machine and packages against what is asked for.

    Raises:
        UserError: one line per problem.
    """
    checks: list[Callable[[], Iterable[str]]] = [
        lambda: check_model(run),
        lambda: check_tasks(run),
        lambda: check_gpus(cluster, count_gpus() if cluster.hardware == "cuda" else 0),
        lambda: check_ports(cluster),
        lambda: check_disk(run, runs_root),
    ]
    problems = [problem for one in checks for problem in one()]
    if problems:
        raise UserError("\n".join(problems))


def check_model(run: RunConfig) -> Iterable[str]:
    """The model is there and its context is long enough."""
    try:
        folder = Path(resolve_model(run.model.path))
    except UserError as error:
        yield str(error)
        return
    if (folder / "config.json").exists():
        longest = json.loads((folder / "config.json").read_text()).get("max_position_embeddings")
        if longest and run.model.max_context > longest:
            yield f"model.max_context: {run.model.path} has {longest} positions, {run.model.max_context} are asked for"


def check_tasks(run: RunConfig) -> Iterable[str]:
    """Task names, their settings, files and reward functions: made as the run will make them."""
    from streamrl.tasks.rewards import Scorer
    from streamrl.tasks.source import PromptSource

    for index, task in enumerate(run.tasks):
        try:
            PromptSource([task], run.seed).prompt(0)
            Scorer([task], run.seed)
        except UserError as error:
            yield f"tasks.{index}: {error}"


def check_gpus(cluster: ClusterConfig, present: int) -> Iterable[str]:
    """Enough GPUs on this machine."""
    if cluster.hardware != "cuda":
        return
    wanted = sum(
        (site.trainer.ranks if site.trainer else 0) + sum(p.replicas * p.gpus_per_replica for p in site.generation)
        for site in cluster.sites.values()
    )
    if wanted > present:
        yield f"the cluster asks for {wanted} GPUs, this machine has {present}"


def count_gpus() -> int:
    """GPUs of this machine, as nvidia-smi lists them."""
    if shutil.which("nvidia-smi") is None:
        return 0
    done = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True)
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())


def check_ports(cluster: ClusterConfig) -> Iterable[str]:
    """Fixed ports are free."""
    for name, site in cluster.sites.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((site.address, site.port))
            except OSError as error:
                yield f"sites.{name}.port: cannot listen on {site.address}:{site.port}: {error.strerror}"


def check_disk(run: RunConfig, runs_root: Path) -> Iterable[str]:
    """Room for the checkpoints that are kept, and one that is being written."""
    try:
        folder = Path(resolve_model(run.model.path))
    except UserError:
        return
    existing = next(p for p in [runs_root.absolute(), *runs_root.absolute().parents] if p.exists())
    if not os.access(existing, os.W_OK):
        yield f"--runs-dir {runs_root}: cannot write to {existing}"
    weights = sum(p.stat().st_size for p in folder.glob("*.safetensors"))
    needed = (run.checkpoint.keep + 1) * weights * CHECKPOINT_BYTES_PER_WEIGHT_BYTE
    free = shutil.disk_usage(existing).free
    if needed > free:
        yield (
            f"--runs-dir {runs_root}: {needed / 2**30:.1f} GiB needed for {run.checkpoint.keep} checkpoints and "
            f"one more, {free / 2**30:.1f} GiB free"
        )
