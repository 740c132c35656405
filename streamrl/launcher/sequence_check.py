"""Checks whether the trainer's ranks can share rows of tokens (`trainer.sequence_parallel`) with a run's models."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from scheduler.cost.model_shapes import text_part, undivided_heads
from streamrl.config.cluster import ClusterConfig
from streamrl.config.run import RunConfig
from streamrl.errors import UserError
from streamrl.machine.model_files import read_config, resolve_model
from streamrl.training.packing_choice import decide_packing


def check_sequence_parallel(cluster: ClusterConfig, run: RunConfig) -> Iterable[str]:
    """Check that heads can be divided, and that tokens meet in attention alone, of the policy and of the critic."""
    trainer = cluster.trainer
    if trainer.sequence_parallel == 1:
        return
    asked = f"sites.{cluster.trainer_site}.trainer.sequence_parallel is {trainer.sequence_parallel}"
    for key, path in run.trained_models.items():
        try:
            folder = resolve_model(path, key)
            values = text_part(read_config(Path(folder)))
            packing = decide_packing(run, folder, key)
        except UserError:
            continue  # reported by `check_model` and `check_packing`
        heads = values.get("num_attention_heads")
        kv_heads, ranks = values.get("num_key_value_heads"), trainer.sequence_parallel
        if isinstance(heads, int) and (problem := undivided_heads(heads, kv_heads, ranks)):
            yield f"{asked}: {problem} of {path}"
        if packing is not None and packing.undivided:
            yield f"{asked}, expected 1 for {path}: {packing.undivided}"
