"""When a process that died is restarted; pure."""

from __future__ import annotations

from streamrl.config.recovery import RecoveryConfig, pause_after


def restart_time(recovery: RecoveryConfig, deaths: list[float], now: float) -> float | None:
    """Return when to restart a process that died `now`, or None if its budget of restarts is used up.

    Args:
        deaths: times of earlier deaths, seconds on the caller's clock; updated in place.
    """
    deaths[:] = [*(then for then in deaths if now - then < recovery.window_s), now]
    if len(deaths) > recovery.restarts:
        return None
    return now + pause_after(len(deaths), recovery.pause_s, recovery.longest_pause_s)
