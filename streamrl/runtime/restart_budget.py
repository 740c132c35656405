"""How often a process that dies is started again. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from streamrl.config.run import RecoveryConfig

MOST_DOUBLINGS = 60
"""Of a pause, which is longer than any by then; a float holds no more than 1023."""


@dataclass(frozen=True)
class RestartBudget:
    """So many within a window, each after a longer pause."""

    restarts: int = 5
    """Within `window_s`; 0: never."""
    window_s: float = 600.0
    first_pause_s: float = 1.0
    """Before the first one; twice as long before each further one of the window."""
    longest_pause_s: float = 60.0

    @staticmethod
    def of(config: RecoveryConfig) -> RestartBudget:
        """The run file's."""
        return RestartBudget(config.restarts, config.window_s, config.pause_s, config.longest_pause_s)

    def after_death(self, deaths: list[float], now: float) -> float | None:
        """When to start again, or None if the budget is used up.

        Args:
            deaths: times of death so far, seconds on the caller's clock; `now` is added, what is too old removed.
            now: of this one.
        """
        deaths[:] = [*(then for then in deaths if now - then < self.window_s), now]
        if len(deaths) > self.restarts:
            return None
        return now + min(self.longest_pause_s, self.first_pause_s * 2.0 ** min(len(deaths) - 1, MOST_DOUBLINGS))
