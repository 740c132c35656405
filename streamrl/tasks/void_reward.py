"""The exception with which a reward declares itself void, and the cause of any other exception."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import traceback
from pathlib import Path

from streamrl.rollouts.plain_text import plain_text
from streamrl.rollouts.void import LONGEST_TRACEBACK, VoidCause

NETWORK_PACKAGES = frozenset(
    {"aiohttp", "anthropic", "grpc", "http", "httpcore2", "httpx", "httpx2", "openai", "requests", "socket", "urllib"}
    | {"urllib3"}
)
"""Packages whose exceptions mean that a service failed."""
LONGEST_ERROR = 300
"""Most characters of an error in the rollout row; the traceback is in the log."""


class VoidReward(Exception):
    """Raise it in a reward function that cannot judge a completion: the reward is void instead of 0.

    >>> raise VoidReward("provider", "the judge is overloaded")
    Traceback (most recent call last):
    streamrl.tasks.void_reward.VoidReward: the judge is overloaded

    A subclass may have an `__init__` of its own, and need not call this one.
    """

    cause: VoidCause = VoidCause.VERIFIER
    """What failed; a subclass may name it."""
    retry: bool = True
    """Whether another try may succeed."""

    def __init__(self, cause: VoidCause | str = VoidCause.VERIFIER, text: str = "", *, retry: bool = True) -> None:
        """
        Args:
            cause: a `VoidCause` or its name.
            text: what failed, in one line.
            retry: whether another try may succeed.

        Raises:
            ValueError: there is no such cause.
        """
        found = VoidCause(cause)
        for name, value in (("cause", found), ("retry", retry)):
            with contextlib.suppress(AttributeError):  # a subclass has a property of that name
                setattr(self, name, value)
        super().__init__(text or f"void: {found}")


def cause_of(error: BaseException) -> VoidCause:
    """Return the cause that an exception of a reward function stands for."""
    packages = {base.__module__.partition(".")[0] for base in type(error).__mro__}
    match error:
        case VoidReward():
            with contextlib.suppress(Exception):  # a subclass may have made something else of it, or fail at it
                return VoidCause(error.cause)
            return VoidCause.VERIFIER
        case TimeoutError() | subprocess.TimeoutExpired():
            return VoidCause.TIMEOUT
        case ConnectionError():
            return VoidCause.PROVIDER
        case _ if packages & NETWORK_PACKAGES:
            return VoidCause.PROVIDER
        case MemoryError() | OSError() | ImportError():
            return VoidCause.ENVIRONMENT
    return VoidCause.VERIFIER


def may_retry(error: BaseException) -> bool:
    """Return whether another try may succeed after an exception of a reward function."""
    if isinstance(error, VoidReward):
        with contextlib.suppress(Exception):  # of a property of a subclass
            return bool(error.retry)
    return True


def failures_of(error: BaseException) -> list[BaseException]:
    """Return what an exception is about: the exceptions of a group, cancellations only if there is nothing else.

    Code that is cancelled because code beside it failed (`asyncio.TaskGroup`) says nothing of its own.
    """
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    found = [one for part in error.exceptions for one in failures_of(part)]
    return [one for one in found if not isinstance(one, asyncio.CancelledError)] or found


def text_of(error: BaseException) -> str:
    """Return an exception's text in one line; '': its `__str__` fails."""
    try:
        return plain_text(" ".join(str(error).split()), LONGEST_ERROR)
    except Exception:  # of a user's exception
        return ""


def one_line(error: BaseException) -> str:
    """Return an exception's class and text in one line."""
    return f"{type(error).__name__}: {text_of(error)}".removesuffix(": ")[:LONGEST_ERROR]


def void_text(error: BaseException) -> str:
    """Return what is told of a failure in one line: the text of a `VoidReward`, else the class and the text."""
    return (isinstance(error, VoidReward) and text_of(error)) or one_line(error)


CUT = "Traceback (most recent call last):\n  ...\n"
"""Beginning of a traceback of which only the end is kept."""


def traceback_of(error: BaseException, without: Path) -> str:
    """Return an exception's traceback, of a long one the end; '': it has no frames outside of a folder.

    Args:
        error: the exception.
        without: folder of this package; its frames before the user's are left out.
    """
    trace = error.__traceback__
    while trace is not None and Path(trace.tb_frame.f_code.co_filename).parent == without:
        trace = trace.tb_next
    if trace is None:
        return ""
    text = plain_text("".join(traceback.format_exception(type(error), error, trace)).strip())
    if len(text) <= LONGEST_TRACEBACK:
        return text
    _, _, end = text[len(CUT) - LONGEST_TRACEBACK :].partition("\n")  # from the beginning of a line on
    return CUT + end
