"""Processes that a user's reward starts: they begin as those of a plain Python."""

from __future__ import annotations

import asyncio
import importlib.util
import multiprocessing
import sys
from pathlib import Path

import pytest

from streamrl.config.tasks import FileTask, Task
from streamrl.tasks.reward_pool import RewardPool, RewardResult

NEVER_S = 240.0
"""Limit that no reward reaches."""
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


def test_multiprocessing_works_in_a_reward_and_imports_nothing_of_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "launching.py").write_text(LAUNCHING)
    (tmp_path / "parallel_reward.py").write_text(PARALLEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    # as of a process that was started by `python -m launching`
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", importlib.util.find_spec("launching"))
    tasks: list[Task] = [FileTask(kind="file", name="mine", path="unused.jsonl", reward="parallel_reward:reward")]
    plain = multiprocessing.get_start_method()

    async def run() -> list[RewardResult]:
        pool = RewardPool(tasks, 0, workers=1, timeout_s=NEVER_S)
        try:
            await pool.start()
            given = {"prompt": "", "answer": plain}
            return [await pool.score("mine", method, given) for method in ("", "spawn", "forkserver")]
        finally:
            pool.close()

    assert [(result.reward, result.void) for result in asyncio.run(run())] == [(14.0, None)] * 3
    assert (tmp_path / "imported").read_text() == "x"  # by the worker alone
