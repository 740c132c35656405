"""The rewards process of a site with a launcher of its own gives that launcher signs of life."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from streamrl.run_dir import layout
from streamrl.tasks import rewards_process
from streamrl.tasks.rewards_process import RewardsProcess
from tests.waiting import until


class Pool:
    """Workers that never start."""

    async def start(self, limit_s: float) -> None:
        await asyncio.Event().wait()

    def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize("remote", [True, False])
def test_it_touches_its_file_from_its_start_on_where_the_controllers_launcher_does_not_watch_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: bool
) -> None:
    monkeypatch.setattr(rewards_process, "SIGN_EVERY_S", 0.01)
    sign, said = tmp_path / layout.REWARDS_SIGN, asyncio.Event()
    run = SimpleNamespace(deadlines=SimpleNamespace(startup_s=300.0))
    context = SimpleNamespace(name="rewards-west", run=run, run_dir=tmp_path, remote=remote, say=lambda _: said.set())
    process: Any = SimpleNamespace(context=context, pool=Pool())
    process._give_signs = lambda: RewardsProcess._give_signs(process)

    async def play() -> None:
        running = asyncio.create_task(RewardsProcess.run(cast(RewardsProcess, process)))
        await said.wait()
        for _ in range(2 if remote else 0):
            await until(lambda: sign.exists() and sign.stat().st_mtime > 1.0)
            os.utime(sign, (1.0, 1.0))
        running.cancel()
        await asyncio.wait([running])
        await until(lambda: len(asyncio.all_tasks()) == 1)

    asyncio.run(play())
    assert sign.exists() == remote
