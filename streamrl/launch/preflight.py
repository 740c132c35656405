"""What can be known to be wrong before anything starts; all problems in one message."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

from streamrl.config.algorithm import PPOConfig
from streamrl.config.cluster import ClusterConfig, TrainerPool
from streamrl.config.run import RunConfig
from streamrl.errors import UserError
from streamrl.launch.models import resolve_model, weight_bytes
from streamrl.launch.plan import plan_processes

CHECKPOINT_BYTES_PER_WEIGHT_BYTE = 7
"""A checkpoint holds bf16 weights (2 bytes a parameter) and fp32 weights with two AdamW moments (12 more)."""

NVIDIA_SMI_S = 30
"""Seconds; it needs several on a machine with eight GPUs that sleep."""
TRAINING_BYTES_PER_WEIGHT_BYTE = 10
"""Of the trainer: bf16 weights and gradients, fp32 weights, gradients and two AdamW moments, 20 bytes a parameter."""
FROZEN_BYTES_PER_WEIGHT_BYTE = 3
"""A reference or proximal copy: fp32 weights and their compute copy, for weights that are bf16 on disk."""

PROCESS_BYTES = 1.0 * 2**30
"""What a process with torch and vLLM occupies before it holds a model (measured on CPU: 0.7 to 1.2 GiB)."""


def check(cluster: ClusterConfig, run: RunConfig, runs_root: Path) -> list[str]:
    """Checks files, machine and packages against what is asked for.

    Returns:
        Warnings: what will be slow or may fail, but can be run.

    Raises:
        UserError: one line per problem.
    """
    checks: list[Callable[[], Iterable[str]]] = [
        lambda: check_packages(cluster),
        lambda: check_model(run),
        lambda: check_tasks(run),
        lambda: check_ranker(run),
        lambda: check_gpus(cluster, count_gpus() if cluster.hardware == "cuda" else 0),
        lambda: check_ports(cluster),
        lambda: check_disk(run, runs_root),
    ]
    problems = [problem for one in checks for problem in one()]
    if problems:
        raise UserError("\n".join(problems))
    return [*thread_warnings(cluster, run, cores()), *memory_warnings(cluster, run, free_memory())]


def check_packages(cluster: ClusterConfig) -> Iterable[str]:
    """torch and vLLM are installed (they are not in the base install)."""
    missing = [name for name in ("torch", "vllm", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        extra = "gpu" if cluster.hardware == "cuda" else "cpu"
        yield f"not installed: {', '.join(missing)}; install with: pip install 'streamrl[{extra},tasks]'"


def check_model(run: RunConfig) -> Iterable[str]:
    """The model is there and its context is long enough."""
    try:
        folder = Path(resolve_model(run.model.path))
    except UserError as error:
        yield str(error)
        return
    longest = context_length(json.loads((folder / "config.json").read_text()))
    if longest is not None and run.model.max_context > longest:
        yield f"model.max_context: {run.model.path} has {longest} positions, {run.model.max_context} are asked for"


def context_length(model_config: dict[str, Any]) -> int | None:
    """Positions that a model's config.json allows; multi-modal models say so of their text part."""
    for part in (model_config, model_config.get("text_config")):
        if isinstance(part, dict) and isinstance(part.get("max_position_embeddings"), int):
            return int(part["max_position_embeddings"])
    return None


def check_tasks(run: RunConfig) -> Iterable[str]:
    """Task names, their settings, files and reward functions: made as the run will make them."""
    from streamrl.tasks.rewards import Scorer
    from streamrl.tasks.source import PromptSource

    held_out = run.evaluation.tasks if run.evaluation else []
    named = [(f"tasks.{index}", task) for index, task in enumerate(run.tasks)]
    named += [(f"evaluation.tasks.{index}", task) for index, task in enumerate(held_out)]
    for key, task in named:
        try:
            PromptSource([task], run.seed).prompt(0)
            Scorer([task], run.seed)
        except UserError as error:
            yield f"{key}: {error}"


def check_ranker(run: RunConfig) -> Iterable[str]:
    """The ranker to begin with can be read."""
    from streamrl.control.lengths import load_ranker

    try:
        load_ranker(run)
    except UserError as error:
        yield str(error)


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
    try:
        done = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=NVIDIA_SMI_S)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"nvidia-smi --list-gpus did not answer within {NVIDIA_SMI_S} s") from error
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
    needed = (run.checkpoint.keep + 1) * weight_bytes(folder) * CHECKPOINT_BYTES_PER_WEIGHT_BYTE
    free = shutil.disk_usage(existing).free
    if needed > free:
        yield (
            f"--runs-dir {runs_root}: {needed / 2**30:.1f} GiB needed for {run.checkpoint.keep} checkpoints and "
            f"one more, {free / 2**30:.1f} GiB free"
        )


def thread_warnings(cluster: ClusterConfig, run: RunConfig, cores: int) -> list[str]:
    """Far more computing threads than cores: everything gets slower, heartbeats too.

    The trainer and the instances seldom compute all at once, so twice the cores is usual.
    """
    if cluster.hardware != "cpu":
        return []
    specs = plan_processes(cluster, run, Path())
    threads = sum(
        spec.threads * (cluster.sites[spec.site].trainer or TrainerPool()).ranks
        if spec.role == "trainer"
        else spec.threads
        for spec in specs
        if spec.role in ("trainer", "instance")
    )
    if threads <= 2 * cores:
        return []
    return [
        f"the cluster file asks for {threads} computing threads, this machine has {cores} cores: expect it to be slow"
    ]


def memory_warnings(cluster: ClusterConfig, run: RunConfig, free: float) -> list[str]:
    """A rough sum of what the processes hold, against the memory that is free (bytes); activations not counted."""
    if cluster.hardware != "cpu":
        return []
    weights = weight_bytes(Path(resolve_model(run.model.path)))
    needed = 0.0
    for site in cluster.sites.values():
        if site.trainer:
            learning = 2 if isinstance(run.algorithm, PPOConfig) else 1  # policy, critic
            frozen = run.algorithm.needs_reference + run.algorithm.needs_proximal(run.schedule.sync_every)
            copies = learning * TRAINING_BYTES_PER_WEIGHT_BYTE + frozen * FROZEN_BYTES_PER_WEIGHT_BYTE
            needed += copies * weights + site.trainer.ranks * PROCESS_BYTES
        for pool in site.generation:
            needed += pool.replicas * (weights + pool.kv_cache_gb * 2**30 + PROCESS_BYTES)
    if needed <= free:
        return []
    return [
        f"the run needs about {needed / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB are free: it may be killed"
    ]


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory() -> float:
    """Bytes that can be used without swapping."""
    return float(psutil.virtual_memory().available)
