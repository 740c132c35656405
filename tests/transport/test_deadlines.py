"""Waits of a process: each ends with its limit and is named; those with a sign of progress last as long as it comes."""

from __future__ import annotations

import asyncio
import math
import selectors
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

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
    progress, left = seen(0.0, LIMIT_S / 2, 0.0, LIMIT_S - deadlines.EARLY_S / 2, 0.0)

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


def test_a_wait_is_as_old_as_its_latest_sign_of_progress_whatever_clocks_and_standstills(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, ahead_s = 1000.0, 0.0
    clock = SimpleNamespace(time=lambda: now + ahead_s, monotonic=lambda: now)
    monkeypatch.setattr(deadlines, "time", clock)

    async def check() -> None:
        nonlocal now, ahead_s
        waits = WaitRegistry("controller")

        def found() -> list[tuple[str, float]]:
            return [(wait["waiting_for"], wait["since"]) for wait in waits.snapshot()]

        waits.begin("samples", "samples", 60.0, lambda: now - 1095.0)
        waits.begin("rewards", "rewards", 60.0)
        waits.begin("canaries", "canaries", 60.0, lambda: now + 2600.0)
        waits.begin("groups", "groups", 60.0, lambda: now - 6000.0 if now > 6000.0 else now - 1096.0)
        async with waits.deadline("weights 3", 60.0, lambda: now - 1093.0):
            while now < 1100.0:
                now += deadlines.MOST_S
                assert len(waits.snapshot()) == 5
            early = [("rewards", 1000.0), ("canaries", 1000.0), ("weights 3", 1093.0), ("samples", 1095.0)]
            assert found() == [*early, ("groups", 1096.0)]
            now += 5000.0 + deadlines.MOST_S  # it stands still
            before = [(name, since + 5000.0) for name, since in early] + [("groups", 6102.0)]  # in the middle of it
            assert found() == before
            now += deadlines.MOST_S
            waits.begin("trainer", "trainer", 60.0)
            before = [*before, ("trainer", 6104.0)]
            assert found() == before
            ahead_s = 1e6  # the machine's clock is set
            assert found() == [(name, since + ahead_s) for name, since in before]
        assert len(waits.snapshot()) == 5

    asyncio.run(check())


def test_a_wait_that_is_a_part_of_another_for_the_same_is_shown_once() -> None:
    async def check() -> None:
        waits = WaitRegistry("service-here")
        async with waits.deadline("here-0 to start", 60.0):
            async with waits.deadline("here-0 to start", 30.0), waits.deadline("here-1 to start", 30.0):
                shown = [(wait["waiting_for"], wait["limit_s"]) for wait in waits.snapshot()]
                assert shown == [("here-0 to start", 60.0), ("here-1 to start", 30.0)]
            assert [wait["waiting_for"] for wait in waits.snapshot()] == ["here-0 to start"]

    asyncio.run(check())


class Clock(selectors.PollSelector):
    """A loop's clock: where the loop would wait for its next timer, that time has passed."""

    now = 1000.0

    def select(self, timeout: float | None = None) -> Any:
        self.now += timeout or 0.0
        return super().select(0)

    def loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.SelectorEventLoop(self)
        loop.time = lambda: self.now  # type: ignore[method-assign]
        return loop


@pytest.mark.parametrize("begun", [True, False])
def test_time_in_which_nothing_but_the_wait_happens_counts_each_time(
    monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    clock = Clock()
    monkeypatch.setattr(deadlines, "time", SimpleNamespace(time=time.time, monotonic=lambda: clock.now))

    async def expire(waits: WaitRegistry) -> float:
        began, answer = clock.now, asyncio.get_running_loop().create_future()
        with pytest.raises(DeadlineExpired, match="waited 60 s for samples"):
            if begun:
                waits.begin("samples", "samples", 60.0)
                await waits.first_of_begun(answer)
            else:
                async with waits.deadline("samples", 60.0):
                    await answer
        waits.end("samples")
        return clock.now - began

    async def check() -> None:
        waits = WaitRegistry("controller")
        assert await expire(waits) == 60.0
        await asyncio.sleep(5.0)  # sleeps: by that clock, while there are no waits
        assert await expire(waits) == 60.0

    with asyncio.Runner(loop_factory=clock.loop) as runner:
        runner.run(check())


@pytest.mark.parametrize("begun", [True, False])
def test_a_standstill_of_the_machine_ends_no_wait(monkeypatch: pytest.MonkeyPatch, begun: bool) -> None:
    stood_still_s = 0.0

    def clock() -> float:
        return time.monotonic() + stood_still_s

    monkeypatch.setattr(deadlines, "time", SimpleNamespace(time=time.time, monotonic=clock))

    async def check() -> str:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "time", clock)
        answer: asyncio.Future[str] = loop.create_future()

        def stand_still() -> None:
            """Afterwards the other process needs a moment, too."""
            nonlocal stood_still_s
            stood_still_s = 1e6
            loop.call_later(0.05, answer.set_result, "trained")

        waits = WaitRegistry("controller")
        loop.call_soon(stand_still)
        if begun:
            waits.begin("trainer", "trainer-0 to answer 'train'", 900.0)
            return await waits.first_of_begun(answer)
        async with waits.deadline("trainer-0 to start", 900.0):
            return await answer

    assert asyncio.run(check()) == "trained"
