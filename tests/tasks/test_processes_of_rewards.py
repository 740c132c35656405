"""Processes that a user's reward starts: they begin as those of a plain Python, and end with the reward's worker."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import multiprocessing
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from streamrl.config.tasks import FileTask, Task
from streamrl.rollouts.void import VoidCause
from streamrl.runtime.processes import is_alive
from streamrl.tasks.reward_pool import RewardPool, RewardResult
from tests.waiting import scaled, until

NEVER_S = 240.0
"""Limit that no reward reaches."""
GIVEN = {"prompt": "", "answer": None}
LAUNCHING = """
with open("imported", "a") as file: file.write("x")
"""
PARALLEL = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

def square(number): return number * number

def reward(completion, *, prompt, answer):
    context = multiprocessing.get_context(completion or None)
    with multiprocessing.Pool(1) if completion == "" else context.Pool(1) as pool: some = pool.map(square, [1, 2])
    with ProcessPoolExecutor(1, context) as pool: more = list(pool.map(square, [3]))
    return sum(some + more) if context.get_start_method() == (completion or answer) else None
"""
LEAVING = """
import multiprocessing, os, subprocess, sys, time

def tell(*pids):
    with open("pids", "a") as file: file.write("".join(f"{pid}\\n" for pid in pids))

def reward(completion, *, prompt, answer):
    if not (child := os.fork()): time.sleep(1000)
    tell(child)
    process = multiprocessing.Process(target=time.sleep, args=(1000,), daemon=True)
    process.start()
    tell(process.pid)
    tell(subprocess.Popen(["sleep", "1000"]).pid)
    daemon = subprocess.run(["sh", "-c", "sleep 1000 >&2 & echo $!"], stdout=subprocess.PIPE, start_new_session=True)
    tell(int(daemon.stdout))
    match completion:
        case "hang": subprocess.run(["sleep", "1000"])
        case "exit": os._exit(3)
    return 1.0
"""
STARTED = 4
"""Processes that a reward of these starts and reports."""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Task]:
    (tmp_path / "parallel_reward.py").write_text(PARALLEL)
    (tmp_path / "leaving_reward.py").write_text(LEAVING)
    monkeypatch.chdir(tmp_path)
    return [
        FileTask(kind="file", name=name, path="unused.jsonl", reward=f"{name}_reward:reward")
        for name in ("parallel", "leaving")
    ]


@contextlib.asynccontextmanager
async def started(tasks: list[Task], timeout_s: float = NEVER_S) -> AsyncIterator[RewardPool]:
    pool = RewardPool(tasks, 0, workers=1, timeout_s=timeout_s)
    try:
        await pool.start()
        yield pool
    finally:
        pool.close()


def told() -> list[int]:
    """The processes that rewards have reported."""
    return [int(line) for line in Path("pids").read_text().splitlines()] if Path("pids").exists() else []


def test_multiprocessing_works_in_a_reward_and_imports_nothing_of_the_launch(
    tasks: list[Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "launching.py").write_text(LAUNCHING)
    monkeypatch.syspath_prepend(tmp_path)
    # as of a process that was started by `python -m launching`
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", importlib.util.find_spec("launching"))
    given = {"prompt": "", "answer": multiprocessing.get_start_method()}

    async def run() -> list[RewardResult]:
        async with started(tasks) as pool:
            return [await pool.score("parallel", method, given) for method in ("", "spawn", "forkserver")]

    assert [(result.reward, result.void) for result in asyncio.run(run())] == [(14.0, None)] * 3
    assert (tmp_path / "imported").read_text() == "x"  # by the worker alone


async def is_late(tasks: list[Task]) -> None:
    async with started(tasks, scaled(2)) as pool:
        for _ in range(20):  # a loaded machine may take as long as the limit to start the processes
            result = await pool.score("leaving", "hang", GIVEN)
            assert result.void is not None and result.void.cause is VoidCause.TIMEOUT
            if len(told()) >= STARTED:
                break
        await until(all_ended)


async def is_cancelled(tasks: list[Task]) -> None:
    async with started(tasks) as pool:
        hanging = asyncio.ensure_future(pool.score("leaving", "hang", GIVEN))
        await until(lambda: len(told()) == STARTED)
        hanging.cancel()
        await until(all_ended)


async def kills_its_worker(tasks: list[Task]) -> None:
    async with started(tasks) as pool:
        result = await pool.score("leaving", "exit", GIVEN)
        assert result.void is not None and result.void.cause is VoidCause.CRASH
        await until(all_ended)


async def has_returned(tasks: list[Task]) -> None:
    async with started(tasks) as pool:
        assert (await pool.score("leaving", "return", GIVEN)).reward == 1.0
        assert all(map(is_alive, told()))
    await until(all_ended)


def all_ended() -> bool:
    return not any(map(is_alive, told()))


@pytest.mark.parametrize("scenario", [is_late, is_cancelled, kills_its_worker, has_returned])
def test_what_a_reward_has_started_ends_with_its_worker(
    tasks: list[Task], scenario: Callable[[list[Task]], Coroutine[Any, Any, None]]
) -> None:
    asyncio.run(scenario(tasks))
    assert len(told()) >= STARTED
