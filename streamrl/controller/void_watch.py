"""The watch over void rewards: ends a run whose rewards fail too often, before it trains on a rest. Pure: no I/O.

    a task's first `FEWEST` rewards are all void         -> its reward does not work at all: the run ends
    more than `rewards.max_void_rate` of the newest ones -> the run ends
    otherwise                                            -> it continues; each step's metrics have its void rate

"The newest ones" are `rewards.void_window` steps' worth of rewards, at least `FEWEST`; nothing is judged before there
are as many. Rewards of evaluations do not count.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from streamrl.config.run import RunConfig
from streamrl.errors import ErrorCode
from streamrl.rollouts.plain_text import shown
from streamrl.rollouts.void import Void, VoidCause

FEWEST = 32
"""Fewest rewards that are judged: with half of all rewards void, 32 void ones in a row have a chance of 2e-10."""


@dataclass
class _TaskRewards:
    """Rewards of one task until the first valid one."""

    void: int = 0
    works: bool = False
    """Whether there was a valid reward."""


class VoidWatch:
    """The newest rewards of a run."""

    def __init__(self, run: RunConfig) -> None:
        self._most = run.rewards.max_void_rate
        samples = run.batch.prompts_per_step * run.batch.samples_per_prompt
        self._newest: deque[VoidCause | None] = deque(maxlen=max(FEWEST, run.rewards.void_window * samples))
        self._tasks: dict[str, _TaskRewards] = {}
        self._words: dict[VoidCause, str] = {}
        """Last failure of each cause: its text, and the traceback if there is one."""

    def record(self, task: str, void: Void | None, traceback: str = "") -> str | None:
        """Record a reward.

        Args:
            task: the sample's task.
            void: why the reward is void; None: it is not.
            traceback: the reward function's, or the agent's; '': it did not raise.

        Returns:
            Why the run has to end; None: it continues.
        """
        seen = self._tasks.setdefault(task, _TaskRewards())
        self._newest.append(void.cause if void else None)
        if void is None:
            seen.works = True
            return None
        seen.void += 1
        self._words[void.cause] = shown("\n".join([void.text, *([traceback] if traceback else [])]))
        if self._most is None:
            return None
        if not seen.works and seen.void >= FEWEST:
            what = "generation" if self._most_frequent() is VoidCause.GENERATION else "the reward"
            never = f"{what} of task {task!r} does not work: all {seen.void} are void"
            return f"{ErrorCode.REWARD.refer(never)}. {self._causes()}"
        count = sum(cause is not None for cause in self._newest)
        if len(self._newest) == self._newest.maxlen and count > self._most * len(self._newest):
            often = f"{count} of the newest {len(self._newest)} rewards are void"
            allowed = f"rewards.max_void_rate allows {self._most:g}"
            return f"{often}, and {ErrorCode.REWARD.refer(allowed)}. {self._causes()}"
        return None

    def _most_frequent(self) -> VoidCause:
        """Return the most frequent cause; there must be one."""
        return Counter(cause for cause in self._newest if cause is not None).most_common(1)[0][0]

    def _causes(self) -> str:
        """Name the most frequent cause, where to look, and the words of its last failure."""
        cause = self._most_frequent()
        count, void = self._newest.count(cause), sum(one is not None for one in self._newest)
        where = "'turned away' in streamrl status" if cause is VoidCause.GENERATION else "logs/*-workers.log"
        return f"Most frequent cause: {cause} ({count} of {void}); see {where}. The last one: {self._words[cause]}"
