"""Does training see the lengths that were generated? A pure account of every sample's way, with a test.

Dropping what takes long is the classic way to train a model towards short answers without noticing. So each sample is
followed from issue to its fate:

    issued for batch n -> open (no length yet) -> finished -> trained | dropped
                              `-> dropped while it still ran (counts with the tokens it had)

The samples issued for batch n are *cohort* n. Who was trained in a step says little on its own: where the trainer takes
what is finished first, the first steps train short completions and the long ones follow, and nothing is lost. And what
still runs has no length yet, and it is the longest that run longest: comparing trained lengths with the lengths that
happen to be known would hide just what is looked for. So the comparison is made within *settled* cohorts only, in
which the fate of every sample is known: those trained against all that were issued, in the same cohorts. A schedule
that waits gives two equal sets, always. A cohort that has not settled after `window_steps` more batches is taken as it
is: what of it is still not trained counts as left out (a schedule that puts a prompt off for ever drops it).

What the figures do not say: a sample dropped while it ran had at least the tokens it is counted with, and an overdue
one that still runs is not counted at all. Both make the bias look *smaller* than it is. A cohort cut short by the end
of the run is not compared; `unfinished_share` says how much that is.

The test: samples of one prompt have like lengths and share their fate, so 8 siblings are not 8 observations. One
observation is the mean length of a group's trained part, or of its left-out part; the two-sample Kolmogorov-Smirnov
test compares the ones with the others. (TrainDone against issued would put the same samples on both sides, and the
p-value would be none.) It is made after every step, so the level of 0.01 is divided by the looks at one window
(Bonferroni): in a window of steps without any bias, the chance of a false alarm is at most 1 %. There is a warning when
that holds *and* the mean trained length differs by more than 5 % from the mean issued length; a tiny difference becomes
significant in any long run, and is harmless.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

BUCKETS = 12
"""Between 0 and the token limit; one more holds the completions that reached the limit."""
SIGNIFICANT = 0.01
"""Chance of a false alarm per window of steps; the p-value must be below this over the window's steps."""
MATERIAL = 0.05
"""Relative difference of the means below which a bias is too small to matter."""
FEWEST_GROUPS = 10
"""Observations on either side below which nothing is claimed."""
REMEMBERED = 3
"""Cohorts older than this many windows are forgotten, settled or not."""


@dataclass(frozen=True)
class LengthComparison:
    """TrainDone against issued over the newest settled cohorts."""

    cohorts: int
    """Settled cohorts compared."""
    groups_trained: int
    groups_left_out: int
    """Groups with samples that were dropped or put off; one of which only a part was is in both counts."""
    mean_issued: float | None
    """Tokens, over samples; None: no sample has a length."""
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
    """Bucket i holds edges[i] <= length < edges[i + 1]; the last holds what reached the token limit."""
    issued: tuple[int, ...]
    """Samples issued for this step's batch, by length, as far as they have one. Shape of this and the next three:
    [buckets]."""
    finished: tuple[int, ...]
    """Finished since the step before, whatever they were issued for."""
    trained: tuple[int, ...]
    """TrainDone in this step, whatever they were issued for."""
    dropped: tuple[int, ...]
    """Dropped since the step before; those that still ran with the tokens they had."""
    drop_reasons: dict[str, int]
    """Samples of `dropped` by reason."""
    open: int
    """Samples issued for this step's batch that have no length yet."""
    unfinished_share: float
    """Of the samples issued for the newest `window_steps` batches up to this one: neither finished nor dropped."""
    comparison: LengthComparison
    warning: str | None
    """In plain words, when trained and issued differ significantly and materially."""


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
        """Of all samples that have one."""
        # Whichever tells of more samples: what ran when it was dropped never finished, and what has finished may
        # still wait for its fate.
        return max([*self.trained, *self.dropped], list(self.finished.values()), key=len)

    @property
    def left_out(self) -> list[int]:
        """Lengths of what was not trained, as far as there are any."""
        rest = Counter(self.lengths)
        rest.subtract(self.trained)
        return list(rest.elements())

    @property
    def open(self) -> int:
        return max(0, self.size - len(self.lengths))


class LengthAudit:
    """Takes what happens to samples, gives a `StepAudit` at the end of each step. No I/O, no clock.

    Call `issued`, `finished`, `dropped` as it happens, `trained` for every group of a step's batch, then `end_step`.
    """

    def __init__(self, max_tokens: int, window_steps: int = 20) -> None:
        """
        Args:
            max_tokens: the token limit of a completion.
            window_steps: settled cohorts that are compared, and batches after which an unsettled one is overdue.
        """
        self.edges = bucket_edges(max_tokens)
        self._window = window_steps
        self._groups: dict[str, _Group] = {}
        self._finished: list[int] = []
        self._trained: defaultdict[int, list[int]] = defaultdict(list)
        """By step: a step's groups may be told before the step before has ended."""
        self._dropped: list[tuple[int, int, str]] = []
        """(step, length, why)."""

    def issued(self, step_number: int, group_id: str, size: int) -> None:
        """A group of `size` samples is issued for batch `step_number`."""
        self._groups[group_id] = _Group(step_number, size)

    def finished(self, sample_id: str, group_id: str, length: int) -> None:
        """A sample has ended with `length` tokens; told twice, it counts once."""
        group = self._groups.get(group_id)
        if group is not None:
            if sample_id in group.finished:
                return
            group.finished[sample_id] = length
        self._finished.append(length)

    def trained(self, step: int, group_id: str, lengths: Sequence[int]) -> None:
        """Step `step` trains on these samples of a group (one that gives no gradient is trained on, too)."""
        self._trained[step] += lengths
        if (group := self._groups.get(group_id)) is not None:
            group.trained += lengths

    def dropped(self, step: int, group_id: str, lengths: Sequence[int], why: str) -> None:
        """These samples of a group will never be trained on; one that still ran counts with the tokens it had.

        Args:
            step: the optimizer step under way.
            group_id: the group they belong to.
            lengths: tokens of each.
            why: the reason in a few words, shown in the report.
        """
        self._dropped += [(step, length, why) for length in lengths]
        if (group := self._groups.get(group_id)) is not None:
            group.dropped += lengths

    def end_step(self, step: int) -> StepAudit:
        """The account of optimizer step `step` (counts from 1), which has just been made."""
        self._groups = {
            name: group for name, group in self._groups.items() if group.number > step - REMEMBERED * self._window
        }
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
        cohorts: dict[int, list[_Group]] = {}
        for group in self._groups.values():
            cohorts.setdefault(group.number, []).append(group)
        settled = [
            number
            for number, groups in cohorts.items()
            if number <= step and (step - number >= self._window or all(group.settled for group in groups))
        ]
        chosen = sorted(settled)[-self._window :]
        groups = [group for number in chosen for group in cohorts[number]]
        issued = [length for group in groups for length in group.lengths]
        trained = [length for group in groups for length in group.trained]
        inside = [float(np.mean(group.trained)) for group in groups if group.trained]
        outside = [float(np.mean(rest)) for group in groups if (rest := group.left_out)]
        mean_issued = float(np.mean(issued)) if issued else None
        mean_trained = float(np.mean(trained)) if trained else None
        statistic, p_value = (
            ks_test(inside, outside) if min(len(inside), len(outside)) >= FEWEST_GROUPS else (None, None)
        )
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


def bucket_edges(max_tokens: int) -> tuple[int, ...]:
    """Rising edges from 0: equal ratios up to the limit, and a bucket of its own for completions that reached it.

    Below max_tokens / 64 there is one bucket; from there on each is about 1.5 times as wide as the one before.
    """
    inner = np.geomspace(max(1.0, max_tokens / 64), max_tokens, BUCKETS)
    return tuple(sorted({0, *(round(edge) for edge in inner), max_tokens, max_tokens + 1}))


def ks_test(some: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """Two-sample Kolmogorov-Smirnov test, two-sided: (statistic, p-value), exact where scipy can."""
    from scipy.stats import ks_2samp  # slow to import, and most runs drop nothing

    found = ks_2samp(some, others)
    return float(found.statistic), float(found.pvalue)


def warning(comparison: LengthComparison, level: float) -> str | None:
    """What to tell a person of a comparison; None while p is `level` or more, or the difference does not matter."""
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
