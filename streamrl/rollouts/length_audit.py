"""Audit whether training sees the lengths that were generated: a pure account of every sample, with a test.

Dropping slow samples is the classic way to train a model towards short answers unnoticed. So each sample is followed
from issue to its end:

    issued for batch n -> open (no length yet) -> finished -> trained | dropped
                              `-> dropped while it still ran (counts with the tokens it had)

The samples issued for batch n are *cohort* n. The samples trained in one step say little by themselves: if the trainer
takes what finishes first, the first steps train short completions, the long ones follow, and nothing is lost. Running
samples have no length yet, and the longest ones run longest, so comparing trained lengths with the lengths known so far
would hide the very bias. The comparison is therefore made within *settled* cohorts only, in which every sample is
trained or dropped: those trained against all issued, in the same cohorts. A schedule that waits always gives two equal
sets. A cohort that has not settled after `window_steps` more batches is taken as it is: whatever is not trained by then
counts as left out (a schedule that defers a prompt for ever drops it).

Limits of the figures: a sample dropped while it ran would have had at least the tokens it is counted with, and an
overdue one that still runs is not counted at all. Both make the bias look *smaller* than it is. A cohort cut short by
the end of the run is not compared; `unfinished_share` is the share of such samples.

The test: samples of one prompt have similar lengths and end together, so 8 siblings are not 8 observations. One
observation is the mean length of a group's trained part, or of its left-out part; the two-sample Kolmogorov-Smirnov
test compares these two kinds. (Trained against issued would have the same samples on both sides, so the p-value would
be invalid.) The test is made after every step, so the level of 0.01 is divided by the number of tests in a window
(Bonferroni): in a window of steps without bias, the chance of a false alarm is at most 1 %. A warning needs a
significant test *and* a mean trained length that differs by more than 5 % from the mean issued length, because in a
long run even a tiny, harmless difference becomes significant.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np

BUCKETS = 12
"""Buckets between 0 and the longest length; with a token limit, another one holds the completions that reached it."""
SIGNIFICANT = 0.01
"""Chance of a false alarm per window of steps; the p-value must be below this divided by the window's steps."""
MATERIAL = 0.05
"""Relative difference of the means up to which a bias is too small to matter."""
FEWEST_GROUPS = 10
"""Fewest observations on either side for a test."""
REMEMBERED = 3
"""Windows after which a cohort is forgotten, settled or not."""


@dataclass(frozen=True)
class LengthComparison:
    """Comparison of trained and issued lengths over the newest settled cohorts."""

    cohorts: int
    """Settled cohorts compared."""
    groups_trained: int
    groups_left_out: int
    """Groups with samples that were dropped or deferred; a group left out in part is in both counts."""
    mean_issued: float | None
    """Mean tokens of a sample; None: no sample has a length."""
    mean_trained: float | None
    mean_ratio: float | None
    """Mean trained length over mean issued length."""
    ks_statistic: float | None
    """Largest distance between the two distributions of group means; None: too few groups on a side."""
    p_value: float | None


@dataclass(frozen=True)
class StepAudit:
    """The account of one optimizer step; lengths in tokens."""

    edges: tuple[int, ...]
    """Edges of the buckets: edges[i] <= length < edges[i + 1]. The last bucket is one token wide and holds the samples
    that reached the token limit; in runs with agents, whose episodes have none, it holds all longer ones, too."""
    issued: tuple[int, ...]
    """Samples issued for this step's batch that have a length; shape of this and the next three: [buckets]."""
    finished: tuple[int, ...]
    """Samples finished since the previous step, whatever batch they were issued for."""
    trained: tuple[int, ...]
    """Samples trained in this step, whatever batch they were issued for."""
    dropped: tuple[int, ...]
    """Samples dropped since the previous step; those that still ran count with the tokens they had."""
    drop_reasons: dict[str, int]
    """Samples of `dropped` by reason."""
    open: int
    """Samples issued for this step's batch that have no length yet."""
    unfinished_share: float
    """Share of the samples issued for the newest `window_steps` batches that have neither finished nor been dropped."""
    comparison: LengthComparison
    warning: str | None
    """Message, if trained and issued lengths differ significantly and materially."""


@dataclass
class _Group:
    number: int
    size: int
    finished: dict[str, int] = field(default_factory=dict)
    trained: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)

    @property
    def settled(self) -> bool:
        return len(self.trained) + len(self.dropped) >= self.size

    @property
    def lengths(self) -> list[int]:
        """Lengths of all samples that have one."""
        # Take the longer list: a sample dropped while it ran never finished, and a finished one may be undecided yet.
        return max([*self.trained, *self.dropped], list(self.finished.values()), key=len)

    @property
    def left_out(self) -> list[int]:
        """Known lengths of the samples that were not trained."""
        rest = Counter(self.lengths)
        rest.subtract(self.trained)
        return list(rest.elements())

    @property
    def open(self) -> int:
        return max(0, self.size - len(self.lengths))


class LengthAudit:
    """An account of samples that gives a `StepAudit` at the end of each step. No I/O, no clock.

    Call `issued`, `finished` and `dropped` as these happen, `trained` for every group of a step's batch, then
    `end_step`.
    """

    def __init__(self, longest: int, window_steps: int = 20, limited: bool = True) -> None:
        """Start an empty account.

        Args:
            longest: the upper end of the lengths that are told apart, tokens.
            window_steps: settled cohorts that are compared, and batches after which an unsettled one is overdue.
            limited: whether `longest` is the token limit of a sample, at which it is cut.
        """
        self.edges = bucket_edges(longest, limited)
        self._window = window_steps
        self._groups: dict[str, _Group] = {}
        self._finished: list[int] = []
        self._trained: defaultdict[int, list[int]] = defaultdict(list)
        """Trained lengths by step; a step's groups may be reported before the previous step has ended."""
        self._dropped: list[tuple[int, int, str]] = []
        """Dropped samples: (step, length, reason)."""

    def issued(self, step_number: int, group_id: str, size: int) -> None:
        """Record that a group of `size` samples is issued for batch `step_number`."""
        self._groups[group_id] = _Group(step_number, size)

    def finished(self, sample_id: str, group_id: str, length: int) -> None:
        """Record that a sample has ended with `length` tokens; a repeated report counts once."""
        if (group := self._groups.get(group_id)) is not None:
            if sample_id in group.finished:
                return
            group.finished[sample_id] = length
        self._finished.append(length)

    def trained(self, step: int, group_id: str, lengths: Sequence[int]) -> None:
        """Record that step `step` trains on these samples of a group (also if the group gives no gradient)."""
        self._trained[step] += lengths
        if (group := self._groups.get(group_id)) is not None:
            group.trained += lengths

    def dropped(self, step: int, group_id: str, lengths: Sequence[int], why: str) -> None:
        """Record that these samples of a group will never be trained; a running one counts with the tokens it had.

        Args:
            step: the current optimizer step.
            group_id: the group they belong to.
            lengths: tokens of each.
            why: the reason in a few words, shown in the report.
        """
        self._dropped += [(step, length, why) for length in lengths]
        if (group := self._groups.get(group_id)) is not None:
            group.dropped += lengths

    def end_step(self, step: int) -> StepAudit:
        """Return the account of optimizer step `step` (counts from 1), which has just been made."""
        oldest = step - REMEMBERED * self._window
        self._groups = {name: group for name, group in self._groups.items() if group.number > oldest}
        own = [group for group in self._groups.values() if group.number == step]
        recent = [group for group in self._groups.values() if step - self._window < group.number <= step]
        sizes = sum(group.size for group in recent)
        trained = [length for number in list(self._trained) if number <= step for length in self._trained.pop(number)]
        dropped = [item for item in self._dropped if item[0] <= step]
        comparison = self._compare(step)
        audit = StepAudit(
            edges=self.edges,
            issued=self._count(length for group in own for length in group.lengths),
            finished=self._count(self._finished),
            trained=self._count(trained),
            dropped=self._count(length for _, length, _ in dropped),
            drop_reasons=dict(Counter(why for _, _, why in dropped)),
            open=sum(group.open for group in own),
            unfinished_share=sum(group.open for group in recent) / sizes if sizes else 0.0,
            comparison=comparison,
            warning=warning(comparison, SIGNIFICANT / self._window),
        )
        self._finished, self._dropped = [], [item for item in self._dropped if item[0] > step]
        return audit

    def _compare(self, step: int) -> LengthComparison:
        issued_by = {group.number for group in self._groups.values() if group.number <= step}
        unsettled = {group.number for group in self._groups.values() if not group.settled}
        settled = (number for number in issued_by if number not in unsettled or step - number >= self._window)
        chosen = set(sorted(settled)[-self._window :])
        groups = [group for group in self._groups.values() if group.number in chosen]
        issued = [length for group in groups for length in group.lengths]
        trained = [length for group in groups for length in group.trained]
        inside = [fmean(group.trained) for group in groups if group.trained]
        outside = [fmean(rest) for group in groups if (rest := group.left_out)]
        mean_issued = fmean(issued) if issued else None
        mean_trained = fmean(trained) if trained else None
        tested = min(len(inside), len(outside)) >= FEWEST_GROUPS
        statistic, p_value = ks_test(inside, outside) if tested else (None, None)
        return LengthComparison(
            cohorts=len(chosen),
            groups_trained=len(inside),
            groups_left_out=len(outside),
            mean_issued=mean_issued,
            mean_trained=mean_trained,
            mean_ratio=mean_trained / mean_issued if mean_trained is not None and mean_issued else None,
            ks_statistic=statistic,
            p_value=p_value,
        )

    def _count(self, lengths: Iterable[int]) -> tuple[int, ...]:
        counts = [0] * (len(self.edges) - 1)
        for length in lengths:
            counts[min(max(0, bisect_right(self.edges, length) - 1), len(counts) - 1)] += 1
        return tuple(counts)


def bucket_edges(longest: int, limited: bool = True) -> tuple[int, ...]:
    """Return rising edges from 0, in equal ratios up to `longest`; if it is a limit, also a bucket for what reaches it.

    There is one bucket below longest / 64; each further one is about 1.5 times as wide as the previous.
    """
    inner = np.geomspace(max(1.0, longest / 64), longest, BUCKETS)
    return tuple(sorted({0, *(round(edge) for edge in inner), longest, *([longest + 1] if limited else [])}))


def has_limit(edges: Sequence[int]) -> bool:
    """Return whether the last bucket between these edges holds the samples that reached a limit, and no others."""
    return edges[-1] - edges[-2] == 1


def ks_test(some: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """Return (statistic, p-value) of the two-sided two-sample Kolmogorov-Smirnov test, exact where scipy can."""
    from scipy.stats import ks_2samp  # slow to import, and most runs drop nothing

    found = ks_2samp(some, others)
    return float(found.statistic), float(found.pvalue)


def warning(comparison: LengthComparison, level: float) -> str | None:
    """Return a warning about a comparison; None while p is `level` or more, or the difference does not matter."""
    ratio, p_value = comparison.mean_ratio, comparison.p_value
    if ratio is None or p_value is None or p_value >= level or abs(ratio - 1) <= MATERIAL:
        return None
    shorter = "shorter" if ratio < 1 else "longer"
    return (
        f"length bias: what was trained is {100 * abs(ratio - 1):.0f} % {shorter} than what was issued (mean "
        f"{comparison.mean_trained:.0f} against {comparison.mean_issued:.0f} tokens over {comparison.cohorts} steps, "
        f"{comparison.groups_left_out} groups left out, p = {p_value:.1g}): training pulls the model towards "
        f"{shorter} answers"
    )
