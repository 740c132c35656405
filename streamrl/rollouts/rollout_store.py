"""Rollouts on disk: one Parquet file per optimizer step, with the columns of `SCHEMA`.

A completion is one row. An agent's episode has as many rows as its trajectory, with the same `trajectory_id`; one
without any token has one row.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from ranker.data import ROW_IDS, first_rows
from streamrl.atomic_files import remove_left, replacing, sync_folder
from streamrl.errors import RunFailed
from streamrl.rollouts.parquet_files import step_file, step_files, step_of
from streamrl.rollouts.row_parts import episode_rows
from streamrl.rollouts.types import Group

log = logging.getLogger(__name__)

SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("trajectory_id", pa.string()),
        ("group_id", pa.string()),
        ("prompt_id", pa.string()),
        ("task", pa.string()),
        ("epoch", pa.int32()),
        ("step", pa.int32()),
        ("prompt", pa.string()),
        ("completion", pa.string()),
        ("prompt_tokens", pa.list_(pa.int32())),
        ("completion_tokens", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("mask", pa.list_(pa.bool_())),
        ("metrics", pa.map_(pa.string(), pa.float64())),
        ("conversation", pa.string()),
        ("output_length", pa.int32()),
        ("finish_reason", pa.string()),
        ("reward", pa.float64()),
        ("void_cause", pa.string()),
        ("reward_error", pa.string()),
        ("advantage", pa.float64()),
        ("weight_versions", pa.list_(pa.int32())),
        ("site", pa.string()),
        ("instance", pa.string()),
        ("pool", pa.string()),
        ("route", pa.string()),
        ("predicted_length", pa.float64()),
        ("drafted_tokens", pa.int32()),
        ("accepted_tokens", pa.int32()),
        *[(name, pa.float64()) for name in ("t_queued", "t_dispatched", "t_first_token", "t_finished")],
        *[(name, pa.float64()) for name in ("t_received", "t_trained")],
    ]
)
"""Columns of a file; `weight_versions` has one version per completion token, times are unix seconds.

`trajectory_id` is the id of the sample; `sample_id` has '#' and the row's number after it from an episode's second row
on. Of an episode's row, `mask` says which tokens were sampled (null: all were); the others have log-probability 0 and
version -1. `output_length` is the number of sampled tokens of all rows. `metrics` has what an agent
returned beside its reward (null: not an episode; files of earlier versions lack the column). `conversation` has an
episode's messages and steps as JSON, in its first row.

`reward` is null where it is void: `void_cause` and `reward_error` say why, and `advantage` and `t_trained` are null.
"""


class RolloutStore:
    """The `rollouts/` folder of a run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, step: int) -> Path:
        """Return the name of a step's file."""
        return self.directory / step_file(step)

    def write(self, step: int, groups: list[Group]) -> Path:
        """Write a step's samples atomically, to disk: the ledger forgets what they hold once this returns.

        Raises:
            RunFailed: the file cannot be written.
        """
        rows = [row for group in groups for sample_id in sorted(group.scored) for row in _rows(group, sample_id)]
        target = self.path(step)
        try:
            if not self.directory.is_dir():
                self.directory.mkdir(parents=True, exist_ok=True)
                sync_folder(self.directory.parent)
            with replacing(target, lasting=True) as partial:
                pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), partial, compression="zstd")
        except OSError as error:
            raise RunFailed(f"cannot write rollouts to {target}: {error}") from error
        return target

    def newest(self, columns: Sequence[str], most: int) -> list[dict[str, Any]]:
        """Return columns of the newest samples' first rows, oldest first: as few whole steps as have `most` samples.

        What a file of an earlier version lacks is None. A file that cannot be read is named in the log and left out.
        """
        steps: list[list[dict[str, Any]]] = []
        count = 0
        for _, path in reversed(step_files(self.directory)):
            if count >= most:
                break
            try:
                there = set(pq.read_schema(path).names)
                table = first_rows(pq.read_table(path, columns=[*there & {*columns, *ROW_IDS}]))
            except (pa.ArrowException, OSError) as error:
                log.warning("%s is left out, expected a readable Parquet file: %s", path, error)
                continue
            steps.append([{name: row.get(name) for name in columns} for row in table.to_pylist()])
            count += len(steps[-1])
        return [row for step in reversed(steps) for row in step]

    def rewind(self, first_step: int) -> None:
        """Delete the files from `first_step` on, and what a killed controller has left of any."""
        remove_left(self.directory, lambda name: step_of(name) is not None)
        for step, path in step_files(self.directory):
            if step >= first_step:
                path.unlink()


def _rows(group: Group, sample_id: str) -> list[dict[str, object]]:
    """Return the rows of a sample."""
    first, sample = _row(group, sample_id), group.scored[sample_id].sample
    if (trajectory := sample.trajectory) is None:
        return [first]
    told = {"messages": trajectory.messages, "steps": msgspec.to_builtins(trajectory.steps)}
    first["conversation"] = json.dumps(told)
    first["metrics"] = trajectory.metrics
    parts = [
        {
            "sample_id": part.row_id,
            "prompt_tokens": prompt,
            "completion_tokens": part.tokens,
            "logprobs": part.logprobs,
            "weight_versions": part.versions,
            "mask": part.mask,
        }
        for prompt, part in episode_rows(sample)
    ]
    return [(first if number == 0 else first | {"conversation": None}) | part for number, part in enumerate(parts)] or [
        first
    ]


def _row(group: Group, sample_id: str) -> dict[str, object]:
    scored = group.scored[sample_id]
    sample = scored.sample
    return {
        "sample_id": sample_id,
        "trajectory_id": sample_id,
        "group_id": group.group_id,
        "prompt_id": group.prompt_id,
        "task": group.task,
        "epoch": group.epoch,
        "step": group.step,
        "prompt": group.prompt,
        "completion": sample.text,
        "prompt_tokens": group.prompt_tokens,
        "completion_tokens": sample.completion_tokens,
        "logprobs": sample.logprobs,
        "mask": None,
        "metrics": None,
        "conversation": None,
        "output_length": sample.output_length,
        "finish_reason": sample.finish_reason,
        "reward": scored.reward,
        "void_cause": scored.void and scored.void.cause.value,
        "reward_error": scored.void and scored.void.text,
        "advantage": group.advantages.get(sample_id),
        "weight_versions": sample.token_versions,
        "site": sample.site,
        "instance": sample.instance,
        "pool": sample.pool,
        "route": sample.route,
        "predicted_length": group.predicted_length,
        "drafted_tokens": sample.drafted_tokens,
        "accepted_tokens": sample.accepted_tokens,
        "t_queued": sample.t_queued,
        "t_dispatched": sample.t_dispatched,
        "t_first_token": sample.t_first_token,
        "t_finished": sample.t_finished,
        "t_received": scored.t_received,
        "t_trained": None if scored.void else group.t_trained,
    }
