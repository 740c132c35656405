"""The exception with which a reward declares itself void, and the cause of any other exception."""

from __future__ import annotations

import subprocess

from streamrl.rollouts.void import VoidCause

NETWORK_PACKAGES = frozenset(
    {"aiohttp", "anthropic", "grpc", "http", "httpx", "openai", "requests", "socket", "urllib", "urllib3"}
)
"""Packages whose exceptions mean that a service failed."""


class VoidReward(Exception):
    """Raise it in a reward function that cannot judge a completion: the reward is void instead of 0.

    >>> raise VoidReward("provider", "the judge is overloaded")
    Traceback (most recent call last):
    streamrl.tasks.void_reward.VoidReward: the judge is overloaded
    """

    def __init__(self, cause: VoidCause | str = VoidCause.VERIFIER, text: str = "", *, retry: bool = True) -> None:
        """
        Args:
            cause: a `VoidCause` or its name.
            text: what failed, in one line.
            retry: whether another try may succeed.

        Raises:
            ValueError: there is no such cause.
        """
        self.cause = VoidCause(cause)
        self.retry = retry
        super().__init__(text or f"void: {self.cause}")


def cause_of(error: BaseException) -> VoidCause:
    """Return the cause that an exception of a reward function stands for."""
    packages = {base.__module__.partition(".")[0] for base in type(error).__mro__}
    match error:
        case VoidReward():
            return error.cause
        case TimeoutError() | subprocess.TimeoutExpired():
            return VoidCause.TIMEOUT
        case ConnectionError():
            return VoidCause.PROVIDER
        case _ if packages & NETWORK_PACKAGES:
            return VoidCause.PROVIDER
        case MemoryError() | OSError() | ImportError():
            return VoidCause.ENVIRONMENT
    return VoidCause.VERIFIER
