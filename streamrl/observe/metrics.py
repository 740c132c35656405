"""`metrics.jsonl`: one row per optimizer step, written by the controller and read by everything that shows a
run.

The file only ever grows, except when a run is resumed from an older checkpoint (`MetricsWriter.rewind`). A
killed run may leave a cut last line: readers skip it and the writer removes it before it appends.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

FILE_NAME = "metrics.jsonl"


def finite(value: Any) -> Any:
    """The same value with NaN and infinities replaced by None, at any depth of dicts, lists and tuples."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


class MetricsRow(BaseModel):
    """What was measured in one optimizer step; None where there is no figure. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    step: int = Field(ge=1, description="optimizer steps completed, with this one (the first row is 1)")
    time: float = Field(description="unix seconds at which the step ended")
    step_time_s: float | None = Field(None, description="wall time since the previous step ended")
    generate_time_s: float | None = Field(None, description="time in which at least one sample was being generated")
    train_time_s: float | None = Field(None, description="time in which the trainer computed")
    bubble_fraction_generation: float | None = Field(None, description="share of the step instances stood idle")
    bubble_fraction_training: float | None = Field(None, description="share of the step the trainer stood idle")
    samples_per_s: float | None = Field(None, description="trained samples per second of the step")
    tokens_per_s: float | None = Field(None, description="generated tokens per second of the step")
    reward_mean: float | None = None
    reward_std: float | None = Field(None, description="deviation of the rewards over the step's samples")
    loss: float | None = None
    grad_norm: float | None = Field(None, description="before clipping")
    entropy: float | None = Field(None, description="nats per completion token under the policy")
    output_length_mean: float | None = None
    output_length_p50: float | None = None
    output_length_p90: float | None = None
    output_length_max: float | None = None
    staleness_mean: float | None = Field(None, description="weight versions between sampling and training")
    staleness_max: float | None = None
    logprob_gap_mean: float | None = Field(None, description="mean |trainer - generator| log-probability, nats")
    importance_ratio_max: float | None = None
    weight_version: int | None = Field(None, description="version that this step made")
    weight_bytes_sent: int | None = None
    weight_sync_exposed_s: float | None = Field(None, description="time generation waited for new weights")
    ranker_recall_at_20: float | None = Field(None, description="of the longest 20 %; None until there is a ranker")
    ranker_kendall_tau: float | None = Field(None, description="predictions against lengths; None until there are any")

    dispatch_by_prediction: bool | None = Field(None, description="predictions were trusted, dispatch went by them")
    dispatch_saved: float | None = Field(
        None,
        description="share of least-loaded's generation time saved, simulated from the step's lengths and the "
        "instances' measured step times",
    )
    dispatch_captured: float | None = Field(None, description="the same as a share of what known lengths would save")
    groups_total: int | None = None
    groups_no_gradient: int | None = Field(None, description="groups whose rewards are all equal")
    samples_total: int | None = None
    reward_errors: int | None = None
    prompts_too_long: int | None = Field(None, description="prompts skipped since the run was (re)started")
    truncated_fraction: float | None = Field(None, description="share of samples ended by the token limit")
    learning_rate: float | None = None
    clip_fraction: float | None = Field(None, description="share of tokens whose ratio was clipped")
    kl_mean: float | None = Field(None, description="nats per token to the reference; None without one")
    tokens_trained: int | None = None
    reward_by_task: dict[str, float | None] = Field(default_factory=dict)
    output_length_by_task: dict[str, float | None] = Field(default_factory=dict)
    process_memory_gb: float | None = Field(None, description="GiB over all of the run's processes")

    @model_validator(mode="before")
    @classmethod
    def _no_nan(cls, values: Any) -> Any:
        return finite(values)


def _parse(line: bytes) -> MetricsRow | None:
    """The row of one line, or None for a cut or foreign line. Keys of a newer version are dropped."""
    try:
        values = json.loads(line)
        return MetricsRow(**{key: item for key, item in values.items() if key in MetricsRow.model_fields})
    except (ValueError, AttributeError, ValidationError):
        return None


def read_metrics(path: Path) -> list[MetricsRow]:
    """All whole rows of a metrics file in order; an absent file has none, unreadable lines are skipped."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    return [row for line in lines if (row := _parse(line)) is not None]


def _encode(row: MetricsRow) -> bytes:
    return json.dumps(row.model_dump(), allow_nan=False).encode() + b"\n"


class MetricsWriter:
    """Appends rows; each one is on its way to the file before `append` returns. One writer per file."""

    def __init__(self, path: Path) -> None:
        """Opens (or makes) the file and removes a last line that was cut by a kill."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        content = path.read_bytes()
        if content and not content.endswith(b"\n"):
            os.truncate(path, content.rfind(b"\n") + 1)
        self._file = path.open("ab", buffering=0)

    def append(self, row: MetricsRow) -> None:
        """Writes one row. Raises OSError (a full disk)."""
        self._file.write(_encode(row))

    def rewind(self, step: int) -> int:
        """Drops the rows after `step` (a run resumed from that checkpoint does them again); returns how many.

        The file is replaced in one piece: a kill leaves the old or the new one.
        """
        rows = read_metrics(self.path)
        kept = [row for row in rows if row.step <= step]
        temporary = self.path.with_name(self.path.name + ".tmp")
        temporary.write_bytes(b"".join(map(_encode, kept)))
        self._file.close()
        os.replace(temporary, self.path)
        self._file = self.path.open("ab", buffering=0)
        return len(rows) - len(kept)

    def close(self) -> None:
        """Ends writing."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
