"""Rollouts on disk: one Parquet file per optimizer step, with the columns of `SCHEMA`.

A completion is one row. An agent's episode has as many rows as its trajectory, with the same `trajectory_id`; one
without any token has one row.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ranker.data import ROW_IDS, first_rows
from streamrl.atomic_files import remove_left, replacing, sync_folder
from streamrl.byte_parts import parts_of
from streamrl.errors import writing
from streamrl.rollouts.parquet_files import step_file, step_files, step_of
from streamrl.rollouts.row_parts import episode_rows
from streamrl.rollouts.types import Group

log = logging.getLogger(__name__)

TEXT, NUMBER, COUNT = pa.string(), pa.float64(), pa.int32()
COLUMNS: dict[str, tuple[pa.DataType, str]] = {
    "sample_id": (TEXT, "the row's id: the sample's; from an episode's second row on with `#` and the row's number"),
    "trajectory_id": (TEXT, "id of the sample, the same in all rows of an episode"),
    "group_id": (TEXT, "group of samples of one prompt, issued together"),
    "prompt_id": (TEXT, "task and number of the prompt, the same in each epoch"),
    "task": (TEXT, "name of the task"),
    "epoch": (COUNT, "how often the task's prompts had all been issued before"),
    "step": (COUNT, "optimizer step, from 1, that trained it"),
    "prompt": (TEXT, "what the reward got as the prompt"),
    "completion": (TEXT, "what the reward got as the completion, without special tokens"),
    "prompt_tokens": (pa.list_(COUNT), "token ids of the templated prompt"),
    "completion_tokens": (pa.list_(COUNT), "token ids of the completion, the end token included"),
    "logprobs": (pa.list_(pa.float32()), "log-probability of each of them as it was sampled; 0 where it was not"),
    "mask": (pa.list_(pa.bool_()), "which of them were sampled, in an episode's row; null: all"),
    "metrics": (pa.map_(TEXT, NUMBER), "what an agent returned beside its reward; null: no episode"),
    "conversation": (TEXT, "an episode's messages and steps as JSON, in its first row"),
    "output_length": (COUNT, "number of sampled tokens, of all rows of an episode"),
    "finish_reason": (TEXT, "`stop` (end token or stop string) or `length` (token limit)"),
    "reward": (NUMBER, "reward; null where it is void"),
    "void_cause": (TEXT, "why the reward is void, as in `docs/how-to/tasks.md`; null: it is not"),
    "reward_error": (TEXT, "the error that made it void"),
    "advantage": (NUMBER, "advantage within its group; null: void, or the algorithm computes it later"),
    "weight_versions": (pa.list_(COUNT), "weight version of each completion token; -1 where it was not sampled"),
    "site": (TEXT, "site that generated it"),
    "instance": (TEXT, "vLLM instance on which it ended"),
    "pool": (TEXT, "pool of that instance"),
    "route": (TEXT, "why it was there: `tail` as predicted long, else `regular`"),
    "predicted_length": (NUMBER, "forecast tokens; null: no forecast"),
    "drafted_tokens": (COUNT, "tokens drafted and verified on its last instance (speculative decoding)"),
    "accepted_tokens": (COUNT, "those of them that were accepted"),
    "t_queued": (NUMBER, "when the controller issued it, unix seconds"),
    "t_dispatched": (NUMBER, "when its first instance took it, unix seconds"),
    "t_first_token": (NUMBER, "when its first token was there, unix seconds"),
    "t_finished": (NUMBER, "when its last token was there, unix seconds"),
    "t_received": (NUMBER, "when the controller had it, unix seconds"),
    "t_trained": (NUMBER, "when its optimizer step had ended, unix seconds; null where it is void"),
}
"""Type and meaning of each column; files of earlier versions lack some."""
ROW_GROUP_BYTES = 32 << 20
"""Most bytes of tokens and texts in a row group: whoever writes or reads one has it in memory, and no other thread runs
while its rows become columns."""
SCHEMA = pa.schema([(name, kind) for name, (kind, _) in COLUMNS.items()])


class RolloutStore:
    """The `rollouts/` folder of a run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, step: int) -> Path:
        """Return the name of a step's file."""
        return self.directory / step_file(step)

    def write(self, step: int, groups: list[Group]) -> Path:
        """Write a step's samples atomically, to disk: the ledger forgets what they hold once this returns.

        Some `ROW_GROUP_BYTES` are in memory at a time, besides the samples.

        Raises:
            RunFailed: the file cannot be written.
        """
        rows = (row for group in groups for sample_id in sorted(group.scored) for row in _rows(group, sample_id))
        target = self.path(step)
        with writing(target):
            if not self.directory.is_dir():
                self.directory.mkdir(exist_ok=True)  # a run's folder that has been moved is not made anew
                sync_folder(self.directory.parent)
            with (
                replacing(target, lasting=True) as partial,
                pq.ParquetWriter(partial, SCHEMA, compression="zstd") as writer,
            ):
                for part in _row_groups(rows):
                    writer.write_table(pa.Table.from_pylist(part, schema=SCHEMA), row_group_size=len(part))
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


def _row_groups(rows: Iterable[dict[str, object]]) -> Iterator[list[dict[str, object]]]:
    """Divide rows into row groups of at most `ROW_GROUP_BYTES`, but at least one row."""
    return parts_of(rows, lambda row: sum(map(_size, row.values())), ROW_GROUP_BYTES)


def _size(value: object) -> int:
    """Return about how many bytes a value takes in a table; numbers and short lists count as nothing."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    return len(value) if isinstance(value, str) else 0


def _rows(group: Group, sample_id: str) -> list[dict[str, object]]:
    """Return the rows of a sample."""
    first, sample = _row(group, sample_id), group.scored[sample_id].sample
    if (trajectory := sample.trajectory) is None:
        return [first]
    told = {"messages": trajectory.messages, "steps": msgspec.to_builtins(trajectory.steps)}
    first["conversation"] = json.dumps(told, ensure_ascii=False)
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
