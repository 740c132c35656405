"""A whole run of a tiny random model on this machine's devices, as a stage of `streamrl verify --hardware`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from streamrl.errors import UserError
from streamrl.generation.instance.settings_trial import error_of
from streamrl.machine.gpus import gpu_names
from streamrl.run_dir import layout
from streamrl.run_dir.metrics import read_metrics
from streamrl.run_dir.status import read_status
from streamrl.scratch_folders import ScratchFolder
from streamrl.verify.hardware_measurement import Measurement

TINY_RUN = "tiny run"
LIMIT_S = 600.0
"""Seconds that the run may take; starting vLLM takes nearly all of them."""
STEPS = 2


def tiny_files(folder: Path, gpus: int) -> None:
    """Write a model, its tasks, a cluster file and a run file.

    Args:
        folder: an existing empty folder.
        gpus: usable GPUs. With one, trainer and generation take turns (colocated); with none, both use CPUs.
    """
    from transformers import Qwen2Config

    from streamrl.verify.small_folder import save_small_models

    config = Qwen2Config(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    model, _ = save_small_models(config, folder)
    rows = [{"prompt": f"say {word}", "answer": word} for word in ("one", "two", "three", "four")]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    site: dict[str, Any] = {"trainer": {"ranks": 1}, "generation": [{"name": "regular", "replicas": 1}]}
    if not gpus:
        site["generation"][0] |= {"max_batch": 8, "kv_cache_gb": 0.05}
    cluster = {"name": "tiny", "hardware": "cuda" if gpus else "cpu", "sites": {"here": site}}
    run = {
        "name": "tiny",
        "steps": STEPS,
        "model": {"path": str(model), "max_context": 96},
        "tasks": [{"kind": "file", "name": "words", "path": "prompts.jsonl", "reward": "exact_match"}],
        "batch": {"prompts_per_step": 4, "samples_per_prompt": 4},
        "sampling": {"max_tokens": 16},
        "schedule": {"name": "colocated" if gpus == 1 else "stream"},
    }
    (folder / "cluster.yaml").write_text(json.dumps(cluster), encoding="utf-8")
    (folder / "run.yaml").write_text(json.dumps(run), encoding="utf-8")


def tiny_run() -> tuple[list[Measurement], str]:
    """Launch the run; return what it shows, and why it failed ('': it did not)."""
    try:
        gpus = len(gpu_names())
    except UserError as error:
        return [], str(error)
    with ScratchFolder() as folder:
        tiny_files(folder, gpus)
        command = ["launch", "--cluster", "cluster.yaml", "--run", "run.yaml"]
        try:
            done = subprocess.run(
                [sys.executable, "-m", "streamrl.cli.main", *command],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            return [], f"the run had no end within {LIMIT_S:.0f} s"
        if done.returncode:
            return [], error_of(done.stderr + done.stdout)
        return _shown(folder / "runs" / "tiny", "colocated" if gpus == 1 else "stream"), ""


def _shown(run_dir: Path, schedule: str) -> list[Measurement]:
    last = read_metrics(run_dir / layout.METRICS)[-1]
    verified = read_status(run_dir).verified
    return [
        Measurement("steps", last.step, "", schedule),
        Measurement("generation in the last step", last.tokens_per_s, "tokens/s"),
        Measurement("weights", verified.versions, "versions", verified.words),
    ]
