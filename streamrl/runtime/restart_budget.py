"""The budget of restarts for a process that dies; pure."""

from __future__ import annotations

from dataclasses import dataclass

from streamrl.config.run import RecoveryConfig

MOST_DOUBLINGS = 60
"""Most doublings of a pause, longer than any limit by then; a float overflows at 1024."""


@dataclass(frozen=True)
class RestartBudget:
    """A number of restarts within a time window, each after a longer pause."""

    restarts: int = 5
    """Restarts allowed within `window_s`; 0: none."""
    window_s: float = 600.0
    first_pause_s: float = 1.0
    """Seconds before the first restart; doubled for each further one within the window."""
    longest_pause_s: float = 60.0

    @staticmethod
    def of(config: RecoveryConfig) -> RestartBudget:
        """Return the budget of the run file."""
        return RestartBudget(config.restarts, config.window_s, config.pause_s, config.longest_pause_s)

    def after_death(self, deaths: list[float], now: float) -> float | None:
        """Return when to restart the process, or None if the budget is used up.

        Args:
            deaths: times of earlier deaths, seconds on the caller's clock; updated in place (`now` added, old ones
                removed).
            now: time of this death.
        """
        deaths[:] = [*(then for then in deaths if now - then < self.window_s), now]
        if len(deaths) > self.restarts:
            return None
        return now + min(self.longest_pause_s, self.first_pause_s * 2.0 ** min(len(deaths) - 1, MOST_DOUBLINGS))
