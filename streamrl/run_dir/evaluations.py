"""`evaluations.jsonl`: one row per evaluated weight version, in the order in which the evaluations ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import Field

from streamrl.run_dir.jsonl import Row, RowWriter, read_rows


class Scores(Row):
    """What some prompts' completions got. Every prompt weighs the same."""

    prompts: int = Field(ge=1)
    samples: int = Field(ge=0, description="completions, greedy ones too")
    reward_greedy: float | None = Field(None, description="mean reward of the greedy completions; None: not made")
    pass_greedy: float | None = Field(None, description="share of prompts whose greedy completion passes")
    reward_sampled: float | None = Field(None, description="mean reward of the sampled completions; None: none made")
    pass_at: list[float] = Field(
        default_factory=list,
        description="entry j - 1 is pass@j: the chance that one of j sampled completions passes (unbiased estimate, "
        "mean over prompts)",
    )
    length_mean: float = Field(description="tokens per completion, greedy ones too")
    reward_errors: int = Field(ge=0, description="completions that could not be scored and count as reward 0")


class EvaluationRow(Row):
    """One evaluation."""

    step: int = Field(ge=0, description="the weight version evaluated: optimizer steps that had made it (0: untrained)")
    time: float = Field(description="unix seconds at which the last reward came")
    seconds: float = Field(ge=0, description="from issue to the last reward; training goes on meanwhile")
    overall: Scores
    by_task: dict[str, Scores]
    other_version_share: float = Field(
        ge=0, le=1, description="share of completion tokens sampled under another version (new weights came meanwhile)"
    )

    @property
    def score(self) -> float:
        """What decides which version is the best: the greedy reward, or else the sampled one."""
        value = self.overall.reward_greedy if self.overall.reward_greedy is not None else self.overall.reward_sampled
        return float("-inf") if value is None else value


def best(rows: Iterable[EvaluationRow]) -> EvaluationRow | None:
    """The row with the highest score; of equals the earliest version. None without rows."""
    return max(rows, key=lambda row: (row.score, -row.step), default=None)


def evaluation_line(row: EvaluationRow, rows: Sequence[EvaluationRow] = ()) -> str:
    """'eval@40: greedy 0.42 pass@4 0.61 (best)': one evaluation in one line; `rows`: all up to it, to tell the best."""
    overall = row.overall
    parts = [f"eval@{row.step}:"]
    if overall.reward_greedy is not None:
        parts.append(f"greedy {overall.reward_greedy:.2f}")
    elif overall.reward_sampled is not None:
        parts.append(f"reward {overall.reward_sampled:.2f}")
    if overall.pass_at:
        parts.append(f"pass@{len(overall.pass_at)} {overall.pass_at[-1]:.2f}")
    if overall.reward_errors:
        parts.append(f"{overall.reward_errors} reward errors")
    if row.other_version_share >= 0.005:
        parts.append(f"{100 * row.other_version_share:.0f}% of tokens by other weights")
    if best(rows) == row:
        parts.append("(best)")
    return " ".join(parts)


def read_evaluations(path: Path) -> list[EvaluationRow]:
    """All whole rows of the file in order; an absent file has none, unreadable lines are skipped."""
    return read_rows(path, EvaluationRow)


class EvaluationWriter(RowWriter[EvaluationRow]):
    """Appends evaluations. One writer per file."""

    def __init__(self, path: Path) -> None:
        """Opens (or makes) the file and removes a last line that was cut by a kill."""
        super().__init__(path, EvaluationRow, lambda row: row.step)
