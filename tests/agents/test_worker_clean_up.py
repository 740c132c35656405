"""What an agent leaves behind: it may end what it has begun, and nothing of it outlives its worker."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from streamrl.rollouts.void import VoidCause
from streamrl.runtime.processes import is_alive
from tests.agents.agents_module import enter_folder_with
from tests.agents.test_workers import agent, order, play, started
from tests.waiting import scaled, until

AGENTS = """
import asyncio, os, subprocess, sys

LIVE = "import os, time; open('{}', 'w').write(str(os.getpid())); os.replace('{}', '{}.pid'); time.sleep(3600)"

async def serve(closing):  # as a task of a library, which ends once its server has
    await closing.wait()
    await asyncio.sleep(1)
    return "closed"

async def swallow():
    try: await asyncio.sleep(1000)
    except asyncio.CancelledError: await asyncio.sleep(1000)

def begin(name):
    return subprocess.Popen([sys.executable, "-c", LIVE.replace("{}", name)], start_new_session=True)

async def run(task, client):
    if task["prompt"] == "leaves daemons":
        begin("child")
        if os.fork() == 0:  # its daemon is nobody's child
            begin("daemon")
            os._exit(0)
        while not (os.path.exists("child.pid") and os.path.exists("daemon.pid")): await asyncio.sleep(0.01)
        if task["dies"]: os._exit(3)
        return 1.0
    if task["prompt"] == "leaves a task that swallows a cancellation":
        sys.modules["__main__"].UNWIND_S = 3600.0  # of the worker: the second cancellation does not wait for that
        task["left"] = asyncio.create_task(swallow())
        await asyncio.sleep(0)
        return 1.0
    closing = asyncio.Event()
    serving = asyncio.create_task(serve(closing))
    try: await asyncio.sleep(1000)
    finally:
        closing.set()
        open("said", "w").write(await serving)
"""


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enter_folder_with(AGENTS, tmp_path, monkeypatch)


def test_a_cancelled_agent_may_take_its_time_to_end_what_it_has_begun() -> None:
    async def scenario() -> None:
        async with started(agent(deadlines={"episode_s": scaled(0.5)})) as owner:
            void = (await play(owner, None, order("", "one"))).void
            assert void is not None and void.cause is VoidCause.TIMEOUT
            assert Path("said").read_text() == "closed"

    asyncio.run(scenario())


def test_a_task_that_swallows_a_cancellation_is_cancelled_again_and_the_log_says_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with started(log=tmp_path / "log") as owner:
            playing = play(owner, None, order("leaves a task that swallows a cancellation", "one"))
            assert (await asyncio.wait_for(playing, scaled(30))).reward == 1.0
            told = " s for the end of 1 coroutines and 0 calls in threads"
            await until(lambda: told in (tmp_path / "log").read_text())

    asyncio.run(scenario())


@pytest.mark.parametrize("dies", [True, False])
def test_what_an_agent_has_started_ends_with_its_worker(dies: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with started() as owner:
            await play(owner, None, order("leaves daemons", dies=dies))
            pids = [int(Path(f"{name}.pid").read_text()) for name in ("child", "daemon")]
            if not dies:
                assert all(map(is_alive, pids))
        assert not any(map(is_alive, pids))

    asyncio.run(scenario())
    assert "ended with an agent worker: " in caplog.text
