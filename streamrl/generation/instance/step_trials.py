"""What is timed to know an instance's step time by batch size and context, and what follows from the times. Pure.

    tau(batch, context) = base(batch) + per_context_token * context          (`scheduler.cost.decode`)

A batch is timed twice, with few tokens and with more: what both runs share cancels, and the difference is decode steps.
The same batch with long prompts, which are in the prefix cache by then, gives the time per token of context. Then the
pairs are repeated in turn, those with the fewest repeats first, until the repeats of each agree
(`scheduler.cost.step_measurement`) and no larger batch seems faster than a smaller one, or there is no time left.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from scheduler.cost.decode import StepCurve
from scheduler.cost.step_measurement import SPREAD, describe_fall, is_stable, spread, steepest_fall

ONE_TOKEN = 1
"""Prompt tokens of a batch without context: with more, the prefill of a large batch would outweigh its steps."""
LEAST_CONTEXT = 64
"""Fewest prompt tokens from which a time per token of context is taken."""
MOST_CONTEXT = 2048
"""Most of them: enough for a difference, and longer prompts only take longer to prefill."""
MOST_REPEATS = 15
"""Most repeats of one batch size: what differs after that will not agree."""
LEAST_STEP_S = 1e-6


@dataclass(frozen=True)
class TimingTrial:
    """Equal requests that are timed together."""

    batch: int
    prompt: int
    """Prompt tokens of each request."""
    tokens: int
    """Tokens that each request produces."""
    kind: Literal["steps", "prefill", "fill"] = "steps"
    """steps: one of a pair; if its prompts have more than one token, they are those that `fill` has prefilled. prefill:
    times a new prompt. fill: prefills prompts for the trials that follow."""


BatchAndContext = tuple[int, int]
"""Batch size and prompt tokens."""


def fitting(tokens: tuple[int, int], context: int) -> tuple[int, int]:
    """Return the tokens of a pair's two trials, fewer where a request of one prompt token has no room for them.

    Args:
        tokens: those of the two trials.
        context: most tokens of a request, its prompt included.
    """
    most = max(1, min(tokens[1], context - ONE_TOKEN))
    return max(1, min(tokens[0], most // 2)), most


class StepTrials:
    """The choice of what is timed within a time budget.

    In this order: the step times of the given batch sizes, with the cost of a prompt token after the second one; those
    of one batch size with a long context; repeats. `next` names a trial, `took` records its time.

    Where the first trial of a batch leaves no time for the second, its mean time per token, start-up included, is taken
    as an upper bound of the step time. A trial that is expected to exceed the budget is left out: a step time between
    two measured batches is interpolated, a prompt token that was not timed costs as much as one more request in a step,
    and a token of context that was not timed costs nothing.
    """

    def __init__(
        self,
        sizes: Iterable[int],
        prompt: int,
        context: int,
        room: int,
        tokens: tuple[int, int],
        budget_s: float,
        repeat_s: float,
        most_repeats: int = MOST_REPEATS,
    ) -> None:
        """
        Args:
            sizes: batch sizes in the order in which they are measured.
            prompt: tokens of the prompt whose prefill is timed.
            context: most prompt tokens of a request in the trials with context; below `LEAST_CONTEXT`, they are left
                out.
            room: most prompt tokens of such a batch together.
            tokens: tokens that each request of a pair's two trials produces.
            budget_s: seconds for all trials.
            repeat_s: seconds of them for repeats.
            most_repeats: most times that one batch is timed.
        """
        self.sizes = list(dict.fromkeys(sizes))
        self.prompt, self.context, self.room, self.tokens = prompt, context, room, tokens
        self.budget_s, self.repeat_s, self.most_repeats = budget_s, repeat_s, most_repeats
        self.times: dict[BatchAndContext, list[float]] = {}
        """Step times by batch size and context, one for each repeat."""
        self.per_prefill_token: float | None = None
        self.spent_s = self.repeated_s = 0.0
        self._todo = [TimingTrial(size, ONE_TOKEN, tokens[0]) for size in self.sizes]
        self._todo.insert(2, TimingTrial(1, prompt, 1, "prefill"))
        self._first: float | None = None
        """Seconds of the current pair's first trial; None: not run yet."""
        self._pairs: dict[BatchAndContext, tuple[float, int]] = {}
        """Seconds of each shortest pair, and the tokens of its second trial."""
        self._with_context = False
        """Whether trials with context were planned, or left out."""

    @property
    def points(self) -> dict[int, float]:
        """Seconds of a step without context by batch size: medians over the repeats."""
        return {batch: statistics.median(times) for (batch, p), times in self.times.items() if p == ONE_TOKEN}

    def next(self) -> TimingTrial | None:
        """Return the next trial; None: all are done, or there is no time for more."""
        while self._todo and self.times and self._first is None and self._is_too_long(self._todo[0]):
            filling = self._todo.pop(0).kind == "fill"
            if filling:
                self._todo.clear()
        if not self._todo and self.times:
            self._todo = self._context_trials() or self._repeat()
        return self._todo[0] if self._todo else None

    def took(self, seconds: float) -> None:
        """Record the seconds of the trial that `next` returned."""
        trial = self._todo.pop(0)
        self.spent_s += seconds
        key = trial.batch, trial.prompt
        if key in self._pairs:
            self.repeated_s += seconds
        if trial.kind == "prefill":
            self.per_prefill_token = max(0.0, (seconds - self._step(1)) / self.prompt)
        elif trial.kind == "fill":
            pass
        elif self._first is None:
            if key in self._pairs:
                more = self._pairs[key][1] - trial.tokens
            else:
                # the second trial may take half of what is left; a step takes no longer than the mean one so far
                fits = int((self.budget_s - self.spent_s) / 2 / (seconds / trial.tokens)) - trial.tokens
                more = min(self.tokens[1] - trial.tokens, fits)
            if more < 1:
                if trial.prompt == ONE_TOKEN:
                    self.times.setdefault(key, []).append(seconds / trial.tokens)
                return
            self._first = seconds
            self._todo.insert(0, TimingTrial(trial.batch, trial.prompt, trial.tokens + more))
        else:
            step = (seconds - self._first) / (trial.tokens - self.tokens[0])
            self.times.setdefault(key, []).append(max(step, LEAST_STEP_S))
            shortest, _ = self._pairs.get(key, (math.inf, 0))
            self._pairs[key] = min(shortest, self._first + seconds), trial.tokens
            self._first = None

    def _context_trials(self) -> list[TimingTrial]:
        """Return the trials with context; none: they were planned already, or there is no room or time."""
        if self._with_context or self.per_prefill_token is None:
            return []
        self._with_context = True
        batch, longest = self._context_batch
        if (batch, ONE_TOKEN) not in self._pairs:
            return []
        # prefilling the prompts may take a quarter of what is left
        affordable = (self.budget_s - self.spent_s) / 4 / max(batch * self.per_prefill_token, 1e-12)
        length = int(min(longest, affordable))
        if length < LEAST_CONTEXT:
            return []
        return [TimingTrial(batch, length, 1, "fill"), TimingTrial(batch, length, self.tokens[0])]

    @property
    def _context_batch(self) -> tuple[int, int]:
        """Batch size of the trials with context, and the most prompt tokens that each of its requests may have."""
        batch = sorted(self.sizes)[len(self.sizes) // 2]
        return batch, min(self.context, self.room // batch, MOST_CONTEXT)

    def _repeat(self) -> list[TimingTrial]:
        """Return the first trial of the next repeat; none: all is stable, or there is no time."""
        fall = self._fall or ()
        left = min(self.budget_s - self.spent_s, self.repeat_s - self.repeated_s)
        shaky = [
            key
            for key in self._pairs
            if self._pair_s(key) <= left
            and len(self.times[key]) < self.most_repeats
            and (not is_stable(self.times[key]) or (key[1] == ONE_TOKEN and key[0] in fall))
        ]
        if not shaky:
            return []
        batch, prompt = min(shaky, key=lambda key: len(self.times[key]))
        return [TimingTrial(batch, prompt, self.tokens[0])]

    def _pair_s(self, key: BatchAndContext) -> float:
        """Return the seconds that a pair is expected to take again: no larger batch's pair took less."""
        batch, prompt = key
        return min(seconds for (b, p), (seconds, _) in self._pairs.items() if b >= batch and p == prompt)

    def _step(self, batch: int) -> float:
        return float(StepCurve.measured(self.points).base(batch))

    def _is_too_long(self, trial: TimingTrial) -> bool:
        """Return whether a trial is expected to exceed the budget.

        Below the smallest measured batch a step takes between its share of that batch's step and all of it;
        half of it is assumed.
        """
        points = self.points
        smallest = min(points)
        known = self._step(trial.batch) if trial.batch >= smallest else 0.5 * self._step(smallest)
        per_token = self._most_row_s if trial.kind == "prefill" else self.per_prefill_token or 0.0
        reading = 0.0 if trial.kind == "steps" else (trial.prompt - 1) * trial.batch * per_token
        return self.spent_s + known * trial.tokens + reading > self.budget_s

    @property
    def _row_s(self) -> float:
        """Seconds that one more request adds to a step; its share of the step if only one batch size was measured."""
        small, large = min(self.points), max(self.points)
        if small == large:
            return self._step(large) / large
        return (self._step(large) - self._step(small)) / (large - small)

    @property
    def _most_row_s(self) -> float:
        """Seconds that one more request adds to a step at most.

        A batch of which there was no time for a second trial has an upper bound alone, which may be as much as the step
        of a larger batch: a token of a prompt would seem to cost nothing.
        """
        points = self.points
        if all((batch, ONE_TOKEN) in self._pairs for batch in (min(points), max(points))):
            return self._row_s
        return self._step(max(points)) / max(points)

    @property
    def summary(self) -> str:
        """A line about the progress."""
        return f"measuring step times, {len(self.points)} of {len(self.sizes)} batch sizes done"

    @property
    def left_out(self) -> str:
        """A line about what there was no time for; '': everything was measured."""
        missing = "" if self.per_prefill_token is not None else " and of no prompt"
        if self._context_batch[1] >= LEAST_CONTEXT and all(p == ONE_TOKEN for _, p in self.times):
            missing += " and of one context length only"
        if len(self.points) == len(self.sizes) and not missing:
            return ""
        which = f"{len(self.points)} of {len(self.sizes)} batch sizes{missing}"
        return f"step times of {which} measured in {self.spent_s:.0f} s; the rest follows as it runs"

    @property
    def _fall(self) -> tuple[int, int] | None:
        spreads = {batch: spread(times) for (batch, prompt), times in self.times.items() if prompt == ONE_TOKEN}
        return steepest_fall(self.points, spreads)

    @property
    def fall(self) -> str:
        """What is impossible about the step times: that they fall with the batch beyond noise; '': nothing."""
        return describe_fall(self.points, *self._fall) if self._fall else ""

    @property
    def doubts(self) -> str:
        """Why the step times are doubtful; '': they are not."""
        unstable = [
            f"batch {batch}" + (f" at {prompt} tokens" if prompt > ONE_TOKEN else "") + f" by {spread(times):.0%}"
            for (batch, prompt), times in self.times.items()
            if len(times) > 1 and spread(times) > SPREAD
        ]
        differ = f"repeats of {', '.join(unstable)} differ around their median" if unstable else ""
        return "; ".join(part for part in (self.fall, differ) if part)

    @property
    def per_context_token(self) -> float:
        """Seconds per step and token of context; 0 if it was not measured, or disappears in the noise."""
        for (batch, prompt), times in self.times.items():
            if prompt > ONE_TOKEN:
                longer = statistics.median(times) - self.points[batch]
                return max(0.0, longer / (batch * (prompt - ONE_TOKEN)))
        return 0.0

    @property
    def curve(self) -> StepCurve:
        """The measured curve."""
        per_prefill = self._row_s if self.per_prefill_token is None else self.per_prefill_token
        return StepCurve.measured(self.points, self.per_context_token, per_prefill)
