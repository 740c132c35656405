"""Waits of a process: each ends with its limit and is named; those with a sign of progress last as long as it comes."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from streamrl.transport import deadlines
from streamrl.transport.deadlines import DeadlineExpired, WaitRegistry, never

LIMIT_S = 0.02


def seen(*ages: float) -> tuple[Callable[[], float], list[float]]:
    """A sign of progress that is as old as these, one after the other, and the ages that nobody has asked for."""
    left = list(ages)
    return lambda: left.pop(0), left


async def awaiting(answer: asyncio.Future[str], since_progress: Callable[[], float]) -> str:
    waits = WaitRegistry("controller")
    waits.begin("samples", "3 samples of 2 groups", LIMIT_S, since_progress)
    return await waits.first_of_begun(answer)


def test_a_wait_without_progress_ends_at_its_limit() -> None:
    async def check() -> None:
        with pytest.raises(DeadlineExpired, match="controller waited 0 s for 3 samples of 2 groups"):
            await awaiting(asyncio.get_running_loop().create_future(), never)

    asyncio.run(check())


def test_a_wait_lasts_while_there_is_progress_and_ends_a_limit_after_the_last() -> None:
    progress, left = seen(0.0, LIMIT_S / 2, 0.0, math.inf, 0.0)

    async def check() -> None:
        with pytest.raises(DeadlineExpired, match="3 samples"):
            await awaiting(asyncio.get_running_loop().create_future(), progress)

    asyncio.run(check())
    assert left == [0.0]  # the fourth sign was too old


def test_what_comes_after_the_first_limit_is_returned() -> None:
    async def check() -> str:
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def produce() -> float:
            answer.get_loop().call_soon(answer.set_result, "a sample")
            return 0.0

        return await awaiting(answer, produce)

    assert asyncio.run(check()) == "a sample"


def test_the_wait_that_ends_first_is_the_one_that_is_named() -> None:
    async def check() -> None:
        waits = WaitRegistry("controller")
        waits.begin("samples", "samples", LIMIT_S, lambda: 0.0)
        waits.begin("rewards", "rewards", 4 * LIMIT_S)
        with pytest.raises(DeadlineExpired, match="for rewards"):
            await waits.first_of_begun(asyncio.get_running_loop().create_future())

    asyncio.run(check())


def test_a_deadline_lasts_while_there_is_progress_and_ends_a_limit_after_the_last() -> None:
    progress, left = seen(0.0, LIMIT_S / 2, math.inf, 0.0)

    async def check() -> None:
        waits = WaitRegistry("service-here")
        with pytest.raises(DeadlineExpired, match="service-here waited 0 s for weights 3"):
            async with waits.deadline("weights 3", LIMIT_S, progress):
                await asyncio.get_running_loop().create_future()
        assert waits.snapshot() == []

    asyncio.run(check())
    assert left == [0.0]  # the third sign was too old


def test_a_wait_is_as_old_as_its_latest_sign_of_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(deadlines, "time", SimpleNamespace(time=lambda: now, monotonic=time.monotonic))

    async def check() -> None:
        nonlocal now
        waits = WaitRegistry("controller")
        waits.begin("samples", "samples", 60.0, lambda: 5.0)
        waits.begin("rewards", "rewards", 60.0)
        waits.begin("canaries", "canaries", 60.0, lambda: 3600.0)
        async with waits.deadline("weights 3", 60.0, lambda: 7.0):
            now = 1100.0
            found = [(wait["waiting_for"], wait["since"]) for wait in waits.snapshot()]
        assert found == [("rewards", 1000.0), ("canaries", 1000.0), ("weights 3", 1093.0), ("samples", 1095.0)]
        assert len(waits.snapshot()) == 3

    asyncio.run(check())
