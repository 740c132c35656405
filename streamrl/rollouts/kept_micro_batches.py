"""The micro-batches of a refused optimizer step on disk: one Parquet file per step, one row per sequence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from streamrl.atomic_files import remove_left, replacing
from streamrl.errors import UserError
from streamrl.rollouts.parquet_files import read_columns, step_file, step_files, step_of
from streamrl.rollouts.train_groups import TrainGroup, TrainSequence
from streamrl.rollouts.types import ByteArray, rows_from

SCHEMA = pa.schema(
    [
        ("micro_batch", pa.int32()),
        ("worker", pa.int32()),
        ("part", pa.int32()),
        ("group_id", pa.string()),
        ("sample_id", pa.string()),
        ("prompt_tokens", pa.list_(pa.int32())),
        ("completion_tokens", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("advantage", pa.float64()),
        ("reference_logprobs", pa.list_(pa.float32())),
        ("mask", pa.list_(pa.bool_())),
        ("trajectory", pa.string()),
        ("trajectory_tokens", pa.int64()),
        ("estimates", pa.list_(pa.list_(pa.float32()))),
        ("prompt_experts", pa.binary()),
        ("experts", pa.binary()),
        ("expert_row_bytes", pa.int32()),
    ]
)
"""Columns of a file; `part` counts the groups (or parts of groups) of a worker's share. The experts are rows of bytes,
with router replay; `prompt_experts` is in a part's first row only. Files of earlier versions lack the last six."""
UNPACKED = 16
"""Most bytes in memory per byte of a file: a large step, with the experts of some million tokens, is read as it was
written (such numbers pack to a half or a quarter), and a small file stands for no more than others may."""
FACTS = b"streamrl"
"""Key of the file's metadata under which the facts of the step are kept, as JSON."""

MicroBatches = Sequence[Sequence[Sequence[TrainGroup]]]
"""Share of every worker, of every micro-batch."""


@dataclass(frozen=True)
class KeptStep:
    """A refused optimizer step."""

    step: int
    """Number of the step, from 1."""
    normalizer: float
    """Divisor of the step's summed loss."""
    cause: str
    not_finite: dict[str, str]
    """What was not finite in each group concerned, by its id; {}: no group on its own, or not examined yet."""
    micro_batches: MicroBatches


class KeptMicroBatches:
    """The folder of refused steps."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, step: int) -> Path:
        """Return the file of a step."""
        return self.directory / step_file(step)

    def steps(self) -> list[int]:
        """Return the numbers of all kept steps, in order."""
        return [step for step, _ in step_files(self.directory)]

    def write(self, kept: KeptStep) -> Path:
        """Write a step atomically; a file of the same step is replaced.

        Raises:
            OSError: the file cannot be written.
        """
        rows = [
            {
                "micro_batch": number,
                "worker": worker,
                "part": part,
                "group_id": group.group_id,
                "sample_id": sequence.sample_id,
                "prompt_tokens": group.prompt_tokens,
                "completion_tokens": sequence.completion_tokens,
                "logprobs": sequence.logprobs,
                "advantage": sequence.advantage,
                "reference_logprobs": sequence.reference_logprobs,
                "mask": sequence.mask,
                "trajectory": group.trajectory,
                "trajectory_tokens": sequence.trajectory_tokens,
                "estimates": None if sequence.estimates is None else sequence.estimates.tolist(),
                "prompt_experts": None if place else _bytes_of(group.prompt_experts),
                "experts": _bytes_of(sequence.experts),
                "expert_row_bytes": None if group.prompt_experts is None else group.prompt_experts.shape[1],
            }
            for number, shares in enumerate(kept.micro_batches)
            for worker, share in enumerate(shares)
            for part, group in enumerate(share)
            for place, sequence in enumerate(group.sequences)
        ]
        facts = {"step": kept.step, "normalizer": kept.normalizer, "cause": kept.cause, "not_finite": kept.not_finite}
        table = pa.Table.from_pylist(rows, schema=SCHEMA.with_metadata({FACTS: json.dumps(facts).encode()}))
        self.directory.mkdir(exist_ok=True)
        target = self.path(kept.step)
        with replacing(target) as partial:
            pq.write_table(table, partial, compression="zstd")
        return target

    def rewind(self, first_step: int) -> None:
        """Delete the steps from `first_step` on, and what a killed controller has left of any."""
        remove_left(self.directory, lambda name: step_of(name) is not None)
        for step in self.steps():
            if step >= first_step:
                self.path(step).unlink()

    def read(self, step: int) -> KeptStep:
        """Read a step that was refused.

        Raises:
            UserError: there is none of this number; the message names those that are kept.
        """
        path = self.path(step)
        if not path.exists():
            known = ", ".join(map(str, self.steps()))
            raise UserError(
                f"step {step} has no micro-batches to replay: they are kept in {self.directory} only when the trainer "
                + (f"refuses a step; kept are those of step {known}" if known else "refuses a step, which it has not")
            )
        try:
            table = read_columns(path, self.directory.parent, per_byte=UNPACKED)
            facts = json.loads(table.schema.metadata[FACTS])
        except (pa.ArrowException, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path} is not a file of micro-batches that streamrl has kept: {error}") from error
        found: dict[tuple[int, int, int], TrainGroup] = {}
        for row in table.to_pylist():
            place = row["micro_batch"], row["worker"], row["part"]
            if place not in found:
                prompt, trajectory = np.array(row["prompt_tokens"], np.int32), row.get("trajectory", "")
                found[place] = TrainGroup(row["group_id"], prompt, [], trajectory, _rows_of(row, "prompt_experts"))
            reference, mask, estimates = row["reference_logprobs"], row["mask"], row.get("estimates")
            found[place].sequences.append(
                TrainSequence(
                    np.array(row["completion_tokens"], np.int32),
                    np.array(row["logprobs"], np.float32),
                    row["advantage"],
                    None if reference is None else np.array(reference, np.float32),
                    None if estimates is None else np.array(estimates, np.float32).reshape(-1, 3),
                    row["sample_id"],
                    None if mask is None else np.array(mask, np.bool_),
                    row.get("trajectory_tokens"),
                    _rows_of(row, "experts"),
                )
            )
        shares: dict[int, dict[int, list[TrainGroup]]] = {}
        for (number, worker, _), group in found.items():
            shares.setdefault(number, {}).setdefault(worker, []).append(group)
        workers = max((worker for _, worker, _ in found), default=0) + 1
        micro_batches = [[one.get(worker, []) for worker in range(workers)] for one in shares.values()]
        return KeptStep(facts["step"], facts["normalizer"], facts["cause"], facts["not_finite"], micro_batches)


def _bytes_of(rows: ByteArray | None) -> bytes | None:
    return None if rows is None else rows.tobytes()


def _rows_of(row: dict[str, Any], column: str) -> ByteArray | None:
    """Return the rows of experts of a column; None: there are none."""
    return rows_from(row.get(column), row.get("expert_row_bytes"))
