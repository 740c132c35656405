"""Check from a run's files that it has trained every sample exactly once. Pure.

Prompts are numbered in the order in which they are first issued, and a group's id is its prompt's number. Every number
up to the largest one trained must be

    trained or dropped     all samples of its group, in one step
    open                   in the ledger, without a step; or in the newest checkpoint's list of prompts to issue again,
                           until that list is used up
    too long               skipped when it was drawn; the metrics count these

and any other prompt is lost. The list is used up once a prompt has been issued that the checkpoint did not know.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from streamrl.rollouts.types import FloatArray, IntArray

SETTLED = frozenset({"trained", "dropped"})
"""Final ledger states."""
MOST_EXAMPLES = 8
"""Most ids named in a fault's text."""


@dataclass(frozen=True)
class LedgerRow:
    """One sample of the ledger."""

    sample_id: str
    group_id: str
    state: str
    void_cause: str | None = None
    """Why its reward is void; None: it is not."""


@dataclass(frozen=True)
class RolloutRow:
    """One row of the rollouts: a completion, or a row of an episode."""

    sample_id: str
    """Its own id; an episode's rows after the first are no samples of their own."""
    first: bool
    """Whether it is a completion or an episode's first row."""
    step: int
    trained: bool
    """False: its group was dropped, or its reward is void."""
    output_length: int
    """Number that the run states, less the sampled tokens of the episode's other rows."""
    tokens: IntArray
    """Sampled tokens, shape [C]; likewise the others."""
    logprobs: FloatArray
    """Shape [C]."""
    versions: IntArray
    """Weight version of each token, shape [C]."""


@dataclass(frozen=True)
class Account:
    """Everything that an audit compares."""

    ledger: Sequence[LedgerRow]
    step_sizes: Mapping[int, int]
    """Samples that each step trained, by the ledger."""
    rollouts: Sequence[RolloutRow]
    metric_steps: Sequence[int]
    """Steps in the order of metrics.jsonl."""
    too_long: int = 0
    """Prompts skipped because they were too long."""
    next_index: int = 0
    """Number of the next new prompt, by the newest checkpoint."""
    again: frozenset[int] = frozenset()
    """Numbers of that checkpoint's open prompts, which a resumed run issues first."""


@dataclass(frozen=True)
class Audit:
    """Findings of an audit."""

    steps: int
    prompts: int
    """Prompt numbers checked."""
    samples: int
    """Samples trained."""
    open: int
    """Prompts that are neither trained nor lost."""
    lost: int
    """Samples that were issued, or should have been, and are neither trained nor open."""
    twice: int
    """Samples that were trained more than once."""
    malformed: int
    """Samples that are wrong in another way."""
    voids: Mapping[str, int] = field(default_factory=dict)
    """Number of void samples by cause: they count as neither trained nor lost."""
    faults: tuple[str, ...] = ()
    """Everything found wrong, one sentence each."""


def audit(account: Account) -> Audit:
    """Compare ledger, rollouts and metrics."""
    faults: list[str] = []
    trained = [row for row in account.rollouts if row.trained and row.first]
    size = max(Counter(row.group_id for row in account.ledger).values(), default=0)
    settled = {int(row.group_id) for row in account.ledger if row.state in SETTLED}
    missing, opened = _missing_prompts(account, settled)
    lost = max(0, len(missing) - account.too_long) * size
    if lost:
        faults.append(f"prompts neither trained nor open: {_some(missing)} ({account.too_long} were too long)")
    gone = _missing_samples(account, trained, size)
    if gone:
        faults.append(f"samples missing in a trained group or its rollouts: {_some(gone)}")
    twice = sorted(name for name, count in Counter(row.sample_id for row in trained).items() if count > 1)
    if twice:
        faults.append(f"samples trained twice: {_some(twice)}")
    faults += _steps(account, trained)
    malformed = sorted({row.sample_id for row in account.rollouts if _malformed(row)})
    if malformed:
        worst = next(row for row in account.rollouts if row.sample_id == malformed[0])
        faults.append(f"malformed samples: {_some(malformed)}; the first: {_malformed(worst)}")
    return Audit(
        steps=len(account.metric_steps),
        prompts=max(settled, default=-1) + 1,
        samples=len(trained),
        open=opened,
        lost=lost + len(gone),
        twice=len(twice),
        malformed=len(malformed),
        voids=dict(sorted(Counter(row.void_cause for row in account.ledger if row.void_cause is not None).items())),
        faults=tuple(faults),
    )


def _missing_prompts(account: Account, settled: set[int]) -> tuple[list[int], int]:
    """Return the prompt numbers that are not accounted for, and how many prompts are open."""
    known = {int(row.group_id) for row in account.ledger}
    used_up = any(number >= account.next_index for number in known)
    waiting = frozenset() if used_up else account.again
    numbers = range(max(settled, default=-1) + 1)
    missing = [number for number in numbers if number not in known and number not in waiting]
    return missing, sum(number not in settled for number in numbers) - len(missing)


def _missing_samples(account: Account, trained: Sequence[RolloutRow], size: int) -> list[str]:
    """Describe samples that trained groups lack, and samples that only one of ledger and rollouts has."""
    settled = Counter(row.group_id for row in account.ledger if row.state in SETTLED)  # void ones are dropped
    in_ledger = {row.sample_id for row in account.ledger if row.state == "trained"}
    groups = {row.group_id for row in account.ledger if row.state == "trained"}
    short = [f"{name} has {settled[name]} of {size}" for name in sorted(groups) if settled[name] < size]
    return [*short, *sorted(in_ledger ^ {row.sample_id for row in trained})]


def _steps(account: Account, trained: Sequence[RolloutRow]) -> list[str]:
    """Describe steps that are missing, repeated, or differ in size from the ledger."""
    faults = []
    if list(account.metric_steps) != list(range(1, len(account.metric_steps) + 1)):
        faults.append(f"metrics.jsonl has the steps {_some(account.metric_steps)}")
    found = Counter(row.step for row in trained)
    differ = sorted(step for step, count in account.step_sizes.items() if found[step] != count)
    if differ or set(found) - set(account.step_sizes):
        faults.append(f"ledger and rollouts differ in the samples of steps {_some(differ or sorted(found))}")
    if len(account.step_sizes) != len(account.metric_steps):
        faults.append(f"{len(account.step_sizes)} steps in the ledger, {len(account.metric_steps)} in metrics.jsonl")
    return faults


def _malformed(row: RolloutRow) -> str:
    """Describe what is wrong with a sample; '': nothing."""
    lengths = {len(row.tokens), len(row.logprobs), len(row.versions), row.output_length}
    if len(lengths) > 1:
        return f"tokens, log-probabilities, versions and output_length have lengths {sorted(lengths)}"
    if not row.output_length:  # an episode that ended before its agent called the model is void, and has none
        return "it has no token" if row.trained else ""
    if (row.tokens < 0).any():
        return "a token id is negative"
    if not np.isfinite(row.logprobs).all() or (row.logprobs > 1e-3).any():
        return "a log-probability is not one"
    if (np.diff(row.versions) < 0).any():
        return "a token's weight version is older than the one before"
    if row.versions[0] < 0 or row.versions[-1] >= row.step:
        return f"step {row.step} trained tokens of weight versions {row.versions[0]} to {row.versions[-1]}"
    return ""


def _some(values: Sequence[object]) -> str:
    more = len(values) - MOST_EXAMPLES
    return ", ".join(map(str, values[:MOST_EXAMPLES])) + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True)
class Curve:
    """Mean rewards of a run's first and last steps."""

    steps: int
    """Steps averaged at each end."""
    first: float
    last: float
    deviation: float
    """Standard deviation of the steps' mean rewards: the ordinary difference between steps."""


def reward_curve(rewards: Sequence[float], most: int = 10) -> Curve | None:
    """Compare both ends of a curve of steps' mean rewards; None if there are fewer than two steps.

    Args:
        most: most steps averaged at each end; fewer in a run of less than twice as many.
    """
    ends = min(most, len(rewards) // 2)
    if not ends:
        return None
    first, last = statistics.fmean(rewards[:ends]), statistics.fmean(rewards[-ends:])
    return Curve(ends, first, last, statistics.pstdev(rewards))
