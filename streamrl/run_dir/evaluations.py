"""`evaluations.jsonl`: one row per evaluated weight version, in order of completion."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import Field

from streamrl.run_dir.jsonl import Row, StepRow, read_rows


class Scores(Row):
    """The scores of the completions of some prompts; every prompt has the same weight."""

    prompts: int = Field(ge=1)
    samples: int = Field(ge=0, description="completions, including greedy ones")
    reward_greedy: float | None = Field(None, description="mean reward of the greedy completions; None: none has one")
    pass_greedy: float | None = Field(None, description="share of prompts whose greedy completion passes")
    reward_sampled: float | None = Field(None, description="mean reward of the sampled completions; None: none has one")
    pass_at: list[float] = Field(
        default_factory=list,
        description="entry j - 1 is pass@j: the chance that one of j sampled completions passes (unbiased estimate, "
        "mean over prompts with j or more rewards)",
    )
    length_mean: float = Field(description="tokens per completion, including greedy ones")
    rewards_void: int = Field(
        0, ge=0, description="completions that could not be scored; they are in no other score, but in length_mean"
    )
    prompts_scored: int | None = Field(
        None,
        ge=0,
        description="prompts whose greedy completion has a reward; in an evaluation without greedy completions, "
        "prompts with any reward; None: in rows of earlier versions",
    )

    @property
    def reward(self) -> float | None:
        """Greedy reward, or the sampled one of an evaluation without greedy completions; None: it has none."""
        if self.prompts_scored == 0:  # with greedy ones, of which all are void, there may be a sampled one
            return None
        return self.reward_sampled if self.reward_greedy is None else self.reward_greedy

    @property
    def scored_share(self) -> float:
        """Share of the prompts that `reward` is the mean of; its least possible value in rows of earlier versions."""
        if self.prompts_scored is None:
            return max(0.0, 1 - self.rewards_void / self.prompts)
        return self.prompts_scored / self.prompts


class EvaluationRow(StepRow):
    """One evaluation of a weight version."""

    step: int = Field(ge=0, description="evaluated weight version: number of optimizer steps behind it (0: untrained)")
    time: float = Field(description="unix seconds at which the last reward arrived")
    seconds: float = Field(ge=0, description="time from issue to the last reward, while training continues")
    overall: Scores
    by_task: dict[str, Scores]
    other_version_share: float = Field(
        ge=0, le=1, description="share of completion tokens sampled by another version (new weights arrived meanwhile)"
    )

    @property
    def score(self) -> float:
        """Score that decides which version is the best; -inf: it has none, or no token is by this version."""
        if self.overall.reward is None or self.other_version_share == 1:
            return float("-inf")
        return self.overall.reward

    @property
    def rank(self) -> tuple[bool, bool, float, float, int]:
        """Place among all rows: first those mostly by this version, then those mostly scored, then by score."""
        own, scored = self.other_version_share <= 0.5, self.overall.scored_share >= 0.5
        return own, scored, self.score, -self.other_version_share, -self.step


def best(rows: Iterable[EvaluationRow]) -> EvaluationRow | None:
    """Return the row with the highest score; None without a row that has one.

    Of equals it is the one with the fewest tokens by other versions, and then the earliest. A row of which more than
    half is by others comes after all that are not: its score is rather that of a later version. So does, among these
    and those, a row of which less than half of the prompts are scored: few prompts can score anything.
    """
    rated = (row for row in rows if row.score > float("-inf"))
    return max(rated, key=lambda row: row.rank, default=None)


def evaluation_line(row: EvaluationRow, rows: Sequence[EvaluationRow] = ()) -> str:
    """Format an evaluation in one line: 'eval@40: greedy 0.42 pass@4 0.61 (best)'; `rows`: all up to it."""
    overall = row.overall
    parts = [f"eval@{row.step}:"]
    if overall.reward_greedy is not None:
        parts.append(f"greedy {overall.reward_greedy:.2f}")
    elif overall.reward is not None:
        parts.append(f"reward {overall.reward:.2f}")
    if overall.pass_at:
        parts.append(f"pass@{len(overall.pass_at)} {overall.pass_at[-1]:.2f}")
    if overall.rewards_void:
        parts.append(f"{overall.rewards_void} void rewards")
    if row.other_version_share >= 0.005:
        parts.append(f"{100 * row.other_version_share:.0f}% of tokens by other weights")
    if best(rows) == row:
        parts.append("(best)")
    return " ".join(parts)


def read_evaluations(path: Path) -> list[EvaluationRow]:
    """Read all complete rows in order; a missing file has none, unreadable lines are skipped."""
    return read_rows(path, EvaluationRow)
