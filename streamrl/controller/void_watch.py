"""The watch over void rewards: ends a run whose rewards fail too often, before it trains on a rest. Pure: no I/O.

    a task's first `FEWEST` rewards, of `FEWEST_PROMPTS` prompts, are all void -> its reward does not work: the run ends
    more than `rewards.max_void_rate` of the newest ones                       -> the run ends
    otherwise -> it continues; each step's metrics have its void rate

"The newest ones" are `rewards.void_window` steps' worth of rewards, of at least `FEWEST` prompts; nothing is judged
before there are as many. Prompts count beside rewards because samples of one fail together: a row with a wrong answer
voids its whole group. Rewards of evaluations do not count.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from streamrl.config.run import RunConfig
from streamrl.errors import ErrorCode
from streamrl.rollouts.plain_text import shown
from streamrl.rollouts.void import Void, VoidCause

FEWEST = 32
"""Fewest rewards that are judged: with half of all rewards void, 32 void ones in a row have a chance of 2e-10."""
FEWEST_PROMPTS = 8
"""Fewest prompts of which a task's first rewards are judged: with a fifth of all prompts void, 8 void ones in a row
have a chance of 3e-6."""


@dataclass
class _TaskRewards:
    """Rewards of one task until the first valid one."""

    void: int = 0
    prompts: set[str] = field(default_factory=set)
    """Groups of the void ones."""
    works: bool = False
    """Whether there was a valid reward."""


class VoidWatch:
    """The newest rewards of a run."""

    def __init__(self, run: RunConfig) -> None:
        self._most = run.rewards.max_void_rate
        samples = run.batch.prompts_per_step * run.batch.samples_per_prompt
        self._window = max(FEWEST, run.rewards.void_window * samples)
        self._newest: deque[tuple[str, VoidCause | None]] = deque()
        """Group and cause of each."""
        self._groups = Counter[str]()
        """Rewards among the newest by group."""
        self._tasks: dict[str, _TaskRewards] = {}
        self._words: dict[VoidCause, str] = {}
        """Last failure of each cause: its text, and the traceback if there is one."""

    def record(self, task: str, group: str, void: Void | None, traceback: str = "") -> str | None:
        """Record a reward.

        Args:
            task: the sample's task.
            group: the sample's group.
            void: why the reward is void; None: it is not.
            traceback: the reward function's, or the agent's; '': it did not raise.

        Returns:
            Why the run has to end; None: it continues.
        """
        seen = self._tasks.setdefault(task, _TaskRewards())
        self._add(group, void.cause if void else None)
        if void is None:
            seen.works = True
            seen.prompts.clear()
            return None
        seen.void += 1
        if not seen.works:
            seen.prompts.add(group)
        self._words[void.cause] = shown("\n".join([void.text, *([traceback] if traceback else [])]))
        if self._most is None:
            return None
        if not seen.works and seen.void >= FEWEST and len(seen.prompts) >= FEWEST_PROMPTS:
            what = "generation" if self._most_frequent() is VoidCause.GENERATION else "the reward"
            never = f"{what} of task {task!r} does not work: all {seen.void} are void"
            return f"{ErrorCode.REWARD.refer(never)}. {self._causes()}"
        count = len(self._void())
        enough = len(self._newest) >= self._window and len(self._groups) >= FEWEST
        if enough and count > self._most * len(self._newest):
            often = f"{count} of the newest {len(self._newest)} rewards are void"
            allowed = f"rewards.max_void_rate allows {self._most:g}"
            return f"{often}, and {ErrorCode.REWARD.refer(allowed)}. {self._causes()}"
        return None

    def _add(self, group: str, cause: VoidCause | None) -> None:
        """Add a reward to the newest, and forget the oldest that the window does not need."""
        self._newest.append((group, cause))
        self._groups[group] += 1
        while len(self._newest) > self._window:
            oldest = self._newest[0][0]
            if self._groups[oldest] == 1 and len(self._groups) <= FEWEST:
                break  # the last reward of one of the fewest prompts
            self._newest.popleft()
            self._groups[oldest] -= 1
            if not self._groups[oldest]:
                del self._groups[oldest]

    def _void(self) -> list[VoidCause]:
        """Return the causes of the void ones among the newest."""
        return [cause for _, cause in self._newest if cause is not None]

    def _most_frequent(self) -> VoidCause:
        """Return the most frequent cause; there must be one."""
        return Counter(self._void()).most_common(1)[0][0]

    def _causes(self) -> str:
        """Name the most frequent cause, where to look, and the words of its last failure."""
        cause, void = self._most_frequent(), self._void()
        where = "'turned away' in streamrl status" if cause is VoidCause.GENERATION else "logs/*-workers.log"
        told = f"{cause} ({void.count(cause)} of {len(void)})"
        return f"Most frequent cause: {told}; see {where}. The last one: {self._words[cause]}"
