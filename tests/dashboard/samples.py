"""Writes samples as a run writes them, through `RolloutStore`'s schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from streamrl.rollouts.rollout_store import SCHEMA


def a_sample(sample_id: str, **changes: Any) -> dict[str, Any]:
    """A row of a trained sample of four tokens; its group is what its id has before the dot."""
    row: dict[str, Any] = {
        "sample_id": sample_id,
        "trajectory_id": sample_id.partition("#")[0],
        "group_id": sample_id.partition(".")[0],
        "prompt_id": f"of {sample_id.partition('.')[0]}",
        "task": "sum",
        "step": 1,
        "prompt": "What is 1 + 1?",
        "completion": "It is 2",
        "prompt_tokens": [1, 2, 3],
        "completion_tokens": [10, 11, 12, 13],
        "logprobs": [-0.5, -0.25, -4.0, 0.0],
        "weight_versions": [4, 4, 5, 5],
        "output_length": 4,
        "finish_reason": "stop",
        "reward": 1.0,
        "advantage": 0.5,
        "route": "regular",
        "predicted_length": 5.0,
        "t_trained": 9.0,
    }
    return row | changes


def write_samples(folder: Path, step: int, rows: list[dict[str, Any]], **options: Any) -> Path:
    """A step's file in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:06d}.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path, **options)
    return path
