"""What an agent leaves behind: it may end what it has begun, and nothing of it outlives its worker."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from streamrl.rollouts.void import VoidCause
from tests.agents.test_workers import agent, order, play, started
from tests.waiting import scaled

AGENTS = """
import asyncio

async def serve(closing):  # as a task of a library, which ends once its server has
    await closing.wait()
    await asyncio.sleep(1)
    return "closed"

async def run(task, client):
    closing = asyncio.Event()
    serving = asyncio.create_task(serve(closing))
    try: await asyncio.sleep(1000)
    finally:
        closing.set()
        open("said", "w").write(await serving)
"""


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mischievous_agents.py").write_text(AGENTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def test_a_cancelled_agent_may_take_its_time_to_end_what_it_has_begun() -> None:
    async def scenario() -> None:
        async with started(agent(deadlines={"episode_s": scaled(0.5)})) as owner:
            void = (await play(owner, None, order("", "one"))).void
            assert void is not None and void.cause is VoidCause.TIMEOUT
            assert Path("said").read_text() == "closed"

    asyncio.run(scenario())
